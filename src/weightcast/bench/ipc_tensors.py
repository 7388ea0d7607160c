"""What the bench of same-host updates moves: the BF16 tensors of a transformer of any size."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from weightcast.errors import InvalidInput
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import array_sum, root_of_sums

LAYERS = 10
LEAST_NBYTES = 1 << 20
_IN_LAYERS = 0.7  # of all elements; the rest are in the embedding and the head
_WIDER = 3  # the middle of an MLP
_FINITE = np.uint16(0xBFFF)  # without the top bit of the exponent
_FLIPS = (1, 2, 4)  # bits that are flipped in turn: no version equals one of the five before it


def tensor_shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """About a hundred tensors with about so many bytes in all: two large ones, many of some MiB, and small ones."""
    if nbytes < LEAST_NBYTES:
        raise InvalidInput(f"{nbytes} bytes are too few to be the tensors of a model: take {LEAST_NBYTES} or more.")
    elements = nbytes // DType.BF16.itemsize
    width = max(16, round(math.sqrt(_IN_LAYERS * elements / (LAYERS * (2.5 + 3 * _WIDER))) / 16) * 16)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        inside = {
            "input_layernorm": (width,),
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (width // 4, width),
            "self_attn.v_proj": (width // 4, width),
            "self_attn.o_proj": (width, width),
            "post_attention_layernorm": (width,),
            "mlp.gate_proj": (_WIDER * width, width),
            "mlp.up_proj": (_WIDER * width, width),
            "mlp.down_proj": (width, _WIDER * width),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in inside.items()}
    words = max(1, round((elements - sum(map(math.prod, shapes.values()))) / (2 * width)))
    return {
        "model.embed_tokens.weight": (words, width),
        **shapes,
        "model.norm.weight": (width,),
        "lm_head.weight": (words, width),
    }


class Model:
    """The tensors of a trainer: finite values, the same for the same size and seed."""

    def __init__(self, nbytes: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.asked_nbytes = nbytes
        self.tensors = {name: _random(shape, random) for name, shape in tensor_shapes(nbytes).items()}
        self.nbytes = sum(array.nbytes for array in self.tensors.values())

    def change(self, number: int) -> None:
        """Make it another version: every element differs."""
        for array in self.tensors.values():
            bits = array.view(np.uint16)
            np.bitwise_xor(bits, np.uint16(_FLIPS[number % len(_FLIPS)]), out=bits)

    def digest(self) -> str:
        """One digest of everything: the root digest of a version with these tensors."""
        return digest_of(self.tensors)


def _random(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    count = math.prod(shape)
    drawn = random.integers(0, 1 << 64, size=-(-count // 4), dtype=np.uint64).view(np.uint16)[:count]
    return (drawn & _FINITE).view(DType.BF16.numpy).reshape(shape)


def blank_tensors(nbytes: int) -> dict[str, Array]:
    """The tensors of a receiver before its first update, every page of them touched."""
    return {name: np.ones(shape, dtype=DType.BF16.numpy) for name, shape in tensor_shapes(nbytes).items()}


def digest_of(tensors: Mapping[str, Array]) -> str:
    """The root digest of BF16 tensors."""
    specs = {name: TensorSpec(name=name, dtype=DType.BF16, shape=array.shape) for name, array in tensors.items()}
    return root_of_sums((spec, str(array_sum(spec, tensors[name]))) for name, spec in specs.items())
