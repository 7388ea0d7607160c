"""Versions that lie in shared memory: copied and proved in one go by several threads, or cut where they lie."""

import threading

import numpy as np
import pytest
import torch
from delta_samples import same
from mapped_sources import Slab
from shard_models import (
    by_hand,
    check_manifest,
    cut_version,
    held_now,
    next_tensors,
    parameters,
    random_tensors,
    shards_of,
    soon,
    streamed,
)

from weightcast import LiveModel, State
from weightcast.clock import Deadline
from weightcast.errors import (
    CommitFailed,
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    SourceFailed,
    UpdateCancelled,
    VersionDoesNotFit,
)
from weightcast.tensors.flat import flat_bytes
from weightcast.transports.base import MappedReceiver
from weightcast.transports.file import FileReceiver
from weightcast.worker.buffers import Buffers
from weightcast.worker.hashing import COPY_NBYTES
from weightcast.worker.staging import Staging


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def some_tensors(seed):
    """Larger than several blocks, of odd sizes, without elements, of one element."""
    rng = np.random.default_rng(seed)
    shapes = {"large": (3 * COPY_NBYTES + 5,), "odd": (7, 1001), "none": (0, 4), "one": (), "part": (COPY_NBYTES // 2,)}
    return {name: rng.integers(0, 255, shape, np.uint8) for name, shape in shapes.items()} | {
        "f32": rng.standard_normal((300, 77)).astype(np.float32)
    }


def model_like(tensors, kind):
    if kind == "numpy":
        return {name: np.zeros_like(array) for name, array in tensors.items()}
    module = torch.nn.Module()
    for name, array in tensors.items():
        zeros = torch.zeros(array.shape, dtype=torch.from_numpy(array).dtype)
        module.register_parameter(name, torch.nn.Parameter(zeros, requires_grad=False))
    return module


def held_by(model):
    return dict(model) if isinstance(model, dict) else {name: one.numpy() for name, one in model.named_parameters()}


@pytest.fixture(scope="module")
def versions():
    return {"v1": some_tensors(1), "v2": some_tensors(2)}


@pytest.fixture(params=[True, False], ids=["digests", "sums"])
def slab(versions, request):
    slab = Slab(digests=request.param, **versions)
    assert isinstance(slab, MappedReceiver)
    return slab


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("mode", ["copy", "swap", "inplace"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_mode_takes_a_version_from_where_it_lies(kind, mode, threads, slab, versions):
    model = model_like(versions["v1"], kind)
    live = LiveModel(model, source=slab, threads=threads)
    for version in ("v1", "v2", "v1"):
        result = live.update(version, commit=mode)
        assert same(held_by(model), versions[version])
        assert live.root_digest() == slab.manifests[version].root_digest
        assert result.bytes == sum(array.nbytes for array in versions[version].values())
    assert len(slab.asked) == (0 if mode == "inplace" else 3)


def test_no_thread_is_left_and_nothing_of_the_slab_is_kept(slab, versions):
    before = threading.active_count()
    model = model_like(versions["v1"], "numpy")
    LiveModel(model, source=slab).update("v2", commit="swap")
    assert threading.active_count() == before
    for array in slab.arrays["v2"].values():
        flat_bytes(array)[...] = 0  # the publisher fills its memory anew
    assert same(model, versions["v2"])


def test_only_tensors_that_are_wanted_are_asked_for(slab, versions):
    wanted = {name: versions["v1"][name] for name in ("odd", "none", "f32")}
    model = model_like(wanted, "numpy")
    LiveModel(model, source=slab, ignore=("large", "one", "part")).update("v1")
    assert same(model, wanted)
    assert slab.asked == [{"odd", "f32"}]


@pytest.mark.parametrize("mode", ["copy", "swap", "inplace"])
@pytest.mark.parametrize("digests", [True, False])
def test_names_that_the_model_ties_must_have_the_same_bytes(mode, digests):
    one = np.arange(10, dtype=np.float32)
    memory = np.zeros_like(one)
    model = {"a": memory, "b": memory}
    slab = Slab(digests=digests, same={"a": one, "b": one + 0}, other={"a": one, "b": one + 1})
    live = LiveModel(model, source=slab)
    live.update("same", commit=mode)
    assert model["a"] is model["b"]
    assert same(model, {"a": one, "b": one})
    undone = not digests and mode == "inplace"  # their bytes are known to differ only when they have come
    with pytest.raises(CommitFailed if undone else VersionDoesNotFit, match=r"(?s)a = b.*the model ties these names"):
        live.update("other", commit=mode)
    assert same(model, {"a": one, "b": one})
    assert (live.version, live.state) == ("same", State.READY)


def test_threads_must_be_some(versions):
    with pytest.raises(InvalidInput, match="0 threads"):
        LiveModel(model_like(versions["v1"], "numpy"), threads=0)


# -- faults --------------------------------------------------------------------------------------------------------


@pytest.fixture
def serving(slab, versions):
    """A model that serves v1, and a check that it still does, every bit of it."""
    model = model_like(versions["v1"], "torch")
    live = LiveModel(model, source=slab)
    live.update("v1", commit="swap")

    def check():
        assert same(held_by(model), versions["v1"])
        assert (live.version, live.state) == ("v1", State.READY)
        live.update("v2", commit="swap")  # and it takes the next one
        assert same(held_by(model), versions["v2"])

    return live, check


@pytest.mark.parametrize("mode", ["copy", "swap"])
def test_bytes_that_are_overwritten_meanwhile_are_noticed_and_all_are_listed(mode, slab, versions, serving):
    live, check = serving

    def overwrite():
        slab.arrays["v2"]["large"][-1] ^= 1
        slab.arrays["v2"]["f32"][0, 0] += 1
        slab.during = lambda: None

    slab.during = overwrite
    with pytest.raises(DigestMismatch) as caught:
        live.update("v2", commit=mode)
    assert caught.value.tensors == ("large", "f32")
    for name in ("large", "f32"):
        slab.arrays["v2"][name][...] = versions["v2"][name]
    check()


@pytest.mark.parametrize("mode", ["copy", "swap"])
def test_a_source_that_cannot_confirm_what_it_lent_changes_nothing(mode, slab, serving):
    live, check = serving

    def refuse():
        slab.after = lambda: None
        raise SourceFailed("another version was written there")

    slab.after = refuse
    with pytest.raises(SourceFailed, match="another version"):
        live.stage("v2", commit=mode)
    check()


def test_all_tensors_that_are_not_as_described_are_listed(slab, serving):
    live, check = serving
    whole = slab.arrays["v2"]
    slab.arrays["v2"] = {
        "large": whole["large"][1:],
        "odd": whole["odd"].view(np.int8),
        "part": whole["part"],
        "f32": whole["f32"].T.copy().T,
    }
    with pytest.raises(SourceFailed) as caught:
        live.update("v2")
    for said in ("large is uint8[", "odd is int8[7, 1001], not U8[7, 1001]", "one is missing", "f32 is not contiguous"):
        assert said in str(caught.value)
    assert "part" not in str(caught.value)
    assert "none" not in str(caught.value)
    slab.arrays["v2"] = whole
    check()


def test_a_deadline_that_passes_while_bytes_are_copied_ends_it(slab, serving):
    live, check = serving
    with pytest.raises(DeadlineExceeded, match="receiving v2 from slab://"):
        live.stage("v2", deadline=Running(5))
    check()


def test_copying_can_be_cancelled(slab, serving):
    live, check = serving
    cancelled = threading.Event()
    slab.during = cancelled.set
    with pytest.raises(UpdateCancelled, match="receiving v2 from slab://"):
        live.stage("v2", deadline=Deadline.after(60, cancelled=cancelled))
    slab.during = lambda: None
    check()


class Running:
    """A deadline that passes after so many looks, in whichever thread that is."""

    seconds = 60.0

    def __init__(self, looks):
        self.looks, self._lock = looks, threading.Lock()

    def remaining(self):
        return 60.0

    def check(self, what):
        with self._lock:
            self.looks -= 1
            if self.looks < 0:
                raise DeadlineExceeded(what, self.seconds)


def test_when_one_thread_fails_the_others_stop_at_once():
    slab = Slab(v={f"t{number}": np.ones(100, np.uint8) for number in range(4000)})
    manifest = slab.manifests["v"]
    staging = Staging({entry.name: entry for entry in manifest.tensors})
    deadline = Once(10)
    with pytest.raises(SourceFailed, match="only once"):
        staging.fill(slab, manifest, deadline, threads=4)
    assert deadline.looks < 3000, "three threads may have gone on for a moment"


class Once(Running):
    """Raises at one look and lets all others pass."""

    def __init__(self, at):
        super().__init__(0)
        self._at = at

    def check(self, what):
        with self._lock:
            self.looks += 1
            fails = self.looks == self._at
        if fails:
            raise SourceFailed("this fails only once")


# -- slices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (2, 3)])
@pytest.mark.parametrize("digests", [True, False])
def test_slices_of_what_lies_in_memory_are_those_of_the_store(rank, ranks, digests, store, rng):
    tensors = random_tensors(rng)
    store.publish("v", tensors)
    slab, told = Slab(digests=digests, v=tensors), []
    version = cut_version(slab, "v", shards_of(rank, ranks), told=told)
    reference = cut_version(FileReceiver(store), "v", shards_of(rank, ranks))
    assert same(dict(parameters(version)), dict(parameters(reference)))
    assert held_now(version).shard.root_digest == held_now(reference).shard.root_digest
    assert version.full.root_digest == reference.full.root_digest
    check_manifest(version, by_hand(tensors, rank, ranks))
    assert version.nbytes >= reference.nbytes  # whole tensors are mapped, and boxes read from a store
    assert told[-1] == (version.nbytes, version.nbytes)
    for array in slab.arrays["v"].values():
        flat_bytes(array)[...] = 0
    assert same(dict(parameters(version)), by_hand(tensors, rank, ranks))


def test_slices_need_no_memory_beside_their_own(rng):
    buffers = Buffers()
    version = cut_version(Slab(v=random_tensors(rng)), "v", shards_of(0, 2), buffers=buffers)
    assert buffers.nbytes == 0
    assert version.nbytes > 0


def test_slices_are_proved_where_they_lie_and_streamed_again_in_place(rng):
    tensors = random_tensors(rng)
    slab = Slab(v=tensors)
    version = cut_version(slab, "v", shards_of(1, 2), mode="inplace")
    assert same(streamed(version, version.shard), by_hand(tensors, 1, 2))
    before = held_now(version)
    after = next_tensors(rng, tensors)
    slab.add("w", after)
    newer = cut_version(slab, "w", shards_of(1, 2), mode="inplace", held=before)
    assert same(streamed(newer, newer.shard), by_hand(after, 1, 2))
    assert same(streamed(newer, newer.manifest("v", deadline=soon())), by_hand(tensors, 1, 2))


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("mode", ["copy", "inplace"])
def test_damaged_tensors_are_all_listed_and_none_is_cut(mode, digests, rng):
    slab = Slab(digests=digests, v=random_tensors(rng))
    for name in ("k", "stacked.2"):
        slab.arrays["v"][name].view(np.uint16)[-1] ^= 1
    with pytest.raises(DigestMismatch) as caught:
        cut_version(slab, "v", shards_of(1, 2), mode=mode)
    assert set(caught.value.tensors) == {"k", "stacked.2"}
    cut_version(slab, "v", shards_of(1, 2), mode=mode, checksum=False)


@pytest.mark.parametrize("checksum", [True, False])
def test_slices_do_not_count_before_the_source_has_confirmed_them(checksum, rng):
    slab = Slab(v=random_tensors(rng))

    def refuse():
        raise SourceFailed("it was overwritten")

    slab.after = refuse
    with pytest.raises(SourceFailed, match="overwritten"):
        cut_version(slab, "v", shards_of(0, 2), checksum=checksum)


@pytest.mark.parametrize("looks", [1, 5, 20])
def test_cutting_ends_at_the_deadline_and_gives_the_memory_back_to_the_source(looks, rng):
    slab, left = Slab(v=random_tensors(rng)), []
    slab.after = lambda: left.append(True)
    with pytest.raises(DeadlineExceeded):
        cut_version(slab, "v", shards_of(0, 2), deadline=Running(looks))
    assert not left, "it was left with an error"
