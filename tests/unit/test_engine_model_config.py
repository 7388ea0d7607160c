"""config.json is read in every spelling, and what cannot be run is refused with all reasons at once."""

import json

import pytest

from weightcast.engines.embedded.model_config import ModelConfig
from weightcast.engines.embedded.presets import init_checkpoint, preset_config
from weightcast.errors import NotFound, UnsupportedModel

DENSE = preset_config("tiny", tied=True, dtype="float32")
MOE = preset_config("moe", tied=False, dtype="bfloat16")


def parse(fields, **changes):
    return ModelConfig.parse(fields | changes, where="here")


def refusal(fields, **changes):
    with pytest.raises(UnsupportedModel) as caught:
        parse(fields, **changes)
    return str(caught.value)


def test_a_dense_model_is_read():
    config = parse(DENSE)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.tied, config.dtype, config.max_length, config.vocab_size) == (True, "float32", 4096, 259)
    assert not config.mtp
    assert config.moe_layers == ()


def test_a_moe_model_knows_which_layers_have_experts():
    assert parse(MOE).moe_layers == (1, 2)
    assert parse(MOE, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]).moe_layers == (1, 5)
    assert parse(MOE, mlp_only_layers=None).moe_layers == (0, 1, 2)
    config = parse(MOE)
    assert (config.experts, config.experts_per_token, config.moe_intermediate_size, config.norm_topk_prob) == (
        8,
        2,
        64,
        True,
    )


def test_transformers_5_calls_experts_local():
    fields = {name: value for name, value in MOE.items() if name != "num_experts"}
    assert parse(fields, num_local_experts=16).experts == 16


def test_both_spellings_of_rope_and_dtype_are_read():
    old = {name: value for name, value in DENSE.items() if name not in ("rope_theta", "torch_dtype")}
    assert parse(old, rope_theta=5e5, rope_scaling=None, torch_dtype="float16").rope_theta == 5e5
    new = parse(old, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, dtype="bfloat16")
    assert (new.rope_theta, new.dtype) == (1e6, "bfloat16")
    assert parse(old).rope_theta == 10000


def test_what_is_missing_has_the_defaults_of_transformers():
    few = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = ModelConfig.parse({name: DENSE[name] for name in few}, where="here")
    assert (config.kv_heads, config.head_dim, config.tied, config.rms_norm_eps, config.eos_ids) == (4, 16, False, 1e-6, ())


def test_an_mtp_head_is_read():
    assert parse(DENSE, architectures=["Qwen3MTP"]).mtp
    assert parse(MOE, architectures=["Qwen3MTP"]).moe_layers == (1, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": None}, "architectures is []"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "'linear'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": 7}, "rope_parameters is 7"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"torch_dtype": "float8"}, "dtype is 'float8'"),
        ({"num_key_value_heads": 3}, "does not divide"),
        ({"head_dim": 15}, "even"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"eos_token_id": [1, -2]}, "eos_token_id is [1, -2]"),
    ],
)
def test_what_cannot_be_run_is_named(changes, said):
    assert said in refusal(DENSE, **changes)


def test_more_experts_per_token_than_experts_are_refused():
    assert "num_experts_per_tok is 9" in refusal(MOE, num_experts_per_tok=9)


def test_all_reasons_are_listed():
    message = refusal(DENSE, hidden_act="relu", attention_bias=True, vocab_size=None, rope_scaling={"type": "dynamic"})
    for word in ("hidden_act", "attention_bias", "vocab_size", "dynamic"):
        assert word in message
    assert message.count("\n") == 4


@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (2, True), (4, True), (3, False), (8, False)])
def test_a_model_is_divided_only_where_everything_divides(ranks, fits):
    config = parse(MOE)
    if fits:
        config.check_ranks(ranks)
        return
    with pytest.raises(UnsupportedModel) as caught:
        config.check_ranks(ranks)
    assert "num_attention_heads is 4" in str(caught.value)


def test_everything_that_does_not_divide_is_listed():
    with pytest.raises(UnsupportedModel) as caught:
        parse(MOE, intermediate_size=100, num_experts=4, num_key_value_heads=2).check_ranks(3)
    assert str(caught.value).count("\n") == 4
    config = parse(MOE, num_experts=7)
    with pytest.raises(UnsupportedModel, match="num_experts is 7"):
        config.check_ranks(2)
    config.check_ranks(2, experts="replicated")
    parse(MOE, mlp_only_layers=[], intermediate_size=99).check_ranks(2)  # no layer has this MLP


def test_end_tokens_come_from_the_generation_config_first(tmp_path):
    init_checkpoint(tmp_path / "m", "tiny")
    assert ModelConfig.read(tmp_path / "m").eos_ids == (258, 256)
    (tmp_path / "m" / "generation_config.json").unlink()
    assert ModelConfig.read(tmp_path / "m").eos_ids == (258,)


def test_a_config_without_dtype_has_that_of_its_tensors(tmp_path):
    init_checkpoint(tmp_path / "m", "tiny", dtype="bfloat16")
    path = tmp_path / "m" / "config.json"
    fields = json.loads(path.read_text())
    del fields["torch_dtype"]
    path.write_text(json.dumps(fields))
    assert ModelConfig.read(tmp_path / "m").dtype == "bfloat16"


def test_a_directory_without_a_config_or_with_a_broken_one_is_refused(tmp_path):
    for missing in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NotFound, match=r"config\.json"):
            ModelConfig.read(missing)
    for text in ("{", "[]", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(UnsupportedModel, match=r"config\.json"):
            ModelConfig.read(tmp_path)
