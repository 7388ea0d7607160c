"""A tensor-parallel engine of one's own: each rank says which boxes its parameters are, and takes them of whole versions."""

import numpy as np
import pytest
import torch
from delta_samples import chunks_of

from weightcast import (
    Box,
    DeltaPolicy,
    DepotPublisher,
    DType,
    Held,
    LiveModel,
    ModelPart,
    Placement,
    Shards,
    Store,
    TensorSpec,
)
from weightcast.delta import Cut, Slicing
from weightcast.errors import CommitFailed, InvalidInput, VersionDoesNotFit
from weightcast.transports.registry import open_receiver

RANKS, WIDTH, HEADS = 2, 8, 4
MODES = ["copy", "swap", "inplace", "delta"]
SHAPES = {
    "q": (HEADS * 2, WIDTH),
    "k": (HEADS, WIDTH),
    "v": (HEADS, WIDTH),
    "up": (12, WIDTH),
    "down": (WIDTH, 12),
    "norm": (WIDTH,),
}


def version(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def layout(rank, **options):
    fused, at = [], 0
    for name in "qkv":
        box = Box.shard(SHAPES[name], dim=0, rank=rank, ranks=RANKS)
        fused.append(Placement(name, box, (at, 0)))
        at += box.shape[0]
    held = (
        Held(TensorSpec("qkv", DType.F32, (at + 1, WIDTH)), tuple(fused)),  # a row of padding
        Held.slice_of(TensorSpec("up", DType.F32, SHAPES["up"]), Box.shard(SHAPES["up"], dim=0, rank=rank, ranks=RANKS)),
        Held.slice_of(
            TensorSpec("down", DType.F32, SHAPES["down"]), Box.shard(SHAPES["down"], dim=1, rank=rank, ranks=RANKS)
        ),
        Held.slice_of(TensorSpec("norm", DType.F32, SHAPES["norm"]), Box.whole(SHAPES["norm"])),
    )
    return Shards(held, SHAPES, **options)


def blank(rank):
    return {held.spec.name: np.full(held.spec.shape, 7, held.spec.dtype.numpy) for held in layout(rank).held}


def expected(rank, tensors):
    def rows(name, dim=0):
        return np.split(tensors[name], RANKS, axis=dim)[rank]

    return {
        "qkv": np.concatenate([rows("q"), rows("k"), rows("v"), np.zeros((1, WIDTH), np.float32)]),
        "up": rows("up"),
        "down": rows("down", 1),
        "norm": tensors["norm"],
    }


def check(model, rank, tensors):
    for name, wanted in expected(rank, tensors).items():
        assert (model[name] == wanted).all(), name


@pytest.mark.parametrize("commit", MODES)
@pytest.mark.parametrize("rank", range(RANKS))
def test_each_rank_takes_its_boxes_fused_cut_and_whole_and_follows_deltas(store, rank, commit):
    first = version(1)
    store.publish("step_1", first)
    model = blank(rank)
    live = LiveModel(model, source=store, layout=layout(rank))
    live.update("step_1", commit=commit)
    check(model, rank, first)
    assert live.version == "step_1"

    second = {name: array.copy() for name, array in first.items()}
    second["k"][:, 3] += 1
    second["down"][2] -= 1
    store.publish("step_2", second, mode="delta")
    result = live.update(commit=commit)
    check(model, rank, second)
    assert result.mode == ("swap" if commit == "swap" else "delta")
    assert live.update().mode == "none"
    if commit != "swap":
        assert live.previous == ("step_1" if commit != "inplace" else live.previous)
        live.rollback()
        check(model, rank, first)
        assert live.version == "step_1"
        live.update("step_2")
        check(model, rank, second)


def test_a_module_takes_a_layout_too_and_its_parameters_stay_the_same_objects(store):
    tensors = version(3)
    store.publish("v", tensors)
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in blank(1).items()})
    before = dict(model.items())
    LiveModel(model, source=store, layout=layout(1)).update()
    check({name: parameter.detach().numpy() for name, parameter in model.items()}, 1, tensors)
    assert all(model[name] is parameter for name, parameter in before.items())


def test_floats_are_converted_to_what_the_parameters_are(store):
    tensors = version(4, np.float64)
    store.publish("v", tensors)
    model = blank(0)
    LiveModel(model, source=store, layout=layout(0)).update()
    check(model, 0, {name: array.astype(np.float32) for name, array in tensors.items()})


def test_only_the_boxes_cross_the_network(tmp_path):
    tensors = version(5)
    with DepotPublisher("127.0.0.1:0") as publisher:
        publication = publisher.publish("v", tensors)
        model = blank(1)
        live = LiveModel(model, source=publisher.url, layout=layout(1))
        result = live.update("v")
        check(model, 1, tensors)
        own = sum(array.nbytes for array in model.values()) - 4 * WIDTH  # but for the padding
        assert result.bytes == own
        publication.wait(receivers=1, timeout=10)  # told under the version that was published


def test_a_version_that_is_not_made_of_these_tensors_is_refused_and_nothing_changes(store):
    tensors = version(6)
    del tensors["k"]
    store.publish("v", {**tensors, "up": np.zeros((12, 9), np.float32), "extra": np.zeros(1)})
    model = blank(0)
    with pytest.raises(VersionDoesNotFit) as caught:
        LiveModel(model, source=store, layout=layout(0)).update()
    assert {(one.kind, one.name) for one in caught.value.mismatches} == {
        ("missing", "k"), ("shape", "up"), ("unexpected", "extra"),
    }  # fmt: skip
    assert all((array == 7).all() for array in model.values())


def test_what_a_version_has_more_is_declared_in_the_layout_or_to_the_model(store):
    store.publish("v", {**version(7), "extra.a": np.zeros(1), "other": np.zeros(1)})
    LiveModel(blank(0), source=store, layout=layout(0, ignore=("extra.*",)), ignore=["other"]).update()


def test_groups_and_wrappers_are_told_for_layouts_too(store):
    store.publish("v", {f"_orig_mod.{name}": array for name, array in version(8).items()})
    with pytest.raises(VersionDoesNotFit, match=r"6 of its 6 names .* publish it with strip_wrappers=True") as caught:
        LiveModel(blank(0), source=store, layout=layout(0)).update()
    assert "LiveModel" not in str(caught.value)
    store.publish("w", {name: array for name, array in version(8).items() if name != "norm"})
    with pytest.raises(VersionDoesNotFit, match="must come together with norm"):
        LiveModel(blank(0), source=store, layout=layout(0), groups=[("up", "norm")]).update("w")


def test_parameters_that_versions_do_not_hold_are_fixed(store):
    store.publish("v", version(9))
    model = {**blank(0), "rotary": np.full(3, 5.0)}
    with pytest.raises(InvalidInput, match="'rotary' is not in the layout"):
        LiveModel(model, layout=layout(0))
    LiveModel(model, source=store, layout=layout(0), fixed=["rotary"]).update()
    assert model["rotary"].tolist() == [5.0] * 3


def test_a_layout_of_another_model_is_refused_at_once():
    model = blank(0)
    del model["norm"]
    model["up"] = np.zeros((6, WIDTH), np.float64)
    with pytest.raises(InvalidInput, match=r"'up' is F64\[6, 8\] in the model, not F32\[6, 8\]; the model has no 'norm'"):
        LiveModel(model, layout=layout(0))
    for bad in ([blank(0), {"a": np.zeros(1)}], ModelPart(blank(0), names=["*"])):
        with pytest.raises(InvalidInput, match="a LiveModel of its own"):
            LiveModel(bad, layout=layout(0))
    with pytest.raises(InvalidInput, match="write the names there"):
        LiveModel(blank(0), layout=layout(0), strip_wrappers=True)


def test_a_commit_in_place_that_fails_is_undone_from_the_source(store):
    first, second = version(10), version(11)
    store.publish("step_1", first)
    store.publish("step_2", second, mode="full")
    model, fail = blank(0), []

    def post_load():
        if fail:
            fail.pop()
            raise RuntimeError("derived weights")

    live = LiveModel(model, source=store, layout=layout(0), post_load=post_load)
    live.update("step_1")
    fail.append(True)
    with pytest.raises(CommitFailed, match="was restored"):
        live.update("step_2", commit="inplace")
    check(model, 0, first)
    assert live.version == "step_1"


def test_the_receiver_of_a_layout_is_closed_when_its_update_has_ended(store):
    store.publish("v", version(12))
    closed = []
    receiver = open_receiver(f"file://{store.path}", rank=0)

    class Told(type(receiver)):
        def close(self):
            closed.append(True)
            super().close()

    told = Told(Store(store.path))
    live = LiveModel(blank(0), source=told, layout=layout(0))
    staged = live.stage("v", commit="inplace")
    live.abandon(staged)
    assert closed == []  # the caller's own
    live.update("v", commit="inplace")
    assert live.version == "v"


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(("first", "mode"), [("gaps", "copy"), ("dense", "copy"), ("sliced gaps", "delta")])
def test_classes_in_slices_after_changes_of_whole_tensors_are_not_decoded_along_other_lanes(store, rng, rank, first, mode):
    rows, half = Slicing((Cut(("w",), 0, RANKS),)), (64, 64)
    old = rng.choice(np.array([1, 4, 16], np.float32), (128, 64))
    second = old.copy()
    if first == "dense":
        second = rng.permuted(old.reshape(2, -1), axis=1).reshape(old.shape)
    else:  # the classes that both halves have stay as many, but lie elsewhere
        second.reshape(2, -1)[:, [10, 3000]] = [16, 1]
        old = second.copy()
        second.reshape(2, -1)[:, [10, 3000]] = [1, 16]
    third = second.copy()
    third.reshape(2, -1)[:, 500:2500:130] *= np.float32(1.0000002)
    policy = DeltaPolicy(
        packing="classes" if first == "dense" else "gaps", slicing=rows if first == "sliced gaps" else Slicing()
    )
    store.publish("step_1", {"w": old})
    Store(store.path, delta=policy).publish("step_2", {"w": second}, mode="delta")
    Store(store.path, delta=DeltaPolicy(packing="classes", slicing=rows)).publish("step_3", {"w": third}, mode="delta")

    held = Held.slice_of(TensorSpec("w", DType.F32, (128, 64)), Box((rank * 64, 0), half))
    model = {"w": np.zeros(half, np.float32)}
    live = LiveModel(model, source=store, layout=Shards((held,), {"w": (128, 64)}))
    live.update("step_1")
    assert live.update("step_3").mode == mode
    assert (model["w"] == third[rank * 64 :][:64]).all()


def test_blocks_of_classes_that_share_a_row_are_decoded_by_a_rank_that_holds_all_of_it(tmp_path, rng):
    old = rng.normal(size=(40, 30)).astype(np.float32)
    new = old.copy()
    new[::3, 7] += np.float32(1e-6)
    store = Store(tmp_path, delta=DeltaPolicy(packing="classes"))
    with chunks_of(100):  # three rows and a third
        store.publish("step_1", {"w": old})
        store.publish("step_2", {"w": new}, mode="delta")
    held = Held.slice_of(TensorSpec("w", DType.F32, old.shape), Box.whole(old.shape))
    model = {"w": np.zeros_like(old)}
    live = LiveModel(model, source=store, layout=Shards((held,), {"w": old.shape}))
    live.update("step_1")
    assert live.update("step_2").mode == "delta"
    assert (model["w"] == new).all()
