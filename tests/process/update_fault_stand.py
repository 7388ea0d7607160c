"""A real replica of two ranks to try faults on, and the judge of what came of each."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from weightcast.control.statuses import status_of
from weightcast.engines.base import UpdateRequest, UpdateStatus
from weightcast.engines.embedded.messages import Output, Sampling, Submit
from weightcast.engines.embedded.replica.answers import Answer
from weightcast.engines.embedded.replica.backoff import Backoff
from weightcast.engines.embedded.replica.replica import Replica
from weightcast.engines.embedded.settings import EngineSettings
from weightcast.engines.states import ReplicaState
from weightcast.errors import DeadlineExceeded, NotReady, WeightcastError

from .update_fault_cases import FAILED, HANG_S, NEW, OLD, SHORT_S, Case
from .update_fault_world import ANSWER, DELTA_1, FULL_A, FULL_B, PROMPTS, World

PROGRAM = (sys.executable, str(Path(__file__).parent / "faulty_rank.py"))
HEARTBEAT_S = 3.0
QUICK_S = 3.0  # in the place of the 30 s that the front end gives the ranks for a command
SLACK_S = 45.0  # for what comes soon on a machine that is not ours alone
LONG = 300  # tokens of a request that is in flight during a fault
_COMMAND_S = "weightcast.engines.embedded.replica.transaction.COMMAND_S"


@dataclass
class InFlight:
    """A request that is read as its tokens come."""

    prompt: tuple[int, ...]
    answer: Answer
    outputs: list[Output] = field(default_factory=list)

    async def read(self) -> None:
        async for output in self.answer:
            self.outputs.append(output)


class Stand:
    """One replica, used by one case after the other: each must leave it healthy."""

    def __init__(self, world: World, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.world = world
        self._heartbeat_s = heartbeat_s
        self._numbers = itertools.count()
        self._warm: tuple[int, ...] = ()
        self.seen: Counter[tuple[str, str, str]] = Counter()
        self.replica: Replica
        self.runner: asyncio.Runner  # of all that is done here

    async def start(self) -> None:
        settings = EngineSettings(
            model_dir=str(self.world.model_dir), ranks=2, source=self.world.source, cache_nbytes=4 << 20, threads=1,
            heartbeat_s=self._heartbeat_s,
        )  # fmt: skip
        self.replica = Replica(settings, program=PROGRAM, backoff=Backoff(first_s=0.05, longest_s=0.1))
        await self.replica.start()

    async def close(self) -> None:
        await self.replica.close(drain_s=0)

    async def start_again(self) -> None:
        """After a case that failed: the next one gets a replica that it did not spoil."""
        self.clear_faults()
        await self.close()
        await self.start()

    # -- asking ----------------------------------------------------------------------------------------------------------

    def submit(self, prompt: tuple[int, ...], tokens: int) -> Answer:
        request = Submit(id=f"request-{next(self._numbers)}", prompt=prompt, sampling=Sampling(max_tokens=tokens))
        return self.replica.submit(request)

    async def fly(self, prompt: tuple[int, ...] = PROMPTS[0], tokens: int = LONG) -> tuple[InFlight, asyncio.Task[None]]:
        """A request that has begun to be answered."""
        flying = InFlight(prompt, self.submit(prompt, tokens))
        task = asyncio.create_task(flying.read())
        await self.until(lambda: bool(flying.outputs))
        return flying, task

    async def land(self, flying: InFlight, task: asyncio.Task[None], more: int = 4) -> set[str]:
        """See some more of an answer, unless it has ended, and end it. Each of its tokens must be of the version that is
        named for it. Returns these versions.
        """
        seen = len(flying.outputs)
        await self.until(lambda: task.done() or len(flying.outputs) >= seen + more)
        flying.answer.cancel()
        await task
        last = flying.outputs[-1]
        assert last.finish is not None
        assert last.finish != "error" or last.reason
        tokens = [token for output in flying.outputs for token in output.tokens]
        versions = [output.version for output in flying.outputs for _ in output.tokens]
        assert not self.world.wrong_tokens(flying.prompt, tokens, versions)
        return set(versions)

    async def until(self, fact: Any, patience_s: float = SLACK_S) -> None:
        """Wait for a fact; on failure tell what was last seen."""
        end = time.monotonic() + patience_s
        while not fact():
            assert time.monotonic() < end, self.replica.status
            await asyncio.sleep(0.01)

    async def update(self, version: str, **options: Any) -> UpdateStatus:
        """An update that must succeed."""
        status = self.replica.begin_update(UpdateRequest(**{"version": version, "timeout_s": SLACK_S} | options))
        return await self.replica.finish_update(status.id)

    async def warm_up(self) -> None:
        """The first delta of a process compiles, which takes longer than the deadline of some cases."""
        if self._warm != self.replica.status.pids:
            await self.bring_to(FULL_A)
            await self.update(DELTA_1)
            self._warm = self.replica.status.pids

    async def bring_to(self, version: str) -> None:
        """Serve this version, from the sound store."""
        elsewhere = self.replica.weights.source != self.world.source
        if elsewhere and self.replica.status.version == version:  # the same again would move nothing
            await self.update(FULL_B if version == FULL_A else FULL_A)
        if elsewhere or self.replica.status.version != version:
            await self.update(version, commit="copy")

    # -- faults ----------------------------------------------------------------------------------------------------------

    def plant(self, *faults: tuple[int, dict[str, Any]]) -> None:
        """Faults that strike in the next update."""
        for number, (rank, fault) in enumerate(faults):
            (self.world.model_dir / f"fault-{rank}-{number}.json").write_text(json.dumps(fault))

    def clear_faults(self) -> list[str]:
        """Remove what is left of the last case. Returns the faults that never struck."""
        unused = []
        for path in [path for word in ("fault", "struck", "here") for path in self.world.model_dir.glob(f"{word}-*.json")]:
            if path.name.startswith("fault-"):
                unused.append(f"{path.name}: {path.read_text()}")
            path.unlink()
        return unused

    async def met(self, rank: int, number: int = 0) -> None:
        """Wait until a rank waits at the point of its fault "meet"."""
        await self.until((self.world.model_dir / f"here-fault-{rank}-{number}.json").exists)

    def go_on(self, rank: int, number: int = 0) -> None:
        (self.world.model_dir / f"here-fault-{rank}-{number}.json").unlink()

    # -- a case ----------------------------------------------------------------------------------------------------------

    async def run(self, case: Case) -> None:
        """Try a case, and judge it: the right error in time, one whole version, and all as healthy as before."""
        if case.mode.startswith("delta") and case.timeout_s <= SHORT_S:
            await self.warm_up()
        await self.bring_to(FULL_A)
        flying, task = await self.fly()
        self.plant(*case.faults)
        restarts, began = self.replica.status.restarts, time.monotonic()
        request = UpdateRequest(version=case.target, commit=case.commit, timeout_s=case.timeout_s)
        try:
            with mock.patch(_COMMAND_S, QUICK_S) if case.quick_commands else nullcontext():
                error = await self.fails(request, patience_s=(SHORT_S + 2 * QUICK_S if case.quick_commands else 0) + SLACK_S)
            assert type(error) is case.error, f"{type(error).__name__}: {error}"
            if case.error is DeadlineExceeded:
                assert time.monotonic() - began < HANG_S, "it ended with what hung, and not by its deadline"
            if case.fatal:
                await self.until(lambda: self.replica.status.restarts > restarts)
            assert self.replica.status.restarts - restarts == case.fatal
        finally:
            unused = self.clear_faults()
        assert not unused
        if case.outcome == FAILED:
            await self.recover(case, flying, task)
        self.seen[case.fault, case.phase, f"{case.outcome} {status_of(type(error))}"] += 1
        told = await self.land(flying, task)
        assert told <= ({FULL_A, case.target} if case.outcome == NEW else {FULL_A})
        await self.judge({OLD: FULL_A, NEW: case.target, FAILED: self.replica.status.version}[case.outcome])
        await self.go_to_next(case)

    async def fails(self, request: UpdateRequest, *, patience_s: float = SLACK_S) -> WeightcastError:
        """The error that an update ends in, which must be told in all places alike."""
        status = self.replica.begin_update(request)
        async with asyncio.timeout(request.timeout_s + patience_s):
            with pytest.raises(WeightcastError) as caught:
                await self.replica.finish_update(status.id)
        status = self.replica.update_status(status.id)
        assert status.phase in ("failed", "cancelled")
        assert status.error is not None
        assert (status.error.code, status.error.message) == (caught.value.code, str(caught.value))
        assert status.ended is not None
        assert status.result is None
        return caught.value

    async def recover(self, case: Case, flying: InFlight, task: asyncio.Task[None]) -> None:
        """A replica that holds no whole version says so, ends what it was asked, and is mended by one call."""
        assert self.replica.status.state is ReplicaState.FAILED, self.replica.status
        assert not self.replica.status.healthy
        async with asyncio.timeout(SLACK_S):
            await task
        assert flying.outputs[-1].finish in ("error", "length")
        with pytest.raises(NotReady, match="FAILED"):
            self.submit(PROMPTS[0], 1)
        assert {rank.version for rank in (await self.replica.look_at_weights()).ranks} == {""}
        if (case.rank + len(case.mode)) % 2:
            status = self.replica.begin_recovery(UpdateRequest(timeout_s=SLACK_S))
        else:
            status = self.replica.begin_update(UpdateRequest(version=case.target, commit=case.commit, timeout_s=SLACK_S))
        await self.replica.finish_update(status.id)

    async def judge(self, version: str) -> None:
        """The replica serves exactly this version, on all ranks, and knows it."""
        replica = self.replica
        await self.until(lambda: replica.status.state is ReplicaState.READY)
        assert replica.status.healthy
        assert replica.status.version == version
        looked = await replica.look_at_weights()
        assert {rank.version for rank in looked.ranks} == {version}
        assert looked.update is None
        verified = await replica.verify(timeout_s=SLACK_S)
        assert [one["version"] for one in verified] == [version, version]
        looked = await replica.look_at_weights()
        assert {rank.state for rank in looked.ranks} == {"READY"}
        for prompt in PROMPTS:
            flying = InFlight(prompt, self.submit(prompt, ANSWER))
            async with asyncio.timeout(SLACK_S):
                await flying.read()
            assert {output.version for output in flying.outputs} == {version}
            assert [token for output in flying.outputs for token in output.tokens] == self.world.expected(version, prompt)

    async def go_to_next(self, case: Case) -> None:
        """The same update again, or where that takes long another one, works now."""
        if case.fatal or self.replica.status.version == case.target:
            await self.update(FULL_B if self.replica.status.version == FULL_A else FULL_A)
        else:
            await self.update(case.target, commit=case.commit)
            assert self.replica.status.version == case.target

    def table(self) -> str:
        """How often each fault ended how in each phase."""
        faults = list(dict.fromkeys(fault for fault, _, _ in self.seen))
        phases = list(dict.fromkeys(phase for _, phase, _ in self.seen))
        rows = [["", *faults]]
        for phase in phases:
            cells = [
                ", ".join(f"{count}× {how}" for (f, p, how), count in sorted(self.seen.items()) if (f, p) == (fault, phase))
                for fault in faults
            ]
            rows.append([phase, *cells])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
