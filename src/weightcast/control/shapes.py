"""Answers as OpenAI writes them: JSON of whole answers and of the pieces of a stream.

Beside OpenAI's own fields a choice has `weight_versions` (which version made which tokens; in a stream with its last piece),
`finish_details`, and, if asked for, `token_ids`, `prompt_token_ids` and `routed_experts`. Every piece of a stream has
`weight_version`, the version that made its tokens.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec

from weightcast.control.choices import Choice, Piece
from weightcast.control.logprobs import chat_logprobs, text_logprobs
from weightcast.control.plan import Plan
from weightcast.control.tokenizer import Tokenizer
from weightcast.engines.embedded.messages import Routing

_encode = msgspec.json.Encoder().encode


class Shape:
    """Writes the answer to one request."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, *, request_id: str, model: str, created: int) -> None:
        self._plan, self._tokenizer = plan, tokenizer
        self._chat = plan.endpoint == "chat"
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {"id": request_id, "object": kind, "created": created, "model": model}
        chunk = {**self._head, "object": "chat.completion.chunk" if self._chat else kind}
        self._before = b"data: " + _encode(chunk)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if plan.include_usage else b"]}\n\n"
        self._opened: set[int] = set()

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer in one piece, complete or as far as it came."""
        return {**self._head, "choices": [self._choice(choice) for choice in choices], "usage": self._usage(choices)}

    def event(self, choice: Choice, piece: Piece) -> bytes:
        """The event for one output of the engine. The first of a chat's answer is preceded by one with the role."""
        index = choice.wanted.index
        content: dict[str, Any] = {"index": index, "weight_version": piece.version}
        before = b""
        if self._chat:
            content["delta"] = {"content": piece.text}
            if index not in self._opened:
                self._opened.add(index)
                role = {
                    "index": index,
                    "weight_version": piece.version,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
                before = self._before + _encode(role) + self._after
        else:
            content["text"] = piece.text
        content["logprobs"] = self._logprobs(choice, piece.start)
        content["finish_reason"] = choice.finish
        if self._plan.return_token_ids:
            content["token_ids"] = choice.tokens[piece.start :]
        if choice.finish is not None:
            content |= self._ending(choice)
        return before + self._before + _encode(content) + self._after

    def ending(self, choices: Sequence[Choice]) -> bytes:
        """The last events: what was used, if asked for, and the word that OpenAI ends streams with."""
        usage = b""
        if self._plan.include_usage:
            usage = self._before + b'],"usage":' + _encode(self._usage(choices)) + b"}\n\n"
        return usage + b"data: [DONE]\n\n"

    def _choice(self, choice: Choice) -> dict[str, Any]:
        content: dict[str, Any] = {"index": choice.wanted.index}
        if self._chat:
            content["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            content["text"] = choice.text
        content |= {"logprobs": self._logprobs(choice, 0), "finish_reason": choice.finish, **self._ending(choice)}
        if self._plan.return_token_ids:
            content["token_ids"] = choice.tokens
        return content

    def _ending(self, choice: Choice) -> dict[str, Any]:
        """What is known of a choice at its end."""
        content: dict[str, Any] = {"weight_versions": choice.spans, "finish_details": None}
        if choice.stop is not None:
            content["finish_details"] = {"stop": choice.stop}
        elif choice.reason:
            content["finish_details"] = {"reason": choice.reason}
        if self._plan.return_token_ids:
            content["prompt_token_ids"] = choice.wanted.prompt
        if self._plan.record_routing:
            content["routed_experts"] = _routing(choice.routing)
        return content

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        made = sum(len(choice.tokens) for choice in choices)
        cached = sum(choice.cached_tokens for choice in choices[:: self._plan.per_prompt])
        return {
            "prompt_tokens": self._plan.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self._plan.prompt_tokens + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _logprobs(self, choice: Choice, start: int) -> dict[str, Any] | None:
        if choice.wanted.sampling.logprobs is None:
            return None
        return chat_logprobs(choice, start, self._tokenizer) if self._chat else text_logprobs(choice, start, self._tokenizer)


def _routing(routing: Routing | None) -> dict[str, Any] | None:
    """As a later request can send it back."""
    return {"shape": routing.shape, "data": base64.b64encode(routing.data).decode()} if routing else None
