"""Pausing a replica and putting it to sleep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.base import TAGS, Aborted, AbortReport, PauseMode, Tag
from weightcast.engines.embedded.messages import Freeze, Rebuild, Release, Thaw
from weightcast.engines.embedded.replica.host import Host
from weightcast.engines.states import Operation, ReplicaState
from weightcast.errors import DeadlineExceeded, NotReady, WrongState

log = logs.get(__name__)

Load = Callable[[Deadline], Awaitable[None]]


class Pausing:
    """Whether the replica computes, and what of it has memory. Survives the ranks: see `restore`.

    `by_user` is a pause that only `resume` ends; that of `sleep` ends with the wake-up.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._lock = asyncio.Lock()
        self.by_user = False
        self.by_sleep = False
        self.asleep: set[Tag] = set()

    @property
    def paused(self) -> bool:
        """Whether requests are kept waiting."""
        return self.by_user or self.by_sleep

    @asynccontextmanager
    async def turn(self, what: str, timeout_s: float) -> AsyncIterator[Deadline]:
        """Pauses, sleeps, commits and their ends, one after the other. Yields the deadline of this one."""
        deadline = Deadline.after(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlineExceeded(f"{what}, waiting for an earlier call,", timeout_s) from None
        try:
            yield deadline
        finally:
            self._lock.release()

    # -- pause and resume ------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, *, clear_cache: bool, timeout_s: float) -> None:
        """See `LiveWeights.pause`."""
        self._host.allow(Operation.PAUSE)
        async with self.turn("pause", timeout_s) as deadline:
            if not self.by_user:
                frozen = self.paused and mode == "wait"  # by sleep: what runs cannot end
                await self._stand_still("keep" if frozen else mode, "the engine is paused", deadline, recompute=clear_cache)
                self.by_user = True
                log.info("replica paused", mode=mode, clear_cache=clear_cache)

    async def _stand_still(self, mode: PauseMode, reason: str, deadline: Deadline, *, recompute: bool = False) -> None:
        """Compute nothing any more. If that fails, everything goes on."""
        await self.quiet(mode, reason, deadline)
        try:
            await self._freeze(deadline, recompute=recompute)
        except BaseException:
            if not self.paused:
                with suppress(NotReady):  # ranks that are lost begin anew, and not frozen
                    self._host.run.commands.announce(Thaw())  # they may have frozen all the same, or be about to
                self._host.open_gate()
            raise

    async def quiet(self, mode: PauseMode, reason: str, deadline: Deadline) -> None:
        """Close the gate and see to what runs: end it, wait for it, or leave it. Raises with the gate as it was."""
        host, was_closed = self._host, self._host.gate.closed
        running = [answer for answer in host.answers if not host.gate.waits(answer.id)]
        host.gate.close()
        if mode == "abort":
            for answer in running:
                answer.cancel(reason)
        elif mode == "wait" and running:
            try:
                async with asyncio.timeout(deadline.remaining()):
                    await host.answers.gone(running)
            except BaseException as error:
                if not was_closed:
                    host.open_gate()
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded("waiting for running requests to end", deadline.seconds) from None
                raise

    async def resume(self, *, timeout_s: float) -> None:
        """See `LiveWeights.resume`."""
        self._host.allow(Operation.RESUME)
        async with self.turn("resume", timeout_s) as deadline:
            if self.asleep:
                raise WrongState("resume", f"{self._host.state} ({', '.join(sorted(self.asleep))})", [ReplicaState.READY])
            await self._thaw(deadline)
            self.by_user = self.by_sleep = False
            log.info("replica resumed")

    async def _freeze(self, deadline: Deadline, *, recompute: bool = False) -> None:
        await self._host.run.commands.execute(Freeze(recompute=recompute), deadline.remaining())

    async def _thaw(self, deadline: Deadline) -> None:
        await self._host.run.commands.execute(Thaw(), deadline.remaining())
        self._host.open_gate()

    def abort(self, ids: Sequence[str] | None) -> AbortReport:
        """See `LiveWeights.abort_requests`."""
        self._host.allow(Operation.ABORT)
        aborted, known = [], set[str]()
        for answer in self._host.answers:
            matching = {asked for asked in ids or () if _names(asked, answer.id)}
            if ids is None or matching:
                known |= matching
                aborted.append(Aborted(answer.id, answer.made))
                answer.cancel("the request was aborted on demand")
        log.info("requests aborted", count=len(aborted))
        return AbortReport(aborted, [asked for asked in ids or () if asked not in known])

    # -- sleep -----------------------------------------------------------------------------------------------------------

    async def sleep(self, tags: Collection[Tag], mode: PauseMode, *, timeout_s: float) -> list[dict[str, Any]]:
        """See `LiveWeights.sleep`."""
        self._host.allow(Operation.SLEEP)
        async with self.turn("sleep", timeout_s) as deadline:
            if not self.paused:
                await self._stand_still(mode, "the engine was put to sleep", deadline)
                self.by_sleep = True
            try:
                freed = await self._release(set(tags) - self.asleep, deadline)
            finally:
                self._rest()
            log.info("replica asleep", freed=sorted(tags), asleep=sorted(self.asleep))
            return [seconds | {"rank": rank, "asleep": sorted(self.asleep)} for rank, seconds in enumerate(freed)]

    async def _release(self, tags: set[Tag], deadline: Deadline) -> list[dict[str, Any]]:
        release = Release(tags=tuple(tag for tag in TAGS if tag in tags))
        self.asleep |= tags  # before: if it fails half-way, nobody must think that the memory is there
        freed: list[dict[str, Any]] = await self._host.run.commands.execute(release, deadline.remaining())
        return freed

    async def wake(self, tags: Collection[Tag], load: Load, *, timeout_s: float) -> list[dict[str, Any]]:
        """See `LiveWeights.wake`. `load` brings the last committed version back through the one pipeline."""
        self._host.allow(Operation.WAKE)
        async with self.turn("wake up", timeout_s) as deadline:
            seconds, loaded = [0.0] * self._host.settings.ranks, False
            if "kv_cache" in tags and "kv_cache" in self.asleep:
                seconds = await self._host.run.commands.execute(Rebuild(), deadline.remaining())
                self.asleep.discard("kv_cache")
            if "weight" in tags and "weight" in self.asleep:
                try:
                    await load(deadline)
                except BaseException:
                    self._host.rest()
                    raise
                loaded = True
            self._rest(loaded=loaded)
            if self.by_sleep and not self.asleep:
                if not self.by_user:
                    await self._thaw(deadline)
                self.by_sleep = False
            log.info("replica awake", woken=sorted(tags), asleep=sorted(self.asleep))
            return [{"rank": rank, "kv_cache": cost, "asleep": sorted(self.asleep)} for rank, cost in enumerate(seconds)]

    def _rest(self, *, loaded: bool = False) -> None:
        """The state that follows from what has memory. Weights that are not whole are mended by nothing but other ones."""
        if self._host.resting is not ReplicaState.FAILED or loaded or "weight" in self.asleep:
            self._host.rest()

    async def restore(self, deadline: Deadline) -> None:
        """Bring ranks that were started again to where they were: caches freed, and frozen."""
        if self.paused:
            await self._freeze(deadline)
        if "kv_cache" in self.asleep:
            await self._release({"kv_cache"}, deadline)


def _names(asked: str, request_id: str) -> bool:
    """Whether an id means this request: its own, or that of the call whose several answers it is one of."""
    return request_id == asked or any(request_id.startswith(asked + separator) for separator in "-_")
