"""Boxes: the part of a tensor that a rank holds, and where it lies in the rank's own tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
