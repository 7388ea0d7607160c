"""The sparse form of a delta: which lanes of a state change, and by how many steps. Folds, inverts, and applies.

Steps are differences of mapped lanes (see `lanes`) modulo 2^bits: they add, and their negatives undo them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from typing import TypeVar, cast

import numpy as np

from weightcast.errors import BaseVersionMismatch, DeltaDoesNotFit, Mismatch
from weightcast.tensors.kernels import Indices, kernels
from weightcast.tensors.lanes import Steps, index_dtype, kind_of, lane_count
from weightcast.tensors.spec import TensorSpec

Changes = tuple[Indices, Steps]
One = TypeVar("One")
Result = TypeVar("Result")

SPARSE_SHARE = 4  # up to every fourth lane changed is kept as indices, beyond that as a step for every lane


@dataclass(frozen=True)
class TensorDelta:
    """What changes in one tensor. `indices` are sorted lane numbers; None stands for all lanes (steps may be zero then)."""

    spec: TensorSpec
    indices: Indices | None
    steps: Steps

    @property
    def changes(self) -> int:
        """Lanes that change."""
        return len(self.steps) if self.indices is not None else int(np.count_nonzero(self.steps))

    @property
    def nbytes(self) -> int:
        """Memory that this takes."""
        return self.steps.nbytes + (self.indices.nbytes if self.indices is not None else 0)


@dataclass(frozen=True)
class Delta:
    """From one state to another: tensors that do not change are in `specs` only.

    `base_root` and `new_root` are the root digests of the two states, empty where they are not known (a slice of a delta).
    `summed_as` has the names that tensors are summed under for them, where these are not their own: those of tied bytes.
    """

    specs: Mapping[str, TensorSpec]
    tensors: Mapping[str, TensorDelta]
    base_root: str = ""
    new_root: str = ""
    summed_as: Mapping[str, str] = field(default_factory=dict)

    @property
    def changes(self) -> int:
        """Lanes that change in all tensors."""
        return sum(tensor.changes for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Memory that the sparse form takes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def normal_form(spec: TensorSpec, indices: Indices | None, steps: Steps) -> TensorDelta:
    """The one way in which a given change of a tensor is held, so that equal changes have equal forms."""
    lanes = lane_count(spec)
    if indices is None:
        changes = int(np.count_nonzero(steps))
        if changes * SPARSE_SHARE > lanes:
            return TensorDelta(spec, None, steps)
        found = np.flatnonzero(steps)
        return TensorDelta(spec, found.astype(index_dtype(lanes)), steps[found])
    if len(indices) * SPARSE_SHARE <= lanes:
        return TensorDelta(spec, indices, steps)
    return TensorDelta(spec, None, every_step(TensorDelta(spec, indices, steps)))


def span(indices: Indices, start: int, stop: int) -> tuple[int, int]:
    """Where the indices from `start` to before `stop` lie in a sorted array."""
    item = indices.dtype.type  # a bound of another type would have the whole array converted
    first = int(indices.searchsorted(item(start)))
    return first, len(indices) if stop >> 8 * indices.itemsize else int(indices.searchsorted(item(stop)))


def every_step(tensor: TensorDelta) -> Steps:
    """A step for every lane, zeros included."""
    if tensor.indices is None:
        return tensor.steps
    steps = np.zeros(lane_count(tensor.spec), dtype=kind_of(tensor.spec.dtype).signed)
    steps[tensor.indices] = tensor.steps
    return steps


def invert(delta: Delta) -> Delta:
    """The way back: applied after `delta`, it restores every bit."""
    tensors = {name: replace(tensor, steps=-tensor.steps) for name, tensor in delta.tensors.items()}
    return replace(delta, tensors=tensors, base_root=delta.new_root, new_root=delta.base_root)


def fold(*deltas: Delta, threads: int = 1) -> Delta:
    """Deltas that follow one another as one: what encoding the ends directly would give."""
    first, last = deltas[0], deltas[-1]
    for before, after in pairwise(deltas):
        check_specs(before.specs, after.specs)
        if before.new_root and after.base_root and before.new_root != after.base_root:
            raise BaseVersionMismatch(
                version=None, base=None, base_root=after.base_root, serving=None, serving_root=before.new_root
            )
    changing = [name for name in first.specs if any(name in delta.tensors for delta in deltas)]
    changes = [[delta.tensors[name] for delta in deltas if name in delta.tensors] for name in changing]
    folded = zip(changing, on_threads(fold_tensors, changes, threads), strict=True)
    tensors = {name: tensor for name, tensor in folded if len(tensor.steps) and tensor.changes}
    return Delta(first.specs, tensors, first.base_root, last.new_root, last.summed_as or first.summed_as)


def on_threads(task: Callable[[One], Result], items: Sequence[One], threads: int) -> list[Result]:
    """What a task returns for each item. Each thread has its share from the start: there may be many small items."""
    if threads < 2:
        return list(map(task, items))
    results: list[Result | None] = [None] * len(items)
    with ThreadPoolExecutor(threads) as pool:
        for first, done in enumerate(pool.map(lambda first: list(map(task, items[first::threads])), range(threads))):
            results[first::threads] = done
    return cast("list[Result]", results)


def fold_tensors(changes: Sequence[TensorDelta]) -> TensorDelta:
    """The same of one tensor."""
    if len(changes) == 1:
        return changes[0]
    sparse = [(one.indices, one.steps) for one in changes if one.indices is not None]
    if len(sparse) == len(changes):
        return normal_form(changes[0].spec, *fold_changes(sparse))
    dense = [one.steps for one in changes if one.indices is None]
    steps = reduce(np.add, dense) if len(dense) > 1 else dense[0].copy()
    for indices, more in sparse:
        steps[indices] += more
    return normal_form(changes[0].spec, None, steps)


def fold_changes(runs: Sequence[Changes], *, apart: bool = False) -> Changes:
    """See `Kernels.fold`."""
    indices, steps = (np.concatenate(column) for column in zip(*runs, strict=True))
    return kernels().fold((indices, steps), np.cumsum([len(run[0]) for run in runs]), apart=apart)


def check_specs(wanted: Mapping[str, TensorSpec], there: Mapping[str, TensorSpec]) -> None:
    """Raise `DeltaDoesNotFit` listing every tensor that is missing, too many, or of another dtype or shape."""
    mismatches = [Mismatch("missing", name, f"{wanted[name].describe()} is needed") for name in wanted.keys() - there.keys()]
    mismatches += [Mismatch("unexpected", name, "the delta knows no such tensor") for name in there.keys() - wanted.keys()]
    for name in wanted.keys() & there.keys():
        if (wanted[name].dtype, wanted[name].shape) != (there[name].dtype, there[name].shape):
            detail = f"{wanted[name].describe()} is needed, {there[name].describe()} is there"
            mismatches.append(Mismatch("shape", name, detail))
    if mismatches:
        raise DeltaDoesNotFit(sorted(mismatches, key=lambda mismatch: mismatch.name))
