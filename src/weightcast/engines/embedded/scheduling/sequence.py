"""A request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weightcast.engines.embedded.messages import Sampling
from weightcast.engines.embedded.scheduling.blocks import Node


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and answer, and how much of them is in the KV cache.

    `limit` is the number of tokens it can have in the end. The main model's keys and values of the first `computed` tokens
    are in `blocks`, the draft model's of the first `draft_computed`. `replay` has a row for each of the first tokens.

    `chain` is the place in the prefix cache behind its first `entered` blocks. It ends with the weight version under which
    the sequence began to be computed, since all later blocks depend on the earlier ones; None enters nothing more.
    """

    id: str
    tokens: list[int]
    prompt_length: int
    limit: int
    sampling: Sampling
    block_size: int
    record_routing: bool = False
    replay: npt.NDArray[np.int16] | None = None
    computed: int = 0
    draft_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    preemptions: int = 0
    chain: Node | None = None
    entered: int = 0

    @property
    def missing(self) -> int:
        """How many tokens have to be computed before the next one can be chosen."""
        return len(self.tokens) - self.computed

    def slot(self, position: int) -> int:
        """Where in the cache the token at `position` is."""
        return self.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def slots(self, start: int, count: int) -> list[int]:
        """Where in the cache `count` tokens from position `start` on are."""
        if count == 1:
            return [self.slot(start)]
        size, slots = self.block_size, list[int]()
        end = start + count
        while start < end:
            stop = min(end, start - start % size + size)
            first = self.slot(start)
            slots.extend(range(first, first + stop - start))
            start = stop
        return slots
