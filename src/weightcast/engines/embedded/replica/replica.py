"""A replica as the server sees it: takes requests and commands, notices when a rank is lost, and starts all ranks again."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from weightcast.engines.embedded.messages import Action, Cancel, Submit
from weightcast.engines.embedded.replica.answers import Answer, Answers
from weightcast.engines.embedded.replica.backoff import Backoff
from weightcast.engines.embedded.replica.identity import Identity, confirm, identify
from weightcast.engines.embedded.replica.run import Run
from weightcast.engines.embedded.replica.status import Limits, ReplicaState, ReplicaStatus
from weightcast.engines.embedded.settings import EngineSettings
from weightcast.errors import InvalidInput, NotFound, NotReady, ReplicaFailed, WeightcastError, WrongState

log = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "weightcast.engines.embedded.ranks.process")

_SHUTTING_DOWN = "the server is shutting down"


class Replica:
    """All ranks of one copy of the model. To be used from one event loop; `start` first, `close` last.

    `program` is what a rank is started with. `backoff` says how long to wait between restarts.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        max_requests: int = 256,
        program: Sequence[str] = PROGRAM,
        backoff: Backoff | None = None,
    ) -> None:
        self._settings, self._program, self._backoff = settings, tuple(program), backoff or Backoff()
        self._answers = Answers(max_requests)
        self._state, self._reason, self._since = ReplicaState.STARTING, "not started yet", time.time()
        self._identity: Identity | None = None
        self._limits: Limits | None = None
        self._restarts = 0
        self._run: Run | None = None
        self._work: asyncio.Task[None] | None = None  # starts, then supervises
        self._closing: asyncio.Task[None] | None = None
        self._drains: list[asyncio.TimerHandle] = []

    # -- what it is ------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> ReplicaStatus:
        """The state at this moment."""
        return ReplicaStatus(
            state=self._state,
            reason=self._reason,
            since=self._since,
            version=self._identity.version if self._identity else "",
            root_digest=self._identity.root_digest if self._identity else "",
            restarts=self._restarts,
            in_flight=len(self._answers),
            pids=self._run.pids if self._run else (),
        )

    @property
    def limits(self) -> Limits:
        """What requests must keep to. Raises `NotReady` before the first start has succeeded."""
        if self._limits is None:
            raise self._not_ready()
        return self._limits

    # -- requests and commands -------------------------------------------------------------------------------------------

    def submit(self, request: Submit) -> Answer:
        """Send a request to the ranks. Its id must be one that was not used before.

        Raises `NotReady` if the replica takes none now, `Overloaded` if `max_requests` are in flight, `InvalidInput` if the
        ranks could not read it. Once accepted, a request always ends: if a rank is lost with finish "error", if the replica
        is closed with "abort".
        """
        run = self._serving()
        _check_types(request)
        answer = self._answers.open(request.id, run.version, self._cancel)
        try:
            run.send(0, request)
        except ReplicaFailed as error:
            self._answers.drop(answer)
            raise NotReady(f"the replica takes no requests now: {error}") from error
        return answer

    def _cancel(self, request_id: str) -> None:
        if self._run is not None:
            with suppress(ReplicaFailed):  # a rank that is lost has forgotten the request
                self._run.send(0, Cancel(id=request_id))

    async def command(self, action: Action, *, timeout_s: float) -> list[Any]:
        """Let all ranks execute a command, after the earlier ones. One result per rank, as it came over the wire.

        Raises `DeadlineExceeded` naming the ranks that did not answer; `ReplicaFailed` with every rank's error if it failed
        there, or with the cause if a rank was lost meanwhile.
        """
        return await self._serving().commands.execute(action, timeout_s)

    def _serving(self) -> Run:
        if self._run is None or self._state is not ReplicaState.READY:
            raise self._not_ready()
        return self._run

    def _not_ready(self) -> NotReady:
        return NotReady(f"the replica takes no requests now: it is {self._state} ({self._reason}).")

    # -- start and restart -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all ranks and wait until they are ready. To be called once; a failure is raised, not tried again."""
        if self._work is not None or self._closing is not None:
            raise WrongState("start a replica", self._state, [ReplicaState.STARTING])
        self._work = asyncio.create_task(self._begin(), name="replica-start")
        try:
            await self._work
        except asyncio.CancelledError:
            if self._closing is not None:
                raise NotReady("the replica was closed while it started.") from None
            self._turn(ReplicaState.FAILED, "the start was given up")
            raise
        except Exception as error:
            self._turn(ReplicaState.FAILED, str(error))
            raise
        if self._closing is None:
            self._work = asyncio.create_task(self._supervise(), name="replica-supervisor")
            self._work.add_done_callback(self._supervisor_ended)

    async def _begin(self) -> None:
        self._turn(ReplicaState.STARTING, f"reading {self._settings.model_dir}")
        self._identity = await identify(Path(self._settings.model_dir))
        self._turn(ReplicaState.STARTING, f"starting {self._settings.ranks} rank(s) at version {self._identity.version}")
        await self._start_ranks(self._identity)

    async def _start_ranks(self, identity: Identity) -> None:
        began = time.monotonic()
        run = self._run = Run(self._settings, identity, self._program, self._answers, self._lost)
        self._limits = await run.start()
        self._turn(ReplicaState.READY, f"serving version {identity.version}")
        log.info("serve version=%s root=%s start_s=%.3f", identity.version, identity.root_digest, time.monotonic() - began)

    async def _supervise(self) -> None:
        """Wait for a rank to be lost, then bring all back to the committed version, for as long as it takes."""
        loop = asyncio.get_running_loop()
        while self._run is not None:
            ready_at = loop.time()
            await asyncio.shield(self._run.failed)  # being cancelled must not cancel the future too
            self._backoff.was_healthy(loop.time() - ready_at)
            await self._run.end()
            while not await self._restart(self._run.identity):
                pass
            self._restarts += 1

    def _lost(self, error: ReplicaFailed) -> None:
        if self._state is ReplicaState.READY:  # a start that fails is told by the exception it raises
            self._turn(ReplicaState.RESTARTING, str(error))

    async def _restart(self, committed: Identity) -> bool:
        """Try once, after the delay that is due. Says whether the ranks serve again."""
        delay_s = self._backoff.next_s()
        log.warning("restart replica version=%s delay_s=%.1f: %s", committed.version, delay_s, self._reason)
        await asyncio.sleep(delay_s)
        try:
            identity = await confirm(committed)
            if self._state is ReplicaState.FAILED:
                self._turn(ReplicaState.RESTARTING, f"version {committed.version} is there again: starting the ranks")
            await self._start_ranks(identity)
        except NotFound as error:
            self._turn(ReplicaState.FAILED, str(error))
        except WeightcastError as error:
            self._turn(ReplicaState.RESTARTING, str(error))
        except Exception as error:
            log.exception("crash restart")  # to give up would be worse, whatever it is
            self._turn(ReplicaState.FAILED, f"the restart failed: {type(error).__name__}: {error}")
        return self._state is ReplicaState.READY

    def _supervisor_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        log.error("crash supervisor: %s", error, exc_info=error)
        self._turn(ReplicaState.FAILED, f"the supervisor failed: {type(error).__name__}: {error}")
        self._answers.end_all("error", self._reason)

    def _turn(self, state: ReplicaState, reason: str) -> None:
        if self._closing is not None and state not in (ReplicaState.DRAINING, ReplicaState.CLOSED):
            return
        self._state, self._reason, self._since = state, reason, time.time()

    # -- the end ---------------------------------------------------------------------------------------------------------

    async def close(self, *, drain_s: float) -> None:
        """Take no more requests, give those in flight up to `drain_s`, then end all ranks and leave nothing behind.

        Safe in every state, and more than once: a later call with a shorter `drain_s` hurries the first. Being cancelled
        does not stop it.
        """
        if self._closing is None:
            self._turn(ReplicaState.DRAINING, _SHUTTING_DOWN)
            self._closing = asyncio.create_task(self._shut_down(), name="replica-close")
        if not self._closing.done():
            end_all = partial(self._answers.end_all, "abort", _SHUTTING_DOWN)
            self._drains.append(asyncio.get_running_loop().call_later(max(0.0, drain_s), end_all))
        await asyncio.shield(self._closing)

    async def _shut_down(self) -> None:
        try:
            if self._work is not None:
                self._work.cancel()
                await asyncio.wait([self._work])
            if self._run is not None:
                await self._answers.idle()
                await self._run.stop()
        finally:
            self._answers.end_all("abort", _SHUTTING_DOWN)
            for timer in self._drains:
                timer.cancel()
            self._turn(ReplicaState.CLOSED, "closed")
            log.info("close replica restarts=%d", self._restarts)


def _check_types(request: Submit) -> None:
    """Structs take whatever they are given, and rank 0, which checks, would fail for all over the mistake of one."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Submit)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"request {request.id!r} cannot be sent to the ranks: {error}.") from error
