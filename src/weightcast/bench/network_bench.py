"""The bench of the network: from a version that is published to one that another process has staged and verified.

Everything runs on loopback, between processes. Beside it, in the same rounds: bare TCP and a bare READ of NIXL, which are
what a network can do here, and others who move weights.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from weightcast import logs
from weightcast.bench.ipc_bench import available_nbytes
from weightcast.bench.ipc_rivals import Rival
from weightcast.bench.ipc_tensors import tensor_shapes
from weightcast.bench.network_ways import (
    HTTP,
    LENT,
    NIXL,
    READ,
    RIVALS,
    STORED,
    TCP,
    Mover,
    Rounds,
    TcpMover,
    interleaved,
    missing,
    versions_of,
)
from weightcast.bench.report import Report, Row, Target, this_machine
from weightcast.bench.scratch import ended_in_order, scratch_dir
from weightcast.bench.timing import Timing
from weightcast.errors import InvalidInput, WeightcastError
from weightcast.tensors.dtypes import DType

log = logs.get(__name__)

Progress = Callable[[str], None]

LARGE_NBYTES = 256 << 20  # from here on limits are asserted: below it what does not grow with the model counts for too much
OVER_TCP = 0.8
OVER_READ = 0.85
_SIZES = 14.0  # ours twice: tensors, a version, two sets; both limits: two; and some room. With rivals it is no more at once
_PROCESSES_NBYTES = 1 << 30


@dataclass(frozen=True)
class NetworkSettings:
    """What is measured. `rounds` are those that count, after a first cold one and two to warm up."""

    nbytes: int = 1 << 30
    rounds: int = 10
    rivals: bool = True
    seed: int = 0


def run_network_bench(settings: NetworkSettings, progress: Progress = log.info) -> Report:
    """Measure everything. Raises `InvalidInput` if the memory does not suffice."""
    shapes = tensor_shapes(settings.nbytes)  # refuses before anything is made
    _check_memory(settings)
    nbytes = sum(math.prod(shape) * DType.BF16.itemsize for shape in shapes.values())
    before = os.getloadavg()[0]
    with ended_in_order():
        rows = _Measuring(settings, nbytes, progress).rows()
    machine = this_machine()
    return Report(
        bench="network",
        machine=machine,
        settings=asdict(settings),
        rows=rows,
        targets=_targets(rows, settings, machine.cores),
        notes=_notes(nbytes, len(shapes), before),
    )


def _check_memory(settings: NetworkSettings) -> None:
    available, needed = available_nbytes(), int(settings.nbytes * _SIZES) + _PROCESSES_NBYTES
    if available is not None and available < needed:
        raise InvalidInput(
            f"to measure {settings.nbytes} bytes takes {needed} bytes of memory: {_SIZES:g} times as much (tensors, "
            f"versions, two sets in each receiver) and some for processes. {available} are available: take a smaller --size."
        )


class _Measuring:
    """One run. `nbytes` is what the tensors really have."""

    def __init__(self, settings: NetworkSettings, nbytes: int, progress: Progress) -> None:
        self._settings, self._nbytes, self._progress = settings, nbytes, progress

    def rows(self) -> list[Row]:
        """All of them: limits, ours, rivals."""
        rows: list[Row] = []
        with ExitStack() as opened:
            ours = [self._started(way, opened) for way in (HTTP, NIXL) if not missing(way)]
            rows += self._beside_limits(ours)
            if self._settings.rivals:
                rows += [self._beside_rival(rival, ours) for rival in RIVALS]
        rows += self._from_elsewhere()
        return rows

    def _started(self, way: Rival, opened: ExitStack) -> Mover:
        self._progress(f"{way.kind}: starting")
        facts: dict[str, Any] = {
            "nbytes": self._settings.nbytes, "seed": self._settings.seed, "directory": opened.enter_context(scratch_dir())
        }  # fmt: skip
        return opened.enter_context(TcpMover(**facts) if way is TCP else Mover(way, **facts))

    def _interleaved(self, movers: Sequence[Mover]) -> dict[str, Rounds]:
        return interleaved(movers, rounds=self._settings.rounds, progress=self._progress)

    def _beside_limits(self, ours: Sequence[Mover]) -> list[Row]:
        rows: list[Row] = []
        with ExitStack() as opened:
            limits = [self._started(way, opened) for way in (TCP, READ) if not missing(way)]
            taken = self._interleaved([*limits, *ours])
            rows += [self._limit_row(limit, taken) for limit in limits]
        rows += [self._our_row(one.way, taken) for one in ours]
        return rows + [{"kind": way.kind, "missing": missing(way)} for way in (READ, NIXL) if missing(way)]

    def _from_elsewhere(self) -> list[Row]:
        """Other places that a version may lie in: shown, not asserted."""
        ways = [way for way in (STORED, LENT) if not missing(way)]
        with ExitStack() as opened:
            taken = self._interleaved([self._started(way, opened) for way in (TCP, *ways)])
            return [self._our_row(way, taken) for way in ways]

    def _beside_rival(self, rival: Rival, ours: Sequence[Mover]) -> Row:
        """A rival that is not installed, or fails, has a row that says so; the others are measured all the same."""
        if missing(rival):
            return {"kind": rival.kind, "missing": missing(rival)}
        mover = None
        with ExitStack() as opened:
            try:
                mover = self._started(rival, opened)
                taken = self._interleaved([mover, *ours])
            except WeightcastError as error:
                if mover is not None and mover.failed is not error:  # it is no fault of the rival
                    raise
                return {"kind": rival.kind, "failed": str(error)}
        return self._rival_row(rival, taken, ours)

    # -- rows ------------------------------------------------------------------------------------------------------------

    def _steady(self, kind: str, rounds: Rounds) -> dict[str, Any]:
        total = Timing(tuple(rounds.steady_s))
        return {
            "kind": kind,
            "rounds": len(rounds.steady_s),
            "cold_s": rounds.cold_s,
            "s": total.minimum,
            "median_s": total.median,
            "spread": total.spread,
            "gb_per_s": self._nbytes / total.minimum / 1e9,
            "all_s": rounds.steady_s,
        }

    def _limit_row(self, limit: Mover, taken: Mapping[str, Rounds]) -> Row:
        row = self._steady(limit.way.kind, taken[limit.way.kind]) | {"role": "limit", "packages": versions_of(limit.way)}
        if isinstance(limit, TcpMover):
            row["two_streams_s"] = min(told["two_streams_s"] for told in taken[limit.way.kind].told)
            row["shapes"] = [asdict(shape) for shape in limit.shapes]
            row["tried"] = [asdict(shape) | {"gb_per_s": self._nbytes / s / 1e9} for shape, s in limit.tried.items()]
        return row

    def _our_row(self, way: Rival, taken: Mapping[str, Rounds]) -> Row:
        rounds = taken[way.kind]
        fastest = min(range(len(rounds.steady_s)), key=rounds.steady_s.__getitem__)
        told = rounds.told[fastest]
        row = self._steady(way.kind, rounds) | {
            "role": "ours",
            "packages": versions_of(way),
            "noticed_s": rounds.steady_s[fastest] - (told["ended_s"] - told["noticed_s"]),
            "stage_s": told["stage_s"],
            "verify_s": told["verify_s"],
        }
        for name, limit in (("tcp", TCP), ("read", READ)):
            if limit.kind in taken and (limit is TCP or way is NIXL):
                row |= _over(name, rounds, taken[limit.kind])
        return row

    def _rival_row(self, rival: Rival, taken: Mapping[str, Rounds], ours: Sequence[Mover]) -> Row:
        row = self._steady(rival.kind, taken[rival.kind]) | {"role": "rival", "packages": versions_of(rival)}
        for one in ours:
            kind = one.way.kind
            row |= _over(kind, taken[rival.kind], taken[kind])
            row[f"{kind}_ahead"] = 1 / row[f"over_{kind}"]
        return row


def _over(name: str, rounds: Rounds, other: Rounds) -> dict[str, Any]:
    """How fast rounds were compared with others that ran in turn with them: 1 is as fast, 2 twice as fast."""
    here, there = Timing(tuple(rounds.steady_s)), Timing(tuple(other.steady_s))
    by_round = [theirs / ours for ours, theirs in zip(rounds.steady_s, other.steady_s, strict=True)]
    return {
        f"{name}_s": there.minimum,
        f"median_{name}_s": there.median,
        f"over_{name}": there.minimum / here.minimum,
        f"median_over_{name}": there.median / here.median,
        f"best_round_over_{name}": max(by_round),
        f"median_round_over_{name}": statistics.median(by_round),
        f"all_{name}_s": other.steady_s,
    }


# -- targets and notes -----------------------------------------------------------------------------------------------------


def _targets(rows: Sequence[Row], settings: NetworkSettings, cores: int) -> dict[str, Target]:
    why = ""
    if settings.nbytes < LARGE_NBYTES:
        why = f"the model is smaller than {LARGE_NBYTES >> 20} MiB: what does not grow with it counts too much"
    elif cores < 2:
        why = "there is one core, and there are two ends"
    of = {row["kind"]: row for row in rows if "s" in row}
    wanted: list[tuple[str, float, float]] = []
    for kind in (HTTP.kind, NIXL.kind):
        wanted += [(f"{kind}.over_tcp", of[kind]["over_tcp"], OVER_TCP)] if kind in of else []
        wanted += [(f"{kind}.over_nixl_read", of[kind]["over_read"], OVER_READ)] if "over_read" in of.get(kind, {}) else []
        for rival in (one for one in rows if one.get("role") == "rival"):
            if f"{kind}_ahead" in rival:
                wanted.append((f"{kind}.ahead_of_{_word(rival)}", rival[f"{kind}_ahead"], 1.0))
    return {name: Target(value, limit, "least", asserted=not why, why=why) for name, value, limit in wanted}


def _word(row: Row) -> str:
    """The name of a rival in that of a target."""
    return str(row["kind"]).replace(",", " ").split()[0].lower()


def _notes(nbytes: int, tensors: int, load_before: float) -> list[str]:
    return [
        f"{nbytes} bytes in {tensors} BF16 tensors, every element of which differs from one version to the next; all "
        f"processes on loopback; load of the machine {load_before:.2f} before, {os.getloadavg()[0]:.2f} after",
        "a time is from the moment at which publish has returned, when the version is there, until the receiver, which is "
        "told of it by a long poll, has all tensors in memory and has compared every digest: the fastest round. Limits and "
        "rivals check nothing; after the last round the bench compares what both ends have",
        "raw TCP sends the same bytes in one stream from one piece of memory to another, with the fastest of several sizes "
        "to be received at once. raw NIXL READ is one descriptor over UCX with UCX_TLS=tcp, under which our nixl runs too",
        "what is compared ran in turn, round by round; a ratio is of the fastest rounds, beside it that of the medians and "
        "the median of the ratios round by round. All buffers, connections and agents are warm; cold is the first round",
        "http and nixl read from the memory of a trainer that is its own depot. From a store, whose files are new in every "
        "version, mapping them is part of the time; lent tensors are read where the trainer has them, without a copy",
        "gloo broadcasts all tensors at once into live ones; Mooncake writes one piece; Ray puts them as one object that an "
        "actor on a second node fetches and copies: on one node it would share memory, which no network does",
    ]
