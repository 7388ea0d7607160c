"""Commands: one after the other, to all ranks, done when every rank has acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.embedded.messages import Acknowledged, Action, Command, Job
from weightcast.engines.embedded.replica.verdicts import joined_error
from weightcast.errors import DeadlineExceeded, ReplicaFailed, WeightcastError


class _Pending:
    """A command that runs. `done` is set when all ranks have answered."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answers: dict[int, Acknowledged] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Commands:
    """The commands of one start of the ranks. Ids count up from 1, so an answer is never taken for that of another."""

    def __init__(self, ranks: int, send: Callable[[int, Command], None]) -> None:
        self._ranks, self._send = range(ranks), send
        self._lock = asyncio.Lock()  # first come, first served
        self._last = 0
        self._pending: _Pending | None = None
        self._failure: WeightcastError | None = None

    async def execute(self, action: Action, timeout_s: float) -> list[Any]:
        """One result per rank, in their order; see `run`."""
        return (await self.run(action, timeout_s))[1]

    async def begin(self, action: Job, timeout_s: float) -> int:
        """Have all ranks begin a job. Returns its number, under which they report."""
        return (await self.run(action, timeout_s))[0]

    async def run(self, action: Action, timeout_s: float) -> tuple[int, list[Any]]:
        """The command's number, and one result per rank, in their order. `timeout_s` includes waiting for earlier commands.

        A rank that has not answered after a third of the time is sent the command again, which it executes once all the
        same. After `DeadlineExceeded` the ranks that did not answer may still execute it.
        """
        deadline = Deadline.after(timeout_s)
        name = type(action).__name__
        try:
            async with asyncio.timeout(timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlineExceeded(f"command {name}, waiting for an earlier one,", timeout_s) from None
        try:
            pending = self._begin()
            self._post(pending, action)
            if not await _settled(pending.done, min(timeout_s / 3, deadline.remaining())):
                self._post(pending, action)
                await _settled(pending.done, deadline.remaining())
            return pending.number, self._results(pending, name, timeout_s)
        finally:
            self._pending = None
            self._lock.release()

    def announce(self, action: Action) -> None:
        """Send a command whose answers nobody waits for. Ranks that cannot be reached are left out."""
        self._last += 1
        for rank in self._ranks:
            try:
                self._send(rank, _command(self._last, action))
            except ReplicaFailed:
                continue

    def acknowledge(self, answer: Acknowledged) -> None:
        """An answer came. Late and repeated ones are fine; one to a command that was never given is `ReplicaFailed`."""
        if not 1 <= answer.id <= self._last:
            raise ReplicaFailed(f"acknowledged command {answer.id}, which was never given")
        pending = self._pending
        if pending is not None and pending.number == answer.id and answer.rank not in pending.answers:
            pending.answers[answer.rank] = answer
            if len(pending.answers) == len(self._ranks) and not pending.done.done():
                pending.done.set_result(None)

    def fail(self, error: WeightcastError) -> None:
        """No rank will answer any more: the command that runs and all later ones raise this. The first cause counts."""
        self._failure = self._failure or error
        if self._pending is not None and not self._pending.done.done():
            self._pending.done.set_result(None)

    def _begin(self) -> _Pending:
        self._last += 1
        self._pending = _Pending(self._last)
        return self._pending

    def _post(self, pending: _Pending, action: Action) -> None:
        if self._failure is not None:
            raise self._failure
        for rank in self._ranks:
            if rank not in pending.answers:
                self._send(rank, _command(pending.number, action))

    def _results(self, pending: _Pending, name: str, timeout_s: float) -> list[Any]:
        missing = [rank for rank in self._ranks if rank not in pending.answers]
        if missing and self._failure is not None:
            raise self._failure
        if missing:
            ranks = ", ".join(map(str, missing))
            raise DeadlineExceeded(f"command {name} (id {pending.number}) on rank(s) {ranks}", timeout_s)
        answers = [pending.answers[rank] for rank in self._ranks]
        errors = {answer.rank: answer.error for answer in answers if answer.error}
        if errors:
            raise joined_error(f"command {name}", errors, len(answers))
        return [answer.result for answer in answers]


def _command(number: int, action: Action) -> Command:
    """With the ids that the ranks log."""
    ids = logs.ids()
    return Command(id=number, action=action, request_id=ids.get("request_id", ""), update_id=ids.get("update_id", ""))


async def _settled(done: asyncio.Future[None], timeout_s: float) -> bool:
    finished, _ = await asyncio.wait([done], timeout=timeout_s)
    return bool(finished)
