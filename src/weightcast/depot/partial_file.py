"""A file of a version that is on its way here: it has its full size from the start, and is filled in any order."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from weightcast.errors import StorageFailed
from weightcast.store.files import refusals


class PartialFile:
    """A file that is written in any order and read through a mapping: `memory`.

    What another process left under the name is kept, if it has the right size: then it `existed`. Writing through the
    mapping would be killed by a signal when the disk is full, and takes a page fault for every page. Views of the memory
    stay valid after `close`, and after the file was removed.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        with refusals("create", path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            with refusals("size", path):
                self.existed = nbytes > 0 and os.fstat(self._fd).st_size == nbytes
                os.ftruncate(self._fd, nbytes)
                self.memory = memoryview(mmap.mmap(self._fd, nbytes, access=mmap.ACCESS_READ) if nbytes else b"")
        except BaseException:
            self.close()
            raise

    def write(self, start: int, data: memoryview) -> None:
        """Write bytes from `start` on."""
        with refusals("write", self.path):
            while data:
                written = os.pwrite(self._fd, data, start)
                data, start = data[written:], start + written

    @property
    def allocated_nbytes(self) -> int:
        """What it takes of the medium now."""
        with refusals("look at", self.path):
            return os.fstat(self._fd).st_blocks * 512

    def sync(self) -> None:
        """Wait until the bytes are on the medium."""
        with refusals("sync", self.path):
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; its memory goes with the last view of it. Safe twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


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
