"""The weights of the small engine in the process of the test: versions are names, and updates stop where the test says."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weightcast.engines.base import (
    Aborted,
    AbortReport,
    Failure,
    Pin,
    RankWeights,
    UpdateRequest,
    UpdateStatus,
    WeightsStatus,
)
from weightcast.engines.states import TABLE, Operation, ReplicaState, refusal
from weightcast.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    NotReady,
    SourceFailed,
    UpdateCancelled,
    VersionNotFound,
    VersionNotServed,
    WeightcastError,
    WrongState,
)
from weightcast.worker.result import UpdateResult

NBYTES = 1000  # of each rank, in every version
RANKS = 2
_TIMED = {"staging": "stage", "staged": "wait", "committing": "commit", "proving": "proof"}


@dataclass(frozen=True)
class EchoStatus:
    state: str = "READY"
    reason: str = "serving"
    since: float = 0.0
    version: str = "step_1"
    root_digest: str = "xxh3-128:00"
    restarts: int = 0

    @property
    def healthy(self) -> bool:
        return TABLE[ReplicaState(self.state)].healthy


@dataclass
class EchoWeights:
    """`hold` keeps an update in that phase, `fail` fails it there. `published` is the source, oldest first."""

    status: EchoStatus = EchoStatus(state="STARTING", reason="starting", version="", root_digest="")
    published: list[str] = field(default_factory=lambda: ["step_1"])
    source: str | None = "echo://store"
    hold: str | None = None
    fail: tuple[str, Exception] | None = None
    source_dead: bool = False
    corrupt: bool = False
    is_paused: bool = False
    asleep: set[str] = field(default_factory=set)
    previous: str | None = None
    pin: Pin | None = None
    updates: dict[str, UpdateStatus] = field(default_factory=dict)
    asked: int = 0
    looks: int = 0
    requests: list[UpdateRequest] = field(default_factory=list)
    calls: list[tuple[object, ...]] = field(default_factory=list)
    on_update_ended: Callable[[UpdateStatus], None] | None = None

    def __post_init__(self) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.errors: dict[str, WeightcastError] = {}

    # -- what the engine itself needs ------------------------------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        return self.is_paused or bool(self.asleep) or self.status.state == "COMMITTING"

    def stop_requests(self, ids: Collection[str]) -> None:
        raise NotImplementedError

    def made(self) -> dict[str, int]:
        raise NotImplementedError

    async def end_updates(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    # -- LiveWeights -----------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> WeightsStatus:
        status = self.status
        if not status.version:
            raise NotReady("the engine is starting.")
        ranks = tuple(
            RankWeights(rank=rank, version=status.version, state="READY", shard_digest="xxh3-128:0", nbytes=NBYTES)
            for rank in range(RANKS)
        )
        return WeightsStatus(
            state=status.state, legacy_status=int(TABLE[ReplicaState(status.state)].legacy), reason=status.reason,
            version=status.version, root_digest=status.root_digest, source=self.source or "", sequence=1,
            since=status.since, previous=self.previous, paused=self.is_paused, asleep=tuple(sorted(self.asleep)),
            update=next((one.id for one in self.updates.values() if one.ended is None), None), ranks=ranks,
            pin=self.pin,
        )  # fmt: skip

    async def look_at_weights(self) -> WeightsStatus:
        self.looks += 1
        if TABLE[ReplicaState(self.status.state)].away:
            raise NotReady("there are no ranks to ask.")
        return self.weights

    def begin_update(self, request: UpdateRequest) -> UpdateStatus:
        self._allow(Operation.UPDATE)
        source = request.source or self.source
        if source is None:
            raise InvalidInput('no source to update from: name one ("source"), or start the server with --source.')
        version = request.version or self.published[-1]
        if version not in self.published:
            raise VersionNotFound(version, source, self.published)
        self.requests.append(request)
        status = UpdateStatus(id=uuid.uuid4().hex, request=request, version=version, source=source, total=RANKS * NBYTES)
        self.updates[status.id] = status
        pin = None if request.follow or version == self.published[-1] else self._pin(version, "explicit")
        self.tasks[status.id] = asyncio.create_task(self._update(status, self.status.state, pin))
        self._turn("STAGING", "an update")
        return replace_struct(status)

    def begin_recovery(self, request: UpdateRequest) -> UpdateStatus:
        self.calls.append(("recover",))
        return self.begin_update(request)

    async def finish_update(self, update_id: str) -> UpdateStatus:
        self.update_status(update_id)
        await asyncio.wait((self.tasks[update_id],))
        if update_id in self.errors:
            raise self.errors[update_id]
        return self.update_status(update_id)

    def update_status(self, update_id: str) -> UpdateStatus:
        if update_id not in self.updates:
            raise NotFound(f"no update {update_id} is known.")
        return replace_struct(self.updates[update_id])

    async def cancel_update(self, update_id: str) -> UpdateStatus:
        status = self.update_status(update_id)
        if status.phase not in ("waiting", "staging", "staged"):
            raise WrongState("cancel the update", status.phase, ["staging", "staged"])
        self.tasks[update_id].cancel("asked for")
        await asyncio.wait((self.tasks[update_id],))
        return self.update_status(update_id)

    async def verify(self, *, timeout_s: float) -> list[dict[str, object]]:
        self._allow(Operation.VERIFY)
        self.calls.append(("verify", timeout_s))
        if self.corrupt:
            self._turn("FAILED", "rank 1 differs")
            raise SourceFailed("rank 1: a tensor differs from its digest.")
        return [{"rank": rank, "version": self.status.version} for rank in range(RANKS)]

    async def rollback(self, *, timeout_s: float) -> WeightsStatus:
        self._allow(Operation.ROLLBACK)
        self.calls.append(("rollback", timeout_s))
        if self.previous is None:
            raise NotFound("no previous version is held.")
        self.pin = self._pin(self.previous, "rollback")
        self._serve(self.previous)
        self.previous = None
        return self.weights

    async def resume_following(self, *, timeout_s: float) -> WeightsStatus:
        self.pin = None
        return self.weights

    async def ends_pin(self, version: str) -> bool:
        return self.pin is None or self.published.index(version) > self.pin.sequence

    def _pin(self, version: str, why: str) -> Pin:
        newest = len(self.published) - 1
        return Pin(version=version, away_from=self.published[newest], why=why, since=0.0, sequence=newest)

    async def digest(self, names: Collection[str], algorithm: str, *, timeout_s: float) -> list[dict[str, object]]:
        self.calls.append(("digest", tuple(names), algorithm, timeout_s))
        if "nothing" in names:
            raise NotFound("no tensor is called nothing.")
        return [{"rank": rank, "digests": dict.fromkeys(names, f"{algorithm}:00")} for rank in range(RANKS)]

    async def pause(self, mode: str, *, clear_cache: bool = False, timeout_s: float) -> None:
        self._allow(Operation.PAUSE)
        self.calls.append(("pause", mode, clear_cache, timeout_s))
        if mode == "abort":
            self.stop_requests(list(self.made()))
        if mode == "wait":
            try:
                async with asyncio.timeout(timeout_s):
                    while self.made():
                        await asyncio.sleep(0.002)
            except TimeoutError:
                raise DeadlineExceeded("waiting for requests", timeout_s) from None
        self.is_paused = True

    async def resume(self, *, timeout_s: float) -> None:
        self._allow(Operation.RESUME)
        self.calls.append(("resume", timeout_s))
        self.is_paused = False

    async def abort_requests(self, ids: Sequence[str] | None, *, timeout_s: float) -> AbortReport:
        self._allow(Operation.ABORT)
        made = self.made()
        found = {one: [name for name in made if one in (name, name.rpartition("-")[0])] for one in ids or ()}
        chosen = list(made) if ids is None else [name for several in found.values() for name in several]
        self.stop_requests(chosen)
        return AbortReport([Aborted(name, made[name]) for name in chosen], [one for one, ids in found.items() if not ids])

    async def sleep(self, tags: Collection[str], mode: str, *, timeout_s: float) -> list[dict[str, object]]:
        self._allow(Operation.SLEEP)
        self.calls.append(("sleep", tuple(tags), mode, timeout_s))
        await self.pause(mode, timeout_s=timeout_s)
        self.asleep |= set(tags)
        self._turn("CLEARED" if "weight" in self.asleep else "SLEEPING", "asleep")
        return [{"rank": rank, "asleep": sorted(self.asleep)} for rank in range(RANKS)]

    async def wake(self, tags: Collection[str], *, timeout_s: float) -> list[dict[str, object]]:
        self._allow(Operation.WAKE)
        self.calls.append(("wake", tuple(tags), timeout_s))
        self.asleep -= set(tags)
        if self.status.state != "FAILED":
            self._turn("CLEARED" if "weight" in self.asleep else "SLEEPING" if self.asleep else "READY", "woken")
        if not self.asleep:
            self.is_paused = False
        return [{"rank": rank, "asleep": sorted(self.asleep)} for rank in range(RANKS)]

    async def check_version(self, wanted: Mapping[str, str]) -> None:
        serving, order = self.status.version, self.published
        enough = serving == wanted["exact"] if "exact" in wanted else wanted["min"] in order[: order.index(serving) + 1]
        if not enough:
            raise VersionNotServed(next(iter(wanted.values())), serving)

    async def newest_version(self) -> str:
        self.asked += 1
        if self.source is None:
            raise InvalidInput("no source.")
        if self.source_dead:
            raise SourceFailed("the source does not answer.")
        return self.published[-1]

    # -- an update -------------------------------------------------------------------------------------------------------

    async def _update(self, status: UpdateStatus, rested: str, pin: Pin | None) -> None:
        mode = "none" if status.version == self.status.version else "copy"
        error: WeightcastError | None = None
        try:
            async with asyncio.timeout(status.request.timeout_s):
                await self._phases(status)
            self.previous, status.nbytes = self.status.version, status.total if mode == "copy" else 0
            self.pin = pin
            self._serve(status.version, "READY" if rested == "FAILED" else rested)
            status.result = [_result(status, rank, mode) for rank in range(RANKS)]
        except asyncio.CancelledError:
            error = UpdateCancelled("the update was cancelled. No weights were changed.")
        except TimeoutError:
            error = DeadlineExceeded("the update", status.request.timeout_s)
        except WeightcastError as raised:
            error = raised
        status.end("done" if error is None else "cancelled" if isinstance(error, UpdateCancelled) else "failed")
        if error is not None:
            self.errors[status.id], status.error = error, Failure(error.code, str(error))
            self._turn(rested, "serving")
        if self.on_update_ended is not None:
            self.on_update_ended(replace_struct(status))

    async def _phases(self, status: UpdateStatus) -> None:
        for phase in ("staging", "staged", "committing", "proving"):
            status.phase = phase
            status.timeline.enter(_TIMED[phase])
            if phase in ("staged", "committing"):
                self._turn(phase.upper(), "an update")
            if phase == "staging":
                status.nbytes = status.total // 4
            if phase == "committing" and status.request.pause == "abort":
                self.stop_requests(list(self.made()))
            if self.fail is not None and self.fail[0] == phase:
                raise self.fail[1]
            while self.hold == phase:
                await asyncio.sleep(0.002)

    def _allow(self, operation: Operation) -> None:
        error = refusal(operation, ReplicaState(self.status.state), self.status.reason)
        if error is not None:
            raise error

    def _turn(self, state: str, reason: str) -> None:
        self.status = replace(self.status, state=state, reason=reason)

    def _serve(self, version: str, state: str = "READY") -> None:
        self.status = replace(self.status, version=version, state=state, reason="serving")


def replace_struct(status: UpdateStatus) -> UpdateStatus:
    """A copy, as one that was told at one moment."""
    return UpdateStatus(**{name: getattr(status, name) for name in UpdateStatus.__struct_fields__})


def _result(status: UpdateStatus, rank: int, mode: str) -> dict[str, object]:
    nbytes = 0 if mode == "none" else NBYTES
    result = UpdateResult(version=status.version, rank=rank, source=status.source, mode=mode, tensors=3, bytes=nbytes)
    return result.as_dict() | {"pause_s": 0.0 if mode == "none" else 0.25 * (rank + 1)}


def forget(engine: EchoWeights) -> None:
    """Everything as it was after the start, for the next test."""
    engine.asleep.clear()
    engine.status, engine.published, engine.source = EchoStatus(), ["step_1"], "echo://store"
    engine.hold = engine.fail = engine.previous = engine.pin = None
    engine.is_paused = engine.corrupt = engine.source_dead = False
    engine.calls.clear()
    engine.requests.clear()
