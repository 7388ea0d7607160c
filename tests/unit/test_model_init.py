"""`weightcast model` writes checkpoints that load everywhere, whole or not at all."""

import json
import stat

import pytest
import torch
from click.testing import CliRunner
from engine_models import greedy, loaded, prompts
from safetensors.torch import load_file

from weightcast.cli.model import model
from weightcast.engines.embedded import checkpoint_dir, presets
from weightcast.engines.embedded.drafts import init_draft
from weightcast.engines.embedded.model_config import ModelConfig
from weightcast.engines.embedded.presets import init_checkpoint, step_checkpoint
from weightcast.errors import InvalidInput, NotFound, StorageFailed
from weightcast.store.checkpoint import Checkpoint


def run(*arguments):
    result = CliRunner().invoke(model, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize("preset", ["tiny", "moe"])
def test_transformers_loads_what_init_writes(tmp_path, preset):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    assert run("init", tmp_path / "m", "--preset", preset, "--dtype", "bfloat16", "--untied").exit_code == 0
    known = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert known.dtype == torch.bfloat16
    assert not known.config.tie_word_embeddings
    assert known.generation_config.eos_token_id == [258, 256]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert len(tokenizer) == known.config.vocab_size
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 256)


def test_the_tokenizer_is_byte_level_and_knows_the_chat_format(tmp_path):
    from transformers import AutoTokenizer

    init_checkpoint(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    text = "Grüße, 世界!\n\t \x00 end  "
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("a<|im_end|>b") == [97, 258, 98]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        run("init", tmp_path / name, "--seed", seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    first, last = load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / "c" / "model.safetensors")
    assert first.keys() == last.keys()
    assert not any(first[name].equal(last[name]) for name in first)


def test_every_name_and_shape_is_what_the_model_needs(tmp_path):
    for preset in presets.PRESETS:
        for tied in (True, False):
            config = presets.preset_config(preset, tied=tied, dtype="float32")
            names = dict(presets.tensor_shapes(config))
            assert ("lm_head.weight" in names) is not tied
            ModelConfig.parse(config, where=preset).check_ranks(2)
    small = presets.preset_config("small", tied=True, dtype="float32")
    count = sum(torch.Size(shape).numel() for _, shape in presets.tensor_shapes(small))
    assert 24e6 < count < 27e6


def test_json_says_what_was_written(tmp_path):
    made = json.loads(run("init", tmp_path / "m", "--preset", "moe", "--json").output)
    assert made["preset"] == "moe"
    assert made["nbytes"] == Checkpoint(tmp_path / "m").nbytes
    drafted = json.loads(run("draft", tmp_path / "d", "--for", tmp_path / "m", "--kind", "mtp", "--json").output)
    assert drafted["nbytes"] == Checkpoint(tmp_path / "d").nbytes
    assert ModelConfig.read(tmp_path / "d").mtp


def test_an_existing_directory_is_used_only_if_it_is_empty(tmp_path):
    (tmp_path / "empty").mkdir()
    init_checkpoint(tmp_path / "empty")
    assert Checkpoint(tmp_path / "empty").specs
    (tmp_path / "file").write_text("x")
    before = (tmp_path / "empty" / "model.safetensors").read_bytes()
    for taken in ("empty", "file"):
        with pytest.raises(InvalidInput, match="not an empty directory"):
            init_checkpoint(tmp_path / taken, seed=9)
    assert (tmp_path / "empty" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_a_failure_in_the_middle_leaves_nothing_behind(tmp_path, monkeypatch):
    shapes = presets.tensor_shapes

    def broken(config):
        for index, entry in enumerate(shapes(config)):
            if index == 7:
                raise StorageFailed("write", tmp_path, OSError(28, "No space left on device"))
            yield entry

    monkeypatch.setattr(presets, "tensor_shapes", broken)
    with pytest.raises(StorageFailed):
        init_checkpoint(tmp_path / "deep" / "m")
    assert not list((tmp_path / "deep").iterdir())


def test_a_directory_that_fills_up_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    write = checkpoint_dir.write_synced

    def intrude(path, data):
        write(path, data)
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / "mine").write_text("x")

    monkeypatch.setattr(checkpoint_dir, "write_synced", intrude)
    with pytest.raises(InvalidInput):
        init_checkpoint(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_what_is_written_can_be_read_by_others(tmp_path):
    init_checkpoint(tmp_path / "m")
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o755


@pytest.mark.parametrize("wrong", [{"preset": "huge"}, {"dtype": "int8"}, {"seed": -1}])
def test_a_wrong_call_is_refused(tmp_path, wrong):
    with pytest.raises(InvalidInput):
        init_checkpoint(tmp_path / "m", **wrong)
    assert not list(tmp_path.iterdir())


def test_a_draft_of_nothing_or_of_a_head_is_refused(tmp_path):
    with pytest.raises(NotFound):
        init_draft(tmp_path / "d", tmp_path / "nowhere")
    init_checkpoint(tmp_path / "m")
    init_draft(tmp_path / "head", tmp_path / "m", "mtp")
    with pytest.raises(InvalidInput, match="MTP head"):
        init_draft(tmp_path / "d", tmp_path / "head")
    for wrong in ({"kind": "eagle"}, {"noise": -1}, {"noise": float("nan")}):
        with pytest.raises(InvalidInput):
            init_draft(tmp_path / "d", tmp_path / "m", **wrong)


def test_a_draft_without_noise_is_the_main_model(tmp_path):
    init_checkpoint(tmp_path / "m", "moe", dtype="bfloat16")
    init_draft(tmp_path / "d", tmp_path / "m", noise=0)
    main, draft = (load_file(tmp_path / name / "model.safetensors") for name in ("m", "d"))
    assert all(draft[name].equal(tensor) for name, tensor in main.items())
    assert (tmp_path / "d" / "tokenizer.json").read_bytes() == (tmp_path / "m" / "tokenizer.json").read_bytes()


def test_the_output_of_a_random_model_is_varied_and_mostly_printable(tmp_path):
    for preset in ("tiny", "moe"):
        init_checkpoint(tmp_path / preset, preset, seed=1)
        for tokens in greedy(loaded(tmp_path / preset), prompts(12, 30, tokens=range(32, 127)), 80).values():
            assert len(set(tokens)) > 12
            assert sum(32 <= token < 127 or token == 10 for token in tokens) > 60


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_changes_the_share_it_is_asked_for_and_keeps_the_rest(tmp_path, dtype):
    run("init", tmp_path / "a", "--dtype", dtype)
    assert run("step", tmp_path / "b", "--from", tmp_path / "a", "--share", 0.05).exit_code == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert before.keys() == after.keys()
    changed = {name: (before[name] != after[name]).sum().item() for name in before}
    assert changed == {name: max(1, round(0.05 * tensor.numel())) for name, tensor in before.items()}
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    loaded(tmp_path / "b")
    files = {path.name for path in (tmp_path / "a").iterdir()}
    assert {path.name for path in (tmp_path / "b").iterdir()} == files


def test_a_step_is_refused_without_a_checkpoint_or_with_an_impossible_share(tmp_path):
    init_checkpoint(tmp_path / "a")
    (tmp_path / "a" / "config.json").unlink()
    with pytest.raises(NotFound, match="no config"):
        step_checkpoint(tmp_path / "b", tmp_path / "a")
    with pytest.raises(NotFound):
        step_checkpoint(tmp_path / "b", tmp_path / "none")
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        step_checkpoint(tmp_path / "b", tmp_path / "a", share=1.5)
    assert not (tmp_path / "b").exists()
