"""Buffers in memory that other processes of this host can map."""

from __future__ import annotations

import threading
import weakref

import numpy as np

from weightcast.tensors.flat import Array, Bytes
from weightcast.transports.ipc.host_memory import HostDevice, HostMemory
from weightcast.worker.buffers import ALIGNMENT, Buffers


class SharedBuffers(Buffers):
    """Buffers that lie in a few large pieces of shared memory: `slabs`, each as large as a version of `nbytes`.

    Only the process that made it can write there. Descriptors end with this object, memory with the last array as well.
    """

    def __init__(self, nbytes: int) -> None:
        self._slabs = _Slabs(nbytes)
        super().__init__(allocate=self._slabs.cut)

    @property
    def slabs(self) -> list[HostMemory]:
        """All memory that there is, in use or waiting."""
        return list(self._slabs.made)

    def locate(self, array: Array) -> tuple[HostMemory, int] | None:
        """The slab that an array lies in, and the offset there; None if it lies elsewhere."""
        address = array.__array_interface__["data"][0]
        for slab in self.slabs:
            offset = address - slab.bytes.__array_interface__["data"][0]
            if offset >= 0 and offset + array.nbytes <= slab.nbytes:
                return slab, offset
        return None


class _Slabs:
    """Memory that is cut into blocks. It does not know the buffers: a cycle would free gigabytes only now and then."""

    def __init__(self, nbytes: int) -> None:
        self.made: list[HostMemory] = []
        self._nbytes, self._used = nbytes, 0
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self.made).atexit = False

    def cut(self, nbytes: int) -> Bytes:
        """Fresh memory, on a multiple of 64."""
        with self._lock:
            if not self.made or self._used + nbytes > self.made[-1].nbytes:
                self.made.append(HostDevice().allocate(max(self._nbytes, nbytes)))
                self._used = 0
            start = self._used
            self._used += whole_lines(nbytes)
            return np.frombuffer(self.made[-1].bytes.data[start : start + nbytes], dtype=np.uint8)


def whole_lines(nbytes: int) -> int:
    """What a block of memory takes in a slab."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _close_all(slabs: list[HostMemory]) -> None:
    for slab in slabs:
        slab.close()
