"""One start of all ranks: from its directory and its first process until the last of them is reaped.

Nothing is shared between two starts: each has its own directory, socket and count of commands.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from weightcast import logs
from weightcast.engines.embedded.messages import (
    PROTOCOL,
    Acknowledged,
    Failed,
    FromRank,
    Heartbeat,
    Outputs,
    Ready,
    Report,
    Shutdown,
    ToRank,
)
from weightcast.engines.embedded.replica.answers import Answers
from weightcast.engines.embedded.replica.channel import Channel
from weightcast.engines.embedded.replica.commands import Commands
from weightcast.engines.embedded.replica.job_board import JobBoard
from weightcast.engines.embedded.replica.processes import RankProcess, wait_all
from weightcast.engines.embedded.replica.run_dir import RunDir
from weightcast.engines.embedded.replica.status import Limits
from weightcast.engines.embedded.replica.verdicts import named_ranks
from weightcast.engines.embedded.replica.vitals import PATIENCE, TICKS, Attention, Vitals
from weightcast.engines.embedded.replica.votes import VoteLayout
from weightcast.engines.embedded.settings import EngineSettings, RankSettings
from weightcast.errors import DeadlineExceeded, InvalidInput, NotReady, ReplicaFailed

log = logs.get(__name__)

SHUTDOWN_S, TERMINATE_S, KILL_S = 5.0, 2.0, 5.0
# A rank that ends by itself says why, and its peers may have more to say: that long their words are waited for.
_HEAR_STARTING_S, _HEAR_SERVING_S = 1.0, 0.25


class Run:
    """The ranks of a replica while they live. `failed` is done, with the cause, once any of them is lost.

    At that moment `on_lost` is called, all others are killed, and the requests in flight and the commands end with the
    cause. `end` is then to be awaited; `stop` ends ranks that are well.
    """

    def __init__(
        self,
        settings: EngineSettings,
        program: Sequence[str],
        answers: Answers,
        on_lost: Callable[[ReplicaFailed], None],
        on_damaged: Callable[[int, str, str], None],
    ) -> None:
        self._on_lost, self._on_damaged = on_lost, on_damaged
        self._settings, self._program, self._answers = settings, program, answers
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[ReplicaFailed] = self._loop.create_future()
        self._all_ready: asyncio.Future[None] = self._loop.create_future()
        self.commands = Commands(settings.ranks, self.send)
        self.board = JobBoard(settings.ranks)
        self._ready: dict[int, Ready] = {}
        self.layouts: dict[str, VoteLayout] = {}  # which ranks hold what of each model, once all are ready
        self._problems: dict[int, str] = {}
        self._told: set[int] = set()  # ranks whose problem is in their own words
        self._ending = False
        self._processes: list[RankProcess] = []
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tick_s = settings.heartbeat_s / TICKS
        self._vitals = Vitals(settings.ranks, PATIENCE * settings.heartbeat_s)
        self._attention = Attention(self._loop.time(), settings.heartbeat_s)
        self._run_dir = RunDir()
        self._channel: Channel | None = None

    @property
    def alive(self) -> bool:
        """Whether all ranks run and can be spoken to."""
        return self._all_ready.done() and not self.failed.done() and not self._ending

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that run now."""
        return tuple(process.pid for process in self._processes if process.running)

    async def start(self) -> Limits:
        """Start all ranks and wait until they are ready. If that fails, nothing of them is left."""
        try:
            self._open()
            wanted: list[asyncio.Future[Any]] = [self._all_ready, self.failed]
            timeout_s = self._settings.start_timeout_s
            await asyncio.wait(wanted, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                raise self.failed.result()
            if not self._all_ready.done():
                late = [rank for rank in range(self._settings.ranks) if rank not in self._ready]
                raise DeadlineExceeded(f"the start of rank(s) {', '.join(map(str, late))}", timeout_s)
        except BaseException:
            await self.end()
            raise
        ready = self._ready[0]
        return Limits(
            max_length=ready.max_length,
            blocks=ready.blocks,
            block_size=self._settings.block_size,
            vocab_size=ready.vocab_size,
            moe=ready.moe,
        )

    def _open(self) -> None:
        path, ranks = self._run_dir.path, self._settings.ranks
        self._channel = Channel(path, ranks, on_message=self._receive, on_fault=self._blame, on_crash=self._crash)
        for rank in range(ranks):
            settings = RankSettings(
                engine=self._settings,
                rank=rank,
                run_dir=str(path),
                parent_pid=os.getpid(),
                log_level=log.level,
                log_json=logs.as_json(),
            )
            self._processes.append(RankProcess(self._program, settings, partial(self._guard, self._exited)))
        engine = self._settings
        log.info(
            "ranks started", ranks=ranks, pids=self.pids, model_dir=engine.model_dir, device=engine.device,
            dtype=engine.dtype, graphs=engine.graphs, source=engine.source, heartbeat_s=engine.heartbeat_s, run_dir=path,
        )  # fmt: skip
        self._tick()

    def send(self, rank: int, message: ToRank) -> None:
        """Hand a message to a rank. Raises `ReplicaFailed` if that cannot be, and then the whole start has failed."""
        if self._channel is None:
            raise ReplicaFailed(f"rank {rank} was not started.")
        try:
            self._channel.send(rank, message)
        except ReplicaFailed as error:
            if rank not in self._problems:  # how it ended may be known already, or a moment later
                self._note(rank, f"is lost: {error}", hear_s=_HEAR_SERVING_S)
            raise

    async def stop(self) -> None:
        """End ranks that are well: tell them, then ask them, then kill them; each step has its deadline."""
        try:
            if not self.failed.done() and self._all_ready.done():
                self._ending = True
                self.commands.fail(NotReady("the replica is shutting down."))
                self.commands.announce(Shutdown())
                left = await wait_all(self._processes, SHUTDOWN_S)
                for process in left:
                    log.warning("rank terminated", rank=process.rank, pid=process.pid, why="it did not leave when told")
                    process.terminate()
                await wait_all(left, TERMINATE_S)
        finally:
            await self.end()

    async def end(self) -> None:
        """Kill what still runs, reap it, and remove the directory. Safe twice."""
        self._ending = True
        for timer in self._timers.values():
            timer.cancel()
        self.commands.fail(NotReady("the replica is shutting down."))
        self.board.fail(NotReady("the replica is shutting down."))
        for process in self._processes:
            process.kill()
        if self._channel is not None:
            self._channel.close()
        try:
            for process in await wait_all(self._processes, KILL_S):
                log.error("rank left", rank=process.rank, pid=process.pid, why=f"it outlives SIGKILL for {KILL_S:g} s")
        finally:
            self._run_dir.remove()

    # -- what comes from the ranks ---------------------------------------------------------------------------------------

    def _receive(self, rank: int, message: FromRank) -> None:
        if self._ending or self.failed.done():
            return
        if isinstance(message, Outputs):
            if rank == 0:
                self._answers.deliver(message.outputs)
            else:
                self._blame(rank, "sent outputs, which come from rank 0 alone")
        elif message.rank != rank:
            self._blame(rank, f"sent a {type(message).__name__} in the name of rank {message.rank}")
        elif isinstance(message, Heartbeat):
            self._vitals.beat(rank, message.progress, message.busy, self._attention.at(self._loop.time()))
            if message.damaged is not None:
                self._on_damaged(rank, *message.damaged)
        elif isinstance(message, Acknowledged):
            try:
                self.commands.acknowledge(message)
            except ReplicaFailed as error:
                self._blame(rank, str(error))
        elif isinstance(message, Report):
            self.board.report(message)
        elif isinstance(message, Ready):
            self._greet(rank, message)
        else:
            self._hear(rank, message)

    def _greet(self, rank: int, ready: Ready) -> None:
        wrong = []
        if ready.protocol != PROTOCOL:
            wrong.append(f"speaks protocol {ready.protocol} instead of {PROTOCOL}")
        if rank in self._ready:
            wrong.append("said twice that it is ready")
        for other in list(self._ready.values())[:1]:
            names = [name for name in ("max_length", "blocks", "vocab_size", "moe") if _differ(name, ready, other)]
            wrong += [f"has {name}={getattr(ready, name)}, and rank {other.rank} {getattr(other, name)}" for name in names]
        if wrong:
            self._blame(rank, "; ".join(wrong))
            return
        self._ready[rank] = ready
        if len(self._ready) == self._settings.ranks:
            in_order = [self._ready[number] for number in range(self._settings.ranks)]
            try:
                self.layouts = {
                    part: VoteLayout.of([one.layouts[part] for one in in_order if part in one.layouts])
                    for part in ready.layouts
                }
            except InvalidInput as error:
                self._blame(rank, str(error))
                return
        self._vitals.ready(rank, self._attention.at(self._loop.time()))
        if len(self._ready) == self._settings.ranks:
            self._all_ready.set_result(None)

    def _hear(self, rank: int, message: Failed) -> None:
        self._told.add(rank)
        self._note(rank, f"reported {message.code}: {message.message}", hear_s=self._hear_s)

    def _exited(self, process: RankProcess) -> None:
        if process.rank not in self._told:
            self._note(process.rank, process.describe_end(), hear_s=0.0 if process.killed else self._hear_s)

    def _tick(self) -> None:
        self._guard(self._look)
        if not self._ending and not self.failed.done():
            self._timers["tick"] = self._loop.call_later(self._tick_s, self._tick)

    def _look(self) -> None:
        missed_s = self._attention.missed_s
        now = self._attention.at(self._loop.time())
        if self._attention.missed_s - missed_s > self._settings.heartbeat_s:
            log.warning(
                "front end late",
                missed_ms=logs.ms(self._attention.missed_s - missed_s),
                why="this is not held against the ranks",
            )
        hanging = self._vitals.hanging(now)
        if hanging:
            self._problems |= {rank: f"hangs: {complaint}" for rank, complaint in hanging.items()}
            self._settle()

    # -- how a start fails -----------------------------------------------------------------------------------------------

    @property
    def _hear_s(self) -> float:
        return _HEAR_SERVING_S if self._all_ready.done() else _HEAR_STARTING_S

    def give_up(self, problem: str) -> ReplicaFailed:
        """The ranks do not do what they must: end them all, as if one was lost. Returns the error that this is."""
        if not self.failed.done() and not self._ending:
            self._lose(ReplicaFailed(f"the replica {problem}"))
        return self.failed.result() if self.failed.done() else ReplicaFailed(f"the replica {problem}")

    def _blame(self, rank: int, problem: str) -> None:
        self._problems[rank] = problem
        self._settle()

    def _note(self, rank: int, problem: str, *, hear_s: float) -> None:
        """A rank has a problem; the verdict waits up to `hear_s` for more to be known. What is known last says most."""
        self._problems[rank] = problem
        all_told = len(self._told) == self._settings.ranks
        if hear_s == 0.0 or all_told:
            self._settle()
        elif "settle" not in self._timers and not self._ending:
            self._timers["settle"] = self._loop.call_later(hear_s, self._settle)

    def _settle(self) -> None:
        if self._ending or self.failed.done():
            return
        pids = {process.rank: process.pid for process in self._processes}
        said: dict[str, list[int]] = {}
        for rank, problem in sorted(self._problems.items()):
            said.setdefault(problem, []).append(rank)
        problems = [
            f"{named_ranks(ranks)} {problem}" if len(ranks) > 1 else f"rank {ranks[0]} (pid {pids.get(ranks[0])}) {problem}"
            for problem, ranks in said.items()
        ]
        self._lose(ReplicaFailed("; ".join(problems).rstrip(".") + "."))

    def _crash(self, error: Exception) -> None:
        log.error("front end crashed", trace=error, error=error)
        if not self._ending and not self.failed.done():
            self._lose(ReplicaFailed(f"the front end itself failed: {type(error).__name__}: {error}"))

    def _lose(self, error: ReplicaFailed) -> None:
        self.failed.set_result(error)
        self._on_lost(error)
        for timer in self._timers.values():
            timer.cancel()
        for process in self._processes:
            process.kill()
        self.commands.fail(error)
        self.board.fail(error)
        ended = self._answers.end_all("error", str(error))
        level = logging.ERROR if self._all_ready.done() else logging.DEBUG  # the caller of a start logs why it failed
        log.at(level, "rank lost", ranks=sorted(self._problems), requests=ended, error=error)

    def _guard(self, act: Callable[..., None], *arguments: object) -> None:
        """Run a callback of the event loop, where an exception would be lost."""
        try:
            act(*arguments)
        except Exception as error:  # noqa: BLE001 - a bug of ours ends this start instead
            self._crash(error)


def _differ(name: str, one: Ready, other: Ready) -> bool:
    return bool(getattr(one, name) != getattr(other, name))
