"""Taking each new version of the default source by itself."""

from __future__ import annotations

import asyncio

import msgspec

from weightcast import logs
from weightcast.control.engine import Engine
from weightcast.control.waiting import within
from weightcast.engines.base import Pin, UpdateRequest
from weightcast.engines.states import TABLE, ReplicaState
from weightcast.errors import NotReady, UpdateCancelled, UpdateInProgress, WeightcastError, WrongState

log = logs.get(__name__)

_ASK_S = 30.0  # for the source to tell its newest version
_SPARE_S = 60.0  # for an update to end, beyond its own deadline
_LONGEST_WAIT_S = 60.0


class Follower:
    """Asks for the newest version now and then, and has the engine updated to it.

    A version that an operator chose is pinned: it stays until one is published that is newer than what the operator moved
    away from. A version that cannot be taken is tried again, less and less often. One that was cancelled is not, until a pin
    is removed. Nothing is taken while memory is asleep. A replica that has FAILED is brought back by the same means, or to
    the version it is pinned to.
    """

    def __init__(self, engine: Engine, request: UpdateRequest, *, poll_s: float) -> None:
        self._engine, self._poll_s = engine, poll_s
        self._request = msgspec.structs.replace(request, follow=True)
        self._skipped = ""  # the last version whose update was cancelled
        self._pin: Pin | None = None  # as it was seen last
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
        version, pin = self._engine.status.version, self._engine.weights.pin
        if pin is None and self._pin is not None:
            self._skipped = ""
        self._pin = pin
        try:
            newest = await within(_ASK_S, "asking for the newest version", self._engine.newest_version())
            free = pin is None or await within(_ASK_S, f"asking for version {newest}", self._engine.ends_pin(newest))
        except Exception as error:  # noqa: BLE001 - whatever it is, a later turn may do better
            self._silences += 1
            self._tell("", error)
            return
        self._silences = 0
        if newest != self._failed:
            self._failed, self._failures, self._retry_at = "", 0, 0.0
        if (self._engine.status.version, self._engine.weights.pin) != (version, pin):  # an operator decided meanwhile
            return
        if self._wants(newest, free=free) and asyncio.get_running_loop().time() >= self._retry_at:
            await self._take(newest, recover=not free)

    def _may_update(self) -> bool:
        """Whether the replica rests, with all its memory."""
        try:
            return TABLE[ReplicaState(self._engine.status.state)].resting and not self._engine.weights.asleep
        except NotReady:
            return False

    def _wants(self, newest: str, *, free: bool) -> bool:
        status = self._engine.status
        if status.state == ReplicaState.FAILED:
            return True
        return free and newest not in (status.version, self._skipped)

    async def _take(self, version: str, *, recover: bool) -> None:
        request = msgspec.structs.replace(self._request, version=None if recover else version)
        begun = None
        try:
            begun = self._engine.begin_recovery(request) if recover else self._engine.begin_update(request)
            ended = await within(request.timeout_s + _SPARE_S, f"update {begun.id}", self._engine.finish_update(begun.id))
        except UpdateCancelled:
            if not recover:
                log.info("version skipped", version=version, why="its update was cancelled; a newer one is awaited")
                self._skipped = version
        except (UpdateInProgress, WrongState, NotReady) as error:
            log.debug("version not taken", version=version, code=error.code)  # somebody else is at work
        except Exception as error:  # noqa: BLE001 - whatever it is, a later try may do better
            self._failures += 1
            self._failed = version
            retry_s = backoff_s(self._poll_s, self._failures)
            self._retry_at = asyncio.get_running_loop().time() + retry_s
            self._tell(version, error, retry_s if begun is not None else None)
        else:
            log.debug("version taken", version=ended.version)
            self._told = None

    def _tell(self, version: str, error: Exception, retry_s: float | None = None) -> None:
        """Log a failure the first time it is met. Why an update failed, the engine has logged: then `retry_s` is given."""
        known = isinstance(error, WeightcastError)
        what = (version, error.code if isinstance(error, WeightcastError) else type(error).__name__)
        if what != self._told and known and retry_s is not None:
            log.info("version not taken", version=version, code=what[1], retry_s=round(retry_s, 2))
        elif what != self._told:
            log.warning("follow failed", version=version or None, trace=None if known else error, error=error)
        self._told = what


def backoff_s(poll_s: float, failures: int) -> float:
    """How long to wait after so many failures in a row."""
    return min(max(poll_s, _LONGEST_WAIT_S), poll_s * 2.0 ** min(failures, 32))
