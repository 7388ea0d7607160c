"""What a model remembers of the tokens it has seen: keys and values by slot, and what routing and drafting need."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightcast.engines.embedded.model_config import ModelConfig


@dataclass(frozen=True)
class KVCache:
    """The cache of one rank. Slot = block × `block_size` + place in the block.

    `layers[n]` has shape (slots, 2, local key heads, head size): the keys of layer n and its values, so that one copy moves
    both. `routing` holds the experts of each token, int16 of shape (slots, MoE layers, experts per token), `hidden` its
    final hidden state for an MTP head; None if not asked for. A forward pass reads only slots of the batch's own sequences,
    so what is left in the others never matters.
    """

    layers: tuple[torch.Tensor, ...]
    block_size: int
    routing: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        ranks: int,
        *,
        slots: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        hidden: bool = False,
    ) -> KVCache:
        """Make the cache of one of `ranks` ranks. It is zeroed, so that its memory is really there when this returns."""
        shape = (slots, 2, config.local_kv_heads(ranks), config.head_dim)
        routing = None
        if config.moe_layers:
            chosen = (slots, len(config.moe_layers), config.experts_per_token)
            routing = torch.zeros(chosen, dtype=torch.int16, device=device)
        return cls(
            layers=tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)),
            block_size=block_size,
            routing=routing,
            hidden=torch.zeros((slots, config.hidden_size), dtype=dtype, device=device) if hidden else None,
        )

    @staticmethod
    def nbytes_per_slot(config: ModelConfig, ranks: int, *, dtype: torch.dtype, hidden: bool = False) -> int:
        """Bytes that one token takes on one rank."""
        elements = config.layers * 2 * config.local_kv_heads(ranks) * config.head_dim
        elements += config.hidden_size if hidden else 0
        return elements * dtype.itemsize + 2 * len(config.moe_layers) * config.experts_per_token

    @property
    def slots(self) -> int:
        """How many tokens it holds."""
        return self.layers[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in (*self.layers, self.routing, self.hidden) if tensor is not None)
