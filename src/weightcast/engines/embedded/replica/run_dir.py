"""The private directory of one start of the ranks: sockets and rendezvous lie there, so no other start can meet this one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from weightcast import logs
from weightcast.engines.embedded.messages import front_end_address
from weightcast.errors import InvalidInput, StorageFailed

log = logs.get(__name__)

_PREFIX, _NEW = "weightcast-run-", "weightcast-new-"
_SOCKET_PATH_NBYTES = 107
_YOUNG_S = 60.0  # a new directory this young may be between being made and being locked


class RunDir:
    """A new directory, mode 0700, under the system's temporary one. `remove` is safe twice.

    It gets its name when it is locked, and stays locked while this process lives. So a directory of that name without a lock
    was left by a front end that was killed: the ranks remove it when they see that, or else the next start does.
    """

    def __init__(self) -> None:
        root = Path(tempfile.gettempdir())
        _remove_stale(root)
        try:
            made = Path(tempfile.mkdtemp(prefix=_NEW, dir=root))
            self._lock: int | None = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = made.rename(made.with_name(made.name.replace(_NEW, _PREFIX, 1)))
        except OSError as error:
            raise StorageFailed("make the directory of a replica in", root, error) from error
        socket = os.fsencode(front_end_address(self.path).removeprefix("ipc://"))
        if len(socket) > _SOCKET_PATH_NBYTES:
            self.remove()
            raise InvalidInput(
                f"the path of a socket may have {_SOCKET_PATH_NBYTES} bytes, and {os.fsdecode(socket)} has {len(socket)}: "
                "set TMPDIR to a directory with a shorter path."
            )

    def remove(self) -> None:
        """Delete the directory with all that is in it."""
        if self._lock is None:
            return
        shutil.rmtree(self.path, onerror=lambda _, path, error: log.warning("directory left", path=path, error=error[1]))
        os.close(self._lock)
        self._lock = None


def _remove_stale(root: Path) -> None:
    for path in (*root.glob(f"{_PREFIX}*"), *root.glob(f"{_NEW}*")):
        try:
            if path.name.startswith(_NEW) and time.time() - path.lstat().st_mtime < _YOUNG_S:
                continue
        except OSError:  # gone by now
            continue
        remove_abandoned(path)


def remove_abandoned(path: Path) -> bool:
    """Remove the directory of a front end of this user that is dead, which the lock proves. True if it was removed here."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # somebody else's, or gone by now
        return False
    try:
        if os.fstat(lock).st_uid != os.getuid():
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:  # its owner lives, or somebody else removes it
        return False
    finally:
        os.close(lock)
    log.info("directory removed", path=path, why="left by a front end that was killed")
    return True
