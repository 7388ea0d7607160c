"""Copying the box of a tensor to its place in a parameter: cut, transposed, converted, a moment's work at a time."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from weightcast.tensors.boxes import Box, Placement
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec

BLOCK_NBYTES = 16 << 20  # copied between two looks at the deadline
_CONVERT_NBYTES = 2 << 20  # converted before it is transposed: stays in the cache

# Rows and columns of the tiles of a transposed copy, by the size of elements: the fastest of many that were tried.
_TILES = {1: (512, 256), 2: (512, 512), 4: (256, 128), 8: (256, 128)}
_SKEW_NBYTES = 32

_CONVERTIBLE = {DType.F64, DType.F32, DType.F16, DType.BF16}  # an 8-bit float means nothing without its scale

Check = Callable[[], None]


def converts(source: DType, target: DType) -> bool:
    """Whether elements of one type can become those of another by `place`."""
    return source == target or {source, target} <= _CONVERTIBLE


def place(tensor: Array, parameter: Array, placement: Placement, check: Check) -> None:
    """Write a box of a whole tensor to its place. Elements of another dtype are converted as NumPy converts them, rounding
    to the nearest; equal dtypes are copied bit for bit. `check` is called again and again, and may raise.
    """
    source, target = _seen(tensor, placement.box), landing(parameter, placement)
    if source.size == 0:
        return
    if source.dtype == target.dtype:
        source, target = _as_bits(source), _as_bits(target)
    if not placement.transposed:
        _copy(source, target, check)
    elif source.dtype == target.dtype:
        _transpose(source, target, check)
    else:
        rows = _rows_at_once(source, _CONVERT_NBYTES)
        for start in range(0, len(source), rows):
            converted = np.empty((min(rows, len(source) - start), source.shape[1]), dtype=target.dtype)
            _copy(source[start : start + rows], converted, check)
            _transpose(_as_bits(converted), _as_bits(target[:, start : start + rows]), check)


def row_start(tensor: TensorSpec, parameter: TensorSpec, placement: Placement) -> int | None:
    """At which byte of a tensor a box begins that is one stretch of bytes in both, without conversion; None if it is not."""
    box, target = placement.box, placement.target
    inner = len(target.shape) - len(box.shape) + 1  # the dimensions behind that of the rows
    plain = tensor.dtype == parameter.dtype and not placement.transposed and prod(box.shape) > 0
    if not plain or box.shape[1:] != tensor.shape[1:] or target.shape[inner:] != parameter.shape[inner:]:
        return None
    return prod(tensor.shape[1:]) * tensor.dtype.itemsize * (box.start[0] if box.start else 0)


def _seen(tensor: Array, box: Box) -> Array:
    where: tuple[Any, ...] = tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))
    return tensor[(*where, ...)]


def landing(parameter: Array, placement: Placement) -> Array:
    """The place of a box, without the dimensions that it does not have."""
    extra = len(placement.at) - len(placement.box.shape)
    outer: tuple[Any, ...] = (*placement.at[:extra], ...)
    return _seen(parameter[outer], Box(placement.at[extra:], placement.target.shape[extra:]))


def _as_bits(array: Array) -> Array:
    """Integers of the same width: NumPy copies them fastest, and touches no NaN."""
    return array.view(f"u{array.dtype.itemsize}")


def _rows_at_once(array: Array, nbytes: int) -> int:
    return max(1, nbytes // max(1, array.nbytes // len(array)))


def _copy(source: Array, target: Array, check: Check) -> None:
    if source.nbytes <= BLOCK_NBYTES or source.ndim == 0:
        with np.errstate(all="ignore"):  # a value beyond the range of its new dtype becomes infinite
            np.copyto(target, source, casting="unsafe")
        check()
    elif source.nbytes // len(source) > BLOCK_NBYTES:
        for one, other in zip(source, target, strict=True):
            _copy(one, other, check)
    else:
        rows = _rows_at_once(source, BLOCK_NBYTES)
        for start in range(0, len(source), rows):
            _copy(source[start : start + rows], target[start : start + rows], check)


def _transpose(source: Array, target: Array, check: Check) -> None:
    """Copy a matrix into one of the exchanged shape.

    Each tile takes a detour through memory that fits into the cache and whose rows are a little longer than the tile's:
    rows of a matrix are often a power of two apart, and then the elements of a column push each other out of the cache.
    """
    rows, columns = (min(tile, size) for tile, size in zip(_TILES[source.itemsize], source.shape, strict=True))
    skewed = np.empty((rows, columns + _SKEW_NBYTES // source.itemsize), dtype=source.dtype)
    for row in range(0, source.shape[0], rows):
        for column in range(0, source.shape[1], columns):
            block = source[row : row + rows, column : column + columns]
            tile = skewed[: block.shape[0], : block.shape[1]]
            tile[...] = block
            target[column : column + columns, row : row + rows] = tile.T
            check()
