"""Updates of a replica: one at a time, each with a record that can be asked for, and the version that is committed."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.base import Failure, UpdateRequest, UpdateStatus
from weightcast.engines.embedded.messages import DescribeWeights, Feed, Vote
from weightcast.engines.embedded.replica.host import Host
from weightcast.engines.embedded.replica.pausing import Pausing
from weightcast.engines.embedded.replica.served import Served, find_version, read_by, sealed, tell_source
from weightcast.engines.embedded.replica.transaction import COMMAND_S, Transaction, Wanted
from weightcast.engines.states import TABLE, UPDATING, Operation, ReplicaState
from weightcast.errors import (
    InvalidInput,
    NotFound,
    ReplicaFailed,
    UpdateCancelled,
    UpdateFailed,
    WeightcastError,
    WrongState,
)
from weightcast.worker.result import UpdateResult

log = logs.get(__name__)

_REMEMBERED = 64  # updates


@dataclass
class _Entry:
    status: UpdateStatus
    wanted: Served | None  # a version that is known already: no source has to be asked
    stop: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Task[None] | None = None
    failure: WeightcastError | None = None


class Updates:
    """`served` is the committed version: what the ranks hold, or, if they are lost or torn, what they are brought back to.

    `draft` is the start version of the draft model, which versions replace only where its names are declared.
    """

    def __init__(self, host: Host, pausing: Pausing) -> None:
        self._host, self._pausing = host, pausing
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._book: OrderedDict[str, _Entry] = OrderedDict()
        self._current: _Entry | None = None
        self.served: Served | None = None
        self.previous: Served | None = None
        self.draft: Served | None = None
        self.on_ended: Callable[[UpdateStatus], None] | None = None

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
        source = read_by(source, request.transfer_mode)
        if known is not None and source != known.source:
            known = Served(known.manifest, source, known.proved, known.draft)
        entry = _Entry(
            UpdateStatus(id=uuid.uuid4().hex, request=request, version=request.version or "", source=source), known
        )
        self._current = self._book[entry.status.id] = entry
        while len(self._book) > _REMEMBERED:
            self._book.popitem(last=False)
        resting = self._host.resting
        self._host.turn(ReplicaState.STAGING, f"staging {request.version or 'the newest version'} from {source}")
        with logs.bound(update_id=entry.status.id):
            log.info(
                "update received", version=request.version, source=source, commit=request.commit, pause=request.pause,
                timeout_s=request.timeout_s, recover=recover,
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
            status.phase = "done"
        except asyncio.CancelledError:
            entry.failure = UpdateCancelled(f"the update to {status.version or 'the newest version'} was cancelled.")
            status.phase = "cancelled"
        except UpdateCancelled as error:
            entry.failure, status.phase = error, "cancelled"
        except WeightcastError as error:
            entry.failure, status.phase = error, "failed"
        except Exception as error:
            log.exception("update crashed")
            entry.failure = UpdateFailed(f"the update failed: {type(error).__name__}: {error}")
            status.phase = "failed"
        finally:
            await self._come_to_rest(entry)

    async def _come_to_rest(self, entry: _Entry) -> None:
        status, self._current = entry.status, None
        status.ended = time.time()
        if entry.failure is not None:
            status.error = Failure(entry.failure.code, str(entry.failure))
            failure, ms = status.error, logs.ms(status.ended - status.began)
            if status.phase == "cancelled":
                log.info("update cancelled", version=status.version, ms=ms)
            else:
                log.warning("update failed", version=status.version, code=failure.code, error=failure.message, ms=ms)
        if self._host.state in UPDATING:
            await self._look_at_ranks(status)
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
        checksum = request.verify_checksum
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
        sound = resting in (ReplicaState.READY, ReplicaState.SLEEPING)
        if sound and self.served is not None and self.served.is_the(coming.manifest):
            status.result = [_nothing_moved(coming, rank) for rank in range(self._host.settings.ranks)]
            log.info("update not needed", version=coming.version)
            return
        wanted = Wanted(
            feeds=self._feeds(coming, whole=not sound),
            version=coming.version,
            commit=request.commit,
            verify_checksum=checksum,
            clear_cache=request.clear_cache,
            release_cache=request.release_cache,
            afresh=not sound,
        )
        transaction = Transaction(run, status.id, wanted, deadline)

        def progress(nbytes: int, total: int) -> None:
            status.nbytes, status.total = nbytes, total

        began = time.monotonic()
        votes = await transaction.stage(progress)
        if not coming.manifest.sealed:
            coming = await self._sealed(coming, votes, transaction, deadline)
        status.phase = "staged"
        status.nbytes = status.total
        stage_ms, nbytes = logs.ms(time.monotonic() - began), sum(vote.nbytes for vote in votes)
        log.info("update staged", version=coming.version, votes=len(votes), nbytes=nbytes, stage_ms=stage_ms)
        self._host.turn(ReplicaState.STAGED, f"{coming.version} is staged on all ranks")
        status.result = await self._commit(status, transaction, coming, deadline)
        status.nbytes = status.total = sum(one["bytes"] for one in status.result)
        pause_s, proof_s = (max(one.get(name, 0.0) for one in status.result) for name in ("pause_s", "proof_s"))
        log.info(
            "update committed", version=coming.version, mode=status.result[0].get("mode"), nbytes=status.nbytes,
            stage_ms=stage_ms, pause_ms=logs.ms(pause_s), proof_ms=logs.ms(proof_s),
        )  # fmt: skip

    @staticmethod
    async def _sealed(coming: Served, votes: Sequence[Vote], transaction: Transaction, deadline: Deadline) -> Served:
        """A live stream that all ranks have staged, with its digests; if they cannot be had, nothing may be committed."""
        try:
            manifest = await find_version(
                coming.source, coming.version, verify_checksum=coming.proved, deadline=deadline
            )  # fmt: skip
            return sealed(coming, manifest, votes)
        except BaseException:
            await transaction.abandon()
            raise

    async def _commit(
        self, status: UpdateStatus, transaction: Transaction, coming: Served, deadline: Deadline
    ) -> list[dict[str, Any]]:
        pausing = self._pausing
        try:
            async with pausing.turn("the commit", deadline.remaining()):
                if not pausing.paused:
                    await pausing.quiet(status.request.pause, f"the weights are replaced by {coming.version}", deadline)
                deadline.check(f"staging {coming.version}")
                status.phase = "committing"
                self._host.turn(ReplicaState.COMMITTING, f"committing {coming.version}")
                return await self._shielded(transaction.commit(partial(self._decide, coming)))
        except BaseException:
            if status.phase == "staged":
                await transaction.abandon()
            raise
        finally:
            if not pausing.paused:
                self._host.open_gate()

    def _decide(self, coming: Served) -> None:
        """From now on this is the committed version."""
        if coming is not self.served:
            self.previous, self.served = self.served, coming
            tell_source(coming, self._name)
        self._pausing.asleep.discard("weight")

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
        update_id, began = f"load-{uuid.uuid4().hex}", time.monotonic()
        transaction = Transaction(self._host.run, update_id, wanted, deadline)
        with logs.bound(update_id=update_id):
            await transaction.stage()
            await self._shielded(transaction.commit(partial(self._decide, served)))
            log.info("version loaded", version=served.version, source=served.source, ms=logs.ms(time.monotonic() - began))

    async def reload(self, deadline: Deadline) -> None:
        """Fill ranks that have no weights with the committed version. Meanwhile no update can begin."""
        if self.served is None:
            return
        if TABLE[self._host.state].resting:
            self._host.turn(ReplicaState.STAGING, f"bringing {self.served.version} back")
        await self.load(self.served, deadline)

    def _feeds(self, coming: Served, *, whole: bool) -> tuple[Feed, ...]:
        """Where each model takes its tensors from. With `whole` the draft model too, whether the version has it or not."""
        names = self._host.settings.draft_names
        main = Feed(part="main", manifest=coming.encoded, source=coming.source, ignore=names)
        if coming.draft:
            return main, Feed(part="draft", manifest=coming.encoded, source=coming.source, names=names)
        if whole and self.draft is not None:
            return main, Feed(part="draft", manifest=self.draft.encoded, source=self.draft.source)
        return (main,)


def _nothing_moved(served: Served, rank: int) -> dict[str, Any]:
    result = UpdateResult(
        version=served.version, rank=rank, source=served.source, mode="none", tensors=0, bytes=0,
        stage_s=0.0, verify_s=0.0, commit_s=0.0, total_s=0.0,
    )  # fmt: skip
    return result.as_dict() | {"pause_s": 0.0, "proof_s": 0.0, "release_cache": False}
