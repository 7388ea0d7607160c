"""Taking each new version of the default source by itself."""

from __future__ import annotations

import asyncio

import msgspec

from weightcast import logs
from weightcast.control.engine import Engine
from weightcast.control.waiting import within
from weightcast.engines.base import UpdateRequest
from weightcast.engines.states import TABLE, ReplicaState
from weightcast.errors import NotReady, UpdateCancelled, UpdateInProgress, WeightcastError, WrongState

log = logs.get(__name__)

_ASK_S = 30.0  # for the source to tell its newest version
_SPARE_S = 60.0  # for an update to end, beyond its own deadline
_LONGEST_WAIT_S = 60.0


class Follower:
    """Asks for the newest version now and then, and has the engine updated to it.

    Each version is taken once: what somebody does with the replica afterwards (roll back, another version) stays, until a
    newer one is published. One that cannot be taken is tried again, less and less often; one that was cancelled is not.
    Nothing is taken while memory is asleep. A replica that has FAILED is brought back by the same means.
    """

    def __init__(self, engine: Engine, request: UpdateRequest, *, poll_s: float) -> None:
        self._engine, self._request, self._poll_s = engine, request, poll_s
        self._settled = ""  # the last version that was taken, or that nobody wants
        self._restarts = 0
        self._silences = 0
        self._failed, self._failures, self._retry_at = "", 0, 0.0
        self._told: tuple[str, str] | None = None

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            await self.turn()
            await asyncio.sleep(backoff_s(self._poll_s, self._silences))

    async def turn(self) -> None:
        """Look at the source once, and take what is new."""
        if not self._may_update():
            return
        try:
            newest = await within(_ASK_S, "asking for the newest version", self._engine.newest_version())
        except Exception as error:  # noqa: BLE001 - whatever it is, a later turn may do better
            self._silences += 1
            self._tell("", error)
            return
        self._silences = 0
        if newest != self._failed:
            self._failed, self._failures, self._retry_at = "", 0, 0.0
        if self._wants(newest) and asyncio.get_running_loop().time() >= self._retry_at:
            await self._take(newest)

    def _may_update(self) -> bool:
        """Whether the replica rests, with all its memory."""
        try:
            return TABLE[ReplicaState(self._engine.status.state)].resting and not self._engine.weights.asleep
        except NotReady:
            return False

    def _wants(self, newest: str) -> bool:
        status = self._engine.status
        if status.restarts != self._restarts:  # it may have come back with an older one
            self._restarts, self._settled = status.restarts, ""
        if status.state == ReplicaState.FAILED:
            return True
        if newest == status.version:
            self._settled = newest
        return newest != self._settled

    async def _take(self, version: str) -> None:
        request = msgspec.structs.replace(self._request, version=version)
        try:
            begun = self._engine.begin_update(request)
            await within(request.timeout_s + _SPARE_S, f"update {begun.id}", self._engine.finish_update(begun.id))
        except UpdateCancelled:
            log.info("version skipped", version=version, why="its update was cancelled; a newer one is awaited")
            self._settled = version
        except (UpdateInProgress, WrongState, NotReady) as error:
            log.debug("version not taken", version=version, error=error)  # somebody else is at work
        except Exception as error:  # noqa: BLE001 - whatever it is, a later try may do better
            self._failures += 1
            self._failed = version
            self._retry_at = asyncio.get_running_loop().time() + backoff_s(self._poll_s, self._failures)
            self._tell(version, error)
        else:
            log.info("version taken", version=version)
            self._settled, self._told = version, None

    def _tell(self, version: str, error: Exception) -> None:
        """Log a failure the first time it is met."""
        known = isinstance(error, WeightcastError)
        what = (version, error.code if isinstance(error, WeightcastError) else type(error).__name__)
        if what != self._told:
            log.warning("follow failed", version=version or None, trace=None if known else error, error=error)
        self._told = what


def backoff_s(poll_s: float, failures: int) -> float:
    """How long to wait after so many failures in a row."""
    return min(max(poll_s, _LONGEST_WAIT_S), poll_s * 2.0 ** min(failures, 32))
