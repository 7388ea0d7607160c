"""Where a bench keeps files meanwhile, and how it ends: nothing is left behind, whatever ends it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TMPFS = Path("/dev/shm")  # noqa: S108 - looked for, not relied on


@contextmanager
def scratch_dir(parent: str | None = None, *, nbytes: int = 0) -> Iterator[Path]:
    """A directory for sockets and files that is removed: in `parent`, or in memory if that has room for so many bytes.

    Its name is short, as sockets need.
    """
    if parent is None and _TMPFS.is_dir() and os.access(_TMPFS, os.W_OK) and shutil.disk_usage(_TMPFS).free > nbytes:
        parent = str(_TMPFS)
    with tempfile.TemporaryDirectory(prefix="wc-bench-", dir=parent) as scratch:
        yield Path(scratch)


def used_memory(directory: Path, nbytes: int) -> None:
    """Write a file a little larger than this and remove it, so that the next file gets memory that was used a moment ago."""
    path, block = directory / ".used-memory", bytes(1 << 20)
    with path.open("wb", buffering=0) as file:
        for _ in range(5 * nbytes // 4 // len(block)):
            file.write(block)
    path.unlink()


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Being asked to end does what Ctrl-C does: processes are ended and files removed."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
