"""Which versions fit which models, and that every mismatch is told at once."""

import numpy as np
import pytest
import torch

from weightcast import TRANSFORMER_GROUPS, LiveModel, ModelPart
from weightcast.errors import InvalidInput, UnsupportedTensor, VersionDoesNotFit


def mismatches(store, model, tensors, *, commit="copy", **options):
    version = f"v{len(store.versions()) if store.path.exists() else 0}"
    store.publish(version, tensors)
    live = LiveModel(model, source=store, **options)
    with pytest.raises(VersionDoesNotFit) as caught:
        live.update(version, commit=commit)
    text = str(caught.value)
    assert all(mismatch.name in text for mismatch in caught.value.mismatches)
    return {(mismatch.kind, mismatch.name) for mismatch in caught.value.mismatches}


def zeros(**shapes):
    return {name.replace("__", "."): np.zeros(shape, np.float32) for name, shape in shapes.items()}


def test_all_mismatches_are_listed_at_once_in_every_mode(store):
    model = zeros(a=2, b=3, c=4, d=5)
    version = zeros(a=2, b=4, x=1) | {"c": np.zeros(4, np.float16)}
    for commit in ("copy", "swap", "inplace"):
        found = mismatches(store, model, version, commit=commit)
        assert found == {("shape", "b"), ("dtype", "c"), ("missing", "d"), ("unexpected", "x")}
    assert not any(array.any() for array in model.values())


def test_a_version_with_no_name_in_common_fails(store):
    assert ("missing", "a") in mismatches(store, zeros(a=2), zeros(b=2))


def test_tensors_to_ignore_and_parameters_to_keep_are_declared(store):
    model = zeros(a=2, mask=3)
    store.publish("v", zeros(a=2, rotary=4))
    LiveModel(model, source=store, ignore=["rot*"], fixed=["mask"]).update("v")
    assert mismatches(store, model, zeros(a=2, rotary=4), ignore=["rot*"]) == {("missing", "mask")}
    assert mismatches(store, model, zeros(a=2, rotary=4), fixed=["mask"]) == {("unexpected", "rotary")}


def test_a_group_must_come_whole(store):
    prefix = "model.layers.0.self_attn"
    tensors = {f"{prefix}.{name}_proj.weight": np.zeros(4) for name in "qkv"}
    model = {name: array.copy() for name, array in tensors.items()}
    store.publish("whole", tensors)
    LiveModel(model, source=store, groups=TRANSFORMER_GROUPS).update("whole")
    del tensors[f"{prefix}.v_proj.weight"]
    store.publish("half", tensors)
    with pytest.raises(VersionDoesNotFit) as caught:
        LiveModel(model, source=store, groups=TRANSFORMER_GROUPS, fixed=["*.v_proj.weight"]).update("half")
    (mismatch,) = caught.value.mismatches
    assert mismatch.kind == "incomplete group"
    assert f"{prefix}.q_proj.weight, {prefix}.k_proj.weight" in mismatch.name
    assert f"{prefix}.v_proj.weight" in mismatch.detail


def test_a_tied_model_takes_either_name_or_both_if_they_agree(store):
    layer = torch.nn.Linear(4, 4, bias=False)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 4), "head": layer})
    model["embed"].weight = layer.weight
    value = torch.full((4, 4), 3.0)
    for index, tensors in enumerate(
        [{"embed.weight": value}, {"head.weight": value}, {"embed.weight": value, "head.weight": value},
         {"embed.weight": value, "head.weight": value.clone()}]
    ):  # fmt: skip
        store.publish(f"ok{index}", tensors)
        with torch.no_grad():
            layer.weight.zero_()
        result = LiveModel(model, source=store).update(f"ok{index}")
        assert torch.equal(model["embed"].weight, value)
        assert result.tensors == 1
    different = {"embed.weight": value, "head.weight": value + 1}
    assert mismatches(store, model, different) == {("tied", "embed.weight = head.weight")}
    assert mismatches(store, model, {"other": value}) == {
        ("missing", "embed.weight = head.weight"), ("unexpected", "other"),
    }  # fmt: skip


def test_an_untied_model_gets_its_own_copies_of_a_tied_version(store):
    weight = np.full(6, 2.0)
    store.publish("v", {"a": weight, "b": weight})
    for start in ({"a": np.zeros(6), "b": np.zeros(6)},):
        for commit in ("copy", "swap", "inplace"):
            model = {name: array.copy() for name, array in start.items()}
            live = LiveModel(model, source=store)
            live.update("v", commit=commit)
            model["a"][0] = 9
            assert model["b"].tolist() == [2.0] * 6
            live.clear()
            live.update("v", commit=commit)
            model["a"][0] = 9
            assert model["b"].tolist() == [2.0] * 6


def test_a_draft_model_is_fed_by_declared_names(store):
    main, draft = zeros(embed=4, w=2), zeros(embed=4, block__w=3)
    version = {"embed": np.ones(4, np.float32), "w": np.ones(2, np.float32), "mtp.block.w": np.ones(3, np.float32)}
    store.publish("v", version)
    parts = [main, ModelPart(draft, names=["mtp.*", "embed"], rename=lambda name: name.removeprefix("mtp."))]
    result = LiveModel(parts, source=store).update("v")
    assert result.tensors == 3
    assert all(array.all() for array in (*main.values(), *draft.values()))
    assert main["embed"] is not draft["embed"]


def test_a_draft_that_gets_nothing_or_too_little_fails_before_anything_is_written(store):
    main, draft = zeros(w=2), zeros(block__w=3, block__v=3)
    parts = [main, ModelPart(draft, names=["mtp.*"], rename=lambda name: name.removeprefix("mtp."))]
    one = {"w": np.ones(2, np.float32)}
    assert ("missing", "mtp.*") in mismatches(store, parts, one)
    some = one | {"mtp.block.w": np.ones(3, np.float32), "mtp.extra": np.ones(1)}
    assert mismatches(store, parts, some) == {("missing", "block.v"), ("unexpected", "mtp.extra")}
    assert not main["w"].any()


def test_two_models_with_disjoint_names_need_no_patterns(store):
    main, draft = zeros(w=2), zeros(mtp__w=2)
    store.publish("v", {"w": np.ones(2, np.float32), "mtp.w": np.ones(2, np.float32)})
    LiveModel([main, draft], source=store).update("v")
    assert main["w"].all()
    assert draft["mtp.w"].all()


def test_memory_seen_in_two_shapes_cannot_be_swapped_but_copied(store):
    fused = torch.zeros(6, 4)
    model = {"q": fused[:2], "kv": fused[2:]}
    store.publish("v", {"q": torch.ones(2, 4), "kv": torch.ones(4, 4)})
    live = LiveModel(model, source=store)
    with pytest.raises(VersionDoesNotFit, match="not swappable"):
        live.update("v", commit="swap")
    live.update("v", commit="copy")
    assert fused.all()


@pytest.mark.parametrize("model", ["text", 3, [], {}, torch.zeros(3), torch.nn.Module(), (1, 2)])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(InvalidInput):
        LiveModel(model)


def test_parameters_that_cannot_be_written_are_refused_by_name():
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(UnsupportedTensor, match="'f' is read-only"):
        LiveModel({"f": frozen})
    with pytest.raises(UnsupportedTensor, match="'e' is expanded"):
        LiveModel({"e": torch.zeros(1, 3).expand(4, 3)})
    with pytest.raises(UnsupportedTensor, match="in the mapping: t"):
        LiveModel({"t": "text"})


def test_ranks_count_from_zero():
    with pytest.raises(InvalidInput, match="ranks count from 0"):
        LiveModel({"a": np.zeros(1)}, rank=-1)
