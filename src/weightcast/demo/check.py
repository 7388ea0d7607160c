"""Whether the engine's weights are those of the trainer, bit for bit.

Every rank is asked for digests of its live bytes, wherever they lie fused or transposed, and they are compared with digests
of the same boxes of the trainer's own tensors. That the boxes of all ranks together are the whole of every tensor is
counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from weightcast.clock import Deadline
from weightcast.demo.engine_client import EngineClient, LiveBox
from weightcast.tensors.bridges import host_array, spec_of
from weightcast.tensors.digest import array_digest
from weightcast.tensors.flat import Array
from weightcast.tensors.sums import array_sum, root_of_sums

if TYPE_CHECKING:
    import torch

_DIGEST_S = 60.0


@dataclass(frozen=True)
class Comparison:
    """`problems` is empty if every bit is the same. `root_digest` is that of the trainer's tensors."""

    root_digest: str
    tensors: int
    boxes: int
    problems: list[str]

    @property
    def equal(self) -> bool:
        """Whether every bit is the same."""
        return not self.problems


def compare(engine: EngineClient, version: str, tensors: Mapping[str, torch.Tensor]) -> Comparison:
    """Compare what every rank holds now with `tensors`, which were published as `version`."""
    arrays = {name: host_array(name, tensor) for name, tensor in tensors.items()}
    ranks = engine.digests(sorted(arrays), deadline=Deadline.after(_DIGEST_S))
    problems = [f"rank {rank.rank} holds {rank.version}, not {version}" for rank in ranks if rank.version != version]
    boxes = 0
    for name, array in arrays.items():
        held = {(one.box.start, one.box.shape): one for rank in ranks for one in rank.digests[name]}
        boxes += sum(len(rank.digests[name]) for rank in ranks)
        if sum(prod(one.box.shape) for one in held.values()) != array.size:
            problems.append(f"{name}: the ranks do not hold all of it")
        problems += [
            f"{name}: rank {rank.rank} holds other bytes than the trainer"
            for rank in ranks
            for one in rank.digests[name]
            if not _same(one, array)
        ]
    specs = {name: spec_of(name, tensor) for name, tensor in tensors.items()}
    root = root_of_sums((spec, str(array_sum(spec, arrays[name]))) for name, spec in specs.items())
    return Comparison(root, len(arrays), boxes, problems)


def _same(live: LiveBox, array: Array) -> bool:
    place = tuple(slice(start, start + size) for start, size in zip(live.box.start, live.box.shape, strict=True))
    return array_digest(array[place]) == live.digest
