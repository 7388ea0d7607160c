"""One writer at a time: a lock that dies with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import StorageFailed, StoreBusy
from weightcast.store.files import refusals

log = logs.get(__name__)

_POLL_S = 0.02


@contextmanager
def exclusive(path: Path, deadline: Deadline) -> Iterator[None]:
    """Hold the lock file at `path`. The kernel releases it when the holder ends, however it ends."""
    with refusals("lock", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        _acquire(fd, path, deadline)
        yield
    finally:
        with refusals("unlock", path):
            os.close(fd)


def _acquire(fd: int, path: Path, deadline: Deadline) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if deadline.remaining() <= 0:
                raise StoreBusy(
                    f"another process is publishing to or pruning {path.parent}; waited {deadline.seconds:g} s. "
                    f"Wait for it to finish, or find it with: fuser {path}"
                ) from None
            time.sleep(_POLL_S)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise StorageFailed("lock", path, error) from error
            log.warning("no lock", path=path, why="the file system has none: make sure only one process publishes here")
            return
        else:
            return
