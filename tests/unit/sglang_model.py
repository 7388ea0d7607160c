"""A small model whose layers and `load_weights` behave as those of SGLang's dense models do: fused, sliced, padded."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCAB, PADDED = 8, 4, 2, 4, 12, 10, 16
LAYERS = 2


def tensors(seed: int = 0, **changed: float) -> dict[str, np.ndarray]:
    """A checkpoint. `changed` adds to the tensors that have these words in their names."""
    rng = np.random.default_rng(seed)
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{at}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{at}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, FFN),
            f"{at}.input_layernorm.weight": (HIDDEN,),
        }
    made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for words, amount in changed.items():
        made |= {name: array + np.float32(amount) for name, array in made.items() if words in name}
    return made


def default_weight_loader(param: torch.Tensor, loaded: torch.Tensor) -> None:
    assert param.size() == loaded.size(), f"a weight of {tuple(loaded.size())} for a parameter of {tuple(param.size())}"
    param.data.copy_(loaded)


class UnquantizedLinearMethod:
    """Nothing is packed."""


class _Layer(nn.Module):
    def __init__(self, rank: int, ranks: int, *shape: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.quant_method: object = UnquantizedLinearMethod()
        self.weight = nn.Parameter(torch.zeros(*shape), requires_grad=False)
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def slice(self, loaded: torch.Tensor, axis: int) -> torch.Tensor:
        size = loaded.shape[axis] // self.ranks
        return loaded.narrow(axis, self.rank * size, size)


class _Norm(nn.Module):
    """Its parameter has no weight loader."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN), requires_grad=False)


class _Vocab(_Layer):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks, PADDED // ranks, HIDDEN)

    def weight_loader(self, param: torch.Tensor, loaded: torch.Tensor) -> None:
        assert loaded.shape == (VOCAB, HIDDEN), f"a table of {tuple(loaded.shape)}"
        rows = PADDED // self.ranks
        mine = loaded[self.rank * rows : (self.rank + 1) * rows]
        param[: len(mine)].data.copy_(mine)
        param[len(mine) :].data.fill_(0)


class _Fused(_Layer):
    def __init__(self, rank: int, ranks: int, sizes: dict[object, int]) -> None:
        self.sizes = {shard: size // ranks for shard, size in sizes.items()}
        super().__init__(rank, ranks, sum(self.sizes.values()), HIDDEN)

    def weight_loader(self, param: torch.Tensor, loaded: torch.Tensor, shard: object) -> None:
        start = 0
        for name, size in self.sizes.items():
            if name == shard:
                place, mine = param.data.narrow(0, start, size), self.slice(loaded, 0)
                assert place.shape == mine.shape, f"{tuple(mine.shape)} for {tuple(place.shape)}"
                place.copy_(mine)
            start += size


class _Row(_Layer):
    def __init__(self, rank: int, ranks: int, wide: int) -> None:
        super().__init__(rank, ranks, HIDDEN, wide // ranks)

    def weight_loader(self, param: torch.Tensor, loaded: torch.Tensor) -> None:
        mine = self.slice(loaded, 1)
        assert param.data.shape == mine.shape, f"{tuple(mine.shape)} for {tuple(param.data.shape)}"
        param.data.copy_(mine)


class _Block(nn.Module):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.qkv_proj = _Fused(rank, ranks, {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD})
        self.self_attn.o_proj = _Row(rank, ranks, HEADS * HEAD)
        self.mlp.gate_up_proj = _Fused(rank, ranks, {0: FFN, 1: FFN})
        self.mlp.down_proj = _Row(rank, ranks, FFN)
        self.input_layernorm = _Norm()


class Model(nn.Module):
    """`loads` tells the names of each call of its loader. `fail_after` tensors of `failures` calls an error is raised."""

    stacked = (
        ("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k"), ("qkv_proj", "v_proj", "v"),
        ("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1),
    )  # fmt: skip

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = _Vocab(rank, ranks)
        self.model.layers = nn.ModuleList(_Block(rank, ranks) for _ in range(LAYERS))
        self.model.norm = _Norm()
        self.lm_head = _Vocab(rank, ranks)
        self.loads: list[list[str]] = []
        self.fail_after, self.failures = 0, 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        trying = next(self.parameters()).is_meta
        if not hasattr(self, "_cached_params"):  # as some of SGLang's models do
            self._cached_params = dict(self.named_parameters())
        names: list[str] = []
        if not trying:
            self.loads.append(names)
        for name, loaded in weights:
            if not trying and self.failures and len(names) == self.fail_after:
                self.failures -= 1
                raise RuntimeError("no memory left on the device")
            names.append(name)
            for fused, part, shard in self.stacked:
                if f".{part}." in name:
                    param = self._cached_params[name.replace(part, fused)]
                    param.weight_loader(param, loaded, shard)  # type: ignore[attr-defined]
                    break
            else:
                param = self._cached_params.get(name)
                if param is not None:  # SGLang only warns of others
                    getattr(param, "weight_loader", default_weight_loader)(param, loaded)

    def bits(self) -> dict[str, bytes]:
        return {name: param.detach().numpy().tobytes() for name, param in self.named_parameters()}


def bits_of(arrays: dict[str, np.ndarray], rank: int = 0, ranks: int = 1) -> dict[str, bytes]:
    """What a model holds that was given a checkpoint by its own loader and nothing else."""
    model = Model(rank, ranks)
    model.load_weights((name, torch.from_numpy(array.copy())) for name, array in arrays.items())
    return model.bits()
