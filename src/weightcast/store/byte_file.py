"""A file that is read by byte range."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType

from weightcast.errors import PartCorrupt, StorageFailed


class ByteFile:
    """An open regular file. `nbytes` is its size when it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # O_NONBLOCK: a pipe in the place of a file must not hang the opener; it is refused just below.
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise PartCorrupt(path, "the file is missing") from error
        except OSError as error:
            raise StorageFailed("open", path, error) from error
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise PartCorrupt(path, "it is not a regular file")
        self.nbytes = status.st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes at `offset`, or raise `PartCorrupt` if the file ends before."""
        rest = buffer
        while rest:
            try:
                got = os.preadv(self.fd, [rest], offset)
            except OSError as error:
                raise StorageFailed("read", self.path, error) from error
            if got == 0:
                raise PartCorrupt(self.path, f"it ends at byte {offset}, in the middle of its data")
            rest, offset = rest[got:], offset + got

    def read(self, nbytes: int, offset: int) -> bytes:
        """So many bytes from `offset`."""
        data = bytearray(nbytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def close(self) -> None:
        """Close the file. Safe twice."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __enter__(self) -> ByteFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
