"""Random checkpoints to run and test with: there is no model hub here.

The weights are scaled so that an untrained model still says different things after different words: the layers speak louder
than the embedding they add to, and printable characters louder than the rest, so that the output can be read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from weightcast.engines.embedded.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, tokenizer_files
from weightcast.engines.embedded.checkpoint_dir import PART_NBYTES, write_checkpoint_dir
from weightcast.errors import InvalidInput, NotFound
from weightcast.store.checkpoint import Checkpoint
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array

Preset = Literal["tiny", "small", "moe"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
DtypeName = Literal["float32", "bfloat16", "float16"]
STORED_AS: dict[str, DType] = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}

_SIZES: dict[Preset, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
    },
    "small": {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64,
    },
    "moe": {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0],
    },
}  # fmt: skip

_LOGIT_SPREAD = 2.0  # standard deviation of the logits of printable characters
_QUIET = 0.4  # how loud all other tokens are
_LAYER_GAIN = 2.0
_SPEAKING_GAIN = 4.0  # of the matrices that add to what came in


def init_checkpoint(
    directory: str | Path,
    preset: Preset = "tiny",
    *,
    seed: int = 0,
    tied: bool = True,
    dtype: DtypeName = "float32",
    part_nbytes: int = PART_NBYTES,
    **changes: Any,
) -> int:
    """Write a random checkpoint that this engine and `transformers` load; returns the bytes of its tensors.

    `changes` replace fields of the preset's config.json (`num_hidden_layers=4`). The same preset, seed and changes give the
    same weights; another seed gives another version of the same model. `directory` must not exist, or be empty: then it is
    refused with `InvalidInput`, and a failure leaves nothing behind.
    """
    if preset not in PRESETS or dtype not in STORED_AS or seed < 0:
        raise InvalidInput(
            f"no preset {preset!r} in {dtype!r} with seed {seed}: choose one of {', '.join(PRESETS)}, "
            f"one of {', '.join(STORED_AS)}, and a seed of 0 or more."
        )
    config = preset_config(preset, tied=tied, dtype=dtype) | changes
    return write_checkpoint_dir(
        Path(directory),
        config=config,
        tensors=random_tensors(config, seed=seed),
        files=companion_files(config),
        part_nbytes=part_nbytes,
    )


def step_checkpoint(directory: str | Path, base_dir: str | Path, *, share: float = 0.01, seed: int = 0) -> int:
    """Write a copy of a checkpoint in which a share of the weights differs, as after a training step.

    The lowest bit of each chosen element is flipped, at least one per tensor that is not empty. Returns the bytes of all
    tensors. `directory` must not exist, or be empty.
    """
    if not 0 <= share <= 1 or seed < 0:
        raise InvalidInput(f"share {share} and seed {seed}: the share must be between 0 and 1, and the seed 0 or more.")
    checkpoint = Checkpoint(Path(base_dir))
    files = dict(checkpoint.files())
    try:
        config = json.loads(files.pop("config.json"))
    except KeyError:
        raise NotFound(f"{base_dir} holds no config.json: name the directory of a whole checkpoint.") from None
    tensors = _stepped(checkpoint, share, seed)
    return write_checkpoint_dir(Path(directory), config=config, tensors=tensors, files=files, part_nbytes=PART_NBYTES)


def _stepped(checkpoint: Checkpoint, share: float, seed: int) -> Iterator[tuple[str, Array]]:
    for index, (name, array) in enumerate(checkpoint.tensors()):
        changed = array.copy()
        count = min(array.size, max(1, round(array.size * share))) if share else 0
        chosen = np.random.default_rng([seed, index]).choice(array.size, count, replace=False)
        lowest = changed.reshape(-1).view(np.uint8).reshape(array.size, -1)[:, 0]  # little-endian: the lowest byte is first
        lowest[chosen] ^= 1
        yield name, changed


def preset_config(preset: Preset, *, tied: bool, dtype: DtypeName) -> dict[str, Any]:
    """The config.json of a preset."""
    moe = "num_experts" in _SIZES[preset]
    return {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if moe else "qwen3",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        **_SIZES[preset],
    }


def companion_files(config: dict[str, Any]) -> dict[str, bytes]:
    """The small files beside the tensors: generation config and tokenizer."""
    generation = {"eos_token_id": [EOS_ID, PAD_ID], "pad_token_id": PAD_ID, "do_sample": False}
    return {
        "generation_config.json": json.dumps(generation, indent=2).encode(),
        **tokenizer_files(config["max_position_embeddings"]),
    }


def random_tensors(config: dict[str, Any], *, seed: int) -> Iterator[tuple[str, Array]]:
    """Every tensor of a checkpoint by its Hugging Face name, one at a time."""
    stored = STORED_AS[config["torch_dtype"]].numpy
    for index, (name, shape) in enumerate(tensor_shapes(config)):
        yield name, _random_tensor(name, shape, np.random.default_rng([seed, index])).astype(stored)


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors of a checkpoint."""
    hidden, head_dim, vocabulary = config["hidden_size"], config["head_dim"], config["vocab_size"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.self_attn.q_norm.weight", (head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (head_dim,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield from _mlp_shapes(config, layer, f"{prefix}.mlp")
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, hidden)


def _mlp_shapes(config: dict[str, Any], layer: int, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width, prefixes = config["hidden_size"], config["intermediate_size"], [prefix]
    experts = config.get("num_experts", 0)
    if experts and layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0:
        yield f"{prefix}.gate.weight", (experts, hidden)
        width, prefixes = config["moe_intermediate_size"], [f"{prefix}.experts.{expert}" for expert in range(experts)]
    for one in prefixes:
        yield f"{one}.gate_proj.weight", (width, hidden)
        yield f"{one}.up_proj.weight", (width, hidden)
        yield f"{one}.down_proj.weight", (hidden, width)


def _random_tensor(name: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    values = random.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:  # norms
        return 1 + np.float32(0.1) * values
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        # rows of equal length: an MTP head sees embeddings normalised, and would lose their lengths
        values /= np.sqrt((values * values).mean(axis=1, keepdims=True))
        values *= np.float32(_LOGIT_SPREAD / math.sqrt(shape[1])) * _loudness(shape[0])
        return values
    gain = _SPEAKING_GAIN if name.endswith(("o_proj.weight", "down_proj.weight")) else _LAYER_GAIN
    return values * np.float32(gain / math.sqrt(shape[1]))


def _loudness(vocabulary: int) -> NDArray[np.float32]:
    loudness = np.full((vocabulary, 1), _QUIET, dtype=np.float32)
    loudness[32:127] = 1
    loudness[ord("\n")] = 1
    return loudness
