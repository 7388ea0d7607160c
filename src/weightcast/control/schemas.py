"""What may stand in the body of a request, for `/v1/completions` and `/v1/chat/completions`.

A field that is known but cannot be honoured is refused, unless its value asks for nothing. So is a field that is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import Field

from weightcast.control.admission import WeightVersion
from weightcast.control.fields import Strict, read_fields
from weightcast.control.problems import Problems

MAX_LOGPROBS = 20


class StreamOptions(Strict):
    """How a stream is written."""

    include_usage: bool = False


class RoutedExperts(Strict):
    """Experts to send tokens to: int16, little-endian, base64, of shape (tokens, MoE layers, experts per token)."""

    shape: tuple[int, int, int] = Field(strict=False)
    data: str


class _Request(Strict):
    """What both endpoints take. The last block is this server's own, as is `top_k`."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    user: Any = None
    metadata: Any = None
    store: Any = None

    timeout: float | None = Field(None, gt=0)
    ignore_eos: bool = False
    return_token_ids: bool = False
    return_routed_experts: bool = False
    routed_experts: RoutedExperts | None = None
    weight_version: WeightVersion | None = None


class CompletionRequest(_Request):
    """The body of `/v1/completions`."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class ChatRequest(_Request):
    """The body of `/v1/chat/completions`."""

    messages: Any
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None


def _one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: any(value == allowed and type(value) is type(allowed) for allowed in values)


def _zero(value: Any) -> bool:
    return type(value) in (int, float) and value == 0


_EMPTY = _one_of("", [], {})
_BOTH: dict[str, Callable[[Any], bool]] = {"logit_bias": _EMPTY, "presence_penalty": _zero, "frequency_penalty": _zero}
_REFUSED: dict[type[_Request], dict[str, Callable[[Any], bool]]] = {
    CompletionRequest: _BOTH | {"suffix": _EMPTY},
    ChatRequest: _BOTH
    | {
        "tools": _EMPTY, "tool_choice": _one_of("none", "auto"), "parallel_tool_calls": _one_of(True, False),
        "functions": _EMPTY, "function_call": _one_of("none", "auto"), "response_format": _one_of({"type": "text"}),
        "modalities": _one_of(["text"]), "audio": _EMPTY, "prediction": _EMPTY, "reasoning_effort": _EMPTY,
        "verbosity": _EMPTY, "web_search_options": _EMPTY, "moderation": _EMPTY,
        "service_tier": _one_of("auto", "default"),
    },
}  # fmt: skip

AnyRequest = TypeVar("AnyRequest", bound=_Request)


def read_request(kind: type[AnyRequest], content: dict[str, Any], problems: Problems) -> AnyRequest | None:
    """The request, or None if a field is wrong; then `problems` has every field that is."""
    content = {name: value for name, value in content.items() if not _is_refused(kind, name, value, problems)}
    best_of = content.pop("best_of", None) if kind is CompletionRequest else None
    if best_of is not None and best_of != (content.get("n") or 1):
        problems.add("best_of", "only the value of n is supported: all answers are returned")
    return read_fields(kind, content, problems)


def _is_refused(kind: type[_Request], name: str, value: Any, problems: Problems) -> bool:
    """Whether this is a field to leave out. It is a problem too, unless its value asks for nothing."""
    asks_for_nothing = _REFUSED[kind].get(name)
    if asks_for_nothing is None:
        return False
    if value is not None and not asks_for_nothing(value):
        problems.add(name, "this server does not support it; leave it out")
    return True
