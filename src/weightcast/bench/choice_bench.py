"""The bench of the choice between a full version and a delta: from the call of `publish` to a model that serves the version.

Each share of changed weights is published in three ways, in turn: `full`, `delta`, and `auto`, which chooses. Two models
follow each: one reads the store, one asks a depot process on it. A total is the publication and one update.

The store is in memory. On a virtual machine, memory that the host has to provide first takes seven times as long as memory
that was used a moment ago, and which of the two a publication gets is chance. So each is given the latter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from statistics import median
from typing import get_args

import numpy as np

from weightcast import logs
from weightcast.bench.generated import SPREAD, generated_pair
from weightcast.bench.ipc_tensors import tensor_shapes
from weightcast.bench.report import Report, Row, Target, this_machine
from weightcast.bench.scratch import ended_in_order, scratch_dir, used_memory
from weightcast.bench.served import depot
from weightcast.delta import warm_up
from weightcast.errors import Conflict
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.publishing import Mode
from weightcast.store.store import Store
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array
from weightcast.worker.live_model import LiveModel

log = logs.get(__name__)

Progress = Callable[[str], None]

SHARES = (0.0, 0.001, 0.01, 0.1, 0.5, 1.0)
DTYPES = (DType.BF16, DType.F32)
WAYS: tuple[Mode, ...] = get_args(Mode)
SOURCES = ("file", "depot")
TIMES, EXTRA_S = 1.2, 0.02  # the way chosen takes at most so many times as long as the faster one, and so much more
_F32_STEP = 1e-5


@dataclass(frozen=True)
class ChoiceSettings:
    """What is measured. `rounds` are those that count, after one to warm up; a quick run asserts no target."""

    nbytes: int = 128 << 20
    rounds: int = 5
    quick: bool = False
    seed: int = 0


QUICK = ChoiceSettings(nbytes=4 << 20, rounds=1, quick=True)


def run_choice_bench(settings: ChoiceSettings, progress: Progress = log.info) -> Report:
    """Measure every dtype and share. Nothing is left behind."""
    tensor_shapes(settings.nbytes // 2)  # refuses before anything is made; F32 has half as many elements
    before = os.getloadavg()[0]
    progress("compiling kernels")
    warm_up()
    rows: list[Row] = []
    with ended_in_order():
        for dtype in DTYPES:
            with scratch_dir() as directory, ExitStack() as opened:
                ways = [_Way(mode, directory, dtype, settings.nbytes, opened) for mode in WAYS]
                for share in SHARES:
                    progress(f"{dtype}: {share:.1%} changed")
                    rows += _measured(ways, dtype, share, settings)
    return Report(
        bench="choice",
        machine=this_machine(),
        settings=asdict(settings),
        rows=rows,
        targets=_targets(rows, asserted=not settings.quick),
        notes=[
            f"medians of {settings.rounds} rounds; load before: {before:.1f}",
            "a total is publish + one update; -: refused, as the payload would be larger than the full version",
        ],
    )


def _measured(ways: Sequence[_Way], dtype: DType, share: float, settings: ChoiceSettings) -> Iterator[Row]:
    """A row for each source of updates."""
    states = changed_pair(dtype, settings.nbytes, share, seed=settings.seed)
    for way in ways:
        way.begin(states[0])
    for number in range(1, settings.rounds + 2):
        first = number % len(ways)  # none always follows the same one
        for way in (*ways[first:], *ways[:first]):
            way.move(states[number % 2])
    for source in SOURCES:
        row: dict[str, object] = {"dtype": str(dtype), "share": share, "source": source, "chosen": ways[-1].kind}
        for way in ways:
            row |= {f"{way.mode}_{name}": one for name, one in way.medians(source).items()}
        row["faster_s"] = min(one for one in (row["full_s"], row["delta_s"]) if isinstance(one, float))
        yield row


def changed_pair(dtype: DType, nbytes: int, share: float, *, seed: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """The tensors of a model before and after a step that changes this share of its elements.

    BF16 changes as it does in training, most where weights are small. F32 elements are drawn, and each moves by about 1e-5.
    """
    shapes = tensor_shapes(nbytes * DType.BF16.itemsize // dtype.itemsize)
    count = sum(map(prod, shapes.values()))
    if dtype is DType.BF16 and 0 < share < 1:
        old, new = generated_pair(count, share, seed=seed)
    else:
        random = np.random.default_rng(seed)
        drawn = random.standard_normal(count, dtype=np.float32) * np.float32(SPREAD)
        old = drawn.astype(dtype.numpy)
        new = old.copy() if dtype is DType.BF16 else _moved(old, share, random)
        if dtype is DType.BF16 and share:
            new.view(np.uint16)[:] ^= 1
    return _cut(old, shapes), _cut(new, shapes)


def _moved(old: Array, share: float, random: np.random.Generator) -> Array:
    there = random.random(len(old), dtype=np.float32) < share
    step = random.standard_normal(len(old), dtype=np.float32) * np.float32(_F32_STEP)
    moved: Array = np.where(there, old + step, old)
    moved.view(np.uint32)[there & (moved == old)] ^= 1
    return moved


def _cut(flat: Array, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    tensors, start = {}, 0
    for name, shape in shapes.items():
        tensors[name] = flat[start : start + prod(shape)].reshape(shape)
        start += prod(shape)
    return tensors


@dataclass
class _Seconds:
    """What a way took, round by round."""

    publish: list[float] = field(default_factory=list)
    update: dict[str, list[float]] = field(default_factory=lambda: {source: [] for source in SOURCES})


class _Way:
    """A store that is published to in one mode, a depot on it, and the models that follow."""

    def __init__(self, mode: Mode, directory: Path, dtype: DType, nbytes: int, opened: ExitStack) -> None:
        self.mode: Mode = mode
        self.kind = "full"
        self._number = 0
        path = directory / mode
        path.mkdir()
        policy = DeltaPolicy(full_every=1 << 20) if mode == "auto" else DeltaPolicy(full_every=1 << 20, max_share=1.0)
        self._store = Store(path, delta=policy)
        blank = changed_pair(dtype, nbytes, 0, seed=0)[0]
        self._models: dict[str, LiveModel] = {}
        for source, url in {"file": f"file://{path}", "depot": opened.enter_context(depot(path)).url}.items():
            copied = {name: array.copy() for name, array in blank.items()}
            self._models[source] = opened.enter_context(LiveModel(copied, source=url))

    def begin(self, tensors: Mapping[str, Array]) -> None:
        """Publish the state that changes are made on, and have the models serve it."""
        self._seconds = _Seconds()
        self._refused = False
        self._publish(tensors, "full")
        self._store.gc(keep_last=1, ignore_receivers=True)
        for model in self._models.values():
            model.update()

    def move(self, tensors: Mapping[str, Array]) -> None:
        """Publish a state, and update the models to it; times both. A delta that is refused is not tried again."""
        if self._refused:
            return
        used_memory(self._store.path, sum(array.nbytes for array in tensors.values()))
        started = time.perf_counter()
        try:
            self.kind = self._publish(tensors, self.mode)
        except Conflict:
            self._refused = True
            return
        self._seconds.publish.append(time.perf_counter() - started)
        for source, model in self._models.items():
            started = time.perf_counter()
            model.update()
            self._seconds.update[source].append(time.perf_counter() - started)

    def _publish(self, tensors: Mapping[str, Array], mode: Mode) -> str:
        self._number += 1
        return self._store.publish(f"step_{self._number}", tensors, mode).kind

    def medians(self, source: str) -> dict[str, float | None]:
        """Of the rounds after the first."""
        if self._refused:
            return {"publish_s": None, "update_s": None, "s": None}
        publish, update = self._seconds.publish[1:], self._seconds.update[source][1:]
        both = [sum(one) for one in zip(publish, update, strict=True)]
        return {"publish_s": median(publish), "update_s": median(update), "s": median(both)}


def _targets(rows: Sequence[Row], *, asserted: bool) -> dict[str, Target]:
    """For each row, what the chosen way took, against what it may take."""
    return {
        f"{row['dtype']}, {row['share']:g} changed, {row['source']}: seconds of the way chosen": Target(
            row["auto_s"], TIMES * row["faster_s"] + EXTRA_S, "most", asserted, "" if asserted else "a quick run"
        )
        for row in rows
    }
