"""Changes as chunks have them, block by block, and how whole tensors are put together from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightcast.delta.sparse import TensorDelta, normal_form
from weightcast.tensors.lanes import Steps, index_dtype, lane_count
from weightcast.tensors.spec import TensorSpec


class Run(NamedTuple):
    """The changes of one block; `indices` None for a step on every lane."""

    tensor: str
    start: int
    indices: NDArray[np.uint32] | None
    steps: Steps

    def sparse(self) -> tuple[NDArray[np.uint32], Steps]:
        """The indices in the block and the steps there, without zeros."""
        if self.indices is not None:
            return self.indices, self.steps
        found = np.flatnonzero(self.steps)
        return found.astype(np.uint32), self.steps[found]

    @property
    def nbytes(self) -> int:
        """Memory that this takes."""
        return self.steps.nbytes + (self.indices.nbytes if self.indices is not None else 0)


def assemble(specs: Mapping[str, TensorSpec], runs: Iterable[Run]) -> dict[str, TensorDelta]:
    """The changes of whole tensors, in the order of `specs`, from runs in any order."""
    by_tensor: dict[str, list[Run]] = {}
    for run in runs:
        by_tensor.setdefault(run.tensor, []).append(run)
    return {name: _join(spec, by_tensor[name]) for name, spec in specs.items() if name in by_tensor}


def _join(spec: TensorSpec, runs: list[Run]) -> TensorDelta:
    lanes = lane_count(spec)
    wide = index_dtype(lanes)
    if len(runs) == 1 and runs[0].indices is None and len(runs[0].steps) == lanes:
        return normal_form(spec, None, runs[0].steps)
    in_order = sorted(runs, key=lambda run: run.start)
    sparse = [run.sparse() for run in in_order]
    indices = np.empty(sum(len(inside) for inside, _ in sparse), dtype=wide)
    at = 0
    for run, (inside, _) in zip(in_order, sparse, strict=True):
        # One pass over memory: this is the part of decoding that no second thread helps with.
        np.add(inside, wide.type(run.start), out=indices[at : at + len(inside)])
        at += len(inside)
    return normal_form(spec, indices, np.concatenate([steps for _, steps in sparse]))
