"""A real replica, updated in every way while it serves: how long each commit stops it, and how much memory it takes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from weightcast.bench.model_versions import Made
from weightcast.bench.pause_copies import Copiers
from weightcast.bench.pause_streams import Streams
from weightcast.engines.base import UpdateRequest, UpdateStatus
from weightcast.engines.embedded.model.build import build_model
from weightcast.engines.embedded.model.weights import declared_weights
from weightcast.engines.embedded.model_config import ModelConfig
from weightcast.engines.embedded.replica.replica import Replica
from weightcast.engines.embedded.settings import EngineSettings
from weightcast.errors import UpdateFailed

Progress = Callable[[str], None]
Kind = Literal["copy", "swap", "first_delta_swap", "delta_swap", "delta"]
KINDS: tuple[Kind, ...] = get_args(Kind)

COPIES = 1  # rounds of copying memory before, and as many after, each update whose limit that is
_CACHE_NBYTES = 32 << 20
_LOOK_S = 0.005  # how often the memory of the ranks is looked at


@dataclass(frozen=True)
class Step:
    """An update. `mode` is what every rank must report to have done."""

    kind: Kind
    version: str
    commit: Literal["copy", "swap", "auto"]
    mode: str


# A swap of a full version leaves no spare buffers that a delta could move: the next swap makes them, the others use them.
ROUND = (
    Step("copy", "b", "copy", "copy"),
    Step("copy", "a", "copy", "copy"),
    Step("swap", "b", "swap", "swap"),
    Step("swap", "a", "swap", "swap"),
    Step("swap", "b", "swap", "swap"),
    Step("first_delta_swap", "b1", "swap", "swap"),
    Step("delta_swap", "b2", "swap", "swap"),
    Step("delta_swap", "b3", "swap", "swap"),
    Step("delta", "b4", "auto", "delta"),
    Step("delta", "b5", "auto", "delta"),
)


@dataclass(frozen=True)
class Sample:
    """One update. Of what the ranks report the slowest counts; `risen_nbytes` is by how much the memory of one of them rose.

    `copy_s` are the times of copying memory beside it, if that is its limit.
    """

    kind: Kind
    pause_s: float
    stage_s: float
    risen_nbytes: int
    copy_s: tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """What the bench is about. `shard_nbytes` are the bytes of a rank's parameters, `parameters` how many it has."""

    samples: list[Sample]
    shard_nbytes: int
    parameters: int


async def measure(made: Made, *, ranks: int, rounds: int, seed: int, progress: Progress) -> Measured:
    """Run a replica and measure. Leaves no process behind, whatever happens."""
    sizes = shard_sizes(made.model_dir, ranks)
    engine = EngineSettings(
        model_dir=str(made.model_dir), ranks=ranks, source=made.store_dir.as_uri(), cache_nbytes=_CACHE_NBYTES
    )
    replica = Replica(engine)
    async with Copiers(sizes) as copiers:
        try:
            progress(f"starting {ranks} ranks")
            await replica.start()
            samples: list[Sample] = []
            for number in range(rounds):
                for step in ROUND:
                    progress(f"round {number + 1} of {rounds}: {step.kind}")
                    samples.append(await _sampled(replica, step, copiers, seed=seed))
        finally:
            await replica.close(drain_s=0)
    return Measured(samples, max(map(sum, sizes)), len(sizes[0]))


# -- one update ----------------------------------------------------------------------------------------------------------


async def _sampled(replica: Replica, step: Step, copiers: Copiers, *, seed: int) -> Sample:
    """An update under one stream. Memory is copied right before and after it, while the ranks have nothing to do."""
    copies = COPIES if step.kind == "copy" else 0
    copy_s = await copiers.measure(copies)
    async with Streams(replica, 1, seed=seed) as streams:
        with _watched(replica.status.pids) as memory:
            status = await _updated(replica, step)
            await streams.more(2)
            risen = memory.risen
    copy_s += await copiers.measure(copies)
    results = status.result or []
    return Sample(
        kind=step.kind,
        pause_s=max(one["pause_s"] for one in results),
        stage_s=max(one["stage_s"] for one in results),
        risen_nbytes=risen,
        copy_s=tuple(copy_s),
    )


async def _updated(replica: Replica, step: Step) -> UpdateStatus:
    begun = replica.begin_update(UpdateRequest(version=step.version, commit=step.commit))
    status = await replica.finish_update(begun.id)
    modes = [one["mode"] for one in status.result or []]
    if modes != [step.mode] * replica.settings.ranks:
        raise UpdateFailed(f"{step.kind}: {step.version} was committed by {modes} and not by {step.mode}.")
    return status


class _Memory:
    """By how much the resident memory of processes has risen, from any low point on: buffers that are freed and made anew
    count as much as such that come on top.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._lowest, self._risen = self._now(), [0] * len(pids)

    def look(self) -> None:
        now = self._now()
        self._lowest = [min(pair) for pair in zip(self._lowest, now, strict=True)]
        rises = [one - low for one, low in zip(now, self._lowest, strict=True)]
        self._risen = [max(pair) for pair in zip(self._risen, rises, strict=True)]

    @property
    def risen(self) -> int:
        """That of the process where it is most."""
        return max(self._risen)

    def _now(self) -> list[int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in self._pids]


@contextmanager
def _watched(pids: Sequence[int]) -> Iterator[_Memory]:
    memory = _Memory(pids)

    async def look() -> None:
        while True:
            with suppress(OSError):  # a rank that has ended: the update says so
                memory.look()
            await asyncio.sleep(_LOOK_S)

    looking = asyncio.create_task(look(), name="memory")
    try:
        yield memory
    finally:
        looking.cancel()


# -- what a rank holds ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OneOf:
    """A rank that is asked for shapes only."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def shard_sizes(model_dir: Path, ranks: int) -> list[list[int]]:
    """The bytes of every parameter of every rank."""
    config = ModelConfig.read(model_dir)
    models = [build_model(config, _OneOf(rank, ranks), dtype=torch.bfloat16, device="meta") for rank in range(ranks)]
    return [[weight.parameter.nbytes for weight in declared_weights(model)] for model in models]
