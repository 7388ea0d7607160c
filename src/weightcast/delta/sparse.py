"""The sparse form of a delta: which lanes of a state change, and by how many steps. Folds, inverts, and applies.

Steps are differences of mapped lanes (see `lanes`) modulo 2^bits: they add, and their negatives undo them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from weightcast.errors import BaseVersionMismatch, DeltaDoesNotFit, Mismatch
from weightcast.tensors.kernels import Indices, kernels
from weightcast.tensors.lanes import Steps, index_dtype, kind_of, lane_count
from weightcast.tensors.spec import TensorSpec

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
    return first, len(indices) if stop > np.iinfo(item).max else int(indices.searchsorted(item(stop)))


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


def fold(a: Delta, b: Delta) -> Delta:
    """`a` and then `b` as one: what encoding the ends directly would give."""
    check_specs(a.specs, b.specs)
    if a.new_root and b.base_root and a.new_root != b.base_root:
        raise BaseVersionMismatch(version=None, base=None, base_root=b.base_root, serving=None, serving_root=a.new_root)
    tensors: dict[str, TensorDelta] = {}
    for name in a.specs:
        first, second = a.tensors.get(name), b.tensors.get(name)
        folded = folded_tensors(first, second) if first and second else first or second
        if folded is not None and len(folded.steps) and folded.changes:
            tensors[name] = folded
    return Delta(a.specs, tensors, a.base_root, b.new_root, b.summed_as or a.summed_as)


def folded_tensors(a: TensorDelta, b: TensorDelta) -> TensorDelta:
    """The same of one tensor."""
    if a.indices is not None and b.indices is not None:
        return normal_form(a.spec, *kernels().merge((a.indices, a.steps), (b.indices, b.steps)))
    if a.indices is None and b.indices is None:
        return normal_form(a.spec, None, a.steps + b.steps)
    whole, some = (a, b) if a.indices is None else (b, a)
    steps = whole.steps.copy()
    steps[some.indices] += some.steps
    return normal_form(a.spec, None, steps)


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
