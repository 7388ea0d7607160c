"""What an update reports, and where its time went: one form on every path."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from weightcast import logs

log = logs.get(__name__)

CommitMode = Literal["copy", "swap", "inplace", "delta"]
WholeMode = Literal["copy", "swap"]
TimedPhase = Literal["lookup", "stage", "verify", "wait", "commit", "proof", "settle"]
PHASES: tuple[TimedPhase, ...] = get_args(TimedPhase)


class Timeline:
    """Where the time of one update goes, by `time.monotonic`. One phase runs at any moment until `end`, so the phases always
    add up to the total.

    - lookup: open the source and find out what the version is
    - stage: fetch it, decode it, and prepare the commit
    - verify: compare what was staged with its digests and sums
    - wait: for a commit to begin or to go on: for running requests to end, for an earlier call, for the caller
    - commit: change the live weights, on all ranks
    - proof: read back what the commit changed
    - settle: make the version the one that is served, and tell the source
    """

    def __init__(self) -> None:
        self._seconds: dict[TimedPhase, float] = dict.fromkeys(PHASES, 0.0)
        self._phase: TimedPhase | None = "lookup"
        self._since = time.monotonic()

    def enter(self, phase: TimedPhase) -> None:
        """From now on this phase runs."""
        self.end()
        self._phase = phase

    def end(self) -> None:
        """The update has ended, or the phase that ran has."""
        now = time.monotonic()
        if self._phase is not None:
            self._seconds[self._phase] += now - self._since
        self._phase, self._since = None, now

    def attribute(self, seconds: float, *, to: TimedPhase, of: TimedPhase | None = None) -> None:
        """So much of what was counted as one phase was another; without `of`, it passed before this timeline began."""
        if of is not None:
            seconds = min(seconds, self._seconds[of])
            self._seconds[of] -= seconds
        self._seconds[to] += seconds

    def seconds(self, phase: TimedPhase) -> float:
        """How long a phase has taken, up to now if it runs."""
        return self._seconds[phase] + (time.monotonic() - self._since if phase == self._phase else 0.0)

    def as_dict(self) -> dict[str, float]:
        """Every phase as `PHASE_s`, and their sum, `total_s`."""
        times = {f"{phase}_s": self.seconds(phase) for phase in PHASES}
        return times | {"total_s": sum(times.values())}

    def as_ms(self) -> dict[str, float]:
        """The same as log lines have it: `PHASE_ms` and `total_ms`."""
        return {f"{name.removesuffix('_s')}_ms": logs.ms(seconds) for name, seconds in self.as_dict().items()}


def legacy_costs(times: dict[str, float]) -> dict[str, float]:
    """The legacy names: seconds until the bytes were here, from there until they were served, and in all."""
    sync_s = times["lookup_s"] + times["stage_s"]
    return {"sync_cost": sync_s, "update_cost": times["total_s"] - sync_s, "total_cost": times["total_s"]}


@dataclass(frozen=True)
class UpdateResult:
    """One rank's finished update. Times are in seconds. Those of the phases add up to `total_s`; `Timeline` says what each
    phase is. `commit_s` is the time in which the live weights were not whole: what an engine must pause for.

    A version that was already there has mode "none". `mode` is what was done: a delta on what the model holds is scattered
    ("delta") also where `copy` or `inplace` was asked for. `bytes` were fetched.
    """

    version: str
    rank: int
    source: str
    mode: CommitMode | Literal["none"]
    tensors: int
    bytes: int
    lookup_s: float = 0.0
    stage_s: float = 0.0
    verify_s: float = 0.0
    wait_s: float = 0.0
    commit_s: float = 0.0
    proof_s: float = 0.0
    settle_s: float = 0.0
    total_s: float = 0.0

    @property
    def sync_cost(self) -> float:
        """Legacy name: seconds until the bytes were here."""
        return self.lookup_s + self.stage_s

    @property
    def update_cost(self) -> float:
        """Legacy name: seconds from there until they were served."""
        return self.total_s - self.sync_cost

    @property
    def total_cost(self) -> float:
        """Legacy name of `total_s`."""
        return self.total_s

    def as_dict(self) -> dict[str, Any]:
        """All fields, the legacy names included, for JSON."""
        fields = asdict(self)
        return fields | legacy_costs(fields)


def finished(
    version: str,
    rank: int,
    source: str,
    mode: CommitMode | Literal["none"],
    tensors: int,
    nbytes: int,
    timeline: Timeline,
) -> UpdateResult:
    """The result of an update that has just succeeded. Its timeline ends here, and it is logged."""
    timeline.end()
    ms = timeline.as_ms()
    log.info(
        "model updated", version=version, rank=rank, mode=mode, tensors=tensors, nbytes=nbytes, lookup_ms=ms["lookup_ms"],
        stage_ms=ms["stage_ms"], verify_ms=ms["verify_ms"], wait_ms=ms["wait_ms"], commit_ms=ms["commit_ms"],
        proof_ms=ms["proof_ms"], settle_ms=ms["settle_ms"], total_ms=ms["total_ms"], source=source,
    )  # fmt: skip
    return UpdateResult(version, rank, source, mode, tensors, nbytes, **timeline.as_dict())
