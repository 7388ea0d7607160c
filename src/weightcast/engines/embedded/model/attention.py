"""Attention with grouped heads, norms on queries and keys, rotary positions and a paged cache."""

from __future__ import annotations

import torch
from torch import nn

from weightcast.engines.embedded.model.parallel import ColumnParallel, Ranks, RowParallel, rms_normed
from weightcast.engines.embedded.model.plan import AttentionPlan
from weightcast.engines.embedded.model.rope import rotate
from weightcast.engines.embedded.model.weights import Layer, WeightLayout, WeightPiece
from weightcast.engines.embedded.model_config import ModelConfig
from weightcast.tensors.boxes import Box


class Attention(Layer):
    """The heads of one rank. Where there are more ranks than key heads, neighbouring ranks hold the same key head."""

    norms: nn.Parameter

    def __init__(self, config: ModelConfig, prefix: str, ranks: Ranks, *, dtype: torch.dtype) -> None:
        super().__init__()
        size, hidden = config.head_dim, config.hidden_size
        self._head_dim, self._epsilon = size, config.rms_norm_eps
        self._kinds = self._eps = torch.empty((0,), device="meta")
        self._queries = config.heads // ranks.size
        self._keys = config.local_kv_heads(ranks.size)
        first = ranks.rank * config.kv_heads // ranks.size
        held = Box((first * size, 0), (self._keys * size, hidden))
        queries, keys = (config.heads * size, hidden), (config.kv_heads * size, hidden)
        self.qkv_proj = ColumnParallel(
            [
                (f"{prefix}.q_proj.weight", queries, Box.shard(queries, dim=0, rank=ranks.rank, ranks=ranks.size)),
                (f"{prefix}.k_proj.weight", keys, held),
                (f"{prefix}.v_proj.weight", keys, held),
            ],
            dtype=dtype,
        )
        norms = [
            WeightPiece(f"{prefix}.{name}_norm.weight", (size,), Box.whole((size,)), Box((row, 0), (1, size)))
            for row, name in enumerate(("q", "k"))
        ]
        self.declare("norms", WeightLayout((2, size), tuple(norms)), dtype)
        self.o_proj = RowParallel(f"{prefix}.o_proj.weight", (hidden, config.heads * size), ranks, dtype=dtype)

    def materialize(self, device: torch.device, *, weights: bool = True) -> None:
        """Give the weights memory, and note which heads are queries and which are keys."""
        super().materialize(device, weights=weights)
        self._kinds = torch.tensor([0] * self._queries + [1] * self._keys, device=device)
        self._eps = torch.full((1,), self._epsilon, device=device)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionPlan,
        cached: torch.Tensor,
    ) -> torch.Tensor:
        """`residual` plus what the tokens `x` take from their sequences. Their keys and values are put into `cached`."""
        queries, keys = self._queries, self._keys
        heads = self.qkv_proj.forward(x).view(len(x), queries + 2 * keys, self._head_dim)
        # Queries and keys are normed and turned together; only the weights of the norms differ.
        normed = rms_normed(heads[:, : queries + keys], self._eps).mul_(self.norms.index_select(0, self._kinds))
        turned = rotate(normed, *rope)
        heads[:, queries : queries + keys] = turned[:, queries:]
        fresh = heads[:, queries:].view(len(x), 2, keys, self._head_dim)
        cached.index_copy_(0, plan.slots, fresh)
        return self.o_proj.forward(plan.attend(turned[:, :queries], fresh, cached), residual)
