"""Deltas for ranks that hold slices and fused tensors: the changes in their boxes, at the indices of their own memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from weightcast.delta.sparse import Delta, TensorDelta, normal_form, span
from weightcast.errors import DeltaDoesNotFit, Mismatch
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.lanes import Steps, index_dtype, lane_count, lanes_per_element
from weightcast.tensors.spec import TensorSpec

Changes = tuple[NDArray[np.int64], Steps]


def slice_delta(delta: Delta, held: Mapping[str, Box] | Iterable[Held]) -> Delta:
    """What a rank applies of a delta: boxes by name for plain slices, or `Held` for fused tensors.

    Slicing and then applying gives the same bits as applying and then slicing. Tensors that are not mentioned are left out;
    root digests are those of whole states, so the result has none.
    """
    if isinstance(held, Mapping):
        missing = [Mismatch("missing", name, "the delta knows no such tensor") for name in held.keys() - delta.specs.keys()]
        if missing:
            raise DeltaDoesNotFit(missing)
        held = [Held.slice_of(delta.specs[name], box) for name, box in held.items()]
    wanted = list(held)
    mismatches = [mismatch for one in wanted for mismatch in _mismatches(delta, one)]
    if mismatches:
        raise DeltaDoesNotFit(mismatches)
    tensors: dict[str, TensorDelta] = {}
    for one in wanted:
        parts = [
            _placed(delta.tensors[p.source], p, one.spec)
            for p in one.placements
            if p.source in delta.tensors and math.prod(p.box.shape) > 0
        ]
        changes = sum(len(steps) for _, steps in parts)
        if changes:
            indices, steps = (np.concatenate(column) for column in zip(*parts, strict=True))
            order = np.argsort(indices, kind="stable")
            tensors[one.spec.name] = normal_form(
                one.spec, indices[order].astype(index_dtype(lane_count(one.spec))), steps[order]
            )
    return Delta({one.spec.name: one.spec for one in wanted}, tensors)


def _mismatches(delta: Delta, held: Held) -> Iterator[Mismatch]:
    for placement in held.placements:
        spec = delta.specs.get(placement.source)
        if spec is None:
            yield Mismatch("missing", placement.source, "the delta knows no such tensor")
        elif spec.dtype != held.spec.dtype:
            yield Mismatch("dtype", held.spec.name, f"{placement.source} is {spec.dtype}, not {held.spec.dtype}")
        elif not placement.box.fits(spec.shape):
            yield Mismatch("shape", placement.source, f"{placement.box} does not lie inside of {spec.describe()}")
        elif not placement.target.fits(held.spec.shape):
            yield Mismatch("shape", held.spec.name, f"{placement.target} does not lie inside of {held.spec.describe()}")


def _placed(tensor: TensorDelta, placement: Placement, held: TensorSpec) -> Changes:
    """The changes inside of a box, at their lanes in the holding tensor."""
    per_element = lanes_per_element(tensor.spec.dtype)
    rest, steps = _in_rows(tensor, placement.box, per_element)
    strides = _strides(held, per_element)
    axes = len(placement.box.shape)
    own = strides[len(strides) - axes :]  # of the holding tensor, in the order of the box's dimensions
    if placement.transposed:
        own = own[::-1]
    corner = sum(start * stride for start, stride in zip(placement.at, strides, strict=True))
    rest, lane = np.divmod(rest, per_element)
    moved = lane + corner
    keep = np.ones(len(rest), dtype=bool)
    for axis in reversed(range(axes)):
        rest, coordinate = np.divmod(rest, max(1, tensor.spec.shape[axis]))
        inside = coordinate - placement.box.start[axis]
        keep &= (inside >= 0) & (inside < placement.box.shape[axis])
        moved += inside * own[axis]
    return moved[keep], steps[keep]


def _in_rows(tensor: TensorDelta, box: Box, per_element: int) -> Changes:
    """The changes in the rows that a box touches: those of other ranks are not looked at one by one."""
    row = math.prod(tensor.spec.shape[1:]) * per_element
    first, last = (box.start[0] * row, (box.start[0] + box.shape[0]) * row) if box.shape else (0, row)
    if tensor.indices is None:
        found = np.flatnonzero(tensor.steps[first:last])
        return found + first, tensor.steps[first:last][found]
    start, stop = span(tensor.indices, first, last)
    return tensor.indices[start:stop].astype(np.int64), tensor.steps[start:stop]


def _strides(spec: TensorSpec, per_element: int) -> list[int]:
    """How many lanes lie between neighbours along each dimension."""
    return [math.prod(spec.shape[axis + 1 :]) * per_element for axis in range(len(spec.shape))]
