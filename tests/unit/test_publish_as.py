"""Tensors that are published under other names or in another dtype than the trainer has; and errors that propose it."""

import re

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from weightcast import DepotPublisher, LiveModel, Publisher, Shard, Store
from weightcast.cli.main import cli
from weightcast.errors import InvalidInput, UnsupportedTensor, VersionDoesNotFit
from weightcast.tensors.spec import bare_names

LAYERS = 400


def block():
    return torch.nn.ModuleDict({"mlp": torch.nn.Linear(3, 2), "norm": torch.nn.LayerNorm(2)})


def compiled(module):
    return torch.compile(module, backend="eager")


def refusal(model, source, version="v", **options):
    with pytest.raises(VersionDoesNotFit) as caught:
        LiveModel(model, source=source, **options).update(version)
    return caught.value


# -- names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapped", "bare"),
    [
        (["_orig_mod.a.weight", "_orig_mod.b"], ["a.weight", "b"]),
        (["layers.0._checkpoint_wrapped_module.mlp.weight"], ["layers.0.mlp.weight"]),
        (["layers.0._orig_mod.mlp.weight", "head.weight"], ["layers.0.mlp.weight", "head.weight"]),
        (["_fsdp_wrapped_module.a._fsdp_wrapped_module.w"], ["a.w"]),
        (["module._orig_mod.a", "module.b"], ["a", "b"]),
        (["_orig_mod.module.a", "_orig_mod.module.b"], ["a", "b"]),
        (["module.a", "head.b"], ["module.a", "head.b"]),  # a module that is called so
        (["module.module.a", "module.module.b"], ["module.a", "module.b"]),  # the same under DDP
        (["block.module.a"], ["block.module.a"]),
        (["_orig_mod"], ["_orig_mod"]),
    ],
)
def test_names_lose_what_wrappers_put_into_them_and_nothing_else(wrapped, bare):
    assert list(bare_names(wrapped).values()) == bare


def test_one_sentence_proposes_the_rename_instead_of_a_line_for_each_name(store):
    tensors = {f"layers.{layer}.weight": np.full(2, layer, np.float32) for layer in range(LAYERS)}
    wrapped = {f"_orig_mod.{name}": array for name, array in tensors.items()}
    store.publish("v", wrapped)
    model = {name: np.zeros(2, np.float32) for name in tensors}
    error = refusal(model, store)
    assert len(error.mismatches) == 2 * LAYERS
    assert str(error) == (
        "version v does not fit the model; no weights were changed. 400 of its 400 names differ from the model's only by "
        "what a wrapper puts into them: it has '_orig_mod.layers.0.weight', the model 'layers.0.weight'; publish it with "
        "strip_wrappers=True (weightcast publish --strip-wrappers) or make the LiveModel with strip_wrappers=True."
    )
    store.publish("stripped", wrapped, strip_wrappers=True)
    LiveModel(model, source=store).update("stripped")
    assert all((model[name] == array).all() for name, array in tensors.items())


@pytest.mark.parametrize("prefix", ["module.module.", "_orig_mod."])
def test_an_option_that_would_not_help_is_not_proposed(store, prefix):
    """`strip_wrappers` of `publish` removes one `module.`, and knows nothing of a model that is wrapped itself."""
    own = "" if prefix.startswith("module.") else "module."
    tensors = {f"{prefix}{name}": np.ones(2) for name in ("a", "b")}
    model = {f"{own}{name}": np.zeros(2) for name in ("a", "b")}
    store.publish("v", tensors)
    assert str(refusal(model, store)).endswith(f"the model '{own}a'; make the LiveModel with strip_wrappers=True.")
    store.publish("stripped", tensors, strip_wrappers=True)
    refusal(model, store, "stripped")
    LiveModel(model, source=store, strip_wrappers=True).update("v")


def test_other_mismatches_stand_beside_the_proposal_and_long_lists_are_cut_short(store):
    store.publish("v", {"_orig_mod.a": np.ones(2)} | {f"extra.{number}": np.ones(1) for number in range(100)})
    error = refusal({"a": np.zeros(2), "b": np.zeros(2)}, store)
    assert len(error.mismatches) == 103
    lines = str(error).splitlines()
    assert "'_orig_mod.a', the model 'a'" in lines[0]
    assert lines[0].endswith("101 mismatch(es):")
    assert len(lines) == 22
    assert lines[-1] == "  and 81 more"


@pytest.mark.parametrize(
    "wrap",
    [
        compiled,
        lambda model: torch.nn.ModuleDict({"module": model}),
        lambda model: model.update({"mlp": checkpoint_wrapper(model["mlp"])}) or model,
        lambda model: model.update({"mlp": compiled(model["mlp"])}) or model,
    ],
    ids=["compiled", "like DDP", "checkpointed child", "compiled child"],
)
def test_a_wrapped_model_takes_the_versions_of_the_plain_one_and_the_other_way_round(store, wrap):
    trainer, engine = block(), block()
    plain = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    store.publish("v", plain)
    wrapped = wrap(engine)
    error = refusal(wrapped, store)
    assert len(str(error).splitlines()) == 1
    assert str(error).endswith("; make the LiveModel with strip_wrappers=True.")
    LiveModel(wrapped, source=store, strip_wrappers=True).update("v")
    assert all(torch.equal(one, other) for one, other in zip(engine.state_dict().values(), plain.values(), strict=True))

    named = dict(wrap(trainer).named_parameters())
    if list(named) != list(plain):  # what checkpointing hides from others, it does not hide from us
        store.publish("wrapped", named)
        target = block()
        LiveModel(target, source=store, strip_wrappers=True).update("wrapped")
        assert all(torch.equal(one, plain[name]) for name, one in target.state_dict().items())


def test_names_that_would_become_the_same_are_refused(store):
    both = {"_orig_mod.a": np.zeros(1), "a": np.ones(1)}
    with pytest.raises(InvalidInput, match=r"_orig_mod\.a and a become a"):
        store.publish("v", both, strip_wrappers=True)
    assert not store.path.exists()
    with pytest.raises(InvalidInput, match="become a"):
        LiveModel(both, strip_wrappers=True)
    store.publish("v", both)
    with pytest.raises(InvalidInput, match="become a"):
        LiveModel({"a": np.zeros(1)}, source=store, strip_wrappers=True).update("v")
    many = {f"{prefix}{number}": np.zeros(1) for number in range(50) for prefix in ("", "_orig_mod.")}
    with pytest.raises(InvalidInput, match="and 45 more") as caught:
        store.publish("w", many, strip_wrappers=True)
    assert len(str(caught.value)) < 500


def test_an_iterator_is_stripped_as_it_comes(store):
    arrays = {"module.a": np.zeros(1), "module._orig_mod.b": np.ones(1)}
    store.publish("v", iter(arrays.items()), strip_wrappers=True)
    assert sorted(store.load("v")) == ["a", "b"]
    with pytest.raises(InvalidInput, match=r"module\.a begins with 'module\.', and head does not"):
        store.publish("w", iter({"module.a": np.zeros(1), "head": np.zeros(1)}.items()), strip_wrappers=True)
    assert store.versions() == ["v"]


def test_a_module_is_published_as_its_state(store):
    model = block()
    store.publish("v", compiled(model), strip_wrappers=True)
    assert sorted(store.load("v")) == sorted(model.state_dict())
    with pytest.raises(InvalidInput, match="an object of type int cannot be published"):
        store.publish("w", 3)


# -- dtypes ---------------------------------------------------------------------------------------------------------------


def float32_samples():
    """Every exponent and sign with every kind of fraction that rounding has to look at, and whatever is not a number."""
    rng = np.random.default_rng(3)
    tops = np.arange(0, 1 << 16, dtype=np.uint32) << 16
    ends = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, *rng.integers(0, 1 << 16, 10)], np.uint32)
    return (tops[:, None] | ends).view(np.float32).reshape(-1)


@pytest.mark.parametrize("wanted", ["BF16", "F16"])
def test_elements_are_rounded_as_torch_rounds_them(store, wanted):
    samples = float32_samples()
    manifest = store.publish("v", {"w": torch.from_numpy(samples)}, dtype=wanted)
    assert [entry.dtype for entry in manifest.tensors] == [wanted]
    found = store.load("v")["w"]
    expected = torch.from_numpy(samples).to({"BF16": torch.bfloat16, "F16": torch.float16}[wanted])
    numbers = ~np.isnan(samples)
    assert (found.view(np.int16) == expected.view(torch.int16).numpy())[numbers].all()
    assert np.isnan(found[~numbers].astype(np.float32)).all()
    assert (np.isposinf(found) >= np.isposinf(samples)).all()


def test_other_dtypes_and_declared_exceptions_stay_as_they_are(store):
    tensors = {
        "w": np.ones(3, np.float32),
        "router.weight": np.full(3, 1 / 3, np.float32),
        "half": np.ones(2, np.float16),
        "already": np.ones(2, ml_dtypes.bfloat16),
        "fp8": np.ones(2, ml_dtypes.float8_e4m3fn),
        "scale": np.ones(2, ml_dtypes.float8_e8m0fnu),
        "ids": np.arange(3),
        "mask": np.array([True]),
    }
    manifest = store.publish("v", tensors, dtype="BF16", keep_dtype=["router.*"])
    assert {entry.name: str(entry.dtype) for entry in manifest.tensors} == {
        "w": "BF16", "router.weight": "F32", "half": "BF16", "already": "BF16",
        "fp8": "F8_E4M3", "scale": "F8_E8M0", "ids": "I64", "mask": "BOOL",
    }  # fmt: skip
    assert (store.load("v")["router.weight"] == tensors["router.weight"]).all()


@pytest.mark.parametrize("dtype", ["bf16", "F8_E4M3", "I32", "float"])
def test_what_nothing_can_be_converted_to_is_refused(store, dtype):
    with pytest.raises(InvalidInput, match="choose one of F16, BF16, F32, F64"):
        store.publish("v", {"w": np.ones(1)}, dtype=dtype)
    with pytest.raises(InvalidInput, match="list of patterns"):
        store.publish("v", {"w": np.ones(1)}, dtype="F32", keep_dtype="w")


def test_tied_names_stay_tied_and_a_small_change_is_a_delta_of_converted_elements(store):
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    store.publish("v0", {"a": weight, "b": weight}, dtype="BF16")
    weight[3] += 1
    manifest = store.publish("v1", {"a": weight, "b": weight}, mode="delta", dtype="BF16")
    assert (manifest.kind, manifest.tied) == ("delta", {"b": "a"})
    assert (store.load("v1")["b"].view(np.int16) == weight.to(torch.bfloat16).view(torch.int16).numpy()).all()


def test_memory_is_bounded_by_one_tensor(store):
    import tracemalloc

    tensors = {f"w{number}": np.ones(1 << 20, np.float32) for number in range(16)}
    tracemalloc.start()
    try:
        store.publish("v", tensors, dtype="BF16", mode="full")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * (2 << 20)  # all of them would be 16 times 2 MiB


def test_one_sentence_says_that_the_dtypes_differ(store):
    store.publish("v", {f"w{number}": np.ones(2, np.float32) for number in range(LAYERS)})
    model = {f"w{number}": np.zeros(2, ml_dtypes.bfloat16) for number in range(LAYERS)}
    error = refusal(model, store)
    assert len(error.mismatches) == LAYERS
    assert str(error) == (
        "version v does not fit the model; no weights were changed. 400 tensor(s) are F32 and the model wants BF16 (w0, w1, "
        "w2, ...): publish with dtype='BF16' (weightcast publish --dtype BF16), and keep_dtype= for tensors that are to "
        "stay as they are."
    )


def test_what_cannot_be_converted_is_not_proposed(store):
    store.publish("v", {"w": np.ones(2, np.int64)})
    assert "dtype: w: the model has F32, the version I64" in str(refusal({"w": np.zeros(2, np.float32)}, store))


def test_publishers_of_memory_convert_and_strip_too(root):
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    expected = weight.to(torch.bfloat16)
    options = {"dtype": "BF16", "keep_dtype": ["keep"], "strip_wrappers": True}
    tensors = {"_orig_mod.w": weight, "_orig_mod.keep": weight}

    def check(source):
        model = {"w": torch.zeros_like(expected), "keep": torch.zeros_like(weight)}
        with LiveModel(model, source=source) as live:
            live.update("v")
        assert torch.equal(model["w"], expected)
        assert torch.equal(model["keep"], weight)

    with Publisher(root) as publisher:
        publisher.publish("v", tensors, **options)
        check(publisher.url)
    with DepotPublisher("127.0.0.1:0") as publisher:
        publisher.publish("v", tensors, **options)
        check(publisher.url)
    with DepotPublisher("127.0.0.1:0", ranks=2) as first, DepotPublisher("127.0.0.1:0", rank=1, ranks=2) as second:
        for rank, publisher in enumerate((first, second)):
            rows = slice(32 * rank, 32 * rank + 32)
            shards = {name: Shard(one[rows], one.shape, (32 * rank, 0)) for name, one in tensors.items()}
            publisher.publish("v", shards, **options)
        check(f"shares+{first.url},{second.url.removeprefix('http://')}")


def test_the_command_line_converts_and_strips(tmp_path):
    from click.testing import CliRunner
    from safetensors.numpy import save_file

    (tmp_path / "checkpoint").mkdir()
    save_file(
        {"module.w": np.full(3, 1 / 3, np.float32), "module.router": np.full(3, 1 / 3, np.float32)},
        tmp_path / "checkpoint" / "model.safetensors",
    )
    command = ["publish", str(tmp_path / "store"), "v", str(tmp_path / "checkpoint"), "--dtype", "BF16"]
    result = CliRunner().invoke(cli, [*command, "--keep-dtype", "router", "--strip-wrappers"])
    assert result.exit_code == 0, result.output
    loaded = Store(tmp_path / "store").load("v")
    assert {name: str(array.dtype) for name, array in loaded.items()} == {"w": "bfloat16", "router": "float32"}


# -- what is no tensor ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": block()}, "tensor 'model': an object of type ModuleDict is not a"),
        ({"optimizer": torch.optim.SGD(block().parameters(), 0.1)}, "an object of type SGD is not a"),
        ({1: np.zeros(2)}, "1 cannot be the name of a tensor"),
        ("/checkpoints/1", "Store.publish_checkpoint takes a directory"),
    ],
)
def test_what_is_no_tensor_is_refused_with_an_error_of_ours(store, given, said):
    with pytest.raises((InvalidInput, UnsupportedTensor), match=re.escape(said)):
        store.publish("v", given)
    with DepotPublisher("127.0.0.1:0") as publisher, pytest.raises((InvalidInput, UnsupportedTensor)):
        publisher.publish("v", given)


def test_a_mapping_of_modules_is_not_a_model():
    with pytest.raises(UnsupportedTensor, match="an object of type ModuleDict is not a"):
        LiveModel({"model": block()})
