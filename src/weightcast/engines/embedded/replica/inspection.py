"""Looking at what a replica holds, and going back to what it held."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.base import RankWeights, WeightsStatus
from weightcast.engines.embedded.messages import DescribeWeights, Digest, Rollback, Verify
from weightcast.engines.embedded.replica.host import Host
from weightcast.engines.embedded.replica.pausing import Pausing
from weightcast.engines.embedded.replica.served import find_version
from weightcast.engines.embedded.replica.transaction import COMMAND_S
from weightcast.engines.embedded.replica.updates import Updates
from weightcast.engines.states import TABLE, Operation, ReplicaState
from weightcast.errors import Corrupt, InvalidInput, NotFound, VersionNotServed, WeightcastError
from weightcast.transports.registry import open_receiver
from weightcast.wire.manifest import Manifest

log = logs.get(__name__)

_LOOK_S = 30.0
_REMEMBERED = 64  # manifests


class Inspection:
    """Reads; only `rollback` changes anything, and `verify` the state, if the weights are not what they should be."""

    def __init__(self, host: Host, updates: Updates, pausing: Pausing) -> None:
        self._host, self._updates, self._pausing = host, updates, pausing
        self._known: dict[str, Manifest] = {}
        self._previous: str | None = None
        self._ranks: tuple[RankWeights, ...] = ()

    def status(self, reason: str) -> WeightsStatus:
        """What is served now; the ranks as they were when `look` was called last."""
        served, state = self._updates.served, self._host.state
        return WeightsStatus(
            state=state,
            legacy_status=TABLE[state].legacy,
            reason=reason,
            version=served.version if served else "",
            root_digest=served.root_digest if served else "",
            source=served.source if served else "",
            sequence=served.manifest.sequence if served else -1,
            since=served.since if served else 0.0,
            previous=self._previous,
            paused=self._pausing.paused,
            asleep=tuple(sorted(self._pausing.asleep)),
            update=self._updates.running,
            ranks=self._ranks,
            pin=self._updates.pin,
        )

    async def look(self) -> None:
        """Ask the ranks what they hold."""
        described = await self._host.run.commands.execute(DescribeWeights(), COMMAND_S)
        self._ranks = tuple(msgspec.convert(one["weights"], RankWeights) for one in described)
        found = {one["previous"] for one in described}
        self._previous = found.pop() if len(found) == 1 else None

    async def verify(self, timeout_s: float) -> list[dict[str, Any]]:
        """Sum all live weights anew. Weights that are not those of the version are not served any longer."""
        self._host.allow(Operation.VERIFY)
        deadline = Deadline.after(timeout_s)
        run = self._host.run
        job = await run.commands.begin(Verify(), deadline.remaining())
        try:
            results = await run.board.wait(job, "verifying the live weights", deadline)
        except Corrupt as error:
            self._host.fail(str(error))
            raise
        root = self._updates.served.root_digest if self._updates.served else ""
        return [result | {"root_digest": root} for result in results]

    async def digest(self, names: Collection[str], algorithm: str, timeout_s: float) -> list[dict[str, Any]]:
        """Digests of what each rank holds of some tensors."""
        self._host.allow(Operation.VERIFY)
        deadline = Deadline.after(timeout_s)
        action = Digest(names=tuple(dict.fromkeys(names)), algorithm=algorithm)
        job = await self._host.run.commands.begin(action, deadline.remaining())
        return await self._host.run.board.wait(job, "taking digests", deadline)

    async def rollback(self, timeout_s: float) -> None:
        """Have all ranks go back to the version before the last update."""
        self._host.allow(Operation.ROLLBACK)
        updates = self._updates
        async with self._pausing.turn("roll back", timeout_s) as deadline:
            self._host.allow(Operation.ROLLBACK)  # again: an update may have begun while an earlier call was waited for
            to, run = updates.previous, self._host.run
            if to is None:
                raise NotFound("there is no version to go back to: nothing was updated, or it was rolled back already.")
            pin = updates.rollback_pin(to)
            updates.save(to, pin)  # before: if this process dies now, what the operator wanted is kept
            self._host.turn(ReplicaState.COMMITTING, f"rolling back to {to.version}")  # meanwhile no update can begin
            try:
                await run.commands.execute(Rollback(), deadline.remaining())
            except BaseException as error:
                updates.save_again()
                if isinstance(error, NotFound):
                    self._host.rest()
                else:
                    self._host.fail(f"the rollback failed: {str(error) or type(error).__name__}")
                raise
            updates.adopt(to, pin, why="there is no source to follow")
            updates.previous = None
            log.info("replica rolled back", version=to.version)
            self._host.rest()

    async def resume_following(self, timeout_s: float) -> None:
        """Remove the pin."""
        async with self._pausing.turn("resume following", timeout_s):  # not between a commit and what is written of it
            self._updates.unpin()

    async def ends_pin(self, version: str) -> bool:
        """Whether a version of the default source is newer than what the pin moved away from. True without a pin."""
        pin, source = self._updates.pin, self._host.settings.source
        if pin is None or source is None:
            return True
        newest = self._updates.newest = await find_version(
            source, version, verify_checksum=False, deadline=Deadline.after(_LOOK_S)
        )  # fmt: skip
        if pin.ends_with(newest):
            return True
        if not pin.away_from and pin == self._updates.pin and TABLE[self._host.state].resting:
            self._updates.complete_pin(pin, newest)
        return False

    async def newest(self) -> str:
        """The newest version of the default source."""
        source = self._host.settings.source
        if source is None:
            raise InvalidInput("no source to follow: start the server with --source URL (file:///path/to/store).")

        def read(source: str) -> str:
            receiver = open_receiver(source, rank=0)
            try:
                return receiver.newest()
            finally:
                receiver.close()

        return await asyncio.to_thread(read, source)

    async def check_version(self, wanted: Mapping[str, str]) -> None:
        """Compare what a request asks for with what is served. Later means: published later in the same store."""
        served = self._updates.served
        serving = served.version if served else ""
        exact, least = wanted.get("exact"), wanted.get("min")
        if exact is not None and exact != serving:
            raise VersionNotServed(exact, serving)
        if least is not None and least != serving:
            manifest = await self._manifest(least, serving)
            same = served is not None and served.manifest.root_digest == manifest.root_digest
            if served is None or not (same or 0 <= manifest.sequence <= served.manifest.sequence):
                raise VersionNotServed(f"{least} or later", serving)

    async def _manifest(self, version: str, serving: str) -> Manifest:
        """What a version is. Versions never change, so it is asked for once."""
        if version not in self._known:
            served = self._updates.served
            source = self._host.settings.source or (served.source if served else "")
            try:
                manifest = await find_version(source, version, verify_checksum=False, deadline=Deadline.after(_LOOK_S))
            except WeightcastError as error:
                raise VersionNotServed(f"{version} or later", serving) from error
            self._known[version] = manifest
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        return self._known[version]
