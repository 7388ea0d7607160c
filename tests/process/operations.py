"""The file-changing system calls of this process under one directory: counted, recorded, refused or cut off by a kill.

`os` functions are replaced while a block runs; nothing of weightcast is. A call that could change files and is not known
here raises, so that none can slip past unseen.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
UNKNOWN = (
    "copy_file_range", "fdatasync", "ftruncate", "link", "posix_fallocate", "pwritev", "sendfile", "splice", "symlink",
    "truncate", "writev",
)  # fmt: skip

SEALS = ("manifest.json", "version.yaml", "version.txt")  # where readers begin: what these name must be there


@dataclass(frozen=True)
class Operation:
    """One call. Paths are relative to the watched directory; `data` is borrowed from the caller."""

    call: str
    path: str
    to: str = ""
    flags: int = 0
    offset: int | None = None
    data: memoryview | None = None
    half: Callable[[], object] = lambda: None  # does half of a write

    @property
    def splits(self) -> bool:
        """Whether the call can be cut in the middle."""
        return self.call in ("write", "pwrite")

    def __str__(self) -> str:
        return f"{self.call} {self.path}" + (f" -> {self.to}" if self.to else "")


Around = Callable[[Operation, Callable[[], Any]], Any]


@contextmanager
def watched(root: str | os.PathLike[str], around: Around) -> Iterator[None]:
    """Send every file-changing call under `root` through `around(operation, proceed)` while the block runs."""
    top = os.path.abspath(root)
    real = {name: getattr(os, name) for name in (*_Calls.NAMES, *UNKNOWN)}
    flock = fcntl.flock
    calls = _Calls(top, around, real, flock)
    try:
        for name in _Calls.NAMES:
            setattr(os, name, getattr(calls, name))
        for name in UNKNOWN:
            setattr(os, name, _refuse(name))
        fcntl.flock = calls.flock
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)
        fcntl.flock = flock


def _refuse(name: str) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(f"os.{name} was called: tests/process/operations.py does not know it yet")

    return refuse


class _Calls:
    """Stand-ins for the `os` functions. A descriptor is known if it was opened here, so other files are left alone."""

    NAMES = ("open", "write", "pwrite", "fsync", "close", "rename", "replace", "mkdir", "unlink", "remove", "rmdir")

    def __init__(self, top: str, around: Around, real: dict[str, Callable[..., Any]], flock: Callable[..., Any]) -> None:
        self._top, self._around, self._real, self._flock = top, around, real, flock
        self._paths: dict[int, str] = {}

    def _inside(self, path: Any) -> str | None:
        if isinstance(path, int):
            return None
        full = os.path.abspath(os.fsdecode(path))
        return os.path.relpath(full, self._top) if full == self._top or full.startswith(self._top + os.sep) else None

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        inside = self._inside(path)
        if inside is None or not flags & (WRITING | os.O_DIRECTORY):
            return self._real["open"](path, flags, mode, dir_fd=dir_fd)
        fd = self._around(Operation("open", inside, flags=flags), lambda: self._real["open"](path, flags, mode))
        self._paths[fd] = inside
        return fd

    def write(self, fd: int, data: Any) -> int:
        if fd not in self._paths:
            return self._real["write"](fd, data)
        view = memoryview(data).cast("B")
        operation = Operation(
            "write", self._paths[fd], data=view, half=lambda: self._real["write"](fd, view[: len(view) // 2])
        )
        return self._around(operation, lambda: self._real["write"](fd, view))

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if fd not in self._paths:
            return self._real["pwrite"](fd, data, offset)
        view = memoryview(data).cast("B")
        operation = Operation(
            "pwrite", self._paths[fd], offset=offset, data=view,
            half=lambda: self._real["pwrite"](fd, view[: len(view) // 2], offset),
        )  # fmt: skip
        return self._around(operation, lambda: self._real["pwrite"](fd, view, offset))

    def fsync(self, fd: int) -> None:
        self._by_fd("fsync", fd, lambda: self._real["fsync"](fd))

    def close(self, fd: int) -> None:
        try:
            self._by_fd("close", fd, lambda: self._real["close"](fd))
        finally:
            self._paths.pop(fd, None)

    def flock(self, fd: Any, operation: int) -> None:
        self._by_fd("flock", fd, lambda: self._flock(fd, operation))

    def _by_fd(self, call: str, fd: int, proceed: Callable[[], None]) -> None:
        if fd in self._paths:
            self._around(Operation(call, self._paths[fd]), proceed)
        else:
            proceed()

    def rename(self, source: Any, target: Any, **places: Any) -> None:
        self._by_path("rename", source, target, **places)

    def replace(self, source: Any, target: Any, **places: Any) -> None:
        self._by_path("replace", source, target, **places)

    def mkdir(self, path: Any, mode: int = 0o777, **places: Any) -> None:
        self._by_path("mkdir", path, mode, **places)

    def unlink(self, path: Any, **places: Any) -> None:
        self._by_path("unlink", path, **places)

    def remove(self, path: Any, **places: Any) -> None:
        self._by_path("remove", path, **places)

    def rmdir(self, path: Any, **places: Any) -> None:
        self._by_path("rmdir", path, **places)

    def _by_path(self, call: str, path: Any, *rest: Any, **places: Any) -> None:
        inside = self._inside(path)
        to = (self._inside(rest[0]) or "") if call in ("rename", "replace") else ""
        if inside is None:
            self._real[call](path, *rest, **places)
        else:
            self._around(Operation(call, inside, to=to), lambda: self._real[call](path, *rest, **places))


def listing(log: list[Operation]) -> Around:
    """An `around` that notes every operation and lets it happen."""

    def around(operation: Operation, proceed: Callable[[], Any]) -> Any:
        log.append(operation)
        return proceed()

    return around


def killing(at: int, moment: str) -> Around:
    """An `around` that ends this process with SIGKILL `before`, `half` through or `after` operation number `at`."""
    count = 0

    def around(operation: Operation, proceed: Callable[[], Any]) -> Any:
        nonlocal count
        number, count = count, count + 1
        if number != at:
            return proceed()
        if moment == "half":
            operation.half()
        elif moment == "after":
            with suppress(OSError):
                proceed()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL did not end this process")

    return around


def refusing(at: int, error: int, moment: str = "before", *, ever_after: bool = False) -> Around:
    """An `around` in which operation number `at` fails with an errno, and with `ever_after` every change that follows.

    A write may fail `half` through. A close that fails has closed nevertheless, as on Linux.
    """
    count = 0

    def around(operation: Operation, proceed: Callable[[], Any]) -> Any:
        nonlocal count
        number, count = count, count + 1
        if number != at and not (ever_after and number > at and operation.call != "close"):
            return proceed()
        if moment == "half":
            operation.half()
        if operation.call == "close":
            proceed()
        raise OSError(error, os.strerror(error))

    return around


def points(log: list[Operation]) -> list[tuple[int, str]]:
    """Every moment at which a process that does these operations can die and leave different files."""
    return [
        (number, moment)
        for number, operation in enumerate(log)
        for moment in (("before", "half", "after") if operation.splits else ("before", "after"))
    ]


def sampled(log: list[Operation], whole: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """A part of these points, at least an eighth: the first and the last, each kind of call, whole and cut in two, all
    around what is done to the files where readers begin, and every eighth of the rest.
    """
    kinds: dict[tuple[str, bool], list[tuple[int, str]]] = defaultdict(list)
    for number, moment in whole:
        kinds[log[number].call, moment == "half"].append((number, moment))
    seals = {number for number, one in enumerate(log) if os.path.basename(one.to or one.path) in SEALS}
    chosen = {whole[0], whole[-1], *whole[::8], *(places[len(places) // 2] for places in kinds.values())}
    chosen |= {point for point in whole if point[0] in seals}
    return [point for point in whole if point in chosen]
