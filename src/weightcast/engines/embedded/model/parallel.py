"""Layers divided over the ranks of a replica, and what they ask of those ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import nn

from weightcast.engines.embedded.model.weights import Layer, Shape, WeightLayout, WeightPiece
from weightcast.tensors.boxes import Box


class Ranks(Protocol):
    """The ranks that hold one copy of a model, as one of them sees them."""

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; it may be the given tensor itself. Called also where there is one rank only."""


class OneRank:
    """A model that is not divided."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor


class RMSNorm(Layer):
    """Root-mean-square norm over the last dimension, computed in float32; its weight is on all ranks."""

    weight: nn.Parameter

    def __init__(self, source: str, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self._eps = eps
        self.eps = torch.empty((1,), device="meta")
        self.declare("weight", WeightLayout.whole(source, (size,)), dtype)

    def materialize(self, device: torch.device, *, weights: bool = True) -> None:
        """Give the weight memory. Epsilon is a tensor too: wrapping a number anew costs more than the sum itself."""
        super().materialize(device, weights=weights)
        self.eps = torch.full((1,), self._eps, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm the rows."""
        return rms_normed(x, self.eps).mul_(self.weight)


def rms_normed(x: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """Rows with a mean square of 1, rounded to their dtype before any weight is applied, as the models were trained.

    Several times faster on a CPU than `torch.nn.functional.rms_norm`.
    """
    wide = x if x.dtype is torch.float32 else x.float()
    scale = torch.add(eps, torch.sum(wide * wide, -1, keepdim=True), alpha=1 / x.shape[-1]).rsqrt_()
    return wide * scale if wide is x else (wide * scale).to(x.dtype)


class ColumnParallel(Layer):
    """Matrices whose outputs are divided over the ranks, fused into one parameter: this rank computes its boxes of rows.

    `transposed` keeps the weight as (inputs, outputs).
    """

    weight: nn.Parameter

    def __init__(self, sources: Sequence[tuple[str, Shape, Box]], *, dtype: torch.dtype, transposed: bool = False) -> None:
        super().__init__()
        self.transposed = transposed
        self.declare("weight", WeightLayout.rows(sources, transposed=transposed), dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of this rank, in the order of the sources."""
        return torch.mm(x, self.weight) if self.transposed else F.linear(x, self.weight)


class RowParallel(Layer):
    """A matrix whose inputs are divided over the ranks; the outputs are summed. Its weight is kept as (inputs, outputs)."""

    weight: nn.Parameter

    def __init__(self, source: str, shape: Shape, ranks: Ranks, *, dtype: torch.dtype) -> None:
        super().__init__()
        self._ranks = ranks
        box = Box.shard(shape, dim=1, rank=ranks.rank, ranks=ranks.size)
        self.declare("weight", WeightLayout.rows([(source, shape, box)], transposed=True), dtype)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual` plus the product. The first rank puts the residual into the sum."""
        local = torch.addmm(residual, x, self.weight) if self._ranks.rank == 0 else torch.mm(x, self.weight)
        return self._ranks.all_reduce(local)


class VocabParallel(Layer):
    """A table with a row per token, divided by tokens: an embedding, a head, or both at once where they are tied.

    The vocabulary is padded to a multiple of the ranks.
    """

    weight: nn.Parameter

    def __init__(self, source: str, shape: Shape, ranks: Ranks, *, dtype: torch.dtype) -> None:
        super().__init__()
        self._ranks = ranks
        vocabulary, width = shape
        held = -(-vocabulary // ranks.size)
        self._start = min(held * ranks.rank, vocabulary)
        self._count = min(held, vocabulary - self._start)
        self._held = held
        box, padding = Box((self._start, 0), (self._count, width)), None
        if held > self._count:
            padding = Box((self._count, 0), (held - self._count, width))
        if self._count:
            layout = WeightLayout((held, width), (WeightPiece(source, shape, box, Box((0, 0), box.shape)),), padding)
        else:
            layout = WeightLayout((held, width), (), padding, elsewhere=((source, shape),))
        self.declare("weight", layout, dtype)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of these tokens, whichever ranks hold them."""
        if self._ranks.size == 1:
            return self._ranks.all_reduce(F.embedding(tokens, self.weight))
        local = tokens - self._start
        elsewhere = (local < 0) | (local >= self._count)
        rows = F.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        return self._ranks.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of this rank's tokens in float32; those of the padding are −∞."""
        scores = F.linear(hidden, self.weight).float()
        if self._count < self._held:
            scores[:, self._count :] = float("-inf")
        return scores
