"""The bench of pauses: how long a running replica cannot compute while new weights are committed, beside copying memory.

Real ranks serve real requests, versions come from a store, and every update goes the way that `weightcast serve` takes.
A rank's pause is all the time in which it could not compute, agreeing with the other ranks included. Copying memory is
measured right before and after each update whose limit it is, by as many processes as there are ranks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from weightcast import logs
from weightcast.bench.model_versions import make_versions, model_config
from weightcast.bench.report import Report, Row, Target, this_machine
from weightcast.bench.scratch import scratch_dir
from weightcast.bench.timing import Timing
from weightcast.errors import MissingExtra

if TYPE_CHECKING:
    from weightcast.bench.pause_replica import Measured, Sample

log = logs.get(__name__)

Progress = Callable[[str], None]

LARGE_NBYTES = 256 << 20  # from here on limits are asserted: below it what does not grow with the model counts for too much
PAUSE_MS = 10.0
LESS_THAN_A_COPY = 0.35  # shards: what is worked out for a delta, but no second set of buffers
_ROOM = 6  # times the size of the model: what the files take, with room to spare


@dataclass(frozen=True)
class PauseSettings:
    """What is measured. `directory` is where versions lie meanwhile: None is tmpfs if it has room, else the default one."""

    nbytes: int = 512 << 20
    ranks: int = 2
    rounds: int = 3
    seed: int = 0
    directory: str | None = None


def run_pause_bench(settings: PauseSettings, progress: Progress = log.info) -> Report:
    """Measure everything. Raises `MissingExtra` without what a replica needs."""
    try:
        from weightcast.bench.pause_replica import measure  # noqa: PLC0415 - extras, and slow to import
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "a package", "serve", "weightcast bench pause") from error
    model_config(settings.nbytes, settings.ranks)  # refuses before anything is made
    with scratch_dir(settings.directory, nbytes=_ROOM * settings.nbytes) as scratch:
        made = make_versions(scratch, nbytes=settings.nbytes, ranks=settings.ranks, seed=settings.seed, progress=progress)
        before = os.getloadavg()[0]
        measured = asyncio.run(
            measure(made, ranks=settings.ranks, rounds=settings.rounds, seed=settings.seed, progress=progress)
        )
    machine = this_machine()
    rows = _rows(measured)
    return Report(
        bench="pause",
        machine=machine,
        settings=asdict(settings),
        rows=rows,
        targets=_targets(rows, settings),
        notes=[
            f"{made.nbytes} bytes in BF16 over {settings.ranks} ranks: {measured.shard_nbytes} bytes in "
            f"{measured.parameters} parameters each; a delta changes one element in a hundred",
            "pauses and memcpy: the fastest of all rounds, memory: the most, everything else medians; "
            f"load of the machine {before:.2f} before, {os.getloadavg()[0]:.2f} after",
            "a pause is that of the slowest rank, with the vote; memory: by how much that of a rank rose during the "
            "update, in shards; what clients see of it: `weightcast bench update`",
            "the first swap by a delta after one of a full version copies the shard once, while serving: first_delta_swap",
        ],
    )


# -- the report ----------------------------------------------------------------------------------------------------------


def _rows(measured: Measured) -> list[Row]:
    samples: dict[str, list[Sample]] = {}
    for sample in measured.samples:
        samples.setdefault(sample.kind, []).append(sample)
    rows: list[Row] = [_pause_row(kind, taken, measured.shard_nbytes) for kind, taken in samples.items()]
    copied = Timing(tuple(seconds for sample in measured.samples for seconds in sample.copy_s))
    rows.append(
        {
            "kind": "memcpy",
            "rounds": len(copied.seconds),
            "ms": copied.minimum * 1e3,
            "median_ms": copied.median * 1e3,
            "spread": copied.spread,
            "gb_per_s": measured.shard_nbytes / copied.minimum / 1e9,
        }
    )
    return rows


def _pause_row(kind: str, samples: list[Sample], shard_nbytes: int) -> Row:
    pauses, staging = (Timing(tuple(getattr(one, name) for one in samples)) for name in ("pause_s", "stage_s"))
    risen = [one.risen_nbytes / shard_nbytes for one in samples]
    return {
        "kind": kind,
        "rounds": len(samples),
        "ms": pauses.minimum * 1e3,
        "median_ms": pauses.median * 1e3,
        "worst_ms": max(pauses.seconds) * 1e3,
        "stage_s": staging.median,
        "risen_shards": max(risen),  # that no copy is made is said of every update
    }


def _targets(rows: list[Row], settings: PauseSettings) -> dict[str, Target]:
    of = {row["kind"]: row for row in rows}
    large = settings.nbytes >= LARGE_NBYTES
    small = (
        "" if large else f"the model is smaller than {LARGE_NBYTES >> 20} MiB: what does not grow with it counts too much"
    )

    def most(value: float, limit: float) -> Target:
        return Target(value, limit, "most", asserted=large, why=small)

    return {
        "swap.pause_ms": most(of["swap"]["ms"], PAUSE_MS),
        "delta_swap.pause_ms": most(of["delta_swap"]["ms"], PAUSE_MS),
        "delta_swap.risen_shards": most(of["delta_swap"]["risen_shards"], LESS_THAN_A_COPY),
        "copy.over_memcpy": most(of["copy"]["ms"] / of["memcpy"]["ms"], 1.2),
        "delta.over_copy": most(of["delta"]["ms"] / of["copy"]["ms"], 0.5),
    }
