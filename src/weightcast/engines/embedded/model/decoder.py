"""Decoder layers, and the passage of a batch through a stack of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from weightcast.engines.embedded.batch import Batch
from weightcast.engines.embedded.model.attention import Attention
from weightcast.engines.embedded.model.cache import KVCache
from weightcast.engines.embedded.model.mlp import Mlp, MoeBlock
from weightcast.engines.embedded.model.parallel import Ranks, RMSNorm
from weightcast.engines.embedded.model.plan import AttentionPlan
from weightcast.engines.embedded.model.rope import RotaryTable
from weightcast.engines.embedded.model.weights import Layer
from weightcast.engines.embedded.model_config import ModelConfig
from weightcast.engines.embedded.settings import Experts
from weightcast.errors import InvalidInput


class DecoderLayer(Layer):
    """Attention and an MLP, each behind a norm and added to what came in."""

    def __init__(
        self, config: ModelConfig, prefix: str, ranks: Ranks, *, moe: bool, experts: Experts, dtype: torch.dtype
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(f"{prefix}.input_layernorm.weight", hidden, eps, dtype)
        self.attention = Attention(config, f"{prefix}.self_attn", ranks, dtype=dtype)
        self.mlp_norm = RMSNorm(f"{prefix}.post_attention_layernorm.weight", hidden, eps, dtype)
        self.mlp: Mlp | MoeBlock
        if moe:
            self.mlp = MoeBlock(config, f"{prefix}.mlp", ranks, experts=experts, dtype=dtype)
        else:
            self.mlp = Mlp(config, f"{prefix}.mlp", ranks, dtype=dtype)


class Decoder(Layer):
    """The layers of a model and its final norm. Not the embedding, not the head."""

    def __init__(self, config: ModelConfig, prefix: str, ranks: Ranks, *, experts: Experts, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._share = dtype, config.heads // ranks.size // config.local_kv_heads(ranks.size)
        self._routes = (len(config.moe_layers), config.experts_per_token)
        self.rope = RotaryTable(head_dim=config.head_dim, theta=config.rope_theta, positions=config.max_length, dtype=dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config, f"{prefix}.layers.{index}", ranks, moe=index in config.moe_layers, experts=experts, dtype=dtype
            )
            for index in range(config.layers)
        )
        self.norm = RMSNorm(f"{prefix}.norm.weight", config.hidden_size, config.rms_norm_eps, dtype)

    def forward(self, x: torch.Tensor, batch: Batch, cache: KVCache, replay: torch.Tensor | None) -> torch.Tensor:
        """The hidden states of all tokens behind the final norm. Keys, values and chosen experts are put into the cache."""
        if replay is not None and replay.shape[1:] != self._routes:
            raise InvalidInput(f"a routing of shape {list(replay.shape)} cannot be replayed: this model has {self._routes}.")
        plan = AttentionPlan(batch, block_size=cache.block_size, share=self._share, dtype=self._dtype)
        rope = self.rope.at(batch.positions)
        visited: list[torch.Tensor] = []
        for layer, cached in zip(self.layers, cache.layers, strict=True):
            assert isinstance(layer, DecoderLayer)  # noqa: S101 - tells mypy what a ModuleList holds
            x = layer.attention.forward(layer.input_norm.forward(x), x, rope, plan, cached)
            normed = layer.mlp_norm.forward(x)
            if isinstance(layer.mlp, Mlp):
                x = layer.mlp.forward(normed, x)
            else:
                given = None if replay is None else replay[:, len(visited)]
                x, chosen = layer.mlp.forward(normed, x, given)
                visited.append(chosen)
        _record(visited, batch, cache)
        return self.norm.forward(x)


def _record(visited: Sequence[torch.Tensor], batch: Batch, cache: KVCache) -> None:
    if visited and cache.routing is not None:
        cache.routing.index_copy_(0, batch.slots, torch.stack(tuple(visited), dim=1).to(torch.int16))
