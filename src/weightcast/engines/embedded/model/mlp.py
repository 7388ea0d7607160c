"""The two kinds of MLP: one for all tokens, or experts of which each token visits a few."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import nn

from weightcast.engines.embedded.model.parallel import ColumnParallel, Ranks, RowParallel
from weightcast.engines.embedded.model.weights import Layer, WeightLayout, WeightPiece
from weightcast.engines.embedded.model_config import ModelConfig
from weightcast.engines.embedded.settings import Experts
from weightcast.tensors.boxes import Box


class Mlp(Layer):
    """SwiGLU with gate and up fused. Both weights are kept as (inputs, outputs): faster for batches of 4 to 16 on a CPU."""

    def __init__(self, config: ModelConfig, prefix: str, ranks: Ranks, *, dtype: torch.dtype) -> None:
        super().__init__()
        shape = (config.intermediate_size, config.hidden_size)
        box = Box.shard(shape, dim=0, rank=ranks.rank, ranks=ranks.size)
        self.gate_up_proj = ColumnParallel(
            [(f"{prefix}.{name}_proj.weight", shape, box) for name in ("gate", "up")], dtype=dtype, transposed=True
        )
        self.down_proj = RowParallel(f"{prefix}.down_proj.weight", shape[::-1], ranks, dtype=dtype)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual` plus the MLP of `x`."""
        return self.down_proj.forward(_swiglu(self.gate_up_proj.forward(x)), residual)


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    width = gate_up.shape[1] // 2
    return F.silu(gate_up[:, :width]).mul_(gate_up[:, width:])


class MoeBlock(Layer):
    """Experts stacked in two parameters: w13 (experts, 2 × width, hidden) and w2 (experts, hidden, width).

    "sharded" gives this rank a part of the experts, and the results are summed; "replicated" gives it all of them.
    """

    router: nn.Parameter
    w13: nn.Parameter
    w2: nn.Parameter

    def __init__(self, config: ModelConfig, prefix: str, ranks: Ranks, *, experts: Experts, dtype: torch.dtype) -> None:
        super().__init__()
        self._ranks = ranks
        self._sharded = experts == "sharded"
        self._per_token, self._normed = config.experts_per_token, config.norm_topk_prob
        count = config.experts // ranks.size if self._sharded else config.experts
        self._first = ranks.rank * count if self._sharded else 0
        self._count, self._experts = count, config.experts
        width, hidden = config.moe_intermediate_size, config.hidden_size
        self.declare("router", WeightLayout.whole(f"{prefix}.gate.weight", (config.experts, hidden)), dtype)
        self.declare("w13", self._stack(prefix, ("gate_proj", "up_proj"), (width, hidden)), dtype)
        self.declare("w2", self._stack(prefix, ("down_proj",), (hidden, width)), dtype)

    def _stack(self, prefix: str, names: tuple[str, ...], shape: tuple[int, int]) -> WeightLayout:
        pieces, elsewhere = [], []
        for expert in range(self._experts):
            index = expert - self._first
            for place, name in enumerate(names):
                source = f"{prefix}.experts.{expert}.{name}.weight"
                if 0 <= index < self._count:
                    target = Box((index, shape[0] * place, 0), (1, *shape))
                    pieces.append(WeightPiece(source, shape, Box.whole(shape), target))
                else:
                    elsewhere.append((source, shape))
        whole = (self._count, len(names) * shape[0], shape[1])
        return WeightLayout(whole, tuple(pieces), elsewhere=tuple(elsewhere))

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, replay: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual` plus the experts' answers, and the experts that each token went to.

        `replay` names the experts of tokens whose row is not −1; they are weighted by what the router thinks of them.
        """
        likely = F.softmax(F.linear(x, self.router), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(likely, self._per_token, dim=-1)
        if replay is not None:
            chosen = torch.where((replay < 0).any(dim=1, keepdim=True), chosen, replay)
            weights = likely.gather(1, chosen)
        if self._normed:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if not self._sharded:
            return self._visit(x, residual.clone(), chosen, weights.to(x.dtype)), chosen
        local = self._visit(
            x, residual.clone() if self._ranks.rank == 0 else torch.zeros_like(x), chosen, weights.to(x.dtype)
        )
        return self._ranks.all_reduce(local), chosen

    def _visit(self, x: torch.Tensor, total: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Add what this rank's experts say: tokens are sorted by expert, so that each expert computes once."""
        experts, order = chosen.flatten().sort(stable=True)
        tokens, weights = order // chosen.shape[1], weights.flatten()[order].unsqueeze(1)
        edges = torch.arange(self._first, self._first + self._count + 1, device=x.device)
        bounds = torch.searchsorted(experts, edges).tolist()
        for index in range(self._count):
            start, stop = bounds[index], bounds[index + 1]
            if start < stop:
                mine = tokens[start:stop]
                inner = _swiglu(F.linear(x[mine], self.w13[index]))
                total.index_add_(0, mine, F.linear(inner, self.w2[index]).mul_(weights[start:stop]))
        return total
