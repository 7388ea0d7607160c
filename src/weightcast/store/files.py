"""The few file operations that durable publishing is made of. Every refusal of the file system becomes `StorageFailed`."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from weightcast import logs
from weightcast.errors import StorageFailed
from weightcast.tensors.flat import Buffer

log = logs.get(__name__)


@contextmanager
def refusals(operation: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a `StorageFailed` that names the operation and the path."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(operation, path, error) from error


class FileWriter:
    """A new file, written front to back; `sync` makes it survive a power cut.

    A file of that name is refused, or removed first (`overwrite`). A link is never followed.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path
        self.position = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with refusals("create", path):
            try:
                self._fd = os.open(path, flags, 0o644)
            except FileExistsError:
                if not overwrite:
                    raise
                path.unlink(missing_ok=True)
                self._fd = os.open(path, flags, 0o644)

    def write(self, data: Buffer) -> None:
        """Append all of `data`."""
        rest = memoryview(data).cast("B")
        with refusals("write", self.path):
            while rest:
                written = os.write(self._fd, rest)
                rest = rest[written:]
                self.position += written

    def rewrite(self, data: Buffer, offset: int) -> None:
        """Replace bytes that were written before."""
        rest = memoryview(data).cast("B")
        with refusals("write", self.path):
            while rest:
                written = os.pwrite(self._fd, rest, offset)
                rest, offset = rest[written:], offset + written

    def sync(self) -> None:
        """Wait until the bytes are on the medium."""
        with refusals("sync", self.path):
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file. Safe twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with refusals("close", self.path):
                os.close(fd)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def make_dir(path: Path) -> None:
    """Make a directory and its parents; one that exists is fine."""
    if path.is_dir():
        return
    make_dir(path.parent)
    with refusals("make directory", path):
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir():
                raise
    sync_dir(path.parent)


def sync_dir(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    with refusals("sync directory", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file whose directory is not yet visible to anyone."""
    with FileWriter(path) as file:
        file.write(data)
        file.sync()


def aside_path(path: Path) -> Path:
    """Where the new contents of a file are written before they replace the old ones."""
    return path.with_name(f".{path.name}.tmp")


def replace_synced(path: Path, data: Buffer) -> None:
    """Give `path` new contents in one step: readers see the old or the new bytes, also after a power cut."""
    aside = aside_path(path)
    try:
        with FileWriter(aside, overwrite=True) as file:
            file.write(data)
            file.sync()
        rename(aside, path)
    except BaseException:
        with suppress(OSError):  # what failed first is what the caller must hear of; gc removes the rest
            aside.unlink(missing_ok=True)
        raise
    sync_dir(path.parent)


def put_back(path: Path, before: bytes | None) -> bool:
    """Undo a replacement that may have happened although it failed: its name was changed, but not made safe.

    `before` is what the file held, None if there was none. False if it could not be undone, so that the file still says
    what it should not.
    """
    try:
        if _contents(path) != before:
            if before is None:
                remove_file(path)
            else:
                replace_synced(path, before)
    except StorageFailed as error:
        log.warning("file not put back", path=path, error=error)
    return _contents(path) == before


def _contents(path: Path) -> bytes | None:
    with refusals("read", path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def remove_file(path: Path) -> None:
    """Remove a file; one that is gone already is fine."""
    with refusals("remove", path):
        path.unlink(missing_ok=True)


def rename(old: Path, new: Path) -> None:
    """Rename within one file system, replacing what is there."""
    with refusals("rename to", new):
        old.rename(new)


def remove_dir(path: Path) -> int:
    """Remove a flat directory of files and return the bytes freed. Files go in the order of their names.

    Of a link to a directory only the link is removed.
    """
    freed = 0
    with refusals("remove", path):
        if path.is_symlink():
            path.unlink()
            return 0
        for file in sorted(path.iterdir()):
            freed += file.lstat().st_size
            file.unlink()
        path.rmdir()
    return freed


def read_small(path: Path, limit: int) -> bytes:
    """The contents of a small regular file. Missing files raise FileNotFoundError, all others `StorageFailed`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not keep the reader waiting
        with os.fdopen(fd, "rb", buffering=0) as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise StorageFailed("read", path, OSError(errno.EINVAL, "it is not a regular file"))
            if status.st_size > limit:
                raise StorageFailed("read", path, OSError(errno.EFBIG, f"it is larger than {limit} bytes"))
            data = file.read(status.st_size + 1) or b""
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageFailed("read", path, error) from error
    if len(data) != status.st_size:
        raise StorageFailed("read", path, OSError(errno.EIO, "it changed while it was read"))
    return data
