"""The bench of pauses: how long a running replica cannot compute while new weights are committed, beside copying memory.

Real ranks serve real requests, versions come from a store, and every update goes the way that `weightcast serve` takes.
A rank's pause is all the time in which it could not compute, agreeing with the other ranks included. Copying memory is
measured right before and after each update whose limit it is, by as many processes as there are ranks.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weightcast import logs
from weightcast.bench.pause_model import make_versions, model_config
from weightcast.bench.report import Report, Row, Target, this_machine
from weightcast.bench.timing import Timing
from weightcast.errors import MissingExtra

if TYPE_CHECKING:
    from weightcast.bench.pause_replica import Measured, Sample

log = logs.get(__name__)

Progress = Callable[[str], None]

LARGE_NBYTES = 256 << 20  # from here on limits are asserted: below it what does not grow with the model counts for too much
PAUSE_MS = 10.0
LESS_THAN_A_COPY = 0.35  # shards: what is worked out for a delta, but no second set of buffers
_TMPFS = Path("/dev/shm")  # noqa: S108 - looked for, not relied on
_ROOM = 6  # times the size of the model: what the files take, with room to spare


@dataclass(frozen=True)
class PauseSettings:
    """What is measured. `directory` is where versions lie meanwhile: None is tmpfs if it has room, else the default one."""

    nbytes: int = 512 << 20
    ranks: int = 2
    rounds: int = 3
    streams: int = 8
    windows: int = 3
    window_s: float = 4.0
    seed: int = 0
    directory: str | None = None


def run_pause_bench(settings: PauseSettings, progress: Progress = log.info) -> Report:
    """Measure everything. Raises `MissingExtra` without what a replica needs."""
    try:
        from weightcast.bench.pause_replica import measure  # noqa: PLC0415 - extras, and slow to import
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "a package", "serve", "weightcast bench pause") from error
    model_config(settings.nbytes, settings.ranks)  # refuses before anything is made
    with _scratch(settings) as scratch:
        made = make_versions(scratch, nbytes=settings.nbytes, ranks=settings.ranks, seed=settings.seed, progress=progress)
        before = os.getloadavg()[0]
        measured = asyncio.run(
            measure(
                made, ranks=settings.ranks, rounds=settings.rounds, width=settings.streams, windows=settings.windows,
                window_s=settings.window_s, seed=settings.seed, progress=progress,
            )
        )  # fmt: skip
    machine = this_machine()
    rows = _rows(measured, settings)
    return Report(
        bench="pause",
        machine=machine,
        settings=asdict(settings),
        rows=rows,
        targets=_targets(rows, settings, machine.cores),
        notes=[
            f"{made.nbytes} bytes in BF16 over {settings.ranks} ranks: {measured.shard_nbytes} bytes in "
            f"{measured.parameters} parameters each; a delta changes one element in a hundred",
            "pauses and memcpy: the fastest of all rounds, memory: the most, everything else medians; "
            f"load of the machine {before:.2f} before, {os.getloadavg()[0]:.2f} after",
            "a pause is that of the slowest rank, with the vote; memory: by how much that of a rank rose during the "
            "update, in shards; gap: between two tokens of one stream, which also waits for the proof of the new weights "
            "and for its keys and values to be computed anew",
            "the first swap by a delta after one of a full version copies the shard once, while serving: first_delta_swap",
        ],
    )


@contextmanager
def _scratch(settings: PauseSettings) -> Iterator[Path]:
    parent = settings.directory
    if parent is None and _TMPFS.is_dir() and shutil.disk_usage(_TMPFS).free > _ROOM * settings.nbytes:
        parent = str(_TMPFS)
    with tempfile.TemporaryDirectory(prefix="weightcast-bench-", dir=parent) as scratch:
        yield Path(scratch)


# -- the report ----------------------------------------------------------------------------------------------------------


def _rows(measured: Measured, settings: PauseSettings) -> list[Row]:
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
    speeds = measured.speeds
    staging, idle = statistics.median(speeds.staging), statistics.median(speeds.idle)
    rows.append(
        {
            "kind": "throughput",
            "streams": settings.streams,
            "staging_tokens_per_s": staging,
            "tokens_per_s": idle,
            "ratio": staging / idle,
            "best_ratio": max(one / other for one, other in zip(speeds.staging, speeds.idle, strict=True)),
            "windows_staging": list(speeds.staging),
            "windows_idle": list(speeds.idle),
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
        "longest_gap_ms": statistics.median(one.gaps.longest_s for one in samples) * 1e3,
        "usual_gap_ms": statistics.median(one.gaps.median_s for one in samples) * 1e3,
    }


def _targets(rows: list[Row], settings: PauseSettings, cores: int) -> dict[str, Target]:
    of = {row["kind"]: row for row in rows}
    large = settings.nbytes >= LARGE_NBYTES
    small = (
        "" if large else f"the model is smaller than {LARGE_NBYTES >> 20} MiB: what does not grow with it counts too much"
    )
    free = cores > settings.ranks + 1
    busy = "" if free else f"{settings.ranks} ranks on {cores} cores leave none free for staging"

    def most(value: float, limit: float) -> Target:
        return Target(value, limit, "most", asserted=large, why=small)

    return {
        "swap.pause_ms": most(of["swap"]["ms"], PAUSE_MS),
        "delta_swap.pause_ms": most(of["delta_swap"]["ms"], PAUSE_MS),
        "delta_swap.risen_shards": most(of["delta_swap"]["risen_shards"], LESS_THAN_A_COPY),
        "copy.over_memcpy": most(of["copy"]["ms"] / of["memcpy"]["ms"], 1.2),
        "delta.over_copy": most(of["delta"]["ms"] / of["copy"]["ms"], 0.5),
        "throughput.staging_over_idle": Target(
            of["throughput"]["ratio"], 0.8, "least", asserted=large and free, why=small or busy
        ),
    }
