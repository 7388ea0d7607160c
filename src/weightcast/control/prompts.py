"""The parts of a body that may take several forms: prompts, messages, stop strings. Each finds all that is wrong."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightcast.control.problems import Problems
from weightcast.control.schemas import RoutedExperts
from weightcast.engines.embedded.messages import Routing

MAX_MESSAGES = 10_000
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000


@dataclass(frozen=True)
class Prompt:
    """Text or tokens, and where in the body they stand. A `rendered` chat already has its special tokens."""

    place: str
    content: str | list[int]
    rendered: bool = False


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_WITHOUT_EFFECT = ("name",)


def read_prompts(value: Any, problems: Problems) -> list[Prompt]:
    """A text, several texts, tokens, or several lists of tokens."""
    prompts = []
    if isinstance(value, str) or _are(int, value):
        prompts = [Prompt("prompt", value)]
    elif _are(str, value) or (_are(list, value) and all(_are(int, one) or not one for one in value)):
        prompts = [Prompt(f"prompt[{number}]", one) for number, one in enumerate(value)]
    else:
        problems.add(
            "prompt", "must be a text, a list of texts, a list of tokens or a list of lists of tokens, and not empty"
        )
    for prompt in prompts:
        if not prompt.content:
            problems.add(prompt.place, "must not be empty")
    return prompts


def _are(kind: type, value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {kind}


def check_tokens(prompt: Prompt, vocab_size: int, problems: Problems) -> None:
    """Tokens are numbers of the vocabulary."""
    if not isinstance(prompt.content, str) and prompt.content:
        outside = [token for token in (min(prompt.content), max(prompt.content)) if not 0 <= token < vocab_size]
        if outside:
            problems.add(prompt.place, f"the model has tokens 0 to {vocab_size - 1}, not {outside[0]}")


def read_messages(value: Any, problems: Problems) -> list[dict[str, str]]:
    """The messages of a chat, with the text of each in one piece."""
    if not isinstance(value, list) or not value:
        problems.add("messages", "must be a list with at least one message")
        return []
    if len(value) > MAX_MESSAGES:
        problems.add("messages", f"takes {MAX_MESSAGES} messages at most, not {len(value)}")
        return []
    return [_read_message(one, f"messages[{number}]", problems) for number, one in enumerate(value)]


def _read_message(message: Any, place: str, problems: Problems) -> dict[str, str]:
    if not isinstance(message, Mapping):
        problems.add(place, "must be an object with role and content")
        return {}
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        problems.add(f"{place}.role", f"must be one of {', '.join(_ROLES)}")
    for name, value in message.items():
        if name not in ("role", "content", *_WITHOUT_EFFECT) and value is not None and value != []:
            problems.add(f"{place}.{name}", "this server does not support it; leave it out")
    return {
        "role": _ROLES.get(str(role), ""),
        "content": _read_content(message.get("content"), f"{place}.content", problems),
    }


def _read_content(content: Any, place: str, problems: Problems) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not 0 < len(content) <= MAX_MESSAGES:
        problems.add(place, f"must be a text or a list of 1 to {MAX_MESSAGES} text parts")
        return ""
    texts = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if isinstance(text, str):
            texts.append(text)
        else:
            problems.add(f"{place}[{number}]", 'must be a text part: {"type": "text", "text": …}')
    return "".join(texts)


def read_stops(value: Any, problems: Problems) -> tuple[str, ...]:
    """Stop strings: none, one or several."""
    stops = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP_LENGTH for one in stops):
        problems.add("stop", f"must be a text, or a list of texts, of 1 to {MAX_STOP_LENGTH} characters")
        return ()
    if len(stops) > MAX_STOPS:
        problems.add("stop", f"takes {MAX_STOPS} texts at most, not {len(stops)}")
    return tuple(stops)


def read_routing(value: RoutedExperts | None, problems: Problems) -> Routing | None:
    """Experts to replay, as the engine takes them."""
    if value is None:
        return None
    try:
        data = base64.b64decode(value.data, validate=True)
    except (binascii.Error, ValueError):
        problems.add("routed_experts.data", "must be base64")
        return None
    tokens, layers, experts = value.shape
    if min(value.shape) < 1 or len(data) != 2 * tokens * layers * experts:
        problems.add(
            "routed_experts", f"{len(data)} bytes of data are not int16 numbers of shape {tokens} × {layers} × {experts}"
        )
        return None
    return Routing(shape=value.shape, data=data)
