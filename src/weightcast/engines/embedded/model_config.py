"""What a checkpoint's config.json says about its model, and whether this engine can run it. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightcast.engines.embedded.settings import Experts
from weightcast.errors import NotFound, UnsupportedModel
from weightcast.store.checkpoint import Checkpoint
from weightcast.store.files import read_small

DENSE, MOE, MTP = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3MTP"
ARCHITECTURES = (DENSE, MOE, MTP)

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FILE_LIMIT_NBYTES = 16 << 20


@dataclass(frozen=True)
class ModelConfig:
    """One model. `dtype` is the checkpoint's own ("float32", "bfloat16" or "float16"); `max_length` counts tokens.

    `moe_layers` are the numbers of the layers that have `experts` instead of one MLP. An MTP head has no embedding and no
    head of its own: it uses those of the main model.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_length: int
    tied: bool
    dtype: str
    eos_ids: tuple[int, ...]
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    moe_layers: tuple[int, ...] = ()

    @classmethod
    def read(cls, directory: str | Path) -> ModelConfig:
        """Read `config.json` and `generation_config.json`; `UnsupportedModel` lists everything that cannot be run."""
        directory = Path(directory)
        fields = _read_json(directory / "config.json")
        if fields is None:
            raise NotFound(f"{directory} holds no config.json: it is not the directory of a checkpoint.")
        fields = _with_eos(fields, _read_json(directory / "generation_config.json") or {})
        if fields.get("dtype") is None and fields.get("torch_dtype") is None:
            fields["dtype"] = _stored_dtype(directory)
        return cls.parse(fields, where=str(directory))

    @classmethod
    def parse(cls, fields: Mapping[str, Any], *, where: str) -> ModelConfig:
        """The same from the contents of `config.json`."""
        reader = _Fields(fields)
        config = _parse(reader)
        if reader.problems:
            raise UnsupportedModel(f"the model in {where} cannot be run here:" + _lines(reader.problems))
        return config

    @property
    def mtp(self) -> bool:
        """Whether it is a head that drafts with the hidden states of a main model."""
        return self.architecture == MTP

    def local_kv_heads(self, ranks: int) -> int:
        """Key heads on one rank. Where there are more ranks than heads, neighbouring ranks hold the same one."""
        return max(1, self.kv_heads // ranks)

    def check_ranks(self, ranks: int, *, experts: Experts = "sharded") -> None:
        """Raise `UnsupportedModel`, listing everything that cannot be divided over this many ranks."""
        divided = {"num_attention_heads": self.heads}
        if len(self.moe_layers) < self.layers:
            divided["intermediate_size"] = self.intermediate_size
        if self.moe_layers and experts == "sharded":
            divided["num_experts"] = self.experts
        problems = [f"{name} is {size}, which {ranks} does not divide" for name, size in divided.items() if size % ranks]
        if self.kv_heads % ranks and ranks % self.kv_heads:
            problems.append(f"num_key_value_heads is {self.kv_heads}: neither it nor {ranks} divides the other")
        if problems:
            raise UnsupportedModel(f"the model cannot be divided over {ranks} ranks:" + _lines(problems))


def _lines(problems: list[str]) -> str:
    return "".join(f"\n  {problem}" for problem in problems)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        fields = json.loads(read_small(path, _FILE_LIMIT_NBYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise UnsupportedModel(f"{path} is not a JSON object.")
    return fields


def _with_eos(fields: dict[str, Any], generation: dict[str, Any]) -> dict[str, Any]:
    given = generation.get("eos_token_id")
    return fields | ({"eos_token_id": given} if given is not None else {})


def _stored_dtype(directory: Path) -> str | None:
    """What most of the tensors are stored as, where config.json does not say."""
    sizes: dict[str, int] = {}
    for spec in Checkpoint(directory).specs.values():
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.nbytes
    most = max(sizes, key=lambda dtype: sizes[dtype], default="")
    return next((name for name, dtype in _DTYPES.items() if dtype == most), most)


class _Fields:
    """The fields of a config.json. What is missing or wrong is noted, so that all of it can be reported at once."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self.problems: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        value = self._fields.get(name)
        return default if value is None else value

    def count(self, *names: str, default: int | None = None, lowest: int = 1) -> int:
        """A whole number under the first of these names that is there."""
        name = next((name for name in names if self._fields.get(name) is not None), names[0])
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            self.problems.append(f"{name} is {value!r}: it must be a whole number of {lowest} or more")
            return lowest
        return value

    def number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self.problems.append(f"{name} is {value!r}: it must be a number above 0")
            return 1.0
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.problems.append(f"{name} is {value!r}: it must be true or false")
        return value is True

    def whole_numbers(self, name: str) -> tuple[int, ...]:
        """A number or a list of numbers, none of them negative."""
        value = self.get(name, [])
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers):
            self.problems.append(f"{name} is {value!r}: it must be a list of whole numbers")
            return ()
        return tuple(dict.fromkeys(numbers))


def _parse(fields: _Fields) -> ModelConfig:
    architecture = _architecture(fields)
    layers, heads, hidden = (
        fields.count("num_hidden_layers"),
        fields.count("num_attention_heads"),
        fields.count("hidden_size"),
    )
    head_dim = fields.count("head_dim", default=hidden // heads)
    moe = architecture == MOE or (
        architecture == MTP and fields.count("num_experts", "num_local_experts", default=0, lowest=0)
    )
    _check_features(fields, head_dim)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", default=heads),
        head_dim=head_dim,
        rope_theta=_rope_theta(fields),
        rms_norm_eps=fields.number("rms_norm_eps", fields.get("rms_norm_eps", 1e-6)),
        max_length=fields.count("max_position_embeddings", default=32768),
        tied=fields.flag("tie_word_embeddings", default=False),
        dtype=_dtype(fields),
        eos_ids=fields.whole_numbers("eos_token_id"),
        **(_moe_fields(fields, layers) if moe else {}),
    )
    if config.heads % config.kv_heads:
        fields.problems.append(
            f"num_attention_heads is {heads}, which num_key_value_heads, {config.kv_heads}, does not divide"
        )
    return config


def _architecture(fields: _Fields) -> str:
    given = fields.get("architectures", [])
    if isinstance(given, list) and len(given) == 1 and given[0] in ARCHITECTURES:
        return str(given[0])
    fields.problems.append(f"architectures is {given!r}: it must be one of {', '.join(ARCHITECTURES)}")
    return DENSE


def _moe_fields(fields: _Fields, layers: int) -> dict[str, Any]:
    experts = fields.count("num_experts", "num_local_experts")  # transformers 5 writes the second
    per_token = fields.count("num_experts_per_tok")
    step, dense = fields.count("decoder_sparse_step", default=1), fields.whole_numbers("mlp_only_layers")
    if per_token > experts:
        fields.problems.append(f"num_experts_per_tok is {per_token}, but there are {experts} experts")
    return {
        "experts": experts,
        "experts_per_token": per_token,
        "moe_intermediate_size": fields.count("moe_intermediate_size"),
        "norm_topk_prob": fields.flag("norm_topk_prob", default=False),
        "moe_layers": tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0),
    }


def _check_features(fields: _Fields, head_dim: int) -> None:
    """Note what the checkpoint asks for and this engine does not do."""
    if fields.get("hidden_act", "silu") != "silu":
        fields.problems.append(f"hidden_act is {fields.get('hidden_act')!r}: only 'silu' is supported")
    if head_dim % 2:
        fields.problems.append(f"head_dim is {head_dim}: rotary embeddings need an even one")
    if fields.flag("attention_bias", default=False):
        fields.problems.append("attention_bias is true: biases are not supported")
    if fields.flag("use_sliding_window", default=False):
        fields.problems.append("use_sliding_window is true: only full attention is supported")
    kinds = fields.get("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        fields.problems.append(f"layer_types is {kinds!r}: only 'full_attention' is supported")
    if fields.get("quantization_config") is not None:
        fields.problems.append("quantization_config is set: quantised checkpoints are not supported")


def _rope_theta(fields: _Fields) -> float:
    """From `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    theta = fields.get("rope_theta", 10000.0)
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name, {})
        if not isinstance(rope, dict):
            fields.problems.append(f"{name} is {rope!r}: it must be an object")
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            fields.problems.append(f"{name} asks for rotary embeddings of type {kind!r}: only 'default' is supported")
        if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
            fields.problems.append(
                f"{name} has a partial_rotary_factor of {rope['partial_rotary_factor']!r}: only 1 is supported"
            )
        theta = rope.get("rope_theta", theta)
    return fields.number("rope_theta", theta)


def _dtype(fields: _Fields) -> str:
    dtype = fields.get("dtype", fields.get("torch_dtype", "float32"))
    if dtype not in _DTYPES:
        fields.problems.append(f"dtype is {dtype!r}: it must be one of {', '.join(_DTYPES)}")
        return "float32"
    return str(dtype)
