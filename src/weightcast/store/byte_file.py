"""Files that are read by byte range, with a bound on how many are open at a time.

Ranges are read with pread. A mapping would save a copy, but a mapped file that another process truncates ends the reader by
SIGBUS, and Python keeps a descriptor for each mapping.
"""

from __future__ import annotations

import os
import resource
import stat
import threading
from collections import OrderedDict
from pathlib import Path
from types import TracebackType

from weightcast.errors import PartCorrupt, StorageFailed


class ByteFile:
    """An open regular file. `nbytes` is its size when it was opened. It is closed with its last reference at the latest."""

    fd = -1

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self.path = path
        # O_NONBLOCK: a pipe in the place of a file must not hang the opener; it is refused just below.
        try:
            self.fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        except FileNotFoundError as error:
            raise PartCorrupt(path, "the file is missing") from error
        except OSError as error:
            raise StorageFailed("open", path, error) from error
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise PartCorrupt(path, "it is not a regular file")
        self.nbytes = status.st_size
        self.identity = status.st_dev, status.st_ino

    @property
    def size_now(self) -> int:
        """Its size at this moment."""
        return os.fstat(self.fd).st_size

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

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> ByteFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class PooledFile:
    """A regular file that the pool may close while nothing reads it; the next reader opens it again, by its path.

    A file that was replaced meanwhile is refused with `PartCorrupt`, and one that was removed too. `nbytes` is its size when
    it was first opened. Any thread may read.
    """

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self.path, self._flags = path, flags
        opened = ByteFile(path, flags)
        self.nbytes, self._identity = opened.nbytes, opened.identity
        _pool.put(self, opened)

    def opened(self) -> ByteFile:
        """The open file. It stays open for as long as the caller refers to it."""
        opened = _pool.get(self)
        if opened is None:
            opened = ByteFile(self.path, self._flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
            if opened.identity != self._identity:
                raise PartCorrupt(self.path, "another file has taken its place")
            _pool.put(self, opened)
        return opened

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes at `offset`, or raise `PartCorrupt` if the file ends before."""
        self.opened().read_into(buffer, offset)

    def read(self, nbytes: int, offset: int) -> bytes:
        """So many bytes from `offset`."""
        return self.opened().read(nbytes, offset)

    def close(self) -> None:
        """Close the file, once its present readers are done. Safe twice."""
        _pool.drop(self)

    def __del__(self) -> None:
        self.close()


class _Pool:
    """The open files of this process that may be closed: a quarter of the limit on open files, least recently read first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a file may be collected, and so dropped, while its thread is in here
        self._open: OrderedDict[int, ByteFile] = OrderedDict()

    def get(self, file: PooledFile) -> ByteFile | None:
        with self._lock:
            opened = self._open.get(id(file))
            if opened is not None:
                self._open.move_to_end(id(file))
            return opened

    def put(self, file: PooledFile, opened: ByteFile) -> None:
        most = max(16, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 4096))
        with self._lock:
            self._open[id(file)] = opened
            while len(self._open) > most:
                self._open.popitem(last=False)

    def drop(self, file: PooledFile) -> None:
        with self._lock:
            self._open.pop(id(file), None)


_pool = _Pool()
