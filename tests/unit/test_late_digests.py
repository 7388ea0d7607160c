"""Live streams: their digests come with their bytes, and count only if the source says the same afterwards."""

import numpy as np
import pytest
from delta_samples import same
from mapped_sources import Slab, Stream, manifest_of
from msgspec.structs import replace
from shard_models import by_hand, check_manifest, cut_version, held_now, next_tensors, parameters, random_tensors, shards_of
from test_mapped import held_by, model_like

from weightcast import LiveModel, State
from weightcast.errors import CommitFailed, DigestMismatch, InvalidInput, SourceFailed, VersionDoesNotFit
from weightcast.tensors.digest import array_digest
from weightcast.transports.file import FileReceiver

MODES = ("copy", "swap", "inplace")
NO_SUM = "sum:" + "0" * 32


def tensors_of(seed):
    rng = np.random.default_rng(seed)
    return {
        "first": rng.integers(0, 255, 5001, np.uint8),
        "second": rng.standard_normal((30, 41)).astype(np.float32),
        "none": np.zeros((0, 3), np.float32),
        "count": rng.integers(0, 9, (), np.int64),
    }


def without_digests(piece):
    return piece._replace(digest="")


def wrong_bytes(piece):
    return (
        piece._replace(data=memoryview(bytes(len(piece.data))))
        if (piece.tensor, piece.offset) == ("second", 2000)
        else piece
    )


def wrong_digest(piece):
    return piece._replace(digest=NO_SUM) if piece.digest and piece.tensor == "second" else piece


def digest_of_bytes(piece):
    """A right digest, of a kind that streams do not have."""
    right = array_digest(tensors_of(1)["second"])
    return piece._replace(digest=right) if piece.digest and piece.tensor == "second" else piece


def other(seed=9):
    """What a source may say of the version afterwards: other bytes under the same names."""
    return manifest_of("v", tensors_of(seed), digests=False)


def serving(kind="torch"):
    model = model_like(tensors_of(0), kind)
    slab = Slab(old=tensors_of(0))
    live = LiveModel(model)
    live.update(source=slab)
    return live, model, slab


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mixed", [False, True])
def test_a_stream_is_taken_and_what_it_was_is_known_afterwards(mode, mixed, kind, checksum, rng):
    live, model, slab = serving(kind)
    source = Stream(tensors_of(1), rng=rng if mixed else None)
    result = live.update(source=source, commit=mode, verify_checksum=checksum)
    assert same(held_by(model), tensors_of(1))
    assert (result.version, live.version, live.served_manifest) == ("v", "v", source.sealed)
    assert live.root_digest() == source.sealed.root_digest
    if checksum:
        assert live.update("v", source=Slab(v=tensors_of(1))).mode == "none"  # bit for bit the same
    slab.add("new", tensors_of(2))
    live.update("new", source=slab)
    assert live.rollback() == "v" if checksum else live.previous is None


def test_a_stream_is_read_though_a_version_of_its_name_is_served():
    live, model, slab = serving()
    slab.add("v", tensors_of(3))
    live.update("v", source=slab)
    live.update("v", source=Stream(tensors_of(4)))
    assert same(held_by(model), tensors_of(4))


FAULTS = [
    (wrong_bytes, None, True, DigestMismatch, r"1 tensor\(s\) differ from their digests:\n  second: "),
    (wrong_digest, None, True, DigestMismatch, "  second: expected sum:0000"),
    (digest_of_bytes, None, True, DigestMismatch, "second(: expected| came with) xxh3-128:"),
    (without_digests, None, True, SourceFailed, r"without the digest of 3 tensor\(s\).*: first, second, count\."),
    (without_digests, None, False, SourceFailed, r"without the digest of 3 tensor\(s\).*: first, second, count\."),
    (wrong_digest, None, False, SourceFailed, "second came with sum:0000"),
    (None, other(), True, SourceFailed, "first came with .*; second came with .*; count came with "),
    (None, other(), False, SourceFailed, "first came with .*; second came with .*; count came with "),
    (None, replace(other(1), root_digest=""), True, SourceFailed, "still has no digests"),
    (None, replace(other(1), root_digest="sums:" + "1" * 32), True, SourceFailed, "root digest does not follow"),
    (None, replace(other(1), version="w"), True, SourceFailed, "another version"),
    (None, replace(other(1), tensors=other(1).tensors[1:]), True, SourceFailed, "tensor first is not the same"),
    (None, replace(other(1), tied={"third": "first"}), True, SourceFailed, "ties other names"),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tamper", "sealed", "checksum", "kind", "said"), FAULTS, ids=range(len(FAULTS)))
def test_a_stream_that_cannot_be_proved_changes_nothing(mode, tamper, sealed, checksum, kind, said):
    live, model, slab = serving()
    source = Stream(tensors_of(1), tamper=tamper, sealed=sealed)
    old = source.manifest
    source.manifest = lambda version, **more: slab.manifest(version, **more) if version == "old" else old(version, **more)
    read = source.pieces
    source.pieces = lambda manifest, **more: (slab if manifest.version == "old" else Reader(read)).pieces(manifest, **more)
    with pytest.raises(CommitFailed if mode == "inplace" else kind, match=f"(?s){said}"):
        live.update("v", source=source, commit=mode, verify_checksum=checksum)
    assert same(held_by(model), tensors_of(0))
    assert (live.version, live.state) == ("old", State.READY)


class Reader:
    def __init__(self, pieces):
        self.pieces = pieces


def test_names_that_the_model_ties_must_have_the_same_bytes_in_a_stream_too():
    shared = np.zeros(10, np.float32)
    model = {"a": shared, "b": shared}
    live = LiveModel(model)
    live.update(source=Stream({"a": np.ones(10, np.float32), "b": np.ones(10, np.float32)}))
    assert model["b"].tolist() == [1] * 10
    for mode in ("copy", "swap"):
        with pytest.raises(VersionDoesNotFit, match="ties these names"):
            live.update("w", commit=mode, source=Stream({name: np.full(10, ord(name), np.float32) for name in "ab"}, "w"))
        assert model["a"].tolist() == [1] * 10


# -- slices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_slices_are_cut_from_a_stream(rank, ranks, mixed, checksum, rng):
    tensors = random_tensors(rng)
    source = Stream(tensors, rng=rng if mixed else None, size=500)
    version = cut_version(source, "v", shards_of(rank, ranks), checksum=checksum)
    assert version.full == source.sealed
    assert same(dict(parameters(version)), by_hand(tensors, rank, ranks))
    check_manifest(version, by_hand(tensors, rank, ranks))
    held = held_now(version)
    live = LiveModel(model_like(by_hand(random_tensors(rng), rank, ranks), "numpy"))
    live.update(source=version)
    assert live.served_manifest == held.shard
    assert live.root_digest() == held.shard.root_digest


def test_a_delta_can_follow_on_what_came_as_a_stream(store, rng):
    tensors = random_tensors(rng)
    manifest = store.publish("v", tensors)
    held = held_now(cut_version(Stream(tensors), "v", shards_of(0, 2)))
    assert held.full.root_digest == manifest.root_digest
    after = next_tensors(rng, tensors)
    store.publish("w", after, mode="delta")
    version = cut_version(FileReceiver(store), "w", shards_of(0, 2), held=held)
    assert version.by_delta


@pytest.mark.parametrize(
    ("tamper", "checksum", "kind", "said"),
    [
        (lambda piece: piece._replace(digest=NO_SUM) if piece.digest else piece, True, DigestMismatch, "k"),
        (without_digests, True, SourceFailed, "without the digest of"),
        (without_digests, False, SourceFailed, "without the digest of"),
        (lambda piece: None if piece.tensor == "k" else piece, True, SourceFailed, r"k \(0 of 480 bytes\)"),
    ],
)
def test_slices_of_a_stream_that_cannot_be_proved_are_refused(tamper, checksum, kind, said, rng):
    with pytest.raises(kind, match=said):
        cut_version(Stream(random_tensors(rng), tamper=tamper), "v", shards_of(0, 2), checksum=checksum)


def test_slices_of_a_stream_that_is_described_otherwise_afterwards_are_refused(rng):
    tensors = random_tensors(rng)
    said = manifest_of("v", next_tensors(rng, tensors, keep=("norm",)), digests=False)
    with pytest.raises(SourceFailed, match="came with") as caught:
        cut_version(Stream(tensors, sealed=said), "v", shards_of(0, 2))
    assert "norm came" not in str(caught.value)


def test_slices_cannot_be_committed_in_place_from_a_stream_and_nothing_of_it_is_read(rng):
    source = Stream(random_tensors(rng))
    with pytest.raises(InvalidInput, match="Publish it held, or commit by copy or swap"):
        cut_version(source, "v", shards_of(0, 2), mode="inplace")
    assert not source.begun


def test_two_digests_of_one_tensor_are_refused():
    digests = iter([NO_SUM, "sum:" + "1" * 32])
    source = Stream({"a": np.zeros(1500, np.uint8)}, tamper=lambda piece: piece._replace(digest=next(digests)))
    with pytest.raises(SourceFailed, match="two digests of 'a'"):
        LiveModel({"a": np.zeros(1500, np.uint8)}).update(source=source)
