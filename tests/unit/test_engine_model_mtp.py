"""Draft models: a plain one is a model like any other, an MTP head is checked against a computation without a cache."""

from dataclasses import replace

import pytest
import torch
from engine_models import load, loaded, logits_of, new_cache, prompts
from engine_sequences import PagedSequences
from safetensors.torch import load_file

from weightcast.engines.embedded.drafts import init_draft
from weightcast.engines.embedded.model.weights import declared_weights
from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.errors import InvalidInput


@pytest.fixture(scope="module", params=["tiny", "moe"])
def pair(request, tmp_path_factory):
    """A main model and its head."""
    directory = tmp_path_factory.mktemp("pair")
    init_checkpoint(directory / "main", request.param, seed=6)
    init_draft(directory / "head", directory / "main", "mtp", noise=0.1, seed=6)
    main = loaded(directory / "main")
    return main, loaded(directory / "head", main=main), directory


def norm(x, weight):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def plain_layer(x, tensors, prefix):
    """A decoder layer of the tiny model over a whole sequence, as one would write it on a blackboard."""
    get = lambda name: tensors[f"{prefix}.{name}.weight"]  # noqa: E731
    count = len(x)
    given = norm(x, get("input_layernorm"))
    q, k, v = ((given @ get(f"self_attn.{side}_proj").T).view(count, -1, 16) for side in "qkv")
    q, k = norm(q, get("self_attn.q_norm")), norm(k, get("self_attn.k_norm"))
    angles = torch.arange(count).unsqueeze(1) / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)

    def turn(heads):
        turned = torch.complex(heads[..., :8], heads[..., 8:]) * turns
        return torch.cat((turned.real, turned.imag), dim=-1)

    q, k = turn(q), turn(k).repeat_interleave(2, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / 4
    scores.masked_fill_(torch.ones(count, count).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.repeat_interleave(2, dim=1)).reshape(count, -1)
    x = x + mixed @ get("self_attn.o_proj").T
    given = norm(x, get("post_attention_layernorm"))
    return x + plain_mlp(given, tensors, f"{prefix}.mlp")


def plain_mlp(x, tensors, prefix):
    get = lambda name: tensors[f"{prefix}.{name}.weight"]  # noqa: E731
    if f"{prefix}.gate.weight" not in tensors:
        return (torch.nn.functional.silu(x @ get("gate_proj").T) * (x @ get("up_proj").T)) @ get("down_proj").T
    weights, chosen = (x @ get("gate").T).softmax(-1).topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    rows = []
    for row, ways, shares in zip(x, chosen.tolist(), weights, strict=True):
        rows.append(
            sum(share * plain_mlp(row, tensors, f"{prefix}.experts.{way}") for way, share in zip(ways, shares, strict=True))
        )
    return torch.stack(rows)


def plain_head(tokens, hidden, main, tensors):
    """The head over a whole sequence; `hidden` are the main model's states of all its tokens but the last."""
    embedded = main["model.embed_tokens.weight"][torch.tensor(tokens)]
    before = torch.cat((torch.zeros(1, 64), hidden))
    joined = torch.cat(
        (
            norm(embedded, tensors["mtp.pre_fc_norm_embedding.weight"]),
            norm(before, tensors["mtp.pre_fc_norm_hidden.weight"]),
        ),
        dim=1,
    )
    x = joined @ tensors["mtp.fc.weight"].T
    for layer in range(sum(name.endswith("input_layernorm.weight") for name in tensors)):
        x = plain_layer(x, tensors, f"mtp.layers.{layer}")
    return norm(x, tensors["mtp.norm.weight"])


def test_a_head_computes_what_the_blackboard_says(pair):
    main, head, directory = pair
    tensors = [load_file(directory / name / "model.safetensors") for name in ("main", "head")]
    given, sequences = prompts(21, 10), PagedSequences()
    cache, head_cache = new_cache(main, sequences, hidden=True), new_cache(head, sequences)
    found = {name: [] for name in given}
    for start, stop in ((0, 8), (8, 9), (9, 21)):
        batch = sequences.batch({name: tokens[start:stop] for name, tokens in given.items() if len(tokens) > start})
        main(batch, cache)
        kept = cache.hidden.clone()
        hidden = head(batch, head_cache, cache)
        cache.hidden.copy_(kept)
        for name, begin, end in zip(given, batch.starts, batch.starts[1:], strict=False):
            found[name].append(hidden[begin:end])
    for name, tokens in given.items():
        states = cache.hidden[sequences.all_slots(name)][:-1]
        wanted = plain_head(tokens, states, *tensors)
        torch.testing.assert_close(torch.cat(found[name]), wanted, atol=3e-5, rtol=3e-5)
        logits = wanted @ tensors[0]["model.embed_tokens.weight"].T
        torch.testing.assert_close(head.logits(torch.cat(found[name])), logits, atol=1e-4, rtol=1e-4)


def test_a_head_keeps_its_own_states_of_the_rows_only_and_the_main_model_overwrites_them(pair):
    main, head, _ = pair
    given, sequences = prompts(6, 4), PagedSequences()
    cache, head_cache = new_cache(main, sequences, hidden=True), new_cache(head, sequences)
    batch = sequences.batch(given)
    truth = main(batch, cache)
    hidden = head(batch, head_cache, cache)
    wanted = truth.clone()
    wanted[batch.rows] = hidden[batch.rows]
    assert cache.hidden[batch.slots].equal(wanted)
    main(batch, cache)
    torch.testing.assert_close(cache.hidden[batch.slots], truth)


def test_a_pass_without_rows_keeps_no_state_of_the_head(pair):
    main, head, _ = pair
    sequences = PagedSequences()
    cache, head_cache = new_cache(main, sequences, hidden=True), new_cache(head, sequences)
    batch = replace(sequences.batch(prompts(6)), rows=torch.empty(0, dtype=torch.int64))
    truth = main(batch, cache)
    assert head.logits(head(batch, head_cache, cache)[batch.rows]).shape == (0, 259)
    assert cache.hidden[batch.slots].equal(truth)


def test_a_second_draft_step_reads_what_the_first_one_kept(pair):
    main, head, directory = pair
    tensors = [load_file(directory / name / "model.safetensors") for name in ("main", "head")]
    (tokens,), sequences = prompts(9).values(), PagedSequences()
    cache, head_cache = new_cache(main, sequences, hidden=True), new_cache(head, sequences)
    main(sequences.batch({"a": tokens[:7]}), cache)
    sequences.cut("a", 0)
    first = head(sequences.batch({"a": tokens[:8]}), head_cache, cache)  # the main model has not seen the eighth
    second = head(sequences.batch({"a": tokens[8:]}), head_cache, cache)
    states = torch.cat((cache.hidden[sequences.all_slots("a")][:7], first[-1:]))
    torch.testing.assert_close(torch.cat((first, second)), plain_head(tokens, states, *tensors), atol=3e-5, rtol=3e-5)


def test_a_head_owns_neither_embedding_nor_head(pair):
    main, head, directory = pair
    names = {weight.name for weight in declared_weights(head)}
    assert not names & {"embedding.weight", "head.weight"}
    assert not {id(parameter) for parameter in head.parameters()} & {id(parameter) for parameter in main.parameters()}
    load(head, directory / "head")


def test_a_head_without_the_main_models_states_is_refused(pair):
    main, head, _ = pair
    sequences = PagedSequences()
    batch, cache = sequences.batch({"a": [1, 2]}), new_cache(head, sequences)
    for main_cache in (None, new_cache(main, sequences)):
        with pytest.raises(InvalidInput, match="hidden states"):
            head(batch, cache, main_cache)


def test_a_main_model_and_its_head_load_from_one_checkpoint(pair, tmp_path):
    from safetensors.torch import save_file

    main, head, directory = pair
    tensors = [load_file(directory / name / "model.safetensors") for name in ("main", "head")]
    save_file(tensors[0] | tensors[1], tmp_path / "model.safetensors")
    load(main, tmp_path, ignore=["mtp.*"])
    load(head, tmp_path, names=["mtp.*"], ignore=["model.*"])
    assert main.decoder.norm.weight.equal(tensors[0]["model.norm.weight"])
    assert head.decoder.norm.weight.equal(tensors[1]["mtp.norm.weight"])


@pytest.mark.parametrize("kind", ["plain", "mtp"])
def test_a_draft_often_guesses_what_the_main_model_says(tmp_path, kind):
    init_checkpoint(tmp_path / "main", "tiny", seed=8)
    main, given = loaded(tmp_path / "main"), prompts(200, seed=1, tokens=range(32, 127))
    agreement = []
    for noise in (0.0, 0.1):
        directory = tmp_path / f"draft-{noise}"
        init_draft(directory, tmp_path / "main", kind, noise=noise)
        draft, sequences = loaded(directory, main=main), PagedSequences()
        cache = new_cache(main, sequences, hidden=True)
        batch = sequences.batch(given)
        said = main.logits(main(batch, cache)).argmax(-1)
        guessed = draft.logits(draft(batch, new_cache(draft, sequences), cache)).argmax(-1)
        agreement.append((said == guessed).float().mean().item())
    exact, noisy = agreement
    assert exact > (0.99 if kind == "plain" else 0.7)
    assert 0.2 < noisy < 0.99


def test_a_plain_draft_ignores_the_main_models_cache(tmp_path):
    init_checkpoint(tmp_path / "main", "tiny")
    init_draft(tmp_path / "draft", tmp_path / "main", noise=0.2)
    main = loaded(tmp_path / "main")
    draft, given, sequences = loaded(tmp_path / "draft", main=main), prompts(5), PagedSequences()
    batch = sequences.batch(given)
    hidden = draft(batch, new_cache(draft, sequences), new_cache(main, sequences, hidden=True))
    torch.testing.assert_close(draft.logits(hidden), logits_of(draft, given)["s0"])
