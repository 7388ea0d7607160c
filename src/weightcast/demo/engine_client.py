"""What a trainer asks a running engine over HTTP: answers by the OpenAI API, updates, its health and its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from weightcast.clock import Deadline
from weightcast.errors import InvalidInput, ReplicaFailed
from weightcast.fleet.http_call import HttpCaller, Reply
from weightcast.tensors.boxes import Box
from weightcast.wire.decoding import decode

_LOOK_S = 10.0

_Kind = TypeVar("_Kind")


class Health(msgspec.Struct, frozen=True):
    """Whether requests are answered, and if not, why. `restarts` is how often all ranks were started again."""

    status: str
    state: str
    reason: str
    restarts: int
    version: str | None = None

    @property
    def ok(self) -> bool:
        """Whether requests are answered."""
        return self.status == "ok"


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens of an answer, and the version that made them."""

    start: int
    end: int
    version: str


class TokenLogprobs(msgspec.Struct, frozen=True):
    """How likely the engine thought each token of an answer."""

    token_logprobs: list[float]


class Choice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: TokenLogprobs
    weight_versions: list[VersionSpan]


class RankUpdate(msgspec.Struct, frozen=True):
    """How one rank took a version. `pause_s` is how long it did not compute."""

    mode: str
    bytes: int
    stage_s: float
    pause_s: float
    total_s: float


class LiveBox(msgspec.Struct, frozen=True):
    """A part of a tensor that a rank holds, and the digest of its live bytes."""

    box: Box
    digest: str


class RankDigests(msgspec.Struct, frozen=True):
    """What one rank holds, by the name of the tensor."""

    rank: int
    version: str
    digests: dict[str, list[LiveBox]]


class RankStats(msgspec.Struct, frozen=True):
    """One rank: its process, and how many answers it is at. Only rank 0 knows of those."""

    rank: int
    pid: int
    running: int


class _Answers(msgspec.Struct, frozen=True):
    choices: list[Choice]


class _Updated(msgspec.Struct, frozen=True):
    result: list[RankUpdate]


class _Digested(msgspec.Struct, frozen=True):
    result: list[RankDigests]


class _Stats(msgspec.Struct, frozen=True):
    data: list[RankStats]


class EngineClient:
    """Calls one server; any number of threads may. Whatever it cannot do now is `ReplicaFailed`, and may be tried again."""

    def __init__(self, url: str, *, model: str) -> None:
        self._http, self._model = HttpCaller(url), model
        self.url = self._http.url

    def health(self) -> Health:
        """How it is. Raises if there is nobody."""
        reply = self._http.call("GET", "/health", what="asking for its health", deadline=Deadline.after(_LOOK_S))
        return _decoded(reply, Health)

    def stats(self) -> list[RankStats]:
        """Its ranks, in their order."""
        return self._called("GET", "/v1/stats", None, _Stats, "asking for its ranks", Deadline.after(_LOOK_S)).data

    def complete(
        self, prompt: str, *, answers: int, tokens: int, seed: int, version: str, deadline: Deadline
    ) -> list[Choice]:
        """Sample answers of just so many tokens, all of them made by this version. Nothing but the last block is our own."""
        wanted = {
            "model": self._model, "prompt": prompt, "n": answers, "max_tokens": tokens, "seed": seed,
            "temperature": 1.0, "logprobs": 0,
            "ignore_eos": True, "return_token_ids": True, "weight_version": {"exact": version},
        }  # fmt: skip
        choices = self._called("POST", "/v1/completions", wanted, _Answers, "sampling answers", deadline).choices
        return sorted(choices, key=lambda choice: choice.index)

    def update(self, version: str, *, deadline: Deadline) -> list[RankUpdate]:
        """Bring all ranks to a version of their source, and wait until they serve it. One result per rank."""
        wanted = {"version": version, "timeout": deadline.remaining()}
        return self._called("POST", "/v1/update_weights", wanted, _Updated, f"committing {version}", deadline).result

    def digests(self, names: Sequence[str], *, deadline: Deadline) -> list[RankDigests]:
        """Digests of the live bytes that each rank holds of these tensors, taken now."""
        wanted = {"names": list(names), "timeout": deadline.remaining()}
        return self._called("POST", "/v1/weights/digest", wanted, _Digested, "taking digests", deadline).result

    def _called(
        self, method: str, path: str, body: dict[str, Any] | None, kind: type[_Kind], what: str, deadline: Deadline
    ) -> _Kind:
        reply = self._http.call(method, path, body, what=what, deadline=deadline)
        if reply.status == 200:
            return _decoded(reply, kind)
        said = f"the engine answered {reply.status} to {what}: {reply.body[:2000].decode(errors='replace')}"
        raise ReplicaFailed(said) if reply.status >= 500 else InvalidInput(said)


def _decoded(reply: Reply, kind: type[_Kind]) -> _Kind:
    try:
        return decode(reply.body, kind)
    except msgspec.DecodeError as error:
        raise ReplicaFailed(f"the engine answered {reply.status} with what is no {kind.__name__}: {error}.") from error
