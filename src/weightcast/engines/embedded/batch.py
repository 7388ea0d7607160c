"""A batch: what one forward pass computes. Sequences of different lengths lie one behind the other, without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """T new tokens of S sequences, int64 on the model's device unless said otherwise.

    The keys and values of a token go to cache slot `slots[t]`: block × block size + place in the block. Sequence s owns the
    tokens `starts[s]:starts[s + 1]`; with them it has `lengths[s]` tokens, whose blocks are `tables[s]`, padded with 0.
    Logits are wanted of the tokens `rows`. `replay` sends tokens to these experts: shape (T, MoE layers, experts per token),
    a row of −1 leaves the choice to the router.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    tables: torch.Tensor
    rows: torch.Tensor
    replay: torch.Tensor | None = None

    @property
    def sequences(self) -> int:
        """How many sequences there are."""
        return len(self.lengths)
