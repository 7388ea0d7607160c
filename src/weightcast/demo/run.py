"""The loop: sample with the engine, learn, publish, commit; half-way a rank of the engine is killed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from weightcast import delta
from weightcast.clock import Deadline
from weightcast.demo.check import compare
from weightcast.demo.engine_process import START_S, EngineProcess
from weightcast.demo.policy import Policy
from weightcast.demo.records import RANKS, Committed, Finished, Happened, Recovery, RunSettings, Started, Step, Told
from weightcast.demo.rollouts import Group, Round, Sampler
from weightcast.demo.sources import Source, open_source
from weightcast.demo.task import PROMPTS
from weightcast.demo.training import Sampled, Trainer
from weightcast.engines.embedded.presets import init_checkpoint

ANSWERS = 16  # to each prompt
TOKENS = 16  # of each answer
MODEL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip

_ROLLOUT_S = 120.0
_UPDATE_S = 60.0
_LOOK_S = 0.002


def run(settings: RunSettings) -> Generator[Told]:
    """Run the demo, telling what happens as it happens. Nothing but what is in `out_dir` is left, whenever it is closed."""
    began = time.monotonic()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wc-demo-")))
        model_dir = scratch / "model"
        init_checkpoint(model_dir, "tiny", seed=settings.seed, dtype="bfloat16", **MODEL)
        source = stack.enter_context(open_source(settings.transport, scratch))
        engine = stack.enter_context(_engine(settings, model_dir, source.url, scratch))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # more of them wait for each other as soon as anything else wants a core
        loop = _Loop(settings, Policy.load(model_dir), source, engine)
        delta.warm_up()  # meanwhile the engine starts
        client = engine.wait_started(Deadline.after(START_S))
        sampler = stack.enter_context(Sampler(client, PROMPTS, answers=ANSWERS, tokens=TOKENS))
        stack.callback(engine.close)  # before the sampler, whose requests end with it
        first = loop.commit("step_0")
        yield loop.started(first, time.monotonic() - began)
        for number in range(1, settings.steps + 1):
            yield from loop.step(number, sampler)
        yield loop.finished(time.monotonic() - began)


def _engine(settings: RunSettings, model_dir: Path, source: str, scratch: Path) -> EngineProcess:
    log_path, batch = settings.out_dir / "engine.log", len(PROMPTS) * ANSWERS
    return EngineProcess(model_dir, ranks=RANKS, source=source, max_batch=batch, scratch=scratch, log_path=log_path)


class _Loop:
    """What lives from one step to the next: the policy, what was published last, and how to get it to the engine."""

    def __init__(self, settings: RunSettings, policy: Policy, source: Source, engine: EngineProcess) -> None:
        self._settings, self._source, self._engine = settings, source, engine
        self._trainer = Trainer(policy)
        self._published: Mapping[str, torch.Tensor] = {}
        self._version = ""
        self._recovery: Recovery | None = None
        self._began = time.monotonic()

    def commit(self, version: str) -> Committed:
        """Publish the weights as they are now, and have the engine commit them."""
        tensors = self._trainer.policy.rounded()
        published = self._source.publish(version, tensors)
        began = time.monotonic()
        ranks = self._engine.client.update(version, deadline=Deadline.after(_UPDATE_S))
        committed = Committed(
            version=version,
            kind=published.kind,
            mode="/".join(sorted({rank.mode for rank in ranks})),
            nbytes=published.nbytes,
            density=_density(self._published, tensors),
            publish_s=published.seconds,
            stage_s=max(rank.stage_s for rank in ranks),
            pause_s=max(rank.pause_s for rank in ranks),
            update_s=time.monotonic() - began,
        )
        self._published, self._version = tensors, version
        return committed

    def started(self, first: Committed, start_s: float) -> Started:
        """What is there before the first step."""
        return Started(
            url=self._engine.client.url,
            source=self._source.url,
            parameters=sum(tensor.numel() for tensor in self._published.values()),
            full_nbytes=sum(tensor.nbytes for tensor in self._published.values()),
            first=first,
            start_s=start_s,
        )

    def step(self, number: int, sampler: Sampler) -> Generator[Told]:
        """Answers by the version that was committed last, one step of the optimizer, and the next version."""
        began = time.monotonic()
        asked = sampler.round(
            self._version, seed=self._settings.seed * 100_000 + number, deadline=Deadline.after(_ROLLOUT_S)
        )
        asked.send()
        if number == self._settings.kill_step:
            yield from self._killed(number, asked)
        yield from self._collected(number, asked)
        rollout_s, groups = time.monotonic() - began, asked.groups
        began = time.monotonic()
        learned = self._trainer.step(_sampled(groups))
        train_s = time.monotonic() - began
        rewards = [worth for group in groups for worth in group.rewards]
        yield Step(
            number=number,
            reward=sum(rewards) / len(rewards),
            sample=_best(groups),
            tokens=len(rewards) * sampler.tokens,
            rollout_s=rollout_s,
            train_s=train_s,
            gap=learned.gap,
            committed=self.commit(f"step_{number}"),
        )

    def _killed(self, number: int, asked: Round) -> Generator[Told]:
        """Kill a rank while it computes answers, and wait until the engine has it back."""
        while not (asked.is_over or self._engine.is_busy()):
            asked.wait_for_first(_LOOK_S)
        rank, restarts = RANKS - 1, self._engine.client.health().restarts
        pid, began = self._engine.kill_rank(rank), time.monotonic()
        yield self._happened(number, f"rank {rank} (pid {pid}) killed with SIGKILL in the middle of the rollout")
        requests = len(asked.missing)
        failures = asked.collect()
        answers = len(failures) * ANSWERS
        lost = f"{len(failures)} of {requests} requests were lost ({answers} answers)"
        yield self._happened(number, f"{lost}; waiting for the ranks")
        version = self._engine.wait_healthy(Deadline.after(START_S), restarts=restarts + 1)
        self._recovery = Recovery(
            step=number, rank=rank, pid=pid, version=version, requests=requests, lost_requests=len(failures),
            lost_answers=answers, recovery_s=time.monotonic() - began,
        )  # fmt: skip
        yield self._happened(number, f"the engine is back at {version} after {self._recovery.recovery_s:.1f} s")
        asked.send()

    def _collected(self, number: int, asked: Round) -> Generator[Told]:
        """Wait for all answers. What the engine could not answer is asked again when it can, until the deadline."""
        while failures := asked.collect():
            yield self._happened(number, f"{len(failures)} requests failed and are sent again: {failures[0]}")
            self._engine.wait_healthy(Deadline.after(START_S))
            asked.send()

    def _happened(self, number: int, text: str) -> Happened:
        return Happened(number, text, time.monotonic() - self._began)

    def finished(self, total_s: float) -> Finished:
        """Compare the engine's weights with what the trainer published last."""
        found = compare(self._engine.client, self._version, self._published)
        return Finished(
            version=self._version,
            root_digest=found.root_digest,
            tensors=found.tensors,
            boxes=found.boxes,
            problems=found.problems,
            recovery=self._recovery,
            total_s=total_s,
        )


def _sampled(groups: list[Group]) -> Sampled:
    """The answers as the trainer takes them. A byte is a token, so prompts are their own bytes."""
    prompts = [list(group.prompt.encode()) for group in groups]
    rows = [prompt + choice.token_ids for prompt, group in zip(prompts, groups, strict=True) for choice in group.choices]
    told = [choice.logprobs.token_logprobs for group in groups for choice in group.choices]
    return Sampled(
        tokens=torch.tensor(rows),
        start=len(prompts[0]),
        logprobs=torch.tensor(told),
        rewards=torch.tensor([group.rewards for group in groups]),
    )


def _best(groups: list[Group]) -> str:
    pairs = [pair for group in groups for pair in zip(group.rewards, group.choices, strict=True)]
    return max(pairs, key=lambda pair: pair[0])[1].text


def _density(before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> float:
    """The share of weights whose bits are others than before; all of them where there was nothing."""
    if not before:
        return 1.0
    changed = sum(int((now[name].view(torch.int16) != tensor.view(torch.int16)).sum()) for name, tensor in before.items())
    return changed / sum(tensor.numel() for tensor in now.values())
