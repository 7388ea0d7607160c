"""The policy that is trained: Qwen3 as a plain torch module, with the parameter names of its checkpoint.

The engine has a model of its own, which is sharded, fused and cannot be differentiated. This one is neither, and knows
nothing of it: that both give the same log-probabilities is a result, and not an assumption.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import nn

from weightcast.engines.embedded.model_config import DENSE, ModelConfig
from weightcast.errors import UnsupportedModel
from weightcast.store.checkpoint import Checkpoint


class Policy(nn.Module):
    """A causal language model in float32. Where the head is tied to the embedding, there is no parameter for it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.architecture != DENSE:
            raise UnsupportedModel(f"the policy must be a {DENSE}, not a {config.architecture}.")
        self.config = config
        self.model = _Decoder(config)
        self.lm_head = None if config.tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @classmethod
    def load(cls, directory: str | Path) -> Policy:
        """The policy of a checkpoint directory, its weights widened to float32."""
        policy = cls(ModelConfig.read(directory))
        weights = Checkpoint(Path(directory)).tensors()
        policy.load_state_dict({name: torch.from_numpy(array.astype(np.float32)) for name, array in weights})
        return policy

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The scores of every next token: (sequences, tokens) to (sequences, tokens, vocabulary)."""
        hidden = self.model(tokens)
        return F.linear(hidden, self.model.embed_tokens.weight) if self.lm_head is None else self.lm_head(hidden)

    def logprobs(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        """How likely each token from `start` on was, given all before it: (sequences, tokens − start)."""
        scores = self(tokens[:, :-1])[:, start - 1 :]
        chosen: torch.Tensor = torch.log_softmax(scores, dim=-1).gather(2, tokens[:, start:].unsqueeze(2)).squeeze(2)
        return chosen

    def rounded(self) -> dict[str, torch.Tensor]:
        """All parameters as they are published: in BF16, in memory of their own."""
        return {name: parameter.detach().to(torch.bfloat16) for name, parameter in self.named_parameters()}


class _Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._head_dim, self._theta = config.head_dim, config.rope_theta

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        rope = _rope(tokens.shape[1], self._head_dim, self._theta)
        for layer in self.layers:
            hidden = layer(hidden, rope)
        normed: torch.Tensor = self.norm(hidden)
        return normed


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = _Mlp(config)

    def forward(self, hidden: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rope)
        added: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return added


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self._head_dim = size
        self.q_proj = nn.Linear(hidden, config.heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, config.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, config.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(config.heads * size, hidden, bias=False)
        self.q_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        queries = _turned(self.q_norm(self._heads(self.q_proj(hidden))), rope)
        keys = _turned(self.k_norm(self._heads(self.k_proj(hidden))), rope)
        values = self._heads(self.v_proj(hidden))
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        out: torch.Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return out

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        """(sequences, tokens, heads × size) as (sequences, heads, tokens, size)."""
        sequences, tokens, _ = projected.shape
        return projected.view(sequences, tokens, -1, self._head_dim).transpose(1, 2)


class _Mlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


def _rope(length: int, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of all positions, (tokens, head size) each."""
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.arange(length).float().unsqueeze(1) * frequencies
    doubled = torch.cat((angles, angles), dim=1)
    return doubled.cos(), doubled.sin()


def _turned(heads: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * rope[0] + torch.cat((-second, first), dim=-1) * rope[1]
