"""The model computes what `transformers` computes, however the tokens are put into batches."""

import pytest
import torch
from engine_models import greedy, loaded, logits_of, new_cache, prompts, reference, reference_logits, step
from engine_sequences import PagedSequences

from weightcast.engines.embedded.model.cache import KVCache
from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.errors import InvalidInput

KINDS = {
    "dense tied": {"preset": "tiny"},
    "dense untied": {"preset": "tiny", "tied": False, "num_key_value_heads": 1},
    "every head has keys": {"preset": "tiny", "num_key_value_heads": 4, "rope_theta": 1e6},
    "moe": {"preset": "moe"},
    "moe untied, weights not normed": {
        "preset": "moe", "tied": False, "norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.replace(" ", "-"))
def kind_dir(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("kind") / "model"
    init_checkpoint(directory, seed=3, **KINDS[request.param])
    return directory


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny") / "model"
    init_checkpoint(directory, "tiny", seed=3)
    return directory


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("moe") / "model"
    init_checkpoint(directory, "moe", seed=3)
    return directory


def assert_close(found, wanted, tolerance=2e-5):
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(
            found[name], wanted[name], atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_logits_are_those_of_transformers(kind_dir):
    model, known, turns = loaded(kind_dir), reference(kind_dir), prompts(1, 5, 23, 70)
    assert_close(logits_of(model, turns), {name: reference_logits(known, tokens) for name, tokens in turns.items()})


def test_greedy_tokens_are_those_of_transformers(kind_dir):
    known, given = reference(kind_dir), prompts(1, 9, 30)
    said = greedy(loaded(kind_dir), given, 40)
    for name, tokens in given.items():
        known.generation_config.eos_token_id = None
        ids = torch.tensor([tokens])
        wanted = known.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=256
        )
        assert said[name] == wanted[0, len(tokens) :].tolist()


def test_a_ragged_batch_equals_its_sequences_alone(kind_dir):
    model, whole = loaded(kind_dir), prompts(40, 33, 18, 12, 21, 300)
    alone = {name: logits_of(model, {name: tokens}, blocks=128)[name] for name, tokens in whole.items()}
    # how many tokens of each sequence come with each batch: fresh prompts, decoding, drafts, chunks behind a prefix
    turns = [(10, 33 - 6, 0, 1, 0, 299), (1, 3, 17, 1, 12, 1), (20, 1, 1, 4, 6, 0), (1, 2, 0, 6, 1, 0), (8, 0, 0, 0, 2, 0)]
    sequences = PagedSequences(blocks=256)
    cache, found, done = new_cache(model, sequences), {name: [] for name in whole}, dict.fromkeys(whole, 0)
    for counts in turns:
        taken = {}
        for name, count in zip(whole, counts, strict=True):
            if count:
                taken[name] = whole[name][done[name] : done[name] + count]
                done[name] += count
        for name, logits in step(model, cache, sequences, taken).items():
            found[name].append(logits)
    assert done == {name: len(tokens) for name, tokens in whole.items()}
    assert_close({name: torch.cat(logits) for name, logits in found.items()}, alone)


@pytest.mark.parametrize("shuffled", [True, False], ids=["scattered", "consecutive"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_where_blocks_lie_does_not_matter(tiny_dir, shuffled, block_size):
    model, (tokens,) = loaded(tiny_dir), prompts(50).values()
    sequences = PagedSequences(blocks=64, block_size=block_size, shuffled=shuffled)
    cache = new_cache(model, sequences)
    parts = [
        step(model, cache, sequences, {"a": tokens[start:stop]})["a"]
        for start, stop in ((0, 20), (20, 45), (45, 46), (46, 50))
    ]
    assert_close({"a": torch.cat(parts)}, logits_of(model, {"a": tokens}))


def test_what_other_sequences_left_in_the_cache_is_never_read(tiny_dir):
    model, given = loaded(tiny_dir), prompts(30, 3, 19)
    wanted = {name: logits_of(model, {name: tokens})[name][-1:] for name, tokens in given.items()}
    sequences = PagedSequences()
    cache = new_cache(model, sequences)
    for layer in cache.layers:
        layer.fill_(float("nan"))  # a version that overflowed ran here before
    step(model, cache, sequences, {name: tokens[:-1] for name, tokens in given.items()})
    assert_close(step(model, cache, sequences, {name: tokens[-1:] for name, tokens in given.items()}), wanted)


def test_tokens_that_were_taken_back_are_overwritten(tiny_dir):
    model, (tokens,) = loaded(tiny_dir), prompts(20).values()
    sequences = PagedSequences()
    cache = new_cache(model, sequences)
    step(model, cache, sequences, {"a": tokens[:10]})
    step(model, cache, sequences, {"a": [tokens[10], 1, 2, 3]})
    sequences.cut("a", 11)
    found = step(model, cache, sequences, {"a": tokens[11:]})["a"]
    assert_close({"a": found}, {"a": logits_of(model, {"a": tokens})["a"][11:]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_checkpoint_runs_in_another_dtype(tiny_dir, dtype):
    model, known, turns = loaded(tiny_dir, dtype=dtype), reference(tiny_dir, dtype), prompts(6, 25)
    sequences = PagedSequences()
    cache = new_cache(model, sequences, dtype=dtype)
    found = step(model, cache, sequences, turns)
    precise = logits_of(loaded(tiny_dir), turns)
    for name, tokens in turns.items():
        ours, theirs = (
            (logits - precise[name]).abs().mean() for logits in (found[name], reference_logits(known, tokens).float())
        )
        assert found[name].dtype == torch.float32
        assert ours < 1.5 * theirs  # half precision is as far from the truth here as it is there


def test_experts_are_recorded_by_slot(moe_dir):
    model, known, (tokens,) = loaded(moe_dir), reference(moe_dir), prompts(25).values()
    sequences = PagedSequences()
    cache = new_cache(model, sequences)
    step(model, cache, sequences, {"a": tokens[:24]})
    step(model, cache, sequences, {"a": tokens[24:]})
    with torch.no_grad():
        scores = known(torch.tensor([tokens]), output_router_logits=True).router_logits
    wanted = torch.stack([layer.topk(2).indices for layer in scores], dim=1)
    recorded = cache.routing[sequences.all_slots("a")]
    assert recorded.dtype == torch.int16
    assert recorded.long().equal(wanted)


def test_replaying_its_own_experts_changes_nothing_and_others_do(moe_dir):
    model, turns = loaded(moe_dir), prompts(9, 17)
    sequences = PagedSequences()
    cache = new_cache(model, sequences)
    wanted = step(model, cache, sequences, turns)
    own = torch.cat([cache.routing[sequences.all_slots(name)] for name in turns]).long()

    def replayed(replay):
        sequences = PagedSequences(seed=1)
        cache = new_cache(model, sequences)
        logits = step(model, cache, sequences, turns, replay=replay)
        return logits, torch.cat([cache.routing[sequences.all_slots(name)] for name in turns]).long()

    assert_close(replayed(own)[0], wanted, tolerance=0)
    assert_close(replayed(torch.full_like(own, -1))[0], wanted, tolerance=0)
    other = own.clone()
    other[9:] = (own[9:] + 1) % 8  # the second sequence goes elsewhere, the first is left to the router
    other[:9] = -1
    found, recorded = replayed(other)
    assert_close({"s0": found["s0"]}, {"s0": wanted["s0"]})
    assert (found["s1"] - wanted["s1"]).abs().max() > 0.1
    assert recorded[9:].equal(other[9:])
    assert recorded[:9].equal(own[:9])


def test_replayed_experts_are_weighted_by_the_router(tmp_path):
    """Sending every token to all experts in a fixed order equals a model whose tokens visit all experts anyway."""
    everywhere = tmp_path / "model"
    init_checkpoint(everywhere, "moe", num_experts_per_tok=8)
    model, (tokens,) = loaded(everywhere), prompts(11).values()
    sequences = PagedSequences()
    order = torch.arange(7, -1, -1).expand(11, 2, 8)
    found = step(model, new_cache(model, sequences), sequences, {"a": tokens}, replay=order)
    assert_close(found, {"a": logits_of(model, {"a": tokens})["a"]})


def test_a_routing_of_another_shape_is_refused(moe_dir, tiny_dir):
    for directory, shape in ((moe_dir, (4, 2, 3)), (moe_dir, (4, 1, 2)), (tiny_dir, (4, 2, 2))):
        model, sequences = loaded(directory), PagedSequences()
        with pytest.raises(InvalidInput, match="cannot be replayed"):
            step(
                model,
                new_cache(model, sequences),
                sequences,
                {"a": [1, 2, 3, 4]},
                replay=torch.zeros(shape, dtype=torch.int64),
            )


def test_hidden_states_are_kept_by_slot_where_they_are_asked_for(tiny_dir):
    model, turns, sequences = loaded(tiny_dir), prompts(5, 12), PagedSequences()
    cache = new_cache(model, sequences, hidden=True)
    batch = sequences.batch(turns)
    hidden = model(batch, cache)
    assert cache.hidden[batch.slots].equal(hidden)
    assert new_cache(model, sequences).hidden is None


def test_a_cache_is_as_large_as_it_said(tiny_dir, moe_dir):
    for directory in (tiny_dir, moe_dir):
        for ranks in (1, 2, 4):
            for hidden in (True, False):
                config = loaded(directory).config
                what = {"dtype": torch.bfloat16, "hidden": hidden}
                cache = KVCache.allocate(config, ranks, slots=48, block_size=16, device="cpu", **what)
                assert cache.nbytes == 48 * KVCache.nbytes_per_slot(config, ranks, **what)
