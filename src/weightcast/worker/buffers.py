"""Host memory that is used again: touching fresh memory for the first time costs several times what a copy into it does."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np

from weightcast.errors import InvalidInput
from weightcast.tensors.flat import Array, Bytes, flat_bytes
from weightcast.tensors.spec import TensorSpec

ALIGNMENT = 64  # a cache line, and what vector instructions and frameworks like


class Buffers:
    """Arrays by size, handed out and taken back. Whoever keeps an array (a model that adopted it) just never gives it back.

    An array starts on a multiple of 64 bytes and is all of its memory, so a framework that takes it over owns it whole. At
    most `limit_nbytes` are kept waiting; what is given back beyond that is freed. Any thread may call.
    """

    def __init__(self, limit_nbytes: int | None = None) -> None:
        self._limit = limit_nbytes
        self._kept = 0
        self._free: dict[int, list[Bytes]] = {}
        self._addresses: set[int] = set()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory that is waiting to be used again."""
        return self._kept

    def take(self, spec: TensorSpec, *, zeroed: bool = False) -> Array:
        """Memory for a tensor, with whatever is in it; `zeroed` where not every element is going to be written."""
        flat = self._reused(spec.nbytes)
        if flat is None:
            flat = aligned(spec.nbytes)
        if zeroed:
            flat.fill(0)
        return flat.view(spec.dtype.numpy).reshape(spec.shape)

    def give(self, arrays: Iterable[Array]) -> None:
        """Take arrays back that came from `take` and that nobody uses any more. Giving one twice is refused."""
        for array in arrays:
            if array.nbytes == 0:
                continue
            if not array.flags.c_contiguous or not array.flags.writeable or array.ctypes.data % ALIGNMENT:
                raise InvalidInput(f"an array of shape {list(array.shape)} did not come from these buffers.")
            with self._lock:
                if array.ctypes.data in self._addresses:
                    raise InvalidInput(f"an array of shape {list(array.shape)} was given back twice.")
                if self._limit is not None and self._kept + array.nbytes > self._limit:
                    continue
                self._kept += array.nbytes
                self._addresses.add(array.ctypes.data)
                self._free.setdefault(array.nbytes, []).append(flat_bytes(array))

    def clear(self) -> None:
        """Free what is waiting."""
        with self._lock:
            self._kept = 0
            self._free.clear()
            self._addresses.clear()

    def _reused(self, nbytes: int) -> Bytes | None:
        with self._lock:
            free = self._free.get(nbytes)
            if not free:
                return None
            flat = free.pop()
            self._kept -= nbytes
            self._addresses.discard(flat.ctypes.data)
            return flat


def aligned(nbytes: int) -> Bytes:
    """Fresh bytes on a multiple of 64. The slack before them is not part of any array that a framework could find."""
    room = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return np.frombuffer(room.data[start : start + nbytes], dtype=np.uint8)
