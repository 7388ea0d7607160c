"""A file of a version that is on its way here: it has its full size from the start, and is filled in any order."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from weightcast.depot.exchange import FileRange
from weightcast.errors import StorageFailed
from weightcast.store.byte_file import PooledFile
from weightcast.store.files import refusals


class PartialFile:
    """A file that is written in any order, and read where it was written.

    A file of the right size that another process left under the name is kept: then it `existed`. Writing through a mapping
    would end the process by a signal when the disk is full.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        self._file = PooledFile(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        self.existed = nbytes > 0 and self._file.nbytes == nbytes
        with refusals("size", path):
            os.ftruncate(self._file.opened().fd, nbytes)

    def write(self, start: int, data: memoryview) -> None:
        """Write bytes from `start` on."""
        opened = self._file.opened()
        with refusals("write", self.path):
            while data:
                written = os.pwrite(opened.fd, data, start)
                data, start = data[written:], start + written

    def range(self, start: int, stop: int) -> FileRange:
        """Bytes of it, to be read or sent."""
        return FileRange(self._file.opened(), start, stop)

    @property
    def allocated_nbytes(self) -> int:
        """What it takes of the medium now."""
        opened = self._file.opened()
        with refusals("look at", self.path):
            return os.fstat(opened.fd).st_blocks * 512

    def sync(self) -> None:
        """Wait until the bytes are on the medium."""
        opened = self._file.opened()
        with refusals("sync", self.path):
            os.fsync(opened.fd)

    def close(self) -> None:
        """Close the file until it is used again. Safe twice."""
        self._file.close()


def check_room(directory: Path, files: Iterable[PartialFile]) -> None:
    """Refuse to begin what the medium has no room for."""
    needed = sum(max(0, file.nbytes - file.allocated_nbytes) for file in files)
    with refusals("look at", directory):
        status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        why = OSError(errno.ENOSPC, f"{needed} bytes are needed and {free} are free")
        raise StorageFailed("fill", directory, why)


def remove_strays(directory: Path, known: set[str]) -> None:
    """Remove what does not belong to a version that is about to be filled: of another try, or of another version."""
    try:
        for path in directory.iterdir():
            if path.name not in known and not path.is_dir():
                path.unlink()
    except OSError as error:
        raise StorageFailed("clear", directory, error) from error
