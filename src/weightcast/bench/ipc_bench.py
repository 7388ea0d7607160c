"""The bench of same-host updates: from a trainer's tensors to weights that are committed in another process, beside memcpy.

Everything is real: processes, shared memory, digests of every byte at both ends. The limit is what has to be copied at
least, once out of the trainer and once into the engine, by one thread; it is measured right before and after each update.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from weightcast import logs
from weightcast.bench.ipc_copies import Memcpys
from weightcast.bench.ipc_rivals import RIVALS, Rival, measure_rival
from weightcast.bench.ipc_tensors import Model, tensor_shapes
from weightcast.bench.report import Report, Row, Target, this_machine
from weightcast.bench.scratch import ended_in_order, scratch_dir
from weightcast.bench.timing import Timing
from weightcast.errors import InvalidInput, MissingExtra, WeightcastError

if TYPE_CHECKING:
    from weightcast.bench.ipc_updates import Timed, Updates, Way

log = logs.get(__name__)

Progress = Callable[[str], None]

LARGE_NBYTES = 256 << 20  # from here on limits are asserted: below it what does not grow with the model counts for too much
LIMITS = {1: 1.35, 2: 1.6}  # of a swap, by receivers
_SIZES = 10.5  # trainer: tensors, a copy, two of one piece, two slabs; each of two receivers: two sets; and some room
_RIVAL_SIZES = 11.0  # one receiver less, but the trainer, the receiver and the store of a rival
_PROCESSES_NBYTES = 512 << 20
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class IpcSettings:
    """What is measured. `rounds` are those that count, after a first cold one and two to warm up."""

    nbytes: int = 1 << 30
    rounds: int = 10
    rivals: bool = True
    seed: int = 0


def run_ipc_bench(settings: IpcSettings, progress: Progress = log.info) -> Report:
    """Measure everything. Raises `InvalidInput` if the memory does not suffice, `MissingExtra` without ZeroMQ."""
    from weightcast.bench.ipc_updates import WAYS, measure_way  # noqa: PLC0415 - ZeroMQ is an extra

    tensor_shapes(settings.nbytes)  # refuses before anything is made
    _check_memory(settings)
    before = os.getloadavg()[0]
    rows: list[Row] = []
    with ended_in_order():
        progress("making tensors")
        model = Model(settings.nbytes, settings.seed)
        with Memcpys(model.tensors) as memcpys:
            for way in WAYS:
                with scratch_dir() as scratch:
                    timed = measure_way(
                        way, model, memcpys, rounds=settings.rounds, directory=scratch / "run", progress=progress
                    )
                rows.append(_way_row(way, timed, model.nbytes))
            if settings.rivals:
                rows += _rival_rows(model, memcpys, settings, progress)
    machine = this_machine()
    return Report(
        bench="ipc",
        machine=machine,
        settings=asdict(settings),
        rows=rows,
        targets=_targets(rows, settings, machine.cores),
        notes=_notes(rows, model, before),
    )


def _check_memory(settings: IpcSettings) -> None:
    sizes, available = _RIVAL_SIZES if settings.rivals else _SIZES, available_nbytes()
    needed = int(settings.nbytes * sizes) + _PROCESSES_NBYTES
    if available is not None and available < needed:
        raise InvalidInput(
            f"to measure {settings.nbytes} bytes takes {needed} bytes of memory: {sizes:g} times as much (tensors, a copy, "
            f"two slabs, two sets in each receiver{', rivals' if settings.rivals else ''}) and some for processes. "
            f"{available} are available: take a smaller --size{' or --no-rivals' if settings.rivals else ''}."
        )


def available_nbytes() -> int | None:
    """Memory that can be had now; None where the system does not tell."""
    for line in _MEMINFO.read_text().splitlines() if _MEMINFO.exists() else ():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


# -- the report ----------------------------------------------------------------------------------------------------------


def _way_row(way: Way, timed: Timed, nbytes: int) -> Row:
    total = Timing(tuple(one.total_s for one in timed.steady))
    copied, by_two, in_one_piece = Timing(timed.memcpys_s), Timing(timed.two_threads_s), Timing(timed.one_piece_s)
    fastest = min(timed.steady, key=lambda one: one.total_s)
    return {
        "kind": way.kind,
        "commit": way.commit,
        "receivers": way.receivers,
        "rounds": len(timed.steady),
        "cold_s": timed.cold.total_s,
        **_steady(total, nbytes),
        "memcpys_s": copied.minimum,
        "median_memcpys_s": copied.median,
        "over_memcpys": total.minimum / copied.minimum,
        "median_over_memcpys": total.median / copied.median,
        "two_threads_s": by_two.minimum,
        "over_two_threads": total.minimum / by_two.minimum,
        "one_piece_s": in_one_piece.minimum,
        "over_one_piece": total.minimum / in_one_piece.minimum,
        **{name: value for name, value in asdict(fastest).items() if name != "total_s"},
        "median_publish_s": statistics.median(one.publish_s for one in timed.steady),
        "all_rounds": [asdict(one) for one in (timed.cold, *timed.warm_up, *timed.steady)],
        "all_memcpys_s": list(timed.memcpys_s),
        "all_two_threads_s": list(timed.two_threads_s),
        "all_one_piece_s": list(timed.one_piece_s),
    }


def _steady(total: Timing, nbytes: int) -> Row:
    return {
        "s": total.minimum,
        "median_s": total.median,
        "spread": total.spread,
        "gb_per_s": nbytes / total.minimum / 1e9,
    }


def _rival_rows(model: Model, memcpys: Memcpys, settings: IpcSettings, progress: Progress) -> list[Row]:
    """What rivals take. Between their rounds one receiver of ours is updated, so that both have the same machine."""
    from weightcast.bench.ipc_updates import WARM_UP, WAYS, Updates  # noqa: PLC0415 - ZeroMQ is an extra

    with scratch_dir() as scratch, Updates(WAYS[0], model, scratch / "run") as ours:
        progress("warming up")
        for _ in range(1 + WARM_UP):
            ours.round()
        return [_rival_row(rival, model, memcpys, settings, ours, progress) for rival in RIVALS]


def _rival_row(
    rival: Rival, model: Model, memcpys: Memcpys, settings: IpcSettings, ours: Updates, progress: Progress
) -> Row:
    """The row of a rival that is not installed, or fails, says so; the others are measured all the same."""
    from weightcast.bench.ipc_updates import WARM_UP  # noqa: PLC0415 - ZeroMQ is an extra

    row = {"kind": rival.kind, "receivers": 1}
    if rival.lacking:
        return row | {"missing": str(MissingExtra(", ".join(rival.lacking), "bench", rival.kind))}
    copied_s: list[float] = []
    ours_s: list[float] = []

    def between() -> None:
        ours_s.append(ours.round(lambda: copied_s.append(memcpys.two(1))).total_s)

    try:
        with scratch_dir() as scratch:
            seconds = measure_rival(
                rival, nbytes=settings.nbytes, seed=settings.seed, rounds=1 + WARM_UP + settings.rounds, directory=scratch,
                between=between, progress=progress,
            )  # fmt: skip
    except WeightcastError as error:
        if ours.busy:  # it is no fault of the rival
            raise
        return row | {"failed": str(error)}
    total = Timing(tuple(seconds[1 + WARM_UP :]))
    copied, beside = Timing(tuple(copied_s[WARM_UP:])), Timing(tuple(ours_s[WARM_UP:]))  # as many of each
    return row | {
        "rounds": len(total.seconds),
        "cold_s": seconds[0],
        **_steady(total, model.nbytes),
        "memcpys_s": copied.minimum,
        "over_memcpys": total.minimum / copied.minimum,
        "ours_s": beside.minimum,
        "over_ours": total.minimum / beside.minimum,
        "median_over_ours": total.median / beside.median,
        "packages": {package: metadata.version(package) for package in rival.packages},
        "all_s": seconds,
        "all_memcpys_s": copied_s,
        "all_ours_s": ours_s,
    }


def _targets(rows: Sequence[Row], settings: IpcSettings, cores: int) -> dict[str, Target]:
    swaps = {row["receivers"]: row for row in rows if row.get("commit") == "swap" and row["kind"].startswith("swap")}
    why = ""
    if settings.nbytes < LARGE_NBYTES:
        why = f"the model is smaller than {LARGE_NBYTES >> 20} MiB: what does not grow with it counts too much"
    elif cores < 2:
        why = "there is one core, and both ends copy and hash with two"
    return {
        f"{receivers}_receiver{'s' if receivers > 1 else ''}.over_memcpys": Target(
            swaps[receivers]["over_memcpys"], limit, "most", asserted=not why, why=why
        )
        for receivers, limit in LIMITS.items()
    }


def _notes(rows: Sequence[Row], model: Model, load_before: float) -> list[str]:
    gained = [row["memcpys_s"] / row["two_threads_s"] for row in rows if "two_threads_s" in row]
    return [
        f"{model.nbytes} bytes in {len(model.tensors)} BF16 tensors, every element of which differs from one version to the "
        f"next; load of the machine {load_before:.2f} before, {os.getloadavg()[0]:.2f} after",
        "a time is from the call of publish (or stream) to the commit of the last receiver, the fastest of all rounds, over "
        "the fastest of two memcpys of the same tensors by one thread, timed around each round. Memory of one piece is "
        "copied faster than tensors are, past the caches: that ratio is shown too. kept, noticed, staged and "
        "committed are parts of that fastest round: how long the trainer was kept, until a receiver knew of the version, "
        "and what it took from there",
        f"two threads copied memory {min(gained):.2f} to {max(gained):.2f} times as fast as one, table row by table row: "
        "where that is near 1, others had the second core, and the two threads at both ends of an update gained nothing",
        "cold is the first update, with memory that nobody has touched; the two after it, which touch the second slab and "
        "the second set of buffers, are left out",
        "our digests are on: every byte is hashed where it was published and where it was received, and compared. Rivals "
        "check nothing; after their last round the bench compares what both ends have",
        "rivals have their tensors, group, store and processes warm, and write to live tensors: gloo sends all tensors at "
        "once, Ray puts them as one object that an actor maps and copies, the file is saved, opened and copied from; "
        "between their rounds one receiver of ours is updated by swap: what they are compared with",
    ]
