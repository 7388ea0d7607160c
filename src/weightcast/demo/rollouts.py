"""Rollouts: groups of answers that the running engine samples, one request of the OpenAI API per prompt, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from weightcast.clock import Deadline
from weightcast.demo.engine_client import Choice, EngineClient
from weightcast.demo.task import reward
from weightcast.errors import DeadlineExceeded, ReplicaFailed

_SEEDS_PER_STEP = 1000


@dataclass(frozen=True)
class Group:
    """The answers to one prompt, and what each is worth."""

    prompt: str
    choices: list[Choice]
    rewards: list[float]


class Round:
    """The requests of one step. Those that failed can be sent again, and only those."""

    def __init__(self, sampler: Sampler, version: str, seed: int, deadline: Deadline) -> None:
        self._sampler, self._version, self._seed, self._deadline = sampler, version, seed, deadline
        self._groups: dict[int, Group] = {}
        self._futures: dict[int, Future[Group]] = {}

    @property
    def missing(self) -> list[int]:
        """The prompts that have no answers yet."""
        return [index for index in range(len(self._sampler.prompts)) if index not in self._groups]

    def send(self) -> None:
        """Send the requests that are missing."""
        for index in self.missing:
            self._futures[index] = self._sampler.submit(index, self._version, self._seed, self._deadline)

    @property
    def is_over(self) -> bool:
        """Whether no request is under way any more."""
        return all(future.done() for future in self._futures.values())

    def collect(self) -> list[ReplicaFailed]:
        """Wait for what is under way; gives what the requests failed with that the engine could not answer."""
        failures = []
        for index, future in self._futures.items():
            try:
                self._groups[index] = future.result(timeout=self._deadline.remaining())
            except ReplicaFailed as error:
                failures.append(error)
            except TimeoutError as error:
                raise DeadlineExceeded("sampling answers", self._deadline.seconds) from error
        self._futures.clear()
        return failures

    def wait_for_first(self, timeout_s: float) -> None:
        """Wait until any request is answered, for so long at most."""
        wait(self._futures.values(), timeout=timeout_s, return_when=FIRST_COMPLETED)

    @property
    def groups(self) -> list[Group]:
        """The answers to all prompts, in their order."""
        return [self._groups[index] for index in sorted(self._groups)]


class Sampler:
    """Sends the requests of a step, each from a thread of its own."""

    def __init__(self, engine: EngineClient, prompts: Sequence[str], *, answers: int, tokens: int) -> None:
        self.prompts, self.answers, self.tokens = prompts, answers, tokens
        self._engine = engine
        self._pool = ThreadPoolExecutor(max_workers=len(prompts), thread_name_prefix="rollout")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def round(self, version: str, *, seed: int, deadline: Deadline) -> Round:
        """The requests of one step, all of which this version must answer."""
        return Round(self, version, seed, deadline)

    def submit(self, index: int, version: str, seed: int, deadline: Deadline) -> Future[Group]:
        """One request, in the background."""
        return self._pool.submit(self._ask, index, version, seed * _SEEDS_PER_STEP + index, deadline)

    def _ask(self, index: int, version: str, seed: int, deadline: Deadline) -> Group:
        prompt = self.prompts[index]
        choices = self._engine.complete(
            prompt, answers=self.answers, tokens=self.tokens, seed=seed, version=version, deadline=deadline
        )
        _check(choices, version, answers=self.answers, tokens=self.tokens)
        return Group(prompt, choices, [reward(choice.text, self.tokens) for choice in choices])


def _check(choices: Sequence[Choice], version: str, *, answers: int, tokens: int) -> None:
    """Every token must have been made by the version that was asked for, and must have come."""
    spans = {(span.start, span.end, span.version) for choice in choices for span in choice.weight_versions}
    if spans != {(0, tokens, version)}:
        raise ReplicaFailed(f"answers of {tokens} tokens by {version} were asked for, and {sorted(spans)} came.")
    counts = {(len(choice.token_ids), len(choice.logprobs.token_logprobs)) for choice in choices}
    if len(choices) != answers or counts != {(tokens, tokens)}:
        raise ReplicaFailed(f"{answers} answers of {tokens} tokens were asked for; {len(choices)} came of {sorted(counts)}.")
