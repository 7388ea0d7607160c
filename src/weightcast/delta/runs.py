"""Changes as chunks have them, block by block, put together: as changes of whole tensors, or of a rank's own parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weightcast.delta.sparse import Delta, TensorDelta, normal_form, span
from weightcast.errors import DeltaCorrupt, DeltaDoesNotFit, Mismatch
from weightcast.tensors.box_plan import intersection
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.kernels import Indices
from weightcast.tensors.lanes import Steps, index_dtype, lane_count, lanes_per_element
from weightcast.tensors.spec import TensorSpec

Changes = tuple[Indices, Steps]


class Run(NamedTuple):
    """The changes of one block: of a tensor, or of a `box` of it in the box's own C order, from lane `start` on.

    `indices` are sorted, and None for a step on every lane.
    """

    tensor: str
    start: int
    indices: Indices | None
    steps: Steps
    box: Box | None = None

    def sparse(self) -> tuple[Indices, Steps]:
        """The indices in the block and the steps there, without zeros."""
        if self.indices is not None:
            return self.indices, self.steps
        found = np.flatnonzero(self.steps)
        return found.astype(np.uint32), self.steps[found]

    @property
    def lanes(self) -> int:
        """From the start of the block up to its last change."""
        if self.indices is None:
            return len(self.steps)
        return int(self.indices[-1]) + 1 if len(self.indices) else 0

    @property
    def nbytes(self) -> int:
        """Memory that this takes."""
        return self.steps.nbytes + (self.indices.nbytes if self.indices is not None else 0)


def runs_of(delta: Delta) -> Iterator[Run]:
    """A delta as runs: one for each tensor that changes."""
    return (Run(name, 0, tensor.indices, tensor.steps) for name, tensor in delta.tensors.items())


# -- whole tensors -------------------------------------------------------------------------------------------------


def assemble(specs: Mapping[str, TensorSpec], runs: Iterable[Run]) -> dict[str, TensorDelta]:
    """The changes of whole tensors, in the order of `specs`, from runs in any order. `DeltaCorrupt`: they overlap."""
    by_tensor: dict[str, list[Run]] = {}
    for run in runs:
        by_tensor.setdefault(run.tensor, []).append(run)
    return {name: _join(spec, by_tensor[name]) for name, spec in specs.items() if name in by_tensor}


def _join(spec: TensorSpec, runs: list[Run]) -> TensorDelta:
    lanes = lane_count(spec)
    wide = index_dtype(lanes)
    if len(runs) == 1 and runs[0].box is None and runs[0].indices is None and len(runs[0].steps) == lanes:
        return normal_form(spec, None, runs[0].steps)
    in_order = sorted(runs, key=lambda run: (run.box.start if run.box else (), run.start))
    sparse = [run.sparse() for run in in_order]
    indices = np.empty(sum(len(inside) for inside, _ in sparse), dtype=wide)
    at = 0
    for run, (inside, _) in zip(in_order, sparse, strict=True):
        # One pass over memory: this is the part of decoding that no second thread helps with.
        there = indices[at : at + len(inside)]
        if run.box is None:
            np.add(inside, wide.type(run.start), out=there)
        else:
            out_of_box(spec, run.box, inside, run.start, out=there)
        at += len(inside)
    steps = np.concatenate([found for _, found in sparse])
    return normal_form(spec, *_in_order(spec, indices, steps))


def out_of_box(spec: TensorSpec, box: Box, inside: Indices, start: int, *, out: Indices) -> None:
    """The lanes of a tensor that lanes of a box of it are, counted from `start` on."""
    per_element = lanes_per_element(spec.dtype)
    strides = _strides(spec.shape, per_element)
    outer = next((dim for dim in range(len(spec.shape)) if box.shape[dim + 1 :] == spec.shape[dim + 1 :]), 0)
    rest = inside.astype(np.int64) + start
    if outer == 0:
        np.add(rest, box.start[0] * strides[0], out=out, casting="unsafe")
        return
    rest, moved = np.divmod(rest, math.prod(box.shape[outer:]) * per_element)  # what lies together stays so
    moved += sum(first * stride for first, stride in zip(box.start, strides, strict=True))
    for dim in reversed(range(outer)):
        rest, coordinate = np.divmod(rest, box.shape[dim]) if dim else (rest, rest)
        moved += coordinate * strides[dim]
    out[:] = moved


def _in_order(spec: TensorSpec, indices: Indices, steps: Steps) -> tuple[Indices, Steps]:
    """Changes sorted by their lanes. The runs that they come from are sorted: this kind of sort makes use of that."""
    if (indices[1:] > indices[:-1]).all():
        return indices, steps
    order = np.argsort(indices, kind="stable")
    indices, steps = indices[order], steps[order]
    if (indices[1:] == indices[:-1]).any():
        raise DeltaCorrupt(f"blocks of {spec.name!r} overlap")
    return indices, steps


# -- the parameters of a rank --------------------------------------------------------------------------------------


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
    return slice_runs(delta.specs, runs_of(delta), list(held))


def slice_runs(specs: Mapping[str, TensorSpec], runs: Iterable[Run], held: Sequence[Held]) -> Delta:
    """The same of runs of tensors, each of which is looked at once. Raises `DeltaCorrupt` if they overlap."""
    mismatches = [mismatch for one in held for mismatch in _mismatches(specs, one)]
    if mismatches:
        raise DeltaDoesNotFit(mismatches)
    takers: dict[str, list[tuple[Held, Placement]]] = {}
    for one in held:
        for placement in one.placements:
            takers.setdefault(placement.source, []).append((one, placement))
    parts: dict[str, list[Changes]] = {}
    for run in runs:
        for one, placement in takers.get(run.tensor, ()):
            placed = placed_run(run, specs[run.tensor], placement, one.spec)
            if placed is not None and len(placed[0]):
                parts.setdefault(one.spec.name, []).append(placed)
    tensors = {one.spec.name: _merged(one.spec, parts[one.spec.name]) for one in held if one.spec.name in parts}
    return Delta({one.spec.name: one.spec for one in held}, tensors)


def _merged(spec: TensorSpec, parts: list[Changes]) -> TensorDelta:
    wide = index_dtype(lane_count(spec))
    indices, steps = (np.concatenate(column) for column in zip(*parts, strict=True))
    return normal_form(spec, *_in_order(spec, indices.astype(wide), steps))


def _mismatches(specs: Mapping[str, TensorSpec], held: Held) -> Iterator[Mismatch]:
    for placement in held.placements:
        spec = specs.get(placement.source)
        if spec is None:
            yield Mismatch("missing", placement.source, "the delta knows no such tensor")
        elif spec.dtype != held.spec.dtype:
            yield Mismatch("dtype", held.spec.name, f"{placement.source} is {spec.dtype}, not {held.spec.dtype}")
        elif not placement.box.fits(spec.shape):
            yield Mismatch("shape", placement.source, f"{placement.box} does not lie inside of {spec.describe()}")
        elif not placement.target.fits(held.spec.shape):
            yield Mismatch("shape", held.spec.name, f"{placement.target} does not lie inside of {held.spec.describe()}")


def placed_run(run: Run, spec: TensorSpec, placement: Placement, held: TensorSpec) -> Changes | None:
    """The changes of a run that a placement takes, at their lanes in the holding tensor; None if it takes none."""
    inside = run.box or Box.whole(spec.shape)
    shared = intersection(inside, placement.box)
    if shared is None:
        return None
    per_element = lanes_per_element(spec.dtype)
    strides = _strides(held.shape, per_element)
    axes = len(shared.shape)
    own = strides[len(strides) - axes :]  # of the holding tensor, in the order of the box's dimensions
    if placement.transposed:
        own = own[::-1]
    corner = sum(at * stride for at, stride in zip(placement.at, strides, strict=True))
    corner += sum(
        (first - start) * stride for first, start, stride in zip(shared.start, placement.box.start, own, strict=True)
    )
    row = math.prod(inside.shape[1:]) * per_element
    rows = (shared.start[0] - inside.start[0], shared.shape[0]) if axes else (0, 1)
    near, steps = _in_rows(run, rows[0] * row, (rows[0] + rows[1]) * row)
    if own == _strides(inside.shape, per_element) and shared.shape[1:] == inside.shape[1:]:  # they lie together there too
        wide = index_dtype(lane_count(held))
        away = (run.start + corner - rows[0] * row) % (1 << 8 * wide.itemsize)  # it may be negative: the sum wraps round
        return near.astype(wide, copy=False) + wide.type(away), steps
    rest = near.astype(np.int64) + run.start
    rest, lane = np.divmod(rest, per_element) if per_element > 1 else (rest, 0)
    moved = lane + np.full(len(rest), corner)
    keep = np.ones(len(rest), dtype=bool)
    for axis in reversed(range(axes)):
        if axis:
            rest, coordinate = np.divmod(rest, inside.shape[axis])
        else:
            coordinate = rest
        place = coordinate - (shared.start[axis] - inside.start[axis])
        if shared.shape[axis] != inside.shape[axis]:
            keep &= (place >= 0) & (place < shared.shape[axis])
        moved += place * own[axis]
    return moved[keep], steps[keep]


def _in_rows(run: Run, first: int, last: int) -> Changes:
    """The changes of a run in a range of lanes of its tensor or box, counted from the start of the run.

    Those of other ranks are not looked at one by one.
    """
    first, last = max(0, first - run.start), max(0, last - run.start)
    if run.indices is None:
        found = np.flatnonzero(run.steps[first:last])
        return found + first, run.steps[first:last][found]
    start, stop = span(run.indices, first, last)
    return run.indices[start:stop], run.steps[start:stop]


def _strides(shape: tuple[int, ...], per_element: int) -> list[int]:
    """How many lanes lie between neighbours along each dimension."""
    return [math.prod(shape[axis + 1 :]) * per_element for axis in range(len(shape))]
