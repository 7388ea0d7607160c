"""The weights of a rank: staged beside the main loop, committed by it together with all other ranks."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.delta import warm_up
from weightcast.engines.base import RankWeights
from weightcast.engines.embedded.messages import Commit, Committed, Digest, PartLayout, Stage, Vote
from weightcast.engines.embedded.ranks.group import RankGroup
from weightcast.engines.embedded.ranks.jobs import Jobs, Progress
from weightcast.engines.embedded.ranks.part import Fetched, Part
from weightcast.engines.embedded.ranks.runner import Runner
from weightcast.engines.embedded.ranks.step import Work
from weightcast.engines.embedded.ranks.vitals import Vitals
from weightcast.errors import (
    CommitFailed,
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    NotFound,
    WeightcastError,
    WrongState,
)
from weightcast.tensors.digest import ALGORITHMS
from weightcast.worker.states import State

log = logs.get(__name__)

_PROOF_S = 20.0
_WARM_NBYTES = 16 << 20  # of weights: to sum less takes no compiled kernels
_NAMES = {Work.MAIN: "main", Work.DRAFT: "draft"}


class LiveWeights:
    """Everything here is called by the main loop, between two steps; jobs run in threads beside it.

    `version` is what the model computes with: that of the last commit, proved or not; empty if there is no whole one.
    """

    def __init__(self, runner: Runner, group: RankGroup, vitals: Vitals, jobs: Jobs) -> None:
        self._runner, self._group, self._vitals, self._jobs = runner, group, vitals, jobs
        device = runner.settings.device
        self._parts = {
            _NAMES[work]: Part(
                _NAMES[work], model, rank=group.rank, ranks=group.size, device=device, tick=vitals.tick,
                names=runner.settings.draft_names if work is Work.DRAFT else (),
            )
            for work, model in runner.models.items()
        }  # fmt: skip
        self._claim = threading.Lock()  # held while a job touches the live models
        self._update = ""
        self._cancelled = threading.Event()
        self._staged: list[Part] = []
        self._entered: list[Part] = []
        self._last: list[Part] = []
        self._read = threading.Event()  # the proof that ran last does not read the weights any more
        self._mode = ""
        self._torn = False
        self._changes = 0  # how often the live bytes were written or freed
        self.version = ""
        if sum(part.layout_nbytes for part in self._parts.values()) >= _WARM_NBYTES:
            warm_up()  # now: it takes a second or two, in which nothing else runs in this process
        if runner.settings.scrub_share:
            for part in self._parts.values():
                part.scrub(runner.settings.scrub_share, partial(_tell_damage, weakref.ref(self)))

    @property
    def whole(self) -> bool:
        """Whether all models hold a whole version."""
        return bool(self.version)

    def layouts(self) -> dict[str, PartLayout]:
        """What this rank holds of each model."""
        return {name: part.layout() for name, part in self._parts.items()}

    # -- staging ---------------------------------------------------------------------------------------------------------

    def stage(self, number: int, action: Stage) -> None:
        """Begin to stage, as a job. Its result is this rank's vote."""
        self._update, self._mode = action.update, action.commit
        cancelled = self._cancelled = threading.Event()
        self._jobs.start(number, lambda progress: self._stage(action, cancelled, progress), polite=self.whole)

    def _stage(self, action: Stage, cancelled: threading.Event, progress: Progress) -> Vote:
        deadline, began = Deadline.after(action.timeout_s, cancelled=cancelled), time.monotonic()
        coming: list[tuple[Part, Fetched]] = []
        staged: list[Part] = []
        sums: list[bytes] = []
        verify_s = 0.0
        try:
            for feed in action.feeds:  # a source may hang here, and must not keep a later update from its own
                coming.append((self._parts[feed.part], self._parts[feed.part].fetch(feed, action, deadline, progress)))
            if not self._claim.acquire(timeout=deadline.remaining()):
                deadline.check(f"staging {action.update}, waiting for an earlier update to let go,")
            try:
                deadline.check(f"staging {action.update}")
                self._drop_staged()
                for part, fetched in coming:
                    seconds, numbers = part.stage(fetched, deadline)
                    verify_s += seconds
                    sums.append(numbers)
                    staged.append(part)
                deadline.check(f"staging {action.update}")
                self._staged = staged
            except BaseException:
                for part in staged:
                    part.abandon()
                raise
            finally:
                self._claim.release()
        except BaseException:
            for _, fetched in coming:
                fetched.close()
            raise
        if cancelled.is_set():  # it was, after the last look
            self.abandon(action.update)
        nbytes = sum(fetched.version.nbytes for _, fetched in coming)
        log.info("vote cast", vote="yes", nbytes=nbytes, stage_ms=logs.ms(time.monotonic() - began))
        reads = tuple(fetched.read for _, fetched in coming)
        return Vote(nbytes=nbytes, reads=reads, sums=tuple(sums), verify_s=verify_s)

    def abandon(self, update: str) -> None:
        """Stop staging, or drop what was staged."""
        if update != self._update:
            return
        self._cancelled.set()
        if self._claim.acquire(blocking=False):  # else the job itself drops everything when it lets go
            try:
                self._drop_staged()
            finally:
                self._claim.release()

    def _drop_staged(self) -> None:
        for part in self._staged:
            part.abandon()
        self._staged = []

    # -- the commit ------------------------------------------------------------------------------------------------------

    def commit(self, number: int, action: Commit) -> Committed:
        """Enter on all ranks or on none, then begin to prove the live bytes, as a job."""
        began = time.monotonic()
        release_cache = action.release_cache and self._runner.has_caches
        clear_s = _timed(self._runner.release_caches) if release_cache else 0.0
        error = self._enter(action.update)
        verdicts = self._agree(error is None)
        if not all(verdicts) and error is None:
            failed = ", ".join(str(rank) for rank, fine in enumerate(verdicts) if not fine)
            error = self._leave(f"rank(s) {failed} could not commit")
        if error is not None:
            self._agree_on_whole()
        rebuild_s = _timed(self._runner.rebuild_caches) if release_cache else 0.0
        if error is None:
            self._rearm(moved=release_cache or self._mode == "swap" or not self._runner.graphs.armed)
            if self._parts["main"] in self._entered:
                self.version = self._parts["main"].coming_version
            self._read.clear()
            parts = tuple(self._entered)
            self._jobs.start(number, lambda _: self._prove(parts))
        else:
            self._rearm(moved=release_cache)
            raise error
        pause_s = time.monotonic() - began
        log.debug("weights entered", version=self.version, mode=self._mode, pause_ms=logs.ms(pause_s))
        return Committed(
            version=self.version,
            pause_s=pause_s,
            cache_clear_cost=clear_s,
            cache_rebuild_cost=rebuild_s,
        )

    def _enter(self, update: str) -> WeightcastError | None:
        if update != self._update or not self._staged:
            return WrongState(f"commit {update}", "not staged", [State.STAGED])
        self._entered = []
        self._changes += 1
        self._vitals.busy = self._mode != "inplace"  # a source may be slow; the deadline of the update watches it
        try:
            for part in self._staged:
                part.enter()
                self._entered.append(part)
        except WeightcastError as error:
            return self._leave(str(error))
        finally:
            self._staged = []
            self._vitals.busy = True
        return None

    def _leave(self, reason: str, *, proving: bool = False) -> WeightcastError:
        """Undo every part that was entered; says what became of that. With `proving` what is held then is proved too."""
        problems = [reason]
        self._changes += 1
        for part in reversed(self._entered):
            try:
                part.revert()
                if proving:
                    self._vitals.busy = False  # hashing may take long
                    part.prove_held()
            except WeightcastError as error:
                problems.append(str(error))
        self._entered, self._vitals.busy = [], True
        self._look()
        holds = self.version or "no whole version"
        return CommitFailed(f"the commit was undone; rank {self._group.rank} holds {holds}: {'; '.join(problems)}")

    def _prove(self, parts: Sequence[Part]) -> None:
        try:
            for part in parts:
                part.prove()
        finally:
            self._read.set()

    def settle(self, update: str) -> dict[str, Any]:
        """All ranks have proved their weights."""
        self._check_entered(update)
        results = [part.settle() for part in self._entered]
        self._vitals.damaged = None
        self._last, self._entered, self._torn = self._entered, [], False
        self._look()
        return results[0].as_dict()

    def revert(self, update: str, reason: str) -> None:
        """Some rank could not prove its weights. Raises if that cannot be undone."""
        self._check_entered(update)
        self._vitals.busy = False  # another rank's proof failed first; this one's still reads the weights
        read = self._read.wait(timeout=_PROOF_S)
        self._vitals.busy = True
        if not read:
            raise DeadlineExceeded("proving the weights", _PROOF_S)
        error = self._leave(reason, proving=True)  # the wrong bytes may lie where the way back writes nothing
        self._agree_on_whole()
        self._rearm(moved=self._mode == "swap")
        if not self.whole:
            raise error

    def rollback(self) -> None:
        """Go back to the version before on all ranks; on none if one has lost it."""
        if not all(self._agree(self.previous is not None)):
            raise NotFound("the version before is not held any more on every rank: update to it from a source instead.")
        self._changes += 1
        try:
            for part in self._last:
                part.rollback()
        finally:
            self._last = []
            self._look()
            self._agree_on_whole()
            self._rearm(moved=True)

    @property
    def previous(self) -> str | None:
        """What a rollback would lead to."""
        versions = [part.previous for part in self._last]
        return versions[0] if versions and all(versions) else None

    def _agree(self, fine: bool) -> list[bool]:
        self._vitals.busy = False  # to wait for the others is not to hang
        try:
            return self._group.agree(fine)
        finally:
            self._vitals.busy = True

    def _agree_on_whole(self) -> None:
        """After a failure: if any rank is torn, none may compute, whatever it holds itself."""
        self._torn = not all(self._agree(self.whole))
        self._look()

    def _check_entered(self, update: str) -> None:
        if update != self._update or not self._entered:
            raise WrongState(f"end the commit of {update}", "not committed", [State.COMMITTING])

    def _look(self) -> None:
        main = self._parts["main"].held
        whole = all(part.held for part in self._parts.values()) and not self._torn
        self.version = main.full.version if main and whole else ""

    def _rearm(self, *, moved: bool) -> None:
        """Capture the step functions again if addresses changed, and all is there that they need."""
        if moved and self._runner.has_caches and self._weights_resident:
            busy, self._vitals.busy = self._vitals.busy, False  # compiling may take long
            self._runner.graphs.release()
            self._runner.capture()
            self._vitals.busy = busy

    @property
    def _weights_resident(self) -> bool:
        return all(part.held or part in self._entered for part in self._parts.values())

    # -- sleep -----------------------------------------------------------------------------------------------------------

    def release(self) -> float:
        """Free the weights, after what was captured with their addresses. Seconds that it took."""
        began = time.monotonic()
        self._runner.graphs.release()
        self._changes += 1
        self.version, self._last, self._torn = "", [], False
        self._vitals.damaged = None
        for part in reversed(self._parts.values()):
            part.clear()
        return time.monotonic() - began

    def rebuilt_caches(self) -> float:
        """Allocate the caches again. Seconds that it took."""
        seconds = _timed(self._runner.rebuild_caches)
        self._rearm(moved=True)
        return seconds

    # -- what it holds ---------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """As `DescribeWeights` wants it."""
        main = self._parts["main"]
        weights = RankWeights(
            rank=self._group.rank,
            version=self.version,
            state=main.state,
            shard_digest=main.held.shard.root_digest if main.held else "",
            nbytes=sum(part.nbytes for part in self._parts.values()),
            scrub_period_s=round(max(part.scrubbed.period_s for part in self._parts.values()), 3),
            scrubbed=min(part.scrubbed.clean for part in self._parts.values()),
        )
        return {"weights": weights, "previous": self.previous, "asleep": not self._weights_resident}

    def verify(self, number: int) -> None:
        """Compare all live bytes with the version, as a job."""
        self._jobs.start(number, lambda _: self._verify())

    def _verify(self) -> dict[str, Any]:
        with self._claim:
            seen = self._look_at("verify weights")
            wrong = [line for part in self._parts.values() for line in part.wrong()]
            self._look_at("verify weights", seen)
            if wrong:
                raise DigestMismatch(f"the live weights of rank {self._group.rank}", [(line, "", "") for line in wrong])
            main = self._parts["main"].held
            return {
                "rank": self._group.rank,
                "version": self.version,
                "verified": True,
                "shard_digest": main.shard.root_digest if main else "",
            }

    def digest(self, number: int, action: Digest) -> None:
        """Digests of some tensors, as a job."""
        self._jobs.start(number, lambda _: self._digest(action))

    def _digest(self, action: Digest) -> dict[str, Any]:
        algorithm = next((known for known in ALGORITHMS if known == action.algorithm), None)
        if algorithm is None:
            raise InvalidInput(f"unknown digest algorithm {action.algorithm!r}: choose one of {', '.join(ALGORITHMS)}.")
        if not self.whole:
            raise WrongState("take digests", "no whole version", [State.READY])
        seen = self._look_at("take digests")
        parts = reversed(self._parts.values())  # a name that both models know means the main one's
        known = {called: (part, name) for part in parts for called, name in part.sources().items()}
        unknown = sorted(set(action.names) - known.keys())
        if unknown:
            raise InvalidInput(f"the model has no tensors {', '.join(unknown)}.")
        found = {called: list(known[called][0].digests(known[called][1], algorithm)) for called in action.names}
        self._look_at("take digests", seen)
        return {"rank": self._group.rank, "version": self.version, "digests": found}

    def _look_at(self, what: str, seen: int | None = None) -> int:
        """Before and after reading all live weights in a job: `WrongState` if they were not the same all the time."""
        if self._entered or seen not in (None, self._changes):
            raise WrongState(what, "a commit that is not proved yet, or came meanwhile", [State.READY])
        return self._changes


def _timed(act: Callable[[], None]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def _tell_damage(live_of: weakref.ref[LiveWeights], error: DigestMismatch) -> None:
    """Report damage that the scrubber found, with the next heartbeat."""
    live = live_of()
    if live is not None:
        live._vitals.damaged = (live.version, str(error))
