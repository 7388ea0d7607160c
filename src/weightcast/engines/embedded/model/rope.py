"""Rotary position embeddings, as `transformers` computes them, from a table made once."""

from __future__ import annotations

import torch

from weightcast.engines.embedded.model.weights import Layer


class RotaryTable(Layer):
    """Cosines and signed sines of every position: shape (positions, 2, head size), in the model's dtype."""

    def __init__(self, *, head_dim: int, theta: float, positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._head_dim, self._theta, self._positions, self._dtype = head_dim, theta, positions, dtype
        self.table = torch.empty((positions, 2, head_dim), dtype=dtype, device="meta")

    def materialize(self, device: torch.device, *, weights: bool = True) -> None:  # noqa: ARG002 - it has none
        """Compute the table. The sine's first half is negated here, which saves it for every token."""
        places = torch.arange(0, self._head_dim, 2, dtype=torch.int64).to(device=device, dtype=torch.float32)
        frequencies = 1.0 / (self._theta ** (places / self._head_dim))
        angles = torch.arange(self._positions, dtype=torch.float32, device=device).unsqueeze(1) * frequencies
        cos, sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        self.table = torch.stack((torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)), dim=1)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines of these positions, each of shape (tokens, 1, head size)."""
        rows = self.table.index_select(0, positions)
        return rows[:, :1], rows[:, 1:]


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn heads of shape (tokens, heads, head size) by the angles of their tokens."""
    return (heads * cos).add_(heads.roll(heads.shape[-1] // 2, dims=-1).mul_(sin))
