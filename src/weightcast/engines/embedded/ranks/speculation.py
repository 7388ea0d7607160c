"""Speculative decoding: the draft model proposes, the main model decides.

What the draft says never changes an answer, only how many tokens one pass of the main model makes. The main model's own
token at each position is a function of the tokens before, the seed and the position; a proposal stays if it is that token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weightcast.engines.embedded.ranks.batching import Span
from weightcast.engines.embedded.scheduling.scheduler import Chunk

Forward = Callable[[Sequence[Span]], torch.Tensor]


class Speculator:
    """Keeps the draft model's cache in step with the main model's, and makes proposals. Used by rank 0."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.drafted = 0
        self.accepted = 0

    def propose(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """For every chunk the tokens that the draft model would put behind it: as many as it has room for."""
        proposals: list[list[int]] = [[] for _ in chunks]
        for turn in range(max((chunk.draft for chunk in chunks), default=0)):
            taking = [index for index, chunk in enumerate(chunks) if chunk.draft > turn]
            logits = self._forward([self._span(chunks[index], proposals[index]) for index in taking])
            for index, token in zip(taking, logits.argmax(dim=-1).tolist(), strict=True):
                proposals[index].append(token)
        self.drafted += sum(map(len, proposals))
        return proposals

    def _span(self, chunk: Chunk, proposed: Sequence[int]) -> Span:
        sequence = chunk.sequence
        if proposed:
            return Span(sequence, len(sequence.tokens) + len(proposed) - 1, proposed[-1:], rows=1)
        behind = sequence.draft_computed  # the last proposals that stayed did not go through the draft model yet
        return Span(sequence, behind, sequence.tokens[behind:], rows=1)

    def settle(self, chunk: Chunk, proposed: int, accepted: int) -> None:
        """After the main model decided, before its tokens are appended: how much of the draft's cache is right."""
        if proposed:
            chunk.sequence.draft_computed = len(chunk.sequence.tokens) + min(accepted, proposed - 1)
            self.accepted += accepted

    def follow(self, chunks: Sequence[Chunk]) -> None:
        """Run the draft model over what the main model has just computed of chunks without proposals."""
        spans = []
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            spans.append(Span(sequence, sequence.draft_computed, sequence.tokens[sequence.draft_computed : end], rows=0))
            sequence.draft_computed = end
        if spans:
            self._forward(spans)
