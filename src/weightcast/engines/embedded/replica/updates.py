"""Updates of a replica: one at a time, each with a record that can be asked for, and the version that is committed."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.base import Failure, Pin, UpdateRequest, UpdateStatus
from weightcast.engines.embedded.messages import DescribeWeights, Feed, Vote
from weightcast.engines.embedded.replica.host import Host
from weightcast.engines.embedded.replica.job_board import Progress
from weightcast.engines.embedded.replica.pausing import Pausing
from weightcast.engines.embedded.replica.served import (
    Served,
    StateDir,
    check_reads,
    find_version,
    read_by,
    sealed,
    tell_source,
)
from weightcast.engines.embedded.replica.transaction import COMMAND_S, Transaction, Wanted
from weightcast.engines.states import TABLE, UPDATING, Operation, ReplicaState
from weightcast.errors import (
    InvalidInput,
    NotFound,
    ReplicaFailed,
    StorageFailed,
    UpdateCancelled,
    UpdateFailed,
    WeightcastError,
    WrongState,
)
from weightcast.wire.manifest import Manifest
from weightcast.worker.result import Timeline, UpdateResult

log = logs.get(__name__)

_REMEMBERED = 64  # updates
_NEWEST_S = 5.0  # for the default source to tell its newest version, beside an update that names one
_NO_SEQUENCE = 1 << 62  # above that of any version


@dataclass
class _Entry:
    status: UpdateStatus
    wanted: Served | None  # a version that is known already: no source has to be asked
    stop: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Task[None] | None = None
    failure: WeightcastError | None = None
    retried: bool = False  # by the follower, after a failure that was logged
    unpinned: bool = False  # following was resumed meanwhile: it leaves no pin


class Updates:
    """`served` is the committed version: what the ranks hold, or, if they are lost or torn, what they are brought back to.

    `draft` is the start version of the draft model, which versions replace only where its names are declared. `pin` is what
    an operator chose, and `state` where both are kept beyond this process. `newest` is the newest version of the default
    source, when it was asked last.
    """

    def __init__(self, host: Host, pausing: Pausing) -> None:
        self._host, self._pausing = host, pausing
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._book: OrderedDict[str, _Entry] = OrderedDict()
        self._current: _Entry | None = None
        self.served: Served | None = None
        self.previous: Served | None = None
        self.draft: Served | None = None
        self.pin: Pin | None = None
        self.state: StateDir | None = None
        self.newest: Manifest | None = None
        self.on_ended: Callable[[UpdateStatus], None] | None = None
        self._failed: tuple[str, str] | None = None  # the version of the last update and the code of its error, if it failed

    @property
    def running(self) -> str | None:
        """The id of the update that runs."""
        return self._current.status.id if self._current else None

    # -- asking ----------------------------------------------------------------------------------------------------------

    def begin(self, request: UpdateRequest, *, recover: bool = False) -> UpdateStatus:
        """See `LiveWeights.begin_update` and `begin_recovery`."""
        self._host.allow(Operation.UPDATE)
        if self._current is not None:
            raise WrongState("update weights", self._host.state, [ReplicaState.READY])
        known = self.served if recover and request.version is None else None
        source = request.source or (known.source if known else self._host.settings.source)
        if source is None:
            raise InvalidInput(
                'no source for the update: give "source", or start the server with --source URL (file:///path/to/store).'
            )
        ours = known is not None and request.follow  # the transfer mode of --follow is that of the default source
        source = source if ours else read_by(source, request.transfer_mode)
        if known is not None and source != known.source:
            known = replace(known, source=source, since=time.time())
        entry = _Entry(
            UpdateStatus(id=uuid.uuid4().hex, request=request, version=request.version or "", source=source), known
        )
        self._current = self._book[entry.status.id] = entry
        while len(self._book) > _REMEMBERED:
            self._book.popitem(last=False)
        resting = self._host.resting
        self._host.turn(ReplicaState.STAGING, f"staging {request.version or 'the newest version'} from {source}")
        asked = request.version or (known.version if known is not None else None)
        entry.retried = self._failed is not None and self._failed[0] == asked and not logs.ids().get("request_id")
        with logs.bound(update_id=entry.status.id):
            log.at(
                logging.DEBUG if entry.retried else logging.INFO, "update received", version=request.version, source=source,
                commit=request.commit, pause=request.pause, timeout_s=request.timeout_s, recover=recover,
            )  # fmt: skip
            entry.task = asyncio.create_task(self._update(entry, resting), name=f"update-{entry.status.id}")
        return entry.status

    def status(self, update_id: str) -> UpdateStatus:
        """See `LiveWeights.update_status`."""
        return self._entry(update_id).status

    def _entry(self, update_id: str) -> _Entry:
        entry = self._book.get(update_id)
        if entry is None:
            raise NotFound(f"there is no update {update_id!r}, or it ended long ago.")
        return entry

    async def finish(self, update_id: str) -> UpdateStatus:
        """See `LiveWeights.finish_update`. Being cancelled leaves the update alone."""
        entry = self._entry(update_id)
        if entry.task is not None:
            await asyncio.wait([entry.task])
        if entry.failure is not None:
            raise entry.failure
        return entry.status

    async def cancel(self, update_id: str) -> UpdateStatus:
        """See `LiveWeights.cancel_update`."""
        entry = self._entry(update_id)
        if entry is not self._current or entry.task is None:
            raise WrongState("cancel an update", entry.status.phase, ["staging", "staged"])
        self._host.allow(Operation.CANCEL)
        entry.stop.set()
        entry.task.cancel()
        await asyncio.wait([entry.task])
        return entry.status

    async def close(self) -> None:
        """End what runs."""
        entry = self._current
        if entry is not None and entry.task is not None:
            entry.stop.set()
            entry.task.cancel()
            await asyncio.wait([entry.task])

    # -- an update -------------------------------------------------------------------------------------------------------

    async def _update(self, entry: _Entry, resting: ReplicaState) -> None:
        status = entry.status
        try:
            await self._to_version(entry, resting)
        except asyncio.CancelledError:
            entry.failure = UpdateCancelled(f"the update to {status.version or 'the newest version'} was cancelled.")
        except WeightcastError as error:
            entry.failure = error
        except Exception as error:
            log.exception("update crashed")
            entry.failure = UpdateFailed(f"the update failed: {type(error).__name__}: {error}")
        finally:
            await self._come_to_rest(entry)

    async def _come_to_rest(self, entry: _Entry) -> None:
        """End an update: set the state by what the ranks hold, and log the outcome with its times."""
        status, failure, self._current = entry.status, entry.failure, None
        if failure is not None:
            status.error = Failure(failure.code, str(failure))
        if self._host.state in UPDATING:
            await self._look_at_ranks(status)
        status.end("done" if failure is None else "cancelled" if isinstance(failure, UpdateCancelled) else "failed")
        failed = (status.version, status.error.code) if status.phase == "failed" and status.error is not None else None
        _tell(status, again=entry.retried and failed == self._failed)
        self._failed = failed
        if self.on_ended is not None:
            self.on_ended(status)

    async def _look_at_ranks(self, status: UpdateStatus) -> None:
        """What the ranks hold decides the state: all the committed version, or none may be served."""
        try:
            described = await self._host.run.commands.execute(DescribeWeights(), COMMAND_S)
        except WeightcastError as error:
            if not isinstance(error, ReplicaFailed):
                self._host.fail(f"the ranks do not tell what they hold: {error}")
            return
        versions = {one["weights"]["version"] for one in described}
        wanted = self.served.version if self.served and "weight" not in self._pausing.asleep else ""
        if versions == {wanted} and (status.error is None or self._host.resting is not ReplicaState.FAILED):
            self._host.rest()
        else:
            cause = status.error.message if status.error else "an update ended oddly"
            self._host.fail(f"ranks hold {sorted(versions)} instead of {wanted!r}: {cause}")

    async def _to_version(self, entry: _Entry, resting: ReplicaState) -> None:
        status, request = entry.status, entry.status.request
        deadline = Deadline.after(request.timeout_s, cancelled=entry.stop)
        checksum = request.verify_checksum and (entry.wanted is None or entry.wanted.proved)
        run = self._host.run  # if these ranks are lost, so is the update: those after them are brought back meanwhile
        if entry.wanted is not None:
            coming = entry.wanted
        else:
            manifest = await find_version(status.source, request.version, verify_checksum=checksum, deadline=deadline)
            coming = Served(manifest, status.source, checksum, bool(self._host.settings.draft_names))
            if coming.draft and not manifest.sealed:
                raise InvalidInput(
                    f"version {manifest.version} is a live stream, which a rank can read once, and its draft model would be "
                    "a second reader. Publish it held."
                )
        status.version = coming.version
        status.phase = "staging"
        chosen = None if entry.wanted is not None else await self._choose_pin(request, coming, deadline)

        def pin() -> Pin | None:  # an operator may resume following until the version counts
            return self.pin if entry.wanted is not None else None if entry.unpinned else chosen

        sound = resting in (ReplicaState.READY, ReplicaState.SLEEPING)
        if sound and self.served is not None and self.served.is_the(coming.manifest):
            self.decide(self.served, pin())
            status.result = [_nothing_moved(coming, rank) for rank in range(self._host.settings.ranks)]
            return
        served = self.served if sound else None
        renamed = served is not None and served.is_state_of(coming.manifest) and served.draft == coming.draft
        if renamed:  # what was proved stays proved, and no cache is of other weights
            coming = replace(coming, proved=True)
        wanted = Wanted(
            feeds=self._feeds(coming, whole=not sound),
            version=coming.version,
            commit=request.commit,
            verify_checksum=checksum or renamed,
            clear_cache=request.clear_cache and not renamed,
            release_cache=request.release_cache and not renamed,
            afresh=not sound,
        )
        transaction = Transaction(run, status.id, wanted, deadline, status.timeline)

        def progress(nbytes: int, total: int) -> None:
            status.nbytes, status.total = nbytes, total

        votes, coming = await self._staged(transaction, coming, deadline, progress, whole=not sound)
        status.phase = "staged"
        status.nbytes = status.total
        nbytes, stage_ms = sum(vote.nbytes for vote in votes), status.timeline.as_ms()["stage_ms"]
        log.info("update staged", version=coming.version, votes=len(votes), nbytes=nbytes, stage_ms=stage_ms)
        self._host.turn(ReplicaState.STAGED, f"{coming.version} is staged on all ranks")
        status.result = await self._commit(status, transaction, lambda: self._enter(coming, pin()), deadline)
        status.nbytes = status.total = sum(one["bytes"] for one in status.result)

    async def _staged(
        self, transaction: Transaction, coming: Served, deadline: Deadline, progress: Progress | None = None, *, whole: bool
    ) -> tuple[list[Vote], Served]:
        """Have all ranks stage a version, and compare what they read. If they differ, nothing may be committed."""
        votes = await transaction.stage(progress)
        try:
            if not coming.manifest.sealed:  # a live stream has its digests now
                transaction.timeline.enter("lookup")
                found = await find_version(
                    coming.source, coming.version, verify_checksum=coming.proved, deadline=deadline
                )  # fmt: skip
                transaction.timeline.enter("wait")
                coming = sealed(coming, found)
            fed = self._fed(coming, whole=whole)
            read = check_reads(fed, votes)
            transaction.check_sums([served.manifest for served in fed], votes)
            return votes, coming if read == coming.tensors else replace(coming, tensors=read)
        except BaseException:
            await transaction.abandon()
            raise

    async def _commit(
        self, status: UpdateStatus, transaction: Transaction, decided: Callable[[], None], deadline: Deadline
    ) -> list[dict[str, Any]]:
        pausing, version = self._pausing, status.version
        try:
            async with pausing.turn("the commit", deadline.remaining()):
                if not pausing.paused:
                    await pausing.quiet(status.request.pause, f"the weights are replaced by {version}", deadline)
                deadline.check(f"staging {version}")
                status.phase = "committing"
                self._host.turn(ReplicaState.COMMITTING, f"committing {version}")
                return await self._shielded(transaction.commit(decided))
        except BaseException:
            if status.phase == "staged":
                await transaction.abandon()
            raise
        finally:
            if not pausing.paused:
                self._host.open_gate()

    def _enter(self, coming: Served, pin: Pin | None) -> None:
        """All ranks have proved this version: from now on it is the committed one."""
        before = self.served
        self.decide(coming, pin)
        if coming is not before:
            self.previous = before
            tell_source(coming, self._name)
        self._pausing.asleep.discard("weight")

    # -- what is committed, and what an operator pinned ----------------------------------------------------------------

    def save(self, served: Served, pin: Pin | None) -> None:
        """Write down what is committed and pinned. Raises `StorageFailed`: then it must not be committed."""
        if self.state is not None and (served, pin) != (self.served, self.pin):
            self.state.write(served, pin)

    def save_again(self) -> None:
        """Write down what is committed, after something else was written that did not come about."""
        try:
            if self.state is not None and self.served is not None:
                self.state.write(self.served, self.pin)
        except StorageFailed as error:
            log.error("state not saved", version=self.served.version if self.served else None, error=error)

    def decide(self, served: Served, pin: Pin | None, *, why: str = "another version was taken") -> None:
        """Commit to a version, and to a pin or to none. It is written down first."""
        self.save(served, pin)
        self.adopt(served, pin, why=why)

    def adopt(self, served: Served, pin: Pin | None, *, why: str) -> None:
        """From now on this is committed and pinned; it has been written down."""
        if served is not self.served:
            self.served = replace(served, since=time.time())
        before, self.pin = self.pin, pin
        if pin is not None and pin != before:
            log.info("version pinned", version=pin.version, away_from=pin.away_from, why=pin.why)
        elif before is not None and pin is None:
            log.info("pin removed", version=before.version, away_from=before.away_from, why=why)

    def unpin(self) -> None:
        """Remove the pin, also the one that the running update would leave behind."""
        if self.served is not None:
            self.decide(self.served, None, why="following was resumed")
        if self._current is not None:
            self._current.unpinned = True

    def complete_pin(self, pin: Pin, newest: Manifest) -> None:
        """The first version that the default source tells after it was silent is what the operator moved away from.

        Without it, no version of a source that keeps no order would ever be newer.
        """
        if self.served is not None:
            known = _pin(pin.version, newest, pin.why)
            self.decide(self.served, msgspec.structs.replace(known, since=pin.since))

    def rollback_pin(self, to: Served) -> Pin | None:
        """The pin that going back to a version leaves behind."""
        served, source = self.served, self._host.settings.source
        if source is None or served is None:
            return None
        known = served.manifest if served.source == source else None  # other sources number their versions otherwise
        return _pin(to.version, self.newest or known, "rollback")

    async def _choose_pin(self, request: UpdateRequest, coming: Served, deadline: Deadline) -> Pin | None:
        """The pin that an update leaves behind: a version that its caller chose, and that is not the newest there is."""
        source, manifest = self._host.settings.source, coming.manifest
        if source is None:
            return None
        if request.follow or (request.version is None and request.source in (None, source)):
            self.newest = manifest
            return None
        try:
            within = Deadline.after(min(_NEWEST_S, deadline.remaining()))
            self.newest = await find_version(source, None, verify_checksum=False, deadline=within)
        except WeightcastError as error:
            log.warning("newest version unknown", source=source, error=error)
        newest = self.newest
        if newest is not None and (newest.version, newest.root_digest) == (manifest.version, manifest.root_digest):
            return None
        return _pin(coming.version, newest, "explicit")

    @staticmethod
    async def _shielded(commit: Any) -> list[dict[str, Any]]:
        """A commit that was begun is ended one way or the other, whoever is cancelled meanwhile."""
        task: asyncio.Task[list[dict[str, Any]]] = asyncio.ensure_future(commit)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    # -- bringing a version back -----------------------------------------------------------------------------------------

    async def load(self, served: Served, deadline: Deadline) -> None:
        """Fill ranks that have no weights: the first load, a restart, a wake-up. The state is the caller's."""
        wanted = Wanted(feeds=self._feeds(served, whole=True), version=served.version, verify_checksum=served.proved)
        update_id, timeline = f"load-{uuid.uuid4().hex}", Timeline()
        transaction = Transaction(self._host.run, update_id, wanted, deadline, timeline)
        with logs.bound(update_id=update_id):
            await self._staged(transaction, served, deadline, whole=True)
            await self._shielded(transaction.commit(lambda: self._enter(served, self.pin)))
            ms = timeline.as_ms()["total_ms"]
            log.info("version loaded", version=served.version, source=served.source, ms=ms)

    async def reload(self, deadline: Deadline) -> None:
        """Fill ranks that have no weights with the committed version. Meanwhile no update can begin."""
        if self.served is None:
            return
        if TABLE[self._host.state].resting:
            self._host.turn(ReplicaState.STAGING, f"bringing {self.served.version} back")
        await self.load(self.served, deadline)

    def _fed(self, coming: Served, *, whole: bool) -> list[Served]:
        """The version of each model, main first. With `whole` the draft model too, whether the version has it or not."""
        if coming.draft:
            return [coming, coming]
        return [coming, self.draft] if whole and self.draft is not None else [coming]

    def _feeds(self, coming: Served, *, whole: bool) -> tuple[Feed, ...]:
        """Where each model takes its tensors from."""
        names = self._host.settings.draft_names
        main, *others = self._fed(coming, whole=whole)
        feeds = [Feed(part="main", manifest=main.encoded, source=main.source, ignore=names)]
        for draft in others:
            given = names if coming.draft else ()
            feeds.append(Feed(part="draft", manifest=draft.encoded, source=draft.source, names=given))
        return tuple(feeds)


def _pin(version: str, newest: Manifest | None, why: Literal["rollback", "explicit"]) -> Pin:
    if newest is None:  # only what is published from now on is newer
        return Pin(version=version, away_from="", why=why, since=time.time(), sequence=_NO_SEQUENCE, created_s=time.time())
    return Pin(
        version=version, away_from=newest.version, why=why, since=time.time(), sequence=newest.sequence,
        created_s=newest.created_s, root_digest=newest.root_digest,
    )  # fmt: skip


def _nothing_moved(served: Served, rank: int) -> dict[str, Any]:
    result = UpdateResult(version=served.version, rank=rank, source=served.source, mode="none", tensors=0, bytes=0)
    return result.as_dict() | {"pause_s": 0.0, "release_cache": False}


def _tell(status: UpdateStatus, *, again: bool) -> None:
    """Log the end of an update: one line, with the times that its answer and the metrics have.

    `again` means that the follower has tried once more and failed in the same way.
    """
    ms, result = status.timeline.as_ms(), status.result or []
    if status.phase == "cancelled":
        log.info("update cancelled", version=status.version, ms=ms["total_ms"])
    elif status.error is not None:
        error, level = logs.summary(status.error.message), logging.DEBUG if again else logging.WARNING
        log.at(level, "update failed", version=status.version, code=status.error.code, error=error, ms=ms["total_ms"])
    elif all(one.get("mode") == "none" for one in result):
        log.info("update not needed", version=status.version, ms=ms["total_ms"])
    else:
        log.info(
            "update committed", version=status.version, mode=result[0].get("mode"), nbytes=status.nbytes,
            lookup_ms=ms["lookup_ms"], stage_ms=ms["stage_ms"], verify_ms=ms["verify_ms"], wait_ms=ms["wait_ms"],
            commit_ms=ms["commit_ms"], proof_ms=ms["proof_ms"], settle_ms=ms["settle_ms"], total_ms=ms["total_ms"],
            pause_ms=logs.ms(max(one["pause_s"] for one in result)),
        )  # fmt: skip
