"""Host memory that is used again: touching fresh memory for the first time costs several times what a copy into it does."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import numpy as np

from weightcast.tensors.flat import Array, Bytes, empty
from weightcast.tensors.spec import TensorSpec

ALIGNMENT = 64  # a cache line, and what vector instructions and frameworks like


class Buffers:
    """Memory for tensors that comes back by itself, when nothing refers to it any more: no array, tensor, view or storage.

    So whoever keeps an array (a model that adopted it) need not say so, and one that is in use anywhere is never handed out
    again. An array starts on a multiple of 64 bytes and is all of its memory, so a framework that takes it over owns it
    whole. At most `limit_nbytes` are kept waiting; what comes back beyond that is freed. Any thread may call. `allocate`
    gives fresh bytes on a multiple of 64: memory that is shared with other processes, for instance.
    """

    def __init__(self, limit_nbytes: int | None = None, *, allocate: Callable[[int], Bytes] | None = None) -> None:
        self._limit, self._allocate = limit_nbytes, allocate or aligned
        self._shelf = _Shelf(limit_nbytes, self._allocate)

    @property
    def nbytes(self) -> int:
        """Memory that is waiting to be used again."""
        return self._shelf.nbytes

    def take(self, spec: TensorSpec, *, zeroed: bool = False) -> Array:
        """Memory for a tensor, with whatever is in it; `zeroed` where not every element is going to be written."""
        if spec.nbytes == 0:
            return empty(spec)
        shelf = self._shelf
        flat = shelf.lend(shelf.pop(spec.nbytes))
        if zeroed:
            flat.fill(0)
        return flat.view(spec.dtype.numpy).reshape(spec.shape)

    def clear(self) -> None:
        """Free what is waiting. What is in use now will be freed too, and not kept, when it comes back."""
        self._shelf = _Shelf(self._limit, self._allocate)


class _Shelf:
    """Blocks of memory by size. They come back from finalizers, which run in any thread at any time, also in the middle of
    a call here: so there is no lock, and every step is one that the interpreter does not divide.
    """

    def __init__(self, limit_nbytes: int | None, allocate: Callable[[int], Bytes]) -> None:
        self._limit, self._allocate = limit_nbytes, allocate
        self._free: dict[int, list[Bytes]] = {}

    @property
    def nbytes(self) -> int:
        return sum(size * len(self._free[size]) for size in list(self._free))

    def pop(self, nbytes: int) -> Bytes:
        """A block of this size: one that waits, or a fresh one."""
        try:
            return self._free[nbytes].pop()
        except (KeyError, IndexError):
            return self._allocate(nbytes)

    def lend(self, block: Bytes) -> Bytes:
        """The bytes of a block. It comes back when the last view of them is gone, if this shelf is still there then."""
        lent = (ctypes.c_char * len(block)).from_buffer(block.data)  # what all views keep alive, and what can be watched
        weakref.finalize(lent, _take_back, weakref.ref(self), block).atexit = False
        return np.frombuffer(memoryview(lent), dtype=np.uint8)

    def put(self, block: Bytes) -> None:
        """Keep a block, or drop one of its size if that is too much."""
        waiting = self._free.setdefault(len(block), [])
        waiting.append(block)
        if self._limit is not None and self.nbytes > self._limit:
            try:
                waiting.pop()
            except IndexError:  # somebody took it meanwhile
                return


def _take_back(to: weakref.ref[_Shelf], block: Bytes) -> None:
    shelf = to()
    if shelf is not None:
        shelf.put(block)


def aligned(nbytes: int) -> Bytes:
    """Fresh bytes on a multiple of 64. The slack before them is not part of any array that a framework could find."""
    room = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return np.frombuffer(room.data[start : start + nbytes], dtype=np.uint8)
