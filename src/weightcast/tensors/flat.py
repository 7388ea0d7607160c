"""Arrays as bytes: flat views without a copy where memory allows it, bounded blocks where it does not."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightcast.tensors.spec import TensorSpec

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview

BLOCK_NBYTES = 4 << 20  # stays in the last-level cache between being read, hashed and written


class Piece(NamedTuple):
    """A byte range of one tensor. `data` is borrowed: valid until the next piece is asked for.

    A source that takes digests only as it sends has none in its manifest: the last piece of a tensor carries its `digest`.
    """

    tensor: str
    offset: int
    data: memoryview
    digest: str = ""


Pieces = Generator[Piece, None, None]


def flat_bytes(array: Array) -> Bytes:
    """The bytes of a C-contiguous array as a flat view; writing to it writes to the array."""
    return array.reshape(-1, copy=False).view(np.uint8)


def empty(spec: TensorSpec) -> Array:
    """Fresh, uninitialised, contiguous memory for a tensor."""
    return np.empty(spec.shape, dtype=spec.dtype.numpy)


def from_bytes(data: Buffer, spec: TensorSpec) -> Array:
    """The tensor that these bytes are, without a copy."""
    return np.frombuffer(data, dtype=np.uint8).view(spec.dtype.numpy).reshape(spec.shape)


def byte_blocks(array: Array, nbytes: int = BLOCK_NBYTES) -> Iterator[Bytes]:
    """The bytes of any array in C order, in blocks of about `nbytes`.

    Contiguous arrays are sliced without a copy; others are gathered block by block, so that hashing or writing a
    transposed tensor never doubles it. A block is valid until the next one is asked for.
    """
    if array.flags.c_contiguous:
        flat = flat_bytes(array)
        for start in range(0, len(flat), nbytes):
            yield flat[start : start + nbytes]
    elif array.nbytes <= nbytes:
        yield flat_bytes(np.ascontiguousarray(array))
    else:
        rows = nbytes // max(1, array[0].nbytes)
        if rows == 0:
            for row in array:
                yield from byte_blocks(row, nbytes)
        else:
            for start in range(0, len(array), rows):
                yield flat_bytes(np.ascontiguousarray(array[start : start + rows]))
