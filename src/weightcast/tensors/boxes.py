"""Boxes: the part of a tensor that a rank holds, and where it lies in the rank's own tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from weightcast.errors import InvalidInput
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import MAX_DIMS, TensorSpec


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: where it starts and how long it is along each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) > MAX_DIMS:
            raise InvalidInput(f"a box has {MAX_DIMS} dimensions at most, not {len(self.shape)}.")
        if len(self.start) != len(self.shape) or any(number < 0 for number in (*self.start, *self.shape)):
            raise InvalidInput(f"a box cannot start at {self.start} and have shape {self.shape}.")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), shape)

    @classmethod
    def shard(cls, shape: tuple[int, ...], *, dim: int, rank: int, ranks: int) -> Box:
        """The part of one of several ranks that divide a dimension evenly."""
        if shape[dim] % ranks or not 0 <= rank < ranks:
            raise InvalidInput(f"dimension {dim} of {list(shape)} cannot be divided for rank {rank} of {ranks}.")
        size = shape[dim] // ranks
        start = tuple(rank * size if axis == dim else 0 for axis in range(len(shape)))
        return cls(start, tuple(size if axis == dim else length for axis, length in enumerate(shape)))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it lies inside of a tensor of this shape."""
        return len(shape) == len(self.start) and all(
            start + length <= size for start, length, size in zip(self.start, self.shape, shape, strict=True)
        )


def box_of(array: Array, box: Box) -> Array:
    """The elements of a box, where they lie."""
    where: tuple[Any, ...] = tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))
    return array[(*where, ...)]


def run_nbytes(spec: TensorSpec, box: Box) -> int:
    """How many bytes of a box lie together in its tensor: rows, and all the columns that it has of them."""
    return prod(box.shape[_outer(spec, box) :]) * spec.dtype.itemsize


def box_runs(spec: TensorSpec, box: Box) -> Iterator[tuple[int, int]]:
    """The stretches of bytes of a tensor that a box is made of, C order: where each begins, and how long it is."""
    nbytes = run_nbytes(spec, box)
    strides = [spec.dtype.itemsize * prod(spec.shape[dim + 1 :]) for dim in range(len(spec.shape))]
    begin = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    for index in np.ndindex(*box.shape[: _outer(spec, box)]) if nbytes else ():
        yield begin + sum(at * stride for at, stride in zip(index, strides, strict=False)), nbytes


def _outer(spec: TensorSpec, box: Box) -> int:
    """How many dimensions there are outside of what lies together."""
    dim = len(spec.shape)
    while dim > 1 and box.shape[dim - 1] == spec.shape[dim - 1]:
        dim -= 1
    return max(0, dim - 1)


@dataclass(frozen=True)
class Placement:
    """A box of a version's tensor, and where it starts in the tensor that holds it.

    `at` may have more dimensions than the box: experts that are stacked, for instance. The box then has length 1 there.
    The two dimensions of a `transposed` box are exchanged in the tensor that holds it.
    """

    source: str
    box: Box
    at: tuple[int, ...]
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.transposed and len(self.box.shape) != 2:
            raise InvalidInput(
                f"a box of {self.source!r} has shape {self.box.shape}: only two dimensions can be transposed."
            )

    @property
    def target(self) -> Box:
        """The part of the holding tensor that it fills."""
        shape = self.box.shape[::-1] if self.transposed else self.box.shape
        return Box(self.at, (1,) * (len(self.at) - len(shape)) + shape)


@dataclass(frozen=True)
class Held:
    """A tensor as a rank holds it: a slice, or several tensors fused into one (q, k and v; gate and up)."""

    spec: TensorSpec
    placements: tuple[Placement, ...]

    @classmethod
    def slice_of(cls, spec: TensorSpec, box: Box) -> Held:
        """A slice under the same name."""
        held = TensorSpec(name=spec.name, dtype=spec.dtype, shape=box.shape)
        return cls(held, (Placement(spec.name, box, (0,) * len(box.shape)),))
