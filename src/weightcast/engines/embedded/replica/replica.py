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

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.embedded.messages import Action, Cancel, Submit
from weightcast.engines.embedded.replica.answers import Answer, Answers
from weightcast.engines.embedded.replica.backoff import Backoff
from weightcast.engines.embedded.replica.gate import Gate, check_types
from weightcast.engines.embedded.replica.inspection import Inspection
from weightcast.engines.embedded.replica.pausing import Pausing
from weightcast.engines.embedded.replica.run import Run
from weightcast.engines.embedded.replica.served import StateDir, check_config, config_digest, find_checkpoint
from weightcast.engines.embedded.replica.status import Limits, ReplicaStatus
from weightcast.engines.embedded.replica.surface import LiveSurface
from weightcast.engines.embedded.replica.updates import Updates
from weightcast.engines.embedded.settings import EngineSettings
from weightcast.engines.states import TABLE, UPDATING, Operation, ReplicaState, refusal
from weightcast.errors import NotFound, NotReady, ReplicaFailed, WeightcastError, WrongState

log = logs.get(__name__)

PROGRAM = (sys.executable, "-m", "weightcast.engines.embedded.ranks.process")

_STALE_BEAT_S = 0.05
_SHUTTING_DOWN = "the server is shutting down"


class Replica(LiveSurface):
    """All ranks of one copy of the model. To be used from one event loop; `start` first, `close` last.

    `program` is what a rank is started with. `backoff` says how long to wait between restarts. What it does to its weights
    is described at `LiveWeights`.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        max_requests: int = 256,
        program: Sequence[str] = PROGRAM,
        backoff: Backoff | None = None,
    ) -> None:
        self.settings, self._program, self._backoff = settings, tuple(program), backoff or Backoff()
        self.answers, self.gate = Answers(max_requests), Gate()
        self._pausing = Pausing(self)
        self._updates = Updates(self, self._pausing)
        self._inspection = Inspection(self, self._updates, self._pausing)
        self._state, self._reason, self._since = ReplicaState.STARTING, "not started yet", time.time()
        self._resting = self._state
        self._config_digest = ""
        self._limits: Limits | None = None
        self._restarts = 0
        self._unloaded = False  # the ranks run, and the committed version could not be loaded into them
        self._run: Run | None = None
        self._work: asyncio.Task[None] | None = None  # starts, then supervises
        self._closing: asyncio.Task[None] | None = None
        self._drains: list[asyncio.TimerHandle] = []

    # -- what it is ------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> ReplicaStatus:
        """The state at this moment."""
        served = self._updates.served
        return ReplicaStatus(
            state=self._state,
            reason=self._reason,
            since=self._since,
            version=served.version if served else "",
            root_digest=served.root_digest if served else "",
            restarts=self._restarts,
            in_flight=len(self.answers),
            pids=self._run.pids if self._run else (),
            paused=self._pausing.paused,
            resting=self._resting,
        )

    @property
    def limits(self) -> Limits:
        """What requests must keep to. Raises `NotReady` before the first start has succeeded."""
        if self._limits is None:
            raise self._not_ready()
        return self._limits

    @property
    def state(self) -> ReplicaState:
        """The state at this moment."""
        return self._state

    @property
    def resting(self) -> ReplicaState:
        """The last resting state: what an update began in, and what is served meanwhile."""
        return self._resting

    @property
    def run(self) -> Run:
        """The ranks that run now. Raises `NotReady` if there are none."""
        if self._run is None or not self._run.alive:
            raise self._not_ready()
        return self._run

    def allow(self, operation: Operation) -> None:
        """Raise unless the operation may be asked for now: the table in `engines/states.py` decides, and ranks must run."""
        state = self._resting if operation is Operation.GENERATE and self._state in UPDATING else self._state
        error = refusal(operation, state, self._reason)
        if error is None and (self._run is None or not self._run.alive):
            error = self._not_ready()
        if error is not None:
            raise error

    # -- requests and commands -------------------------------------------------------------------------------------------

    def submit(self, request: Submit) -> Answer:
        """Send a request to the ranks. Its id must be one that was not used before.

        Raises `NotReady` if the replica takes none now, `Overloaded` if `max_requests` are in flight, `InvalidInput` if the
        ranks could not read it. Once accepted, a request always ends: if a rank is lost with finish "error", if the replica
        is closed with "abort". While the replica is paused it waits.
        """
        self.allow(Operation.GENERATE)
        check_types(request)
        answer = self.answers.open(request.id, self.status.version, self._cancel)
        try:
            if self.gate.closed:
                self.gate.hold(request)
            else:
                self.run.send(0, request)
        except WeightcastError as error:
            self.answers.drop(answer)
            raise NotReady(f"the replica takes no requests now: {error}") from error
        return answer

    def _cancel(self, request_id: str) -> None:
        if not self.gate.forget(request_id) and self._run is not None:
            with suppress(ReplicaFailed):  # a rank that is lost has forgotten the request
                self._run.send(0, Cancel(id=request_id))

    def open_gate(self) -> None:
        """Let requests through to the ranks again."""

        def send(request: Submit) -> None:
            if self._run is not None:
                with suppress(ReplicaFailed):  # ranks that are lost end all requests, this one included
                    self._run.send(0, request)

        self.gate.open(send)

    async def command(self, action: Action, *, timeout_s: float) -> list[Any]:
        """Let all ranks execute a command, after the earlier ones. One result per rank, as it came over the wire.

        Raises `DeadlineExceeded` naming the ranks that did not answer; an error with every rank's own if it failed there;
        `ReplicaFailed` with the cause if a rank was lost meanwhile.
        """
        if TABLE[self._state].away:
            raise self._not_ready()
        return await self.run.commands.execute(action, timeout_s)

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
            self.turn(ReplicaState.FAILED, "the start was given up")
            raise
        except Exception as error:
            self.turn(ReplicaState.FAILED, str(error))
            raise
        if self._closing is None:
            self._work = asyncio.create_task(self._supervise(), name="replica-supervisor")
            self._work.add_done_callback(self._supervisor_ended)

    async def _begin(self) -> None:
        settings = self.settings
        self.turn(ReplicaState.STARTING, f"reading {settings.model_dir}")
        deadline = Deadline.after(settings.start_timeout_s)
        self._config_digest = config_digest(Path(settings.model_dir))
        restored = self._restore_state()
        if not restored:
            self._updates.served = await find_checkpoint(settings.model_dir, deadline)
        if settings.draft_dir is not None:
            self._updates.draft = await find_checkpoint(settings.draft_dir, deadline)
        self.turn(ReplicaState.STARTING, f"starting {settings.ranks} rank(s) at version {self.status.version}")
        try:
            await self._start_ranks()
        except BaseException as error:
            if restored and self._stays_unloaded(error):
                return
            if self._run is not None:
                await self._run.end()
            raise

    def _restore_state(self) -> bool:
        """Take over the version and the pin that a front end before this one left in the state directory."""
        settings, updates = self.settings, self._updates
        if settings.state_dir is None:
            return False
        updates.state = StateDir(Path(settings.state_dir), config=self._config_digest, follows=settings.source or "")
        found = updates.state.read()
        if found is not None:
            updates.served, updates.pin = found
        return found is not None

    def _stays_unloaded(self, error: BaseException) -> bool:
        """Serve nothing, and try again, if the ranks run and the committed version cannot be loaded into them."""
        alive = self._run is not None and self._run.alive
        if not alive or not isinstance(error, Exception) or isinstance(error, ReplicaFailed):
            return False
        self._unloaded = True
        self.fail(f"version {self.status.version} could not be loaded again: {error}")
        return True

    async def _start_ranks(self) -> None:
        """Start all ranks and bring them to the committed version, as awake and as paused as they were."""
        began = time.monotonic()
        self._run = Run(self.settings, self._program, self.answers, self._lost, self._damaged)
        self._limits = await self._run.start()
        deadline = Deadline.after(self.settings.start_timeout_s)
        await self._pausing.restore(deadline)
        if "weight" not in self._pausing.asleep:
            await self._updates.reload(deadline)
        self.rest()
        log.info(
            "replica ready",
            version=self.status.version,
            ranks=self.settings.ranks,
            start_ms=logs.ms(time.monotonic() - began),
        )

    async def _supervise(self) -> None:
        """Wait for a rank to be lost, then bring all back to the committed version, for as long as it takes."""
        loop = asyncio.get_running_loop()
        while self._run is not None:
            ready_at = loop.time()
            await self._watch(self._run)
            self._backoff.was_healthy(loop.time() - ready_at)
            await self._run.end()
            while not await self._restart():
                pass
            self._restarts += 1

    async def _watch(self, run: Run) -> None:
        """Returns when a rank is lost. Weights that could not be loaded after a restart are tried again meanwhile."""
        told = ""
        while not run.failed.done():
            delay_s = self._backoff.next_s() if self._unloaded else None
            await asyncio.wait([run.failed], timeout=delay_s)  # unlike awaiting it, this does not cancel it
            if self._unloaded and self._state is ReplicaState.FAILED and not run.failed.done():
                reason = self._reason
                try:
                    await self._updates.reload(Deadline.after(self.settings.start_timeout_s))
                    self.rest()
                except WeightcastError as error:
                    level, told = logging.DEBUG if error.code == told else logging.WARNING, error.code
                    log.at(level, "load failed", version=self.status.version, error=error)
                    if self.state is ReplicaState.STAGING:
                        self.turn(ReplicaState.FAILED, reason)
            self._unloaded = self._unloaded and self._state is ReplicaState.FAILED

    def _lost(self, error: ReplicaFailed) -> None:
        self.gate.drop()  # the requests that wait there are ended with all others
        if self._state is not ReplicaState.STARTING:  # a start that fails is told by the exception it raises
            self.turn(ReplicaState.RESTARTING, str(error))

    def _damaged(self, rank: int, version: str, found: str) -> None:
        """A rank says so with each heartbeat. An update that is under way goes on: it may well mend this.

        The first moments of a state do not count: a heartbeat may be from before.
        """
        settled = time.time() - self._since > _STALE_BEAT_S
        if self._state is ReplicaState.READY and settled and self.status.version == version:
            self.fail(f"rank {rank}: {found} Tokens since the last clean pass of the scrubber are suspect.")

    async def _restart(self) -> bool:
        """Try once, after the delay that is due. Says whether the ranks run again: with weights, or FAILED without."""
        delay_s = self._backoff.next_s()
        log.warning("replica restarting", version=self.status.version, delay_s=round(delay_s, 1))
        await asyncio.sleep(delay_s)
        try:
            check_config(Path(self.settings.model_dir), self._config_digest)
            if self._state is ReplicaState.FAILED:
                self.turn(ReplicaState.RESTARTING, "what was missing is there again: starting the ranks")
            await self._start_ranks()
        except Exception as error:
            reason, mended = str(error), isinstance(error, WeightcastError) and not isinstance(error, NotFound)
            if not isinstance(error, WeightcastError):
                log.exception("restart crashed")  # to give up would be worse, whatever it is
                reason = f"the restart failed: {type(error).__name__}: {error}"
            if self._stays_unloaded(error):
                return self._state is ReplicaState.FAILED
            if self._run is not None:
                await self._run.end()
                self.turn(ReplicaState.RESTARTING if mended else ReplicaState.FAILED, reason)
                log.warning("restart failed", version=self.status.version, error=logs.summary(reason))
            return False
        return True

    def _supervisor_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        log.error("supervisor crashed", trace=error, error=error)
        self.fail(f"the supervisor failed: {type(error).__name__}: {error}")

    # -- states ----------------------------------------------------------------------------------------------------------

    def turn(self, state: ReplicaState, reason: str) -> None:
        """Go to another state. One that is closing only goes on with that."""
        if self._closing is not None and state not in (ReplicaState.DRAINING, ReplicaState.CLOSED):
            return
        self._state, self._reason, self._since = state, reason, time.time()
        if TABLE[state].resting:
            self._resting = state

    def rest(self) -> None:
        """Go to the resting state that follows from what is in memory. Without ranks it is the supervisor's to say."""
        if self._run is None or not self._run.alive:
            return
        asleep, version = self._pausing.asleep, self.status.version
        if not self._pausing.paused and self.gate.closed:
            self.open_gate()
        if "weight" in asleep:
            self.turn(ReplicaState.CLEARED, f"asleep: {', '.join(sorted(asleep))}; {version} was served")
        elif asleep:
            self.turn(ReplicaState.SLEEPING, f"asleep: {', '.join(sorted(asleep))}")
        else:
            self.turn(ReplicaState.READY, f"serving version {version}")

    def fail(self, reason: str) -> None:
        """No whole version is in memory: serve nothing, and say so to all who wait. An update or a recovery mends it."""
        level = logging.DEBUG if self._resting is ReplicaState.FAILED else logging.ERROR  # DEBUG: it has been logged
        self.turn(ReplicaState.FAILED, reason)
        for answer in self.answers:
            self._cancel(answer.id)
        self.gate.drop()
        self.answers.end_all("error", reason)
        log.at(level, "replica failed", why=logs.summary(reason))

    # -- the end ---------------------------------------------------------------------------------------------------------

    async def close(self, *, drain_s: float) -> None:
        """Take no more requests, give those in flight up to `drain_s`, then end all ranks and leave nothing behind.

        Safe in every state, and more than once: a later call with a shorter `drain_s` hurries the first. Being cancelled
        does not stop it.
        """
        if self._closing is None:
            self.turn(ReplicaState.DRAINING, _SHUTTING_DOWN)
            self._closing = asyncio.create_task(self._shut_down(), name="replica-close")
        if not self._closing.done():
            end_all = partial(self.answers.end_all, "abort", _SHUTTING_DOWN)
            self._drains.append(asyncio.get_running_loop().call_later(max(0.0, drain_s), end_all))
        await asyncio.shield(self._closing)

    async def _shut_down(self) -> None:
        try:
            await self._updates.close()
            self.open_gate()  # what waited may still be answered within the time to drain
            if self._work is not None:
                self._work.cancel()
                await asyncio.wait([self._work])
            if self._run is not None:
                await self.answers.idle()
                await self._run.stop()
        finally:
            self.answers.end_all("abort", _SHUTTING_DOWN)
            if self._updates.state is not None:
                self._updates.state.close()
            for timer in self._drains:
                timer.cancel()
            self.turn(ReplicaState.CLOSED, "closed")
            log.info("replica closed", restarts=self._restarts)
