"""Where a bench keeps files meanwhile, and how it ends: nothing is left behind, whatever ends it."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TMPFS = Path("/dev/shm")  # noqa: S108 - looked for, not relied on


@contextmanager
def scratch_dir() -> Iterator[Path]:
    """A directory for sockets and files that is removed, in memory if there is one; its name is short, as sockets need."""
    parent = _TMPFS if _TMPFS.is_dir() and os.access(_TMPFS, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="wc-bench-", dir=parent) as scratch:
        yield Path(scratch)


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
