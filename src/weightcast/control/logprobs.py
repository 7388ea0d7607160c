"""Log-probabilities in OpenAI's two forms. Tokens that are not whole characters are written as their bytes."""

from __future__ import annotations

import math
from typing import Any

from weightcast.control.choices import Choice
from weightcast.control.tokenizer import Tokenizer
from weightcast.engines.embedded.messages import TokenLogprob

_IMPOSSIBLE = -9999.0  # what OpenAI writes for a probability of zero


def chat_logprobs(choice: Choice, start: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """For the tokens from `start` on of a chat's answer."""

    def named(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.bytes_of(token)
        return {"token": _name(raw), "logprob": _finite(logprob), "bytes": list(raw)}

    content = []
    for token, found in zip(choice.tokens[start:], choice.logprobs[start:], strict=True):
        top = [named(other, logprob) for other, logprob in found.top[: choice.wanted.sampling.logprobs]]
        content.append({**named(token, found.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(choice: Choice, start: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """For the tokens from `start` on of a completion. The chosen token is always among the top ones."""

    def named(token: int) -> str:
        return _name(tokenizer.bytes_of(token), "bytes:")

    def top(token: int, found: TokenLogprob) -> dict[str, float]:
        names: dict[str, float] = {}
        for other, logprob in (*found.top[: choice.wanted.sampling.logprobs], (token, found.logprob)):
            names.setdefault(named(other), _finite(logprob))  # two tokens may read the same: the likelier one counts
        return names

    tokens, found = choice.tokens[start:], choice.logprobs[start:]
    return {
        "tokens": [named(token) for token in tokens],
        "token_logprobs": [_finite(one.logprob) for one in found],
        "top_logprobs": [top(token, one) for token, one in zip(tokens, found, strict=True)],
        "text_offset": choice.offsets[start:],
    }


def _name(raw: bytes, prefix: str = "") -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE
