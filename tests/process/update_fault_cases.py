"""The fault matrix as data: what goes wrong, where, on which rank, in which commit mode, and what must come of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weightcast.errors import (
    CommitFailed,
    DeadlineExceeded,
    DigestMismatch,
    ReplicaFailed,
    SourceFailed,
    StorageFailed,
    UpdateFailed,
    WeightcastError,
)

from .update_fault_world import DELTA_1, FULL_B

MODES = ("copy", "swap", "inplace", "delta", "delta swap")
RANKS = (0, 1)
EXCEPTIONS = ("OSError", "RuntimeError", "MemoryError")
PHASES = (
    "reading", "cutting", "staging", "voted", "first write", "middle write", "last write", "post-load", "vote", "proving",
    "settling", "undoing", "reverting", "taking back",
)  # fmt: skip
WRITES = {"first write": "first", "middle write": "middle", "last write": "last"}
COMMITS = (*WRITES, "post-load")
UNDOES = ("undoing", "reverting", "taking back")
STAGES = {  # what a sample shows of the phases
    "before the commit": ("reading", "cutting", "staging", "voted"),
    "writing": (*COMMITS, "half a write", "streaming"),
    "agreeing": ("vote", "proving"),
    "settling": ("settling",),
    "going back": (*UNDOES, "streaming back"),
}
HANG_S = 4.0  # of what runs beside the main loop, and so cannot be ended from outside
SHORT_S = 1.0  # the deadline of an update that hangs
OLD, NEW, FAILED = "old", "new", "failed"


@dataclass(frozen=True)
class Case:
    """One update in which something goes wrong. `faults` are those of `faulty_rank.py`, by rank.

    It must end in exactly the class `error`, with the replica serving the `old` or the `new` version as `outcome` says, or
    `failed` until one more call.
    """

    fault: str
    phase: str
    rank: int
    mode: str
    faults: tuple[tuple[int, dict[str, Any]], ...]
    error: type[WeightcastError]
    outcome: str = ""

    def __post_init__(self) -> None:
        """From the moment that all ranks have proved the new version it is the one that counts."""
        if not self.outcome:
            object.__setattr__(self, "outcome", NEW if self.phase == "settling" else OLD)

    timeout_s: float = 30.0
    quick_commands: bool = False  # waits of the front end for the ranks are cut to a few seconds

    @property
    def name(self) -> str:
        return f"{self.fault}-{self.phase}-rank {self.rank}-{self.mode}"

    @property
    def target(self) -> str:
        return DELTA_1 if self.mode.startswith("delta") else FULL_B

    @property
    def commit(self) -> str:
        return self.mode.removeprefix("delta ")

    @property
    def fatal(self) -> bool:
        """Whether ranks are lost by it."""
        return self.error is ReplicaFailed


def _other(rank: int) -> int:
    return 1 - rank


def _at(rank: int, point: str, do: str, **more: Any) -> tuple[int, dict[str, Any]]:
    return rank, {"point": point, "do": do, **more}


def _point(phase: str) -> dict[str, Any]:
    points = {
        "reading": {"point": "read"}, "cutting": {"point": "cut"}, "staging": {"point": "staged"},
        "voted": {"point": "commit"}, "post-load": {"point": "post"}, "vote": {"point": "agree"},
        "proving": {"point": "prove"}, "settling": {"point": "settle"}, "undoing": {"point": "undo", "at": "middle"},
        "reverting": {"point": "undo begins"}, "taking back": {"point": "undo begins"},
    }  # fmt: skip
    return {"point": "apply", "at": WRITES[phase]} if phase in WRITES else points[phase]


def _first(phase: str, rank: int) -> tuple[tuple[int, dict[str, Any]], ...]:
    """What must go wrong before there is anything to undo."""
    if phase == "undoing":
        return (_at(rank, "apply", "raise", at="middle"),)
    if phase == "reverting":
        return (_at(_other(rank), "apply", "raise", at="middle"),)
    return (_at(_other(rank), "prove", "raise"),) if phase == "taking back" else ()


def _modes(phase: str, turn: Iterator[int]) -> list[tuple[str, int]]:
    """Modes and ranks: where parameters are written all modes, and over the places both ranks; else one mode for each."""
    if phase in COMMITS:
        return [(mode, (PHASES.index(phase) + number) % 2) for number, mode in enumerate(MODES)]
    return [(MODES[next(turn) % len(MODES)], rank) for rank in RANKS]


def _end(phase: str) -> str:
    """Once all ranks have proved the new version, it is the one that counts: those that are lost come back to it."""
    return NEW if phase == "settling" else OLD


def _exceptions() -> list[Case]:
    kinds, turn = itertools.cycle(EXCEPTIONS), itertools.count()
    errors = {
        "reading": StorageFailed, "cutting": UpdateFailed, "staging": UpdateFailed, "voted": ReplicaFailed,
        "vote": ReplicaFailed, "settling": ReplicaFailed,
    }  # fmt: skip
    cases = []
    for phase in PHASES:
        everywhere = phase in (*COMMITS, *UNDOES)
        for mode, rank in itertools.product(MODES, RANKS) if everywhere else _modes(phase, turn):
            kind = "OSError" if phase == "reading" else next(kinds)
            fault = (rank, {"do": "raise", "error": kind, **_point(phase)})
            outcome = FAILED if phase in UNDOES else ""
            error = errors.get(phase, CommitFailed)
            cases.append(Case("exception", phase, rank, mode, (*_first(phase, rank), fault), error, outcome))
    return cases


def _kills() -> list[Case]:
    """kill −9: the ranks are started again."""
    turn = itertools.count(2)
    cases = []
    for phase in PHASES:
        for mode, rank in _modes(phase, turn):
            faults = (*_first(phase, rank), (rank, {"do": "kill", **_point(phase)}))
            cases.append(Case("kill", phase, rank, mode, faults, ReplicaFailed, _end(phase)))
    return cases


def _hangs() -> list[Case]:
    """Beside the main loop a hang ends by the deadline of the update; in it the heartbeat tells. Where a rank waits for its
    peers, or streams from a source, standing still is no sign, and the front end's patience ends it.
    """
    turn = itertools.count(2)
    cases = []
    for phase in PHASES:
        beside = phase in ("reading", "cutting", "staging")
        for mode, rank in _modes(phase, turn):
            point = _point(phase) | ({"seconds": HANG_S} if beside else {})
            cases.append(
                Case(
                    "hang", phase, rank, mode, (*_first(phase, rank), (rank, {"do": "hang", **point})),
                    DeadlineExceeded if beside else ReplicaFailed, _end(phase),
                    timeout_s=SHORT_S if beside or mode == "inplace" else 30.0,
                    quick_commands=phase in ("vote", "proving") or mode == "inplace",
                )
            )  # fmt: skip
    return cases


def _wrong_bytes() -> list[Case]:
    """A bit that turns over on one rank: in what was cut, what waits to be committed, or what is live."""
    rows = [("cutting", mode, "cut memory", DigestMismatch) for mode in ("copy", "swap")]
    rows += [("staging", mode, "staged memory", DigestMismatch) for mode in ("copy", "delta")]
    rows += [("proving", "copy", "live memory", CommitFailed)]
    return [
        Case("corrupt byte", phase, rank, mode, (_at(rank, point, "flip"),), error, OLD)
        for (phase, mode, point, error), rank in itertools.product(rows, RANKS)
    ]


def _wrong_tensors() -> list[Case]:
    """A source that leaves a tensor out, or makes one too long, for one rank."""
    return [
        Case(fault, "reading", rank, mode, (_at(rank, "pieces", do),), SourceFailed)
        for (fault, do), rank, mode in itertools.product(
            (("missing tensor", "skip"), ("wrong shape", "grow")), RANKS, ("copy", "inplace")
        )
    ]


def _half_writes() -> list[Case]:
    return [
        Case("exception", "half a write", rank, "copy", (_at(rank, "write", "half", at=5),), CommitFailed) for rank in RANKS
    ]


def _streams() -> list[Case]:
    """A source that fails, hangs or lies while it is streamed into the live parameters, and while the way back is."""
    cases = []
    for rank in RANKS:
        broken = _at(rank, "stream", "raise", at=9, error="OSError")
        silent = _at(rank, "stream", "hang", at=9, seconds=2 * SHORT_S)
        wrong = _at(rank, "stream bytes", "flip", at=9)
        back = (_at(rank, "apply", "raise", at="middle"), _at(rank, "stream back", "raise", at=4, error="OSError"))
        cases += [
            Case("exception", "streaming", rank, "inplace", (broken,), CommitFailed),
            Case("hang", "streaming", rank, "inplace", (silent,), CommitFailed, timeout_s=SHORT_S),
            Case("corrupt byte", "streaming", rank, "inplace", (wrong,), CommitFailed),
            Case("exception", "streaming back", rank, "inplace", back, CommitFailed, FAILED),
        ]
    return cases


def matrix() -> list[Case]:
    """All of it."""
    return [
        *_exceptions(), *_half_writes(), *_streams(), *_kills(), *_hangs(), *_wrong_bytes(), *_wrong_tensors()
    ]  # fmt: skip


def sample(cases: list[Case]) -> list[Case]:
    """A few of them, such that each fault, mode, rank and error is there, and each stage with each of its ends.

    Those that cost a restart, or deltas after one, come last, and only where nothing else will do.
    """
    left = random.Random(3).sample(cases, len(cases))
    wanted = set().union(*map(_shown_by, left))
    chosen: list[Case] = []
    while wanted:
        best = min(
            left, key=lambda case: (case.fatal + (case.fatal and "delta" in case.mode), -len(_shown_by(case) & wanted))
        )
        left.remove(best)
        if _shown_by(best) & wanted:
            chosen.append(best)
            wanted -= _shown_by(best)
    return chosen


def _shown_by(case: Case) -> set[Any]:
    stage = next(stage for stage, phases in STAGES.items() if case.phase in phases)
    ends = set() if case.fatal and case.outcome == OLD else {(stage, case.outcome)}  # ranks that restart come back to it
    return {case.mode, case.rank, case.fault, case.error} | ends
