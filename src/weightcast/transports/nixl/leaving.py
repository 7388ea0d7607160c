"""The end of a process that has NIXL in it: with the exit code that it should have, and nothing freed that is still used."""

from __future__ import annotations

import ctypes
import threading

_lock = threading.Lock()
_guarded = False


def guard_exit() -> None:
    """Have this process end right after its own work at exit, before libraries are unloaded. Call it before loading NIXL.

    Libraries that NIXL brings along can crash while they are unloaded, when all Python code has run and all of Python is
    gone: the process then ends by a signal, whatever its exit code was. The C library calls exit handlers in the reverse
    order of their registration, and unloads last. So what was registered after this still runs; then the buffers of C
    streams are written, and the kernel takes the process with the code that it was to end with.
    """
    global _guarded  # noqa: PLW0603 - once in a process
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "on_exit") and hasattr(libc, "fcloseall")):  # only glibc has them; NIXL needs it anyway
        return
    with _lock:
        if not _guarded:
            # Functions of C alone: no interpreter is left to run anything else. `_exit` gets the exit code as its argument.
            libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
            libc.on_exit(ctypes.cast(libc.fcloseall, ctypes.c_void_p), None)
            _guarded = True


def outlive(thing: object) -> None:
    """Keep an object for good: not even the end of the interpreter frees it. `release_outliving` takes that back."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def release_outliving(thing: object) -> None:
    """The object may go when nobody refers to it any more."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))
