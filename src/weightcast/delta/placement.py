"""Deltas for ranks that hold slices and fused tensors: the changes in their boxes, at the indices of their own memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from weightcast.delta.lanes import Steps, index_dtype, lane_count, lanes_per_element
from weightcast.delta.sparse import Delta, TensorDelta, normal_form
from weightcast.errors import DeltaDoesNotFit, Mismatch
from weightcast.tensors.boxes import Box, Held, Placement
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
        parts = [_placed(delta.tensors[p.source], p, one.spec) for p in one.placements if p.source in delta.tensors]
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
    if tensor.indices is None:
        indices = np.flatnonzero(tensor.steps)
        steps = tensor.steps[indices]
    else:
        indices, steps = tensor.indices.astype(np.int64), tensor.steps
    per_element = lanes_per_element(tensor.spec.dtype)
    extra = (1,) * (len(held.shape) - len(tensor.spec.shape))
    shape = (*extra, *tensor.spec.shape, per_element)
    start = (*(0 for _ in extra), *placement.box.start, 0)
    size = (*extra, *placement.box.shape, per_element)
    at, target = (*placement.at, 0), (*held.shape, per_element)
    keep = np.ones(len(indices), dtype=bool)
    moved = np.zeros(len(indices), dtype=np.int64)
    rest, stride = indices, 1
    for axis in reversed(range(len(shape))):
        rest, coordinate = np.divmod(rest, max(1, shape[axis]))
        inside = coordinate - start[axis]
        keep &= (inside >= 0) & (inside < size[axis])
        moved += (inside + at[axis]) * stride
        stride *= target[axis]
    return moved[keep], steps[keep]
