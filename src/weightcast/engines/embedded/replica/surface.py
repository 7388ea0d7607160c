"""What a replica offers for its weights, gathered from the parts that do it. Each method is described at `LiveWeights`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from weightcast.engines.base import AbortReport, PauseMode, Tag, UpdateRequest, UpdateStatus, WeightsStatus
from weightcast.engines.embedded.replica.inspection import Inspection
from weightcast.engines.embedded.replica.pausing import Pausing
from weightcast.engines.embedded.replica.status import ReplicaStatus
from weightcast.engines.embedded.replica.updates import Updates


class LiveSurface:
    """The `LiveWeights` of a replica."""

    _pausing: Pausing
    _updates: Updates
    _inspection: Inspection

    @property
    def status(self) -> ReplicaStatus:
        """The state at this moment."""
        raise NotImplementedError

    @property
    def weights(self) -> WeightsStatus:
        """What is served now, and what the ranks said they hold when they were asked last."""
        return self._inspection.status(self.status.reason)

    async def look_at_weights(self) -> WeightsStatus:
        """Ask the ranks what they hold."""
        await self._inspection.look()
        return self.weights

    @property
    def is_paused(self) -> bool:
        """Whether requests are kept waiting."""
        return self._pausing.paused

    @property
    def on_update_ended(self) -> Callable[[UpdateStatus], None] | None:
        """Called with every update that has ended, however it was begun."""
        return self._updates.on_ended

    @on_update_ended.setter
    def on_update_ended(self, listener: Callable[[UpdateStatus], None] | None) -> None:
        self._updates.on_ended = listener

    def begin_update(self, request: UpdateRequest) -> UpdateStatus:
        """Start an update and return at once."""
        return self._updates.begin(request)

    def begin_recovery(self, request: UpdateRequest) -> UpdateStatus:
        """Start to bring back the last committed version, or another."""
        return self._updates.begin(request, recover=True)

    async def finish_update(self, update_id: str) -> UpdateStatus:
        """Wait for the end of an update."""
        return await self._updates.finish(update_id)

    def update_status(self, update_id: str) -> UpdateStatus:
        """How an update is doing."""
        return self._updates.status(update_id)

    async def cancel_update(self, update_id: str) -> UpdateStatus:
        """Cancel an update that is staging."""
        return await self._updates.cancel(update_id)

    async def newest_version(self) -> str:
        """The newest version of the default source."""
        return await self._inspection.newest()

    async def check_version(self, wanted: Mapping[str, str]) -> None:
        """Raise `VersionNotServed` unless the version that is wanted is served."""
        await self._inspection.check_version(wanted)

    async def verify(self, *, timeout_s: float) -> list[dict[str, Any]]:
        """Sum all live weights anew."""
        return await self._inspection.verify(timeout_s)

    async def digest(self, names: Collection[str], algorithm: str, *, timeout_s: float) -> list[dict[str, Any]]:
        """Digests of the raw bytes that each rank holds of these tensors."""
        return await self._inspection.digest(names, algorithm, timeout_s)

    async def rollback(self, *, timeout_s: float) -> WeightsStatus:
        """Go back to the previous version."""
        await self._inspection.rollback(timeout_s)
        return await self.look_at_weights()

    async def resume_following(self, *, timeout_s: float) -> WeightsStatus:
        """Remove the pin."""
        await self._inspection.resume_following(timeout_s)
        return self.weights

    async def ends_pin(self, version: str) -> bool:
        """Whether a version is newer than what the pin moved away from."""
        return await self._inspection.ends_pin(version)

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False, timeout_s: float) -> None:
        """Stop computing."""
        await self._pausing.pause(mode, clear_cache=clear_cache, timeout_s=timeout_s)

    async def resume(self, *, timeout_s: float) -> None:
        """Go on."""
        await self._pausing.resume(timeout_s=timeout_s)

    async def abort_requests(self, ids: Sequence[str] | None, *, timeout_s: float) -> AbortReport:  # noqa: ARG002 - at once
        """End requests with what they have."""
        return self._pausing.abort(ids)

    async def sleep(self, tags: Collection[Tag], mode: PauseMode, *, timeout_s: float) -> list[dict[str, Any]]:
        """Pause and free memory."""
        return await self._pausing.sleep(tags, mode, timeout_s=timeout_s)

    async def wake(self, tags: Collection[Tag], *, timeout_s: float) -> list[dict[str, Any]]:
        """Bring memory back."""
        return await self._pausing.wake(tags, self._updates.reload, timeout_s=timeout_s)
