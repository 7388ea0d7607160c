"""Distance between bit patterns, counted in units in the last place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def bits(array: Array) -> Array:
    """The elements as unsigned integers, bit for bit. Complex arrays are to be viewed as pairs of F32 before."""
    return array.view(_UNSIGNED[array.dtype.itemsize])


def ordered(array: Array, dtype: DType) -> NDArray[np.int64]:
    """Integers that grow with the value: neighbours in value are neighbours in number, and −0 and +0 are one apart.

    64-bit elements keep their order but lose their lowest bit, so that differences fit into 64 bits.
    """
    patterns = bits(array)
    width = patterns.dtype.itemsize
    signed = patterns.view(_SIGNED[width]).astype(np.int64)
    if width == 8:
        signed >>= 1
    if dtype.is_float:
        if dtype is DType.F8_E8M0:  # no sign bit
            return patterns.astype(np.int64)
        lowest = np.int64(-(1 << (8 * width - 1 - (width == 8))))
        return np.asarray(np.where(signed < 0, lowest - signed - 1, signed), dtype=np.int64)
    if dtype.value.startswith("U") or dtype is DType.BOOL:
        return np.asarray(patterns >> np.uint64(1) if width == 8 else patterns, dtype=np.int64)
    return np.asarray(signed, dtype=np.int64)


def distance(old: Array, new: Array, dtype: DType) -> NDArray[np.int64]:
    """How far each element moved, in units in the last place (integers: in ones)."""
    moved: NDArray[np.int64] = ordered(new, dtype) - ordered(old, dtype)
    return np.abs(moved)
