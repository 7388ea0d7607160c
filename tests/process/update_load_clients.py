"""Clients that never stop asking, in every way that there is to ask, and write down what they were answered."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

TIMEOUT_S = 60.0
STREAMS = 8

_PREAMBLES = tuple(
    " ".join(f"{word} {number}" for number in range(length))
    for word, length in (("rule", 4), ("example", 12), ("remark", 25), ("paragraph", 45))
)  # the beginnings of many prompts: 27 to 530 tokens
_SHARES = (0.4, 0.3, 0.25, 0.05)
_TEXTS = 48  # few: they come again under other versions, and the tokenizer, which remembers texts, is soon full


@dataclass
class Answer:
    """One choice of a reply. `earliest` and `latest` are the commits whose tokens it can have, as the client saw them."""

    asked: str
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    reason: str | None = None
    max_tokens: int = 0
    earliest: int = 0
    latest: int = 0


@dataclass
class Course:
    """How far the updates have come: the last one that was asked for, and the last that was reported done."""

    begun: int = 0
    done: int = 0


class Load:
    """`tokens` counts what has been answered so far. Anything but an answer is raised by `stream`."""

    def __init__(self, url: str, course: Course, seed: int) -> None:
        self._url, self._course, self._seed = url, course, seed
        self.stopping = False
        self.asked = 0  # requests
        self.tokens = 0
        self.cached_tokens = 0
        self.answers: list[Answer] = []

    async def stream(self, number: int) -> None:
        """Ask one request after the other until `stopping`."""
        asker = Asker(self._seed, number)
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S) as client:
            while not self.stopping:
                path, body = asker.request()
                earliest = self._course.done
                self.asked += 1
                answers = await (self._streamed if body["stream"] else self._whole)(client, path, body)
                assert len(answers) == _wanted(body), f"{body}: {answers}"
                for answer in answers:
                    answer.max_tokens = body["max_tokens"]
                    answer.earliest, answer.latest = earliest, self._course.begun
                self.answers += answers

    async def _whole(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Answer]:
        reply = await client.post(path, json=body)
        assert reply.status_code == 200, f"{body}: {reply.status_code} {reply.text}"
        content = reply.json()
        answers: dict[int, Answer] = defaultdict(lambda: Answer(path))
        for choice in content["choices"]:
            self._take(answers[choice["index"]], choice)
        self._used(content["usage"])
        return list(answers.values())

    async def _streamed(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Answer]:
        answers: dict[int, Answer] = defaultdict(lambda: Answer(path))
        ended = False
        async with client.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200, f"{body}: {reply.status_code} {await reply.aread()!r}"
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line:
                    content = json.loads(line.removeprefix("data: "))
                    assert "error" not in content, f"{body}: {content}"
                    for choice in content["choices"]:
                        self._take(answers[choice["index"]], choice)
                    if content.get("usage"):
                        self._used(content["usage"])
        assert ended, f"{body}: the stream broke off"
        return list(answers.values())

    def _used(self, usage: dict[str, Any]) -> None:
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]

    def _take(self, answer: Answer, choice: dict[str, Any]) -> None:
        """A whole choice, or one more piece of it."""
        tokens = choice.get("token_ids", [])
        answer.tokens += tokens
        self.tokens += len(tokens)
        answer.logprobs += _logprobs(choice.get("logprobs"))
        if choice["finish_reason"] is not None:
            assert answer.finish is None, "an answer ended twice"
            answer.finish, answer.spans = choice["finish_reason"], choice["weight_versions"]
            answer.prompt = choice["prompt_token_ids"]
            answer.reason = (choice["finish_details"] or {}).get("reason")

    async def until(self, tokens: int) -> None:
        """Wait until so many tokens have been answered."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.tokens < tokens:
                await asyncio.sleep(0.002)


def _logprobs(given: dict[str, Any] | None) -> list[float]:
    if given is None:
        return []
    if "content" in given:
        return [one["logprob"] for one in given["content"]]
    return given["token_logprobs"]


class Asker:
    """Makes requests: greedy ones, whose answers are as long as they were asked to be."""

    def __init__(self, seed: int, number: int) -> None:
        common = np.random.default_rng(seed)
        self._endings = [_words(common) for _ in range(_TEXTS)]
        self._texts = [f"{common.choice(_PREAMBLES, p=_SHARES)} {ending}" for ending in self._endings]
        self._rng = np.random.default_rng([seed, number])

    def _one(self, texts: list[str]) -> str:
        return texts[self._rng.integers(len(texts))]

    def _happens(self, share: float) -> bool:
        return bool(self._rng.random() < share)

    def request(self) -> tuple[str, dict[str, Any]]:
        """Where to, and the body."""
        rng, stream, with_logprobs = self._rng, self._happens(0.75), self._happens(0.25)
        body: dict[str, Any] = {
            "model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": stream,
            "max_tokens": int(rng.integers(40, 151)),
        }  # fmt: skip
        if stream and self._happens(0.5):
            body["stream_options"] = {"include_usage": True}
        if self._happens(0.25):
            said = {"system": self._one(self._texts), "user": self._one(self._endings)}
            body["messages"] = [{"role": role, "content": text} for role, text in said.items()]
            return "/v1/chat/completions", body | ({"logprobs": True, "top_logprobs": 1} if with_logprobs else {})
        forms = (
            self._one(self._texts),
            rng.integers(256, size=rng.integers(1, 60)).tolist(),
            [self._one(self._texts), self._one(self._endings)],
        )
        body["prompt"] = forms[rng.choice(3, p=(0.6, 0.3, 0.1))]
        return "/v1/completions", body | ({"logprobs": 1} if with_logprobs else {})


def _words(rng: np.random.Generator) -> str:
    return " ".join(f"{number:x}" for number in rng.integers(1 << 16, size=rng.integers(1, 12)))


def _wanted(body: dict[str, Any]) -> int:
    """How many answers a request has: one for each of several texts."""
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str) else 1
