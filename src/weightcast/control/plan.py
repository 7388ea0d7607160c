"""What a request asks of the engine, once everything that can be decided beforehand is decided."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weightcast.engines.embedded.messages import Routing, Sampling

Endpoint = Literal["completions", "chat"]

_SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class Wanted:
    """One answer: to which prompt, and how its tokens are chosen. `echo` is text to put before it."""

    index: int
    prompt: tuple[int, ...]
    sampling: Sampling
    echo: str = ""


@dataclass(frozen=True)
class Plan:
    """All answers that a request wants, `per_prompt` in a row to each prompt, and how they are returned.

    `prompt_tokens` counts a prompt once, however many answers it gets. `weight_version` is what the request asks of the
    version that answers it, as `LiveWeights.check_version` takes it.
    """

    endpoint: Endpoint
    choices: tuple[Wanted, ...]
    prompt_tokens: int
    per_prompt: int = 1
    stops: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    record_routing: bool = False
    replay: Routing | None = None
    timeout_s: float | None = None
    weight_version: Mapping[str, str] | None = None


def seed_for(seed: int | None, number: int) -> int:
    """The seed of the `number`-th answer to a prompt: the first has the request's own, the others differ and repeat.

    Without one it is random.
    """
    if seed is None:
        return secrets.randbits(63)
    if number == 0:
        return seed & _SEED_MASK
    mixed = (seed + number * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)  # SplitMix64
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (mixed ^ mixed >> 31) & _SEED_MASK
