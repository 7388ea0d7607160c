"""Shared host memory: sealed memfds, which have no name to be left behind and end with their last user."""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np

from weightcast.errors import InvalidInput, SourceFailed, StorageFailed, WrongState
from weightcast.tensors.bridges import host_array
from weightcast.tensors.flat import Bytes, byte_blocks
from weightcast.transports.ipc.device import Block, Descriptor, Handle, Kind, Memory

BLOCK_NBYTES = 1 << 18  # copied and then hashed in the second-level cache: 15 % faster than 1 MiB, 25 % than 4 MiB
LARGE_NBYTES = 32 << 20  # what memcpy writes past the caches, in half the time: worth more than hashing from them
MEMORY_IDS = itertools.count(1)

_SEAL_FUTURE_WRITE = 0x10  # not in fcntl before Python 3.13
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
_TOUCH_NBYTES = 64 << 20  # also the most that a signal can make the kernel begin again
_TOUCH_THREADS = 2  # the kernel clears pages at a fraction of the speed of memory: 0.42 s per GiB with two, 0.55 with one
_MEMINFO = Path("/proc/meminfo")


class HostMemory:
    """A mapped memfd. `bytes` is writeable for whoever allocated it and for nobody else.

    Views of `bytes` keep the mapping alive after `close`, so that no late reader can crash.
    """

    def __init__(self, nbytes: int, mapping: mmap.mmap, *, memory_id: int = 0, descriptor: int = -1) -> None:
        self.nbytes, self.id = nbytes, memory_id
        self._bytes: Bytes | None = np.frombuffer(mapping, dtype=np.uint8, count=nbytes)
        self._descriptor = descriptor
        self._lock = threading.Lock()

    @property
    def bytes(self) -> Bytes:
        """All of it. Raises `WrongState` after `close`."""
        view = self._bytes
        if view is None:
            raise WrongState("use shared memory", "closed", ["open"])
        return view

    @property
    def descriptor(self) -> int:
        """The memfd, for as long as nobody closes this: a thread that does not know that takes a `duplicate`."""
        if self._descriptor < 0:
            raise WrongState("export shared memory", "opened" if self._bytes is not None else "closed", ["allocated"])
        return self._descriptor

    def duplicate(self) -> int:
        """Another descriptor of the memfd, to be closed by the caller."""
        with self._lock:
            return os.dup(self.descriptor)

    def close(self) -> None:
        """Let go of the memory. It is unmapped at once if there is no view of it, otherwise with the last view."""
        with self._lock:
            self._bytes = None
            if self._descriptor >= 0:
                descriptor, self._descriptor = self._descriptor, -1
                os.close(descriptor)


class HostBlock:
    """Bytes of a host tensor."""

    def __init__(self, data: Bytes) -> None:
        self.data, self.nbytes = data, len(data)

    def part(self, start: int, stop: int) -> HostBlock:
        """Some of them."""
        return HostBlock(within(self.data, start, stop))


class HostDevice:
    """Host memory, shared by passing file descriptors. Tensors on other devices are copied to the host first."""

    kind: Kind = "memfd"

    def allocate(self, nbytes: int) -> HostMemory:
        """New zeroed memory. Its pages are there when this returns: lack of memory is an error here and no signal later."""
        if nbytes < 0:
            raise InvalidInput(f"memory cannot have {nbytes} bytes.")
        size = _size(nbytes)
        try:
            descriptor = os.memfd_create("weightcast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                _check_available(size)
                os.ftruncate(descriptor, size)
                mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                mapping.madvise(mmap.MADV_DONTFORK)  # children (workers that load data) must not keep it from being freed
                _touch(descriptor, mapping, size)
                # From here on only the mapping above can write, and no reader can be cut short.
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
                return HostMemory(nbytes, mapping, memory_id=next(MEMORY_IDS), descriptor=descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise StorageFailed("allocate", f"{nbytes} bytes of shared memory", error) from error

    def export(self, memory: Memory) -> Handle:
        """The handle under which the lifeline is asked for the descriptor. The same for every call."""
        owned = cast("HostMemory", memory)
        owned.descriptor  # noqa: B018 - refuses memory that is closed or belongs to another process
        return Handle(kind="memfd", id=owned.id, nbytes=owned.nbytes)

    def open(self, handle: Handle, descriptor: Descriptor) -> HostMemory:
        """Map what another process exported. Nothing it does afterwards can make reading fail: the size is sealed."""
        if handle.kind != self.kind:
            raise SourceFailed(f"memory {handle.id} is of kind {handle.kind!r}, which cannot be mapped into host memory.")
        fd = descriptor(handle)
        try:
            _check_exported(handle, fd)
            mapping = mmap.mmap(fd, _size(handle.nbytes), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        except OSError as error:
            raise SourceFailed(f"memory {handle.id} of {handle.nbytes} bytes cannot be mapped: {error.strerror}.") from error
        finally:
            os.close(fd)
        return HostMemory(handle.nbytes, mapping)

    def blocks(self, name: str, tensor: object) -> Iterator[Block]:
        """Slices of the tensor's own memory if it is contiguous and on the host."""
        array = host_array(name, tensor)
        large = array.flags.c_contiguous and array.nbytes >= LARGE_NBYTES
        return map(HostBlock, byte_blocks(array, LARGE_NBYTES if large else BLOCK_NBYTES))

    def copy(self, block: Block, memory: Memory, offset: int) -> None:
        """Done when this returns."""
        source, target = cast("HostBlock", block).data, cast("HostMemory", memory).bytes
        np.copyto(within(target, offset, offset + len(source)), source)

    def synchronise(self) -> None:
        """Nothing: memory is coherent between processes."""

    def read(self, memory: Memory, start: int, stop: int) -> memoryview:
        """The bytes in place."""
        return within(cast("HostMemory", memory).bytes, start, stop).data.toreadonly()


def private_memory(nbytes: int) -> HostMemory:
    """New zeroed memory of this process alone, every page of it touched. Unlike a memfd it has large pages, where the system
    grants them, and no descriptor. Sending from it over loopback took as long as from a memfd.
    """
    size = _size(nbytes)
    try:
        _check_available(size)
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        mapping.madvise(mmap.MADV_DONTFORK)
        _spread(lambda start, stop: _map_pages(mapping, start, stop), size)
    except OSError as error:
        raise StorageFailed("allocate", f"{nbytes} bytes of memory", error) from error
    return HostMemory(nbytes, mapping)


def within(data: Bytes, start: int, stop: int) -> Bytes:
    """A slice that is what was asked for, or `InvalidInput`."""
    if not 0 <= start <= stop <= len(data):
        raise InvalidInput(f"bytes {start} to {stop} are not in a memory of {len(data)} bytes.")
    return data[start:stop]


def _size(nbytes: int) -> int:
    return max(1, nbytes)  # nothing cannot be mapped


def _check_available(nbytes: int) -> None:
    """A memfd has no limit of its own: without this the kernel would kill processes until it has the memory."""
    for line in _MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable" and nbytes > int(value.split()[0]) * 1024:
            raise OSError(errno.ENOMEM, f"only {value.strip()} of memory are available")


def _touch(descriptor: int, mapping: mmap.mmap, nbytes: int) -> None:
    """Reserve every page, then map it: the first fails properly, the second makes the first copy as fast as the next."""

    def touch(start: int, stop: int) -> None:
        os.posix_fallocate(descriptor, start, stop - start)
        _map_pages(mapping, start, stop)

    _spread(touch, nbytes)


def _map_pages(mapping: mmap.mmap, start: int, stop: int) -> None:
    np.frombuffer(mapping, dtype=np.uint8)[start : stop : mmap.PAGESIZE] = 0


def _spread(touch: Callable[[int, int], None], nbytes: int) -> None:
    """Touch all of a memory, by several threads if it is large."""
    starts = range(0, nbytes, _TOUCH_NBYTES)
    if len(starts) == 1:
        touch(0, nbytes)
        return
    with ThreadPoolExecutor(_TOUCH_THREADS, thread_name_prefix="weightcast-touch") as threads:
        for _ in threads.map(lambda start: touch(start, min(start + _TOUCH_NBYTES, nbytes)), starts):
            pass


def _check_exported(handle: Handle, fd: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or not seals & fcntl.F_SEAL_SHRINK:
        raise SourceFailed(
            f"memory {handle.id} is not a memfd whose size is sealed: its owner could cut it short while it is read."
        )
    if handle.nbytes < 0 or _size(handle.nbytes) > status.st_size:
        raise SourceFailed(f"memory {handle.id} should have {handle.nbytes} bytes, but has {status.st_size}.")
