"""Parameters declare where they come from; loading follows the declarations, writes each element once, and checks before."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from engine_models import FakeRank, cut_from, empty, load, loaded, logits_of, prompts, reference, reference_logits
from safetensors.torch import load_file, save_file

from weightcast.clock import Deadline
from weightcast.engines.embedded.model.build import build_model
from weightcast.engines.embedded.model.parallel import OneRank
from weightcast.engines.embedded.model.weights import WeightLayout, WeightPiece, declared_weights, materialize
from weightcast.engines.embedded.model_config import ModelConfig
from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.errors import InvalidInput, PartCorrupt, UnsupportedModel, VersionDoesNotFit
from weightcast.tensors.boxes import Box
from weightcast.tensors.flat import BLOCK_NBYTES
from weightcast.transports.checkpoint import CheckpointReceiver

KINDS = {
    "tiny": {},
    "untied": {"tied": False},
    "moe": {"preset": "moe"},
    "one key head": {"num_key_value_heads": 1},
}
DIVISIONS = [(1, "sharded"), (2, "sharded"), (4, "sharded"), (2, "replicated")]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.replace(" ", "-"))
def versions(request, tmp_path_factory):
    """Two versions of one model."""
    directory = tmp_path_factory.mktemp("versions")
    for seed in (1, 2):
        init_checkpoint(directory / f"v{seed}", seed=seed, **({"preset": "tiny"} | KINDS[request.param]))
    return directory / "v1", directory / "v2"


@pytest.fixture
def tiny_dir(tmp_path):
    init_checkpoint(tmp_path / "model", "tiny")
    return tmp_path / "model"


def tensors_of(directory):
    return load_file(directory / "model.safetensors")


def assert_holds(model, tensors):
    for weight in declared_weights(model):
        covered = torch.zeros(weight.parameter.shape)
        for piece in weight.layout.pieces:
            live = piece.view(weight.parameter)
            wanted = tensors[piece.source][
                tuple(slice(a, a + n) for a, n in zip(piece.box.start, piece.box.shape, strict=True))
            ]
            assert tuple(tensors[piece.source].shape) == piece.shape
            assert live.equal(wanted), (weight.name, piece)
            piece.view(covered).add_(1)
        if weight.layout.padding is not None:
            rows = weight.layout.padding.shape[0]
            assert not weight.parameter[-rows:].any()
            covered[-rows:] += 1
        assert (covered == 1).all(), weight.name


@pytest.mark.parametrize(("size", "experts"), DIVISIONS)
def test_every_rank_holds_its_boxes_after_a_first_and_a_second_load(versions, size, experts):
    for rank in range(size):
        model = loaded(versions[0], ranks=FakeRank(rank, size), experts=experts)
        assert_holds(model, tensors_of(versions[0]))
        addresses = {weight.name: weight.parameter.data_ptr() for weight in declared_weights(model)}
        load(model, versions[1])
        assert_holds(model, tensors_of(versions[1]))
        assert addresses == {weight.name: weight.parameter.data_ptr() for weight in declared_weights(model)}


@pytest.mark.parametrize(("size", "experts"), DIVISIONS)
def test_the_ranks_together_hold_every_element_of_every_tensor(versions, size, experts):
    seen = {name: torch.zeros(tensor.shape) for name, tensor in tensors_of(versions[0]).items()}
    config = ModelConfig.read(versions[0])
    for rank in range(size):
        model = build_model(config, FakeRank(rank, size), dtype=torch.float32, device="meta", experts=experts)
        for weight in declared_weights(model):
            for piece in weight.layout.pieces:
                piece.cut(seen[piece.source]).fill_(1)
    assert all(held.all() for held in seen.values())


def test_a_second_version_runs_as_a_fresh_model_would(versions):
    model, given = loaded(versions[0]), prompts(12, 3)
    load(model, versions[1])
    for name, logits in logits_of(loaded(versions[1]), given).items():
        assert logits_of(model, given)[name].equal(logits)


def test_building_on_meta_allocates_nothing_and_materializing_allocates_once(versions):
    model = build_model(ModelConfig.read(versions[0]), OneRank(), dtype=torch.bfloat16, device="meta")
    weights = list(declared_weights(model))
    assert all(weight.parameter.is_meta for weight in weights)
    assert model.decoder.rope.table.is_meta
    materialize(model, "cpu")
    weights = list(declared_weights(model))
    storages = {
        weight.parameter.untyped_storage().data_ptr(): weight.parameter.untyped_storage().nbytes() for weight in weights
    }
    assert sum(storages.values()) == sum(2 * weight.parameter.numel() for weight in weights)
    assert len(storages) == len(weights) == len(list(model.parameters()))
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in model.parameters())
    load(model, versions[0])


def test_layouts_are_fused_transposed_and_stacked(tmp_path):
    init_checkpoint(tmp_path / "moe", "moe")
    weights = {weight.name: weight for weight in declared_weights(loaded(tmp_path / "moe"))}
    fused = weights["decoder.layers.0.attention.qkv_proj.weight"].layout
    assert [piece.source.split(".")[-2] for piece in fused.pieces] == ["q_proj", "k_proj", "v_proj"]
    turned = weights["decoder.layers.0.mlp.gate_up_proj.weight"]
    assert turned.parameter.shape == (64, 2 * 192)
    assert all(piece.transposed for piece in turned.layout.pieces)
    assert turned.layout.pieces[1].view(turned.parameter).stride() == (1, 2 * 192)
    stacked = weights["decoder.layers.1.mlp.w13"]
    assert stacked.parameter.shape == (8, 2 * 64, 64)
    assert stacked.layout.pieces[3].source == "model.layers.1.mlp.experts.1.up_proj.weight"


def test_a_tied_head_is_the_embedding(tiny_dir):
    model = loaded(tiny_dir)
    assert model.head is model.embedding
    assert [weight.name for weight in declared_weights(model)].count("embedding.weight") == 1
    assert not any(weight.name.startswith("head") for weight in declared_weights(model))


def change(directory, **tensors):
    """Replace tensors of a checkpoint; None removes one."""
    kept = {name: value for name, value in (tensors_of(directory) | tensors).items() if value is not None}
    save_file({name: value.contiguous() for name, value in kept.items()}, directory / "model.safetensors")


def test_a_checkpoint_may_carry_what_follows_from_the_rest(tiny_dir):
    given = prompts(8)
    wanted = logits_of(loaded(tiny_dir), given)["s0"]
    head = tensors_of(tiny_dir)["model.embed_tokens.weight"].clone()
    change(tiny_dir, **{
        "lm_head.weight": head,
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "mtp.norm.weight": torch.ones(64),
    })  # fmt: skip
    assert logits_of(loaded(tiny_dir), given)["s0"].equal(wanted)


def test_an_untied_model_needs_its_head(tmp_path):
    init_checkpoint(tmp_path / "m", "tiny", tied=False)
    change(tmp_path / "m", **{"lm_head.weight": None})
    with pytest.raises(VersionDoesNotFit, match=r"missing: lm_head\.weight"):
        loaded(tmp_path / "m")


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_lists_every_mismatch_and_writes_nothing(tmp_path, rank):
    init_checkpoint(tmp_path / "v1", "moe", seed=1)
    init_checkpoint(tmp_path / "v2", "moe", seed=2)
    model = loaded(tmp_path / "v1", ranks=FakeRank(rank, 2))
    before = {weight.name: weight.parameter.clone() for weight in declared_weights(model)}
    change(tmp_path / "v2", **{
        "model.norm.weight": None,
        "model.layers.2.mlp.experts.5.up_proj.weight": None,
        "model.layers.0.self_attn.k_proj.weight": torch.zeros(33, 64),
        "model.layers.1.mlp.gate.weight": torch.zeros(8, 64, dtype=torch.int8),
        "model.layers.3.mlp.gate.weight": torch.zeros(8, 64),
    })  # fmt: skip
    with pytest.raises(VersionDoesNotFit) as caught:
        load(model, tmp_path / "v2")
    assert {(mismatch.kind, mismatch.name) for mismatch in caught.value.mismatches} == {
        ("missing", "model.norm.weight"),
        ("missing", "model.layers.2.mlp.experts.5.up_proj.weight"),
        ("shape", "model.layers.0.self_attn.k_proj.weight"),
        ("dtype", "model.layers.1.mlp.gate.weight"),
        ("unexpected", "model.layers.3.mlp.gate.weight"),
    }
    for weight in declared_weights(model):
        assert weight.parameter.equal(before[weight.name])


def test_weights_are_converted_to_the_dtype_that_was_asked_for(tmp_path):
    init_checkpoint(tmp_path / "b", "tiny", dtype="bfloat16")
    change(tmp_path / "b", **{"model.norm.weight": torch.full((64,), 1.5, dtype=torch.float64)})
    for dtype in (torch.float32, torch.float16):
        model = loaded(tmp_path / "b", dtype=dtype)
        assert_holds(model, {name: tensor.to(dtype) for name, tensor in tensors_of(tmp_path / "b").items()})


def test_a_checkpoint_in_several_files_loads_like_one(tmp_path):
    init_checkpoint(tmp_path / "one", "tiny", seed=5)
    init_checkpoint(tmp_path / "many", "tiny", seed=5, part_nbytes=150_000)
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 2
    given = prompts(9)
    found = logits_of(loaded(tmp_path / "many"), given)["s0"]
    assert found.equal(logits_of(loaded(tmp_path / "one"), given)["s0"])
    known = reference_logits(reference(tmp_path / "many"), given["s0"])
    torch.testing.assert_close(found, known, atol=2e-5, rtol=2e-5)


def test_a_first_load_takes_over_what_it_fetched_instead_of_copying_it(tmp_path):
    import tracemalloc

    init_checkpoint(tmp_path / "m", "tiny", num_hidden_layers=24, intermediate_size=2048)
    model = empty(tmp_path / "m")
    nbytes = sum(4 * weight.parameter.numel() for weight in declared_weights(model))
    tracemalloc.start()
    load(model, tmp_path / "m")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < nbytes + 4 * BLOCK_NBYTES + (4 << 20) < 2 * nbytes  # read ahead, and the tensor that is cut


def test_a_layout_that_misses_or_repeats_an_element_cannot_be_declared():
    def layout(*targets, shape=(4, 6)):
        return WeightLayout(shape, tuple(WeightPiece("t", box.shape, Box.whole(box.shape), box) for box in targets))

    layout(Box((0, 0), (2, 6)), Box((2, 0), (2, 4)), Box((2, 4), (2, 2)))
    for wrong in (
        [Box((0, 0), (3, 6))],
        [Box((0, 0), (3, 6)), Box((2, 0), (2, 6))],
        [Box((0, 0), (2, 6)), Box((0, 0), (2, 6))],
        [Box((0, 0), (5, 6))],
        [],
    ):
        with pytest.raises(InvalidInput, match="cover each element once"):
            layout(*wrong)
    with pytest.raises(InvalidInput, match="not what its parameter holds"):
        WeightLayout((4,), (WeightPiece("t", (4,), Box((2,), (4,)), Box((0,), (4,))),))


def test_a_vocabulary_that_does_not_divide_is_padded_and_the_padding_never_wins(tiny_dir):
    held = []
    for rank in range(4):
        model = loaded(tiny_dir, ranks=FakeRank(rank, 4))
        held.append(model.logits(torch.randn(3, 64, generator=torch.Generator().manual_seed(0))))
    together = torch.cat(held, dim=1)
    assert together.shape == (3, 260)
    assert torch.isneginf(together[:, 259:]).all()
    assert torch.isfinite(together[:, :259]).all()


def test_a_vocabulary_smaller_than_its_padding_leaves_a_rank_without_tokens(tmp_path):
    init_checkpoint(tmp_path / "m", "tiny")
    fields = json.loads((tmp_path / "m" / "config.json").read_text())
    config = ModelConfig.parse(fields | {"vocab_size": 5, "num_attention_heads": 4}, where="here")
    model = build_model(config, FakeRank(3, 4), dtype=torch.float32, device="cpu")
    assert torch.isneginf(model.logits(torch.zeros(1, 64))).all()


def test_a_draft_must_go_with_its_main_model(tiny_dir, tmp_path):
    main = loaded(tiny_dir)
    fields = json.loads((tiny_dir / "config.json").read_text())
    head = ModelConfig.parse(fields | {"architectures": ["Qwen3MTP"], "vocab_size": 300, "hidden_size": 32}, where="here")
    with pytest.raises(UnsupportedModel, match=r"(?s)vocab_size is 300.*hidden_size is 32"):
        build_model(head, OneRank(), dtype=torch.float32, device="meta", main=main)
    with pytest.raises(InvalidInput, match="cannot run alone"):
        build_model(head, OneRank(), dtype=torch.float32, device="meta")


def test_what_transformers_saves_is_loaded(tmp_path):
    known = reference(_moe(tmp_path / "ours"))
    known.save_pretrained(tmp_path / "theirs")
    given = prompts(14)
    found = logits_of(loaded(tmp_path / "theirs"), given)["s0"]
    torch.testing.assert_close(found, reference_logits(known, given["s0"]), atol=2e-5, rtol=2e-5)


def _moe(directory: Path) -> Path:
    init_checkpoint(directory, "moe", tied=False)
    return directory


def test_a_file_that_ends_too_early_is_refused(tiny_dir, tmp_path):
    model = loaded(tiny_dir)
    shutil.copytree(tiny_dir, tmp_path / "short")
    receiver = CheckpointReceiver(tmp_path / "short")
    manifest = receiver.identify(deadline=Deadline.after(60))
    receiver.close()
    path = tmp_path / "short" / "model.safetensors"
    path.write_bytes(path.read_bytes()[: -(1 << 16)])
    with pytest.raises(PartCorrupt, match=r"model\.safetensors"):
        cut_from(model, receiver, manifest)
    assert_holds(model, tensors_of(tiny_dir))
