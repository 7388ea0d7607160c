"""Changes as chunks have them, block by block, put together: as changes of whole tensors, or of a rank's own parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from weightcast.delta.sparse import Changes, Delta, TensorDelta, fold_changes, normal_form, span
from weightcast.errors import DeltaCorrupt, DeltaDoesNotFit, Mismatch
from weightcast.tensors.box_plan import intersection
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.kernels import ALL_ROWS, Counts, Indices, Rows, kernels
from weightcast.tensors.lanes import Steps, index_dtype, kind_of, lane_count, lanes_per_element
from weightcast.tensors.spec import TensorSpec

_FOLDED_AT_ONCE = 16  # deltas


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
    return normal_form(spec, *_together(spec.name, [_in_tensor(spec, run, wide) for run in runs]))


def _in_tensor(spec: TensorSpec, run: Run, wide: np.dtype[Any]) -> Changes:
    """The changes of a run at their lanes in the tensor."""
    inside, steps = run.sparse()
    if run.box is not None:
        placed = np.empty(len(inside), dtype=wide)
        out_of_box(spec, run.box, inside, run.start, out=placed)
        return placed, steps
    return (np.add(inside, wide.type(run.start), dtype=wide) if run.start else inside.astype(wide, copy=False)), steps


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


def _together(name: str, parts: Sequence[Changes]) -> Changes:
    """Parts of the changes of a tensor as one. Each of them is sorted. `DeltaCorrupt`: they overlap."""
    some = sorted((part for part in parts if len(part[0])), key=lambda part: int(part[0][0]))
    if len(some) < 2:
        return (some or parts)[0]
    if all(int(before[0][-1]) < int(after[0][0]) for before, after in pairwise(some)):
        indices, steps = (np.concatenate(column) for column in zip(*some, strict=True))
        return indices, steps
    try:
        return fold_changes(some, apart=True)
    except ValueError as error:
        raise DeltaCorrupt(f"blocks of {name!r} overlap") from error


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
    return slice_chains(specs, [[runs]], held)


def slice_chains(specs: Mapping[str, TensorSpec], chains: Iterable[Iterable[Iterable[Run]]], held: Sequence[Held]) -> Delta:
    """The same of deltas that follow one another, folded. A chain has the runs of each; they must not overlap.

    Each of several chains is about other tensors.
    """
    mismatches = [mismatch for one in held for mismatch in _mismatches(specs, one)]
    if mismatches:
        raise DeltaDoesNotFit(mismatches)
    takers: dict[str, list[tuple[str, TensorSpec, Placement]]] = {}
    for one in held:
        for placement in one.placements:
            takers.setdefault(placement.source, []).append((one.spec.name, one.spec, placement))
    parts: dict[str, list[Changes]] = {}
    own = {one.spec.name: one.spec for one in held}
    for chain in chains:
        moves: dict[str, list[_Move]] = {}
        folded: dict[str, Changes] = {}
        for number, runs in enumerate(chain):
            if number and number % _FOLDED_AT_ONCE == 0:  # so that memory does not grow with the length of the chain
                folded, moves = _folded(own, folded, moves), {}
            for run in runs:
                for name, spec, placement in takers.get(run.tensor, ()):
                    way = _way(run.box, specs[run.tensor], placement, spec)
                    if way is not None:
                        move = _Move(number, run.start, _in_rows(run, way.first, way.last), way)
                        moves.setdefault(name, []).append(move)
        for name, changes in _folded(own, folded, moves).items():
            if len(changes[0]):
                parts.setdefault(name, []).append(changes)
    tensors = {name: normal_form(spec, *_together(name, parts.pop(name))) for name, spec in own.items() if name in parts}
    return Delta(own, tensors)


def _folded(
    specs: Mapping[str, TensorSpec], before: Mapping[str, Changes], moves: Mapping[str, Sequence[_Move]]
) -> dict[str, Changes]:
    """Changes of parameters, and those that follow them, as one. What is moved shares one piece of memory."""
    kinds = {name: (index_dtype(lane_count(specs[name])), kind_of(specs[name].dtype).signed) for name in moves}
    room = max((sum(len(move.changes[0]) for move in some) for some in moves.values()), default=0)
    memory = {kind: np.empty(room, dtype=kind) for kind in {kind for pair in kinds.values() for kind in pair}}
    folded = dict(before)
    for name, some in moves.items():
        moved = _moved_together(name, some, (memory[kinds[name][0]], memory[kinds[name][1]]))
        folded[name] = fold_changes([folded[name], moved]) if name in folded else moved
    return folded


def _moved_together(name: str, moves: Sequence[_Move], out: Changes) -> Changes:
    """All changes of moves, in memory of their own. `DeltaCorrupt`: those of one delta overlap."""
    ends, numbers = _carry_out(moves, out), np.array([move.number for move in moves])
    some = np.flatnonzero(np.diff(ends, prepend=0))
    ends, numbers, total = ends[some], numbers[some], int(ends[-1])
    starts = np.concatenate([[0], ends[:-1]])
    firsts, lasts = out[0][starts[: len(some)]], out[0][ends - 1]
    order = np.lexsort((firsts, numbers))
    same = numbers[order][1:] == numbers[order][:-1]
    mixed = {*numbers[order][1:][same & (firsts[order][1:] <= lasts[order][:-1])].tolist()}  # slices along columns
    unsorted = {move.number for move in moves if not move.way.sorted}
    for number in mixed | unsorted:
        own = np.flatnonzero(numbers == number)
        if not len(own):
            continue
        start, end = int(starts[own[0]]), int(ends[own[-1]])
        together = out[0][start:end], out[1][start:end]
        try:
            if number in unsorted:
                together[0][:], together[1][:] = _in_order(together)
            else:
                together[0][:], together[1][:] = kernels().fold(together, ends[own] - start, apart=True)
        except ValueError as error:
            raise DeltaCorrupt(f"blocks of {name!r} overlap") from error
        ends[own[:-1]] = start
    ends = ends[np.diff(ends, prepend=0) > 0]
    found = out[0][:total], out[1][:total]
    if (found[0][ends[:-1] - 1] < found[0][ends[:-1]]).all():
        return found[0].copy(), found[1].copy()
    return kernels().fold(found, ends)


def _in_order(changes: Changes) -> Changes:
    """`ValueError`: two are about one lane."""
    order = np.argsort(changes[0])
    indices = changes[0][order]
    if (indices[1:] == indices[:-1]).any():
        raise ValueError("changes overlap")
    return indices, changes[1][order]


def _carry_out(moves: Sequence[_Move], out: Changes) -> Counts:
    """Write what moves take to `out`; returns where that of each ends."""
    if all(move.way.rows is not None for move in moves):
        indices, steps = (np.concatenate(column) for column in zip(*(move.changes for move in moves), strict=True))
        table = np.array([(len(one.changes[0]), one.start, *(one.way.rows or ALL_ROWS), one.way.step) for one in moves])
        return kernels().place((indices, steps), table, out)
    ends, at = [], 0
    for move in moves:
        at += move.carry_out((out[0][at:], out[1][at:]))
        ends.append(at)
    return np.array(ends)


def _mismatches(specs: Mapping[str, TensorSpec], held: Held) -> Iterator[Mismatch]:
    for placement in held.placements:
        found = _mismatch(specs.get(placement.source), placement, held.spec)
        if found is not None:
            yield found


@lru_cache(maxsize=1 << 14)  # deltas that follow one another are about the same tensors
def _mismatch(spec: TensorSpec | None, placement: Placement, held: TensorSpec) -> Mismatch | None:
    if spec is None:
        return Mismatch("missing", placement.source, "the delta knows no such tensor")
    if spec.dtype != held.dtype:
        return Mismatch("dtype", held.name, f"{placement.source} is {spec.dtype}, not {held.dtype}")
    if not placement.box.fits(spec.shape):
        return Mismatch("shape", placement.source, f"{placement.box} does not lie inside of {spec.describe()}")
    if not placement.target.fits(held.shape):
        return Mismatch("shape", held.name, f"{placement.target} does not lie inside of {held.describe()}")
    return None


def placed_run(run: Run, spec: TensorSpec, placement: Placement, held: TensorSpec) -> Changes | None:
    """The changes of a run that a placement takes, at their lanes in the holding tensor; None if it takes none."""
    way = _way(run.box, spec, placement, held)
    if way is None:
        return None
    move = _Move(0, run.start, _in_rows(run, way.first, way.last), way)
    out = np.empty(len(move.changes[0]), dtype=index_dtype(lane_count(held))), np.empty_like(move.changes[1])
    count = int(_carry_out([move], out)[-1])
    found = out[0][:count], out[1][:count]
    return found if way.sorted else _in_order(found)


class _Way(NamedTuple):
    """How changes of an array of `shape` move into a tensor: what is taken of each dimension, and its strides there.

    Only lanes from `first` to `last` are taken. `corner` is where the first element of the array goes, or would go. With
    `rows`, neighbours in a row are `step` lanes apart in the tensor.
    """

    first: int
    last: int
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    own: tuple[int, ...]
    per_element: int
    corner: int
    rows: Rows | None
    step: int = 1

    @property
    def sorted(self) -> bool:
        """Whether changes keep their order, once they are moved."""
        return self.rows is None or self.step == 1


class _Move(NamedTuple):
    """Changes of delta `number` of a chain that go to a tensor. They count from lane `start` of their array on."""

    number: int
    start: int
    changes: Changes
    way: _Way

    def carry_out(self, out: Changes) -> int:
        """Write those that are taken to `out`, sorted; returns how many these are."""
        way, (near, steps) = self.way, self.changes
        rest = near.astype(np.int64) + self.start
        rest, lane = np.divmod(rest, way.per_element) if way.per_element > 1 else (rest, 0)
        moved = lane + np.full(len(rest), way.corner)
        keep = np.ones(len(rest), dtype=bool)
        for axis in reversed(range(len(way.shape))):
            rest, coordinate = np.divmod(rest, way.shape[axis]) if axis else (rest, rest)
            first, size = way.ranges[axis]
            keep &= (coordinate >= first) & (coordinate < first + size)
            moved += coordinate * way.own[axis]
        moved, steps = moved[keep], steps[keep]
        order = np.argsort(moved)  # they are in the order of the version, and the tensor may be transposed
        out[0][: len(order)], out[1][: len(order)] = moved[order], steps[order]
        return len(order)


@lru_cache(maxsize=1 << 14)  # deltas that follow one another are cut alike
def _way(box: Box | None, spec: TensorSpec, placement: Placement, held: TensorSpec) -> _Way | None:
    inside = box or Box.whole(spec.shape)
    shared = intersection(inside, placement.box)
    if shared is None:
        return None
    per_element, axes = lanes_per_element(spec.dtype), len(shared.shape)
    strides = _strides(held.shape, per_element)
    own = strides[len(strides) - axes :]  # in the order of the box's dimensions
    if placement.transposed:
        own = own[::-1]
    corner = sum(at * stride for at, stride in zip(placement.at, strides, strict=True))
    corner += sum((a - b) * stride for a, b, stride in zip(inside.start, placement.box.start, own, strict=True))
    ranges = tuple((at - first, size) for at, first, size in zip(shared.start, inside.start, shared.shape, strict=True))
    row = math.prod(inside.shape[1:]) * per_element
    first, count = ranges[0] if axes else (0, 1)
    rows, step = _rows(inside.shape, tuple(own), ranges, per_element, corner), 1
    if rows is None and axes == 2 and per_element == 1:  # a transposed matrix
        (skip, width), step = ranges[1], own[1]
        rows = Rows(row, skip, width, own[0], corner + skip * step)
    return _Way(
        first * row, (first + count) * row, inside.shape, ranges, tuple(own), per_element, corner, rows, step
    )  # fmt: skip


def _rows(
    shape: tuple[int, ...], own: tuple[int, ...], ranges: Sequence[tuple[int, int]], per_element: int, corner: int
) -> Rows | None:
    """The same by rows, if equal ranges of rows are taken; None if not. The range of the first dimension counts as whole."""
    natural = tuple(_strides(shape, per_element))
    for axis in range(max(1, len(shape))):
        if own[axis:] != natural[axis:] or any(size != shape[dim] for dim, (_, size) in enumerate(ranges) if dim > axis):
            continue
        if axis == 0:
            return ALL_ROWS._replace(corner=corner)
        if any(size != shape[dim] for dim, (_, size) in enumerate(ranges) if 0 < dim < axis):
            return None
        if any(own[dim] != own[dim + 1] * shape[dim + 1] for dim in range(axis - 1)):
            return None
        skip, width = (number * natural[axis] for number in ranges[axis])
        return Rows(shape[axis] * natural[axis], skip, width, own[axis - 1], corner + skip)
    return None


def _in_rows(run: Run, first: int, last: int) -> Changes:
    """The changes of a run in a range of lanes of its tensor or box, counted from the start of the run.

    Those of other ranks are not looked at one by one.
    """
    first, last = max(0, first - run.start), max(0, last - run.start)
    if run.indices is None:
        found = np.flatnonzero(run.steps[first:last])
        return (found + first).astype(np.uint64), run.steps[first:last][found]
    if not first and run.lanes <= last:
        return run.indices, run.steps
    start, stop = span(run.indices, first, last)
    return run.indices[start:stop], run.steps[start:stop]


def _strides(shape: tuple[int, ...], per_element: int) -> list[int]:
    """How many lanes lie between neighbours along each dimension."""
    return [math.prod(shape[axis + 1 :]) * per_element for axis in range(len(shape))]
