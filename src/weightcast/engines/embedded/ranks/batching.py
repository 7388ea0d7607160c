"""From spans of sequences to the batch of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch

from weightcast.engines.embedded.batch import Batch
from weightcast.engines.embedded.scheduling.sequence import Sequence


@dataclass(frozen=True)
class Span:
    """Tokens of one sequence from position `start` on; logits are wanted of the last `rows` of them."""

    sequence: Sequence
    start: int
    tokens: Items[int]
    rows: int

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.tokens)


def make_batch(spans: Items[Span], *, block_size: int, device: str) -> Batch:
    """One batch of all spans, in their order."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    starts = [0]
    for span in spans:
        tokens.extend(span.tokens)
        positions.extend(range(span.start, span.end))
        slots.extend(span.sequence.slots(span.start, len(span.tokens)))
        starts.append(len(tokens))
        rows.extend(range(len(tokens) - span.rows, len(tokens)))
    needed = [-(-span.end // block_size) for span in spans]
    width = max(needed)
    tables = [[*span.sequence.blocks[:count], *(0,) * (width - count)] for span, count in zip(spans, needed, strict=True)]
    return Batch(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        starts=tuple(starts),
        lengths=tuple(span.end for span in spans),
        tables=torch.tensor(tables, device=device),
        rows=torch.tensor(rows, dtype=torch.int64, device=device),
        replay=_replay(spans, device),
    )


def _replay(spans: Items[Span], device: str) -> torch.Tensor | None:
    """The experts that requests asked for, −1 where they did not."""
    asked = [span.sequence.replay for span in spans if span.sequence.replay is not None]
    if not asked:
        return None
    parts = []
    for span in spans:
        part = np.full((len(span.tokens), *asked[0].shape[1:]), -1, dtype=np.int64)
        if span.sequence.replay is not None:
            given = span.sequence.replay[span.start : span.end]
            part[: len(given)] = given
        parts.append(part)
    return torch.from_numpy(np.concatenate(parts)).to(device)
