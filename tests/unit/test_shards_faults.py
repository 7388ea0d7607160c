"""What does not fit, is damaged, ends early or is cancelled: refused with every reason, and nothing is left behind."""

import threading
import weakref

import numpy as np
import pytest
from delta_samples import same
from msgspec.structs import replace
from shard_models import (
    MixedReceiver,
    by_hand,
    cut_version,
    held_now,
    next_tensors,
    random_tensors,
    shards_of,
    soon,
    streamed,
)

from weightcast import DeltaPolicy, Store, delta
from weightcast.clock import Deadline
from weightcast.errors import (
    BaseVersionMismatch,
    DeadlineExceeded,
    DeltaCorrupt,
    DigestMismatch,
    InvalidInput,
    PartCorrupt,
    SourceFailed,
    UpdateCancelled,
    VersionDoesNotFit,
    VersionNotFound,
)
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.dtypes import DType
from weightcast.tensors.spec import TensorSpec
from weightcast.transports.file import FileReceiver
from weightcast.worker import shards as shards_module
from weightcast.worker.buffers import Buffers
from weightcast.worker.shards import Shards


class Silent(FileReceiver):
    """A source from which nothing but manifests may be fetched."""

    def pieces(self, manifest, *, deadline, names=None):
        raise AssertionError("something was fetched")

    opened_state = folded = pieces


class Counted(Buffers):
    """Buffers that know how many bytes of theirs are in use."""

    out = 0

    def take(self, spec, **more):
        array = super().take(spec, **more)
        if array.nbytes:
            self.out += array.nbytes
            weakref.finalize(array.base, self._came_back, array.nbytes)
        return array

    def _came_back(self, nbytes):
        self.out -= nbytes


@pytest.fixture
def receiver(store):
    return FileReceiver(store)


def part_of(store, version, tensor):
    """The file and the byte at which a tensor of a full version begins."""
    manifest = store.manifest(version)
    entry = manifest.by_name()[tensor]
    return store.path / "versions" / version / manifest.parts[entry.part].file, entry.offset


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# -- what does not fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["copy", "swap", "delta", "inplace", "auto"])
def test_everything_that_does_not_fit_is_listed_and_nothing_is_fetched(mode, store, rng):
    tensors = random_tensors(rng)
    del tensors["k"]
    del tensors["experts.1"]  # all of it belongs to the other rank
    tensors["o"] = tensors["o"].T.copy()
    tensors["table"] = tensors["table"].astype(np.int32)
    tensors["norm"] = tensors["norm"].view(np.uint16)
    tensors["q.again"] = tensors["q"]  # a tied name of a tensor that the model has
    tensors["new"] = tensors["q"].copy()
    tensors["left.out"] = tensors["v"].copy()
    store.publish("v", tensors)
    with pytest.raises(VersionDoesNotFit) as caught:
        cut_version(Silent(store), "v", shards_of(0, 2, ignore=("left.*",)), mode=mode)
    found = {(mismatch.kind, mismatch.name) for mismatch in caught.value.mismatches}
    assert found == {
        ("missing", "k"),
        ("missing", "experts.1"),
        ("shape", "o"),
        ("dtype", "table"),
        ("dtype", "norm"),
        ("unexpected", "new"),
    }


def test_an_unexpected_tensor_is_refused_and_a_tied_name_is_not(store, rng):
    tensors = random_tensors(rng)
    store.publish("tied", tensors | {"head": tensors["embed"]})
    cut_version(FileReceiver(store), "tied", shards_of(0, 2))
    store.publish("more", tensors | {"extra": tensors["embed"].copy(), "extra.too": np.ones(3)})
    with pytest.raises(VersionDoesNotFit, match="2 mismatch") as caught:
        cut_version(Silent(store), "more", shards_of(0, 2))
    assert [(m.kind, m.name) for m in caught.value.mismatches] == [("unexpected", "extra"), ("unexpected", "extra.too")]
    assert "F64[3]" in str(caught.value)
    cut_version(FileReceiver(store), "more", shards_of(0, 2, ignore=("extra*",)))


@pytest.mark.parametrize("dtype", [DType.F8_E5M2, DType.U16, DType.BOOL])
def test_dtypes_that_mean_something_else_are_not_converted(dtype, store, rng):
    tensors = random_tensors(rng)
    store.publish("v", tensors | {"q": np.zeros(tensors["q"].shape, dtype.numpy)})
    with pytest.raises(VersionDoesNotFit, match=f"q: the version has {dtype}, qkv is BF16"):
        cut_version(Silent(store), "v", shards_of(0, 2))


def test_a_rank_that_nothing_is_written_to_is_refused(store, rng):
    store.publish("v", {"w": rng.standard_normal(4)})
    for held in ((), (Held(TensorSpec("p", DType.F64, (4,)), ()),)):
        with pytest.raises(VersionDoesNotFit, match="nothing to write"):
            cut_version(Silent(store), "v", Shards(held, {"w": (4,)}))


def test_what_no_rank_can_hold_is_refused():
    w = Placement("w", Box((0, 0), (2, 4)), (0, 0))
    spec = TensorSpec("p", DType.F32, (2, 4))
    with pytest.raises(InvalidInput, match="not a tensor of the model"):
        Shards((Held(spec, (w,)),), {})
    with pytest.raises(InvalidInput, match="overlap"):
        Shards((Held(spec, (w, Placement("w", Box((1, 2), (1, 1)), (1, 3)))),), {"w": (2, 4)})
    with pytest.raises(InvalidInput, match="whose shape is"):
        Shards((Held(spec, (w,)),), {"w": (2, 3)})
    with pytest.raises(InvalidInput, match="outside of 'p'"):
        Shards((Held(spec, (Placement("w", Box((0, 0), (4, 2)), (0, 0)),)),), {"w": (4, 2)})
    with pytest.raises(InvalidInput, match="'p' is held 2 times"):
        Shards((Held(spec, (w,)), Held(spec, (w,))), {"w": (2, 4)})
    with pytest.raises(InvalidInput, match="only two dimensions"):
        Placement("w", Box((0,), (3,)), (0,), transposed=True)


def test_an_unknown_mode_is_refused(store, rng):
    store.publish("v", random_tensors(rng))
    with pytest.raises(InvalidInput, match="'slowly'"):
        cut_version(Silent(store), "v", shards_of(0, 1), mode="slowly")


# -- damage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["copy", "inplace"])
def test_flipped_bytes_name_every_tensor_that_has_one(mode, store, receiver, rng):
    store.publish("v", random_tensors(rng), part_nbytes=500)
    buffers = Buffers()
    cut_version(receiver, "v", shards_of(1, 2), mode=mode, buffers=buffers)
    used = buffers.nbytes
    for name in ("k", "stacked.2"):
        path, at = part_of(store, "v", name)
        flip(path, at + 3)
    with pytest.raises(DigestMismatch) as caught:
        cut_version(receiver, "v", shards_of(1, 2), mode=mode, buffers=buffers)
    assert len(caught.value.tensors) == 2
    assert all(f"({name}" in str(caught.value) for name in ("k", "stacked.2"))
    del caught  # it has seen the memory
    assert buffers.nbytes == used  # all of it is back
    cut_version(receiver, "v", shards_of(1, 2), mode=mode, checksum=False)


def test_damage_in_what_other_ranks_hold_is_their_matter(store, receiver, rng):
    store.publish("v", random_tensors(rng), part_nbytes=500)
    path, at = part_of(store, "v", "experts.0")
    flip(path, at)
    cut_version(receiver, "v", shards_of(1, 2))
    with pytest.raises(DigestMismatch, match=r"experts\.0"):
        cut_version(receiver, "v", shards_of(0, 2))


def test_a_part_that_is_cut_short_is_refused(store, receiver, rng):
    store.publish("v", random_tensors(rng))
    path, _ = part_of(store, "v", "q")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(PartCorrupt, match="in the middle of its data"):
        cut_version(receiver, "v", shards_of(0, 2))


def test_a_source_that_ends_early_or_repeats_itself_is_refused(store, rng):
    tensors = random_tensors(rng)
    manifest = store.publish("v", tensors)

    class Short(MixedReceiver):
        def pieces(self, manifest, *, deadline, names=None):
            pieces = list(super().pieces(manifest, deadline=deadline, names=names))
            yield from pieces[:-1]

    class Twice(MixedReceiver):
        def pieces(self, manifest, *, deadline, names=None):
            pieces = list(super().pieces(manifest, deadline=deadline, names=names))
            yield from [pieces[0], *pieces]

    for kind, why in ((Short, "ended early"), (Twice, "twice")):
        with pytest.raises(SourceFailed, match=why):
            cut_version(kind(manifest, tensors, rng), "v", shards_of(0, 2))


@pytest.mark.parametrize(
    ("packing", "held", "refusal"),
    [
        ("classes", True, r"base v0, whose bytes may be damaged"),
        ("classes", False, r"base v0|\bup: expected"),
        ("gaps", False, r"1 tensor.*\n  up: expected"),
    ],
)
def test_a_damaged_base_is_noticed_where_it_is_read(packing, refusal, held, tmp_path, rng):
    store = Store(tmp_path, delta=DeltaPolicy(packing=packing))
    receiver = FileReceiver(store)
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    shards = shards_of(0, 2)
    serving = held_now(cut_version(receiver, "v0", shards)) if held else None
    store.publish("v1", next_tensors(rng, tensors), mode="delta")
    path, at = part_of(store, "v0", "up")
    flip(path, at + 1)
    with pytest.raises((DigestMismatch, DeltaCorrupt), match=refusal):
        cut_version(receiver, "v1", shards, held=serving)


def test_a_damaged_payload_is_noticed(store, receiver, rng):
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    shards = shards_of(0, 2)
    serving = held_now(cut_version(receiver, "v0", shards))
    manifest = store.publish("v1", next_tensors(rng, tensors), mode="delta")
    flip(store.path / "versions" / "v1" / manifest.payloads[0].file, manifest.payloads[0].nbytes - 9)
    for held in (serving, None):
        with pytest.raises(DigestMismatch, match="delta-"):
            cut_version(receiver, "v1", shards, held=held)


@pytest.mark.parametrize("fault", ["damaged", "gone", "another"])
def test_the_base_of_changes_that_need_none_is_not_looked_at(fault, tmp_path, store, receiver, rng):
    """A rank serves it, proved: what has become of it in the store is nothing to a delta that is packed as gaps."""
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    shards = shards_of(0, 2)
    serving = held_now(cut_version(receiver, "v0", shards))
    new = next_tensors(rng, tensors)
    store.publish("v1", new, mode="delta")
    if fault == "damaged":
        path, at = part_of(store, "v0", "up")
        flip(path, at + 1)
    else:
        (store.path / "versions" / "v0").rename(tmp_path / "v0")
    if fault == "another":
        store.publish("v0", random_tensors(rng), mode="full")
    version = cut_version(receiver, "v1", shards, held=serving)
    assert version.by_delta
    live = {name: array.copy() for name, array in by_hand(tensors, 0, 2).items()}
    delta.apply(live, version.changes(version.shard))
    assert same(live, by_hand(new, 0, 2))


@pytest.mark.parametrize("packing", ["classes", "gaps"])
def test_a_base_that_is_gone_or_another_is_refused_where_it_is_needed(packing, tmp_path, rng):
    store = Store(tmp_path / "store", delta=DeltaPolicy(packing=packing))
    receiver = FileReceiver(store)
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    shards = shards_of(0, 2)
    serving = held_now(cut_version(receiver, "v0", shards))
    store.publish("v1", next_tensors(rng, tensors), mode="delta")
    needing = (serving, None) if packing == "classes" else (None,)  # unsliced classes are not decoded by a rank
    base = store.path / "versions" / "v0"
    base.rename(tmp_path / "v0")
    for held in needing:
        with pytest.raises((BaseVersionMismatch, VersionNotFound), match="v0"):
            cut_version(receiver, "v1", shards, held=held)
    store.publish("v0", random_tensors(rng), mode="full")
    for held in needing:
        with pytest.raises(BaseVersionMismatch, match="v0"):
            cut_version(receiver, "v1", shards, held=held)
    with (
        pytest.raises(SourceFailed, match="was asked for"),
        receiver.opened_state(replace(store.manifest("v0"), root_digest="xxh3-128:00"), deadline=soon()),
    ):
        pass


def test_a_source_that_cannot_work_out_states_says_what_to_do(store, rng):
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    manifest = store.publish("v1", next_tensors(rng, tensors), mode="delta")
    plain = MixedReceiver(manifest, tensors, rng)
    for mode in ("copy", "inplace"):
        with pytest.raises(InvalidInput, match="publish --mode full"):
            cut_version(plain, "v1", shards_of(0, 2), mode=mode)
    assert plain.asked == []


def test_what_was_held_and_is_nowhere_any_more_is_not_streamed(tmp_path, store, receiver, rng):
    tensors = random_tensors(rng)
    elsewhere = FileReceiver.open(tmp_path / "elsewhere")
    Store(tmp_path / "elsewhere").publish("v0", tensors)
    shards = shards_of(0, 2)
    held = held_now(cut_version(elsewhere, "v0", shards))
    store.publish("v0", random_tensors(rng))
    store.publish("v1", random_tensors(rng))
    version = cut_version(receiver, "v1", shards, held=held, mode="inplace")
    with pytest.raises(SourceFailed, match="other bytes under that name"):
        streamed(version, held.shard)
    with pytest.raises(VersionNotFound):
        version.manifest("v7", deadline=soon())
    with pytest.raises(SourceFailed, match="not v7"):
        version.pieces(replace(held.shard, version="v7"), deadline=soon())


def test_a_version_gives_out_only_what_it_was_cut_as(store, receiver, rng):
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    shards = shards_of(0, 2)
    whole = cut_version(receiver, "v0", shards)
    with pytest.raises(InvalidInput, match="whole parameters"):
        whole.changes(whole.shard)
    in_place = cut_version(receiver, "v0", shards, mode="inplace")
    with pytest.raises(InvalidInput, match="a stream"):
        in_place.arrays(in_place.shard)
    store.publish("v1", next_tensors(rng, tensors), mode="delta")
    changes = cut_version(receiver, "v1", shards, held=held_now(whole))
    with pytest.raises(InvalidInput, match="a delta"):
        changes.arrays(changes.shard)
    with pytest.raises(InvalidInput):
        whole.arrays(changes.shard)
    whole.close()
    whole.close()
    with pytest.raises(InvalidInput):
        whole.arrays(whole.shard)


# -- stopping ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["copy", "inplace"])
def test_a_cut_is_cancelled_in_the_middle_and_gives_its_memory_back(mode, store, rng):
    tensors = random_tensors(rng)
    manifest = store.publish("v", tensors)
    stop, came = threading.Event(), []

    class Cancelling(MixedReceiver):
        def pieces(self, manifest, *, deadline, names=None):
            for number, piece in enumerate(super().pieces(manifest, deadline=deadline, names=names)):
                came.append(number)
                if number == 20:
                    stop.set()
                yield piece

    buffers = Counted()
    with pytest.raises(UpdateCancelled):
        cut_version(
            Cancelling(manifest, tensors, rng), "v", shards_of(0, 2), mode=mode, buffers=buffers,
            deadline=Deadline.after(60, cancelled=stop),
        )  # fmt: skip
    assert came[-1] == 20
    assert buffers.out == 0


def test_a_state_is_not_read_on_after_it_was_cancelled(store, receiver, rng):
    """Decoding a delta along its base reads the base through this state, so that stops too."""
    store.publish("v0", random_tensors(rng))
    stop = threading.Event()
    with receiver.opened_state(store.manifest("v0"), deadline=Deadline.after(60, cancelled=stop)) as state:
        state.lanes("q", 0, 10)
        stop.set()
        with pytest.raises(UpdateCancelled):
            state.lanes("q", 10, 20)


@pytest.mark.parametrize("packing", ["classes", "gaps"])
def test_no_way_goes_on_after_the_deadline(packing, tmp_path, rng):
    store = Store(tmp_path, delta=DeltaPolicy(packing=packing))
    receiver = FileReceiver(store)
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    shards = shards_of(0, 2)
    held = held_now(cut_version(receiver, "v0", shards))
    store.publish("v1", next_tensors(rng, tensors), mode="delta")
    for version, serving, mode in (
        ("v0", None, "copy"),
        ("v1", held, "delta"),
        ("v1", None, "copy"),
        ("v1", None, "inplace"),
    ):
        with pytest.raises(DeadlineExceeded):
            cut_version(FileReceiver(store), version, shards, held=serving, mode=mode, deadline=Deadline.after(0))


def test_streams_give_their_memory_back_also_when_they_are_left_early(store, receiver, rng, monkeypatch):
    tensors = random_tensors(rng)
    store.publish("v", tensors)
    made = []
    monkeypatch.setattr(shards_module, "Buffers", lambda limit: made.append(Counted(limit)) or made[-1])
    version = cut_version(receiver, "v", shards_of(0, 2), mode="inplace")
    (buffers,) = made
    assert buffers.out == 0
    pieces = version.pieces(version.shard, deadline=soon())
    for _ in range(2):
        piece = next(pieces)
        assert bytes(piece.data) == by_hand(tensors, 0, 2)[piece.tensor].tobytes()
    assert buffers.out > 0
    pieces.close()
    del piece
    assert buffers.out == 0
