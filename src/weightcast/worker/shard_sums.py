"""What the parameters of a rank add to the sums of a version's tensors: what the rank votes with.

Read from the memory that will be live, through the declared layout, and not by the code that places boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightcast.delta.edit import TensorEdit
from weightcast.delta.sparse import span
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.flat import Array
from weightcast.tensors.kernels import ALL_ROWS, Rows
from weightcast.tensors.lanes import Lanes, lanes_per_element
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import Sum, box_sum, change_sum
from weightcast.wire.manifest import TensorEntry

Check = Callable[[], None]

_MATRIX = 2  # dimensions


class BoxSum(NamedTuple):
    """What one box adds to the sum of its tensor, and how many elements that are."""

    total: Sum = Sum()
    elements: int = 0


ConvertedSums = dict[tuple[str, Box], Sum]
"""The sums of boxes that a rank converts, by tensor and box: taken from the published bytes before they are converted."""


def sum_parameter(
    one: Held, entries: Mapping[str, TensorEntry], array: Array, converted: ConvertedSums, check: Check
) -> list[BoxSum]:
    """The sums of the boxes of a parameter, in their order. `array` is the parameter as it will be live."""

    def total(placement: Placement) -> Sum:
        entry = entries[placement.source]
        if is_converted(one, entry):
            return converted.get((placement.source, placement.box), Sum())
        return box_sum(entry.sum_spec, placement.box, _elements(array, placement), check)

    return [BoxSum(total(placement), prod(placement.box.shape)) for placement in one.placements]


def sums_by_tensor(held: Sequence[Held], sums: Sequence[BoxSum]) -> dict[str, BoxSum]:
    """What all boxes of a rank add to each tensor. `sums` has those of the boxes in their order."""
    found: dict[str, BoxSum] = {}
    sources = [placement.source for one in held for placement in one.placements]
    for source, (total, elements) in zip(sources, sums, strict=True):
        before = found.get(source, BoxSum())
        found[source] = BoxSum(before.total + total, before.elements + elements)
    return found


def is_converted(one: Held, entry: TensorEntry) -> bool:
    """Whether a parameter does not keep the bits that were published."""
    return entry.dtype != one.spec.dtype


def _elements(array: Array, placement: Placement) -> Array:
    """The elements of a box where they lie in a parameter, in the orientation of the version."""
    extra = len(placement.at) - len(placement.box.shape)
    inside = array[placement.at[:extra]] if extra else array
    lengths = placement.box.shape[::-1] if placement.transposed else placement.box.shape
    view = inside[tuple(slice(at, at + size) for at, size in zip(placement.at[extra:], lengths, strict=True))]
    return view.T if placement.transposed else view


def add_changes(
    sums: Sequence[BoxSum],
    held: Sequence[Held],
    entries: Mapping[str, TensorEntry],
    edits: Mapping[str, TensorEdit],
    check: Check,
) -> list[BoxSum]:
    """The sums after edits of parameters; only edits are read. `sums` are those before, of all boxes in their order."""
    after = list(sums)
    at = 0
    for one in held:
        edit = edits.get(one.spec.name)
        for placement in one.placements:
            if edit is not None:
                growth = _growth(edit, one.spec, placement, entries[placement.source].sum_spec, check)
                after[at] = after[at]._replace(total=after[at].total + growth)
            at += 1
        check()
    return after


def _growth(edit: TensorEdit, held: TensorSpec, placement: Placement, source: TensorSpec, check: Check) -> Sum:
    """What an edit of a parameter adds to the sum of a tensor that it has a box of."""
    if edit.indices is None:
        before, after = (_elements(_whole(lanes, held), placement) for lanes in (edit.before, edit.after))
        return box_sum(source, placement.box, after, check) - box_sum(source, placement.box, before, check)
    first, last, rows = _rows_in_source(edit.indices, held, placement, source)
    indices, before, after = edit.indices[first:last], edit.before[first:last], edit.after[first:last]
    if rows is not None:
        return change_sum(source, indices, before, after, rows)
    chosen, places = _in_source(indices, held, placement, source)
    return change_sum(source, places, before[chosen], after[chosen])


def _whole(lanes: Lanes, spec: TensorSpec) -> Array:
    return lanes.view(spec.dtype.numpy).reshape(spec.shape)


def _rows_in_source(
    indices: NDArray[np.unsignedinteger], held: TensorSpec, placement: Placement, source: TensorSpec
) -> tuple[int, int, Rows | None]:
    """Which of the sorted lanes of a parameter may lie in a box, and how they move to the tensor that it is a box of.

    That is None if the box is not made of equal parts of rows, as in transposed parameters.
    """
    start, stop, rows = _rows_of(held, placement, source)
    return *span(indices, start, stop), rows


@lru_cache(maxsize=1 << 14)  # updates that follow one another have the same layout
def _rows_of(held: TensorSpec, placement: Placement, source: TensorSpec) -> tuple[int, int, Rows | None]:
    lanes, target = lanes_per_element(held.dtype), placement.target
    ends = [start + size - 1 for start, size in zip(target.start, target.shape, strict=True)]
    first, last = _flat(held.shape, target.start) * lanes, (_flat(held.shape, ends) + 1) * lanes
    extra, box = len(placement.at) - len(placement.box.shape), placement.box
    if placement.transposed or not source.shape:
        return first, last, None
    if box.shape[1:] == source.shape[1:] == held.shape[extra + 1 :]:  # they follow one another in both
        return first, last, ALL_ROWS._replace(corner=_flat(source.shape, box.start) * lanes - first)
    if len(box.shape) != _MATRIX:
        return first, last, None
    row = _flat(held.shape, target.start) // held.shape[-1]
    corner = _flat(source.shape, box.start) - row * source.shape[-1]
    sizes = held.shape[-1], placement.at[-1], box.shape[-1], source.shape[-1], corner
    return first, last, Rows(*(size * lanes for size in sizes))


def _in_source(
    indices: NDArray[np.unsignedinteger], held: TensorSpec, placement: Placement, source: TensorSpec
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Which lanes of a parameter lie in a box, and where those lie in the tensor that it is a box of."""
    lanes, target, near = lanes_per_element(held.dtype), placement.target, indices.astype(np.int64)
    elements, rest = np.divmod(near, lanes) if lanes > 1 else (near, np.zeros_like(near))
    places = np.unravel_index(elements, held.shape)
    inside = np.ones(len(near), dtype=bool)
    for place, start, size in zip(places, target.start, target.shape, strict=True):
        inside &= (place >= start) & (place < start + size)
    chosen = np.flatnonzero(inside)
    extra = len(placement.at) - len(placement.box.shape)
    own = [place[chosen] - start for place, start in zip(places[extra:], placement.at[extra:], strict=True)]
    if placement.transposed:
        own.reverse()
    there = [place + start for place, start in zip(own, placement.box.start, strict=True)]
    flat = np.ravel_multi_index(there, source.shape) if source.shape else np.zeros(len(chosen), dtype=np.int64)
    return chosen, (flat * lanes + rest[chosen]).astype(np.uint64)


def _flat(shape: tuple[int, ...], at: Sequence[int]) -> int:
    return sum(place * prod(shape[dim + 1 :]) for dim, place in enumerate(at))
