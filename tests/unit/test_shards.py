"""A version as each rank sees it equals slicing by hand, whichever way it comes."""

import shutil
from math import prod

import numpy as np
import pytest
from delta_samples import same
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from shard_models import (
    VOCABULARY,
    MixedReceiver,
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

from weightcast import DeltaPolicy, Store, delta
from weightcast.delta import Cut, Slicing, slicing
from weightcast.tensors.dtypes import DType
from weightcast.transports.base import Provider, StateReceiver
from weightcast.transports.file import FileReceiver
from weightcast.worker.buffers import Buffers
from weightcast.worker.shards import HeldVersion

HEAD_NBYTES = 16
RANKS = [(rank, ranks) for ranks in (1, 2, 3) for rank in range(ranks)]


@pytest.fixture
def receiver(store):
    return FileReceiver(store)


@pytest.mark.parametrize(("rank", "ranks"), RANKS)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32, DType.F8_E4M3])
def test_a_full_version_is_cut_as_by_hand(rank, ranks, dtype, store, receiver, rng):
    tensors = random_tensors(rng, dtype)
    store.publish("step_7", tensors, step=70, part_nbytes=500)
    told = []
    version = cut_version(receiver, "step_7", shards_of(rank, ranks, dtype), told=told)
    assert isinstance(version, Provider)
    assert same(dict(parameters(version)), by_hand(tensors, rank, ranks))
    shard = check_manifest(version, parameters(version))
    assert (shard.kind, shard.base, version.by_delta, version.newest()) == ("full", None, False, "step_7")
    boxes = {(p.source, p.box) for held in shards_of(rank, ranks, dtype).held for p in held.placements}
    assert version.nbytes == sum(prod(box.shape) * tensors[name].itemsize for name, box in boxes)
    assert told[-1] == (version.nbytes, version.nbytes)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), where=st.sampled_from(RANKS), size=st.sampled_from([34, 100, 1000, 10_000]))
def test_pieces_in_any_order_and_mixed_give_the_same(tmp_path_factory, seed, where, size):
    rng = np.random.default_rng(seed)
    tensors = random_tensors(rng)
    manifest = Store(tmp_path_factory.mktemp("store")).publish("v", tensors)
    receiver = MixedReceiver(manifest, tensors, rng, size)
    version = cut_version(receiver, "v", shards_of(*where))
    assert same(dict(parameters(version)), by_hand(tensors, *where))
    check_manifest(version, parameters(version))


def slicing_for(ranks):
    """Cuts at the edges that so many ranks have: what one of them needs can be decoded along what it holds."""
    per = -(-VOCABULARY // ranks)
    rows = ("q", "k", "v", "gate", "up", "left", "right", "bias")
    return Slicing(
        (
            Cut(("embed",), 0, edges=tuple(range(per, VOCABULARY, per)), like="vocabulary"),
            Cut(rows, 0, parts=6),
            Cut(("o", "stacked.*"), 1, parts=6),
            Cut(("experts.*",), None, number=r"experts\.(\d+)", like="experts"),
        )
    )


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32),
    where=st.sampled_from(RANKS),
    packing=st.sampled_from(["classes", "gaps"]),
    density=st.sampled_from([0.02, 0.5, 1]),
    steps=st.integers(1, 3),
)
def test_deltas_from_what_is_held_are_deltas_of_the_parameters(tmp_path_factory, seed, where, packing, density, steps):
    rng = np.random.default_rng(seed)
    policy = DeltaPolicy(packing=packing, slicing=slicing_for(where[1]), max_share=1)
    store = Store(tmp_path_factory.mktemp("store"), delta=policy)
    receiver = FileReceiver(store)
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    shards = shards_of(*where)
    held = held_now(cut_version(receiver, "v0", shards))
    live = {name: array.copy() for name, array in by_hand(tensors, *where).items()}
    for _ in range(2):  # the second time from a version that was a delta itself
        for _ in range(steps):
            tensors = next_tensors(rng, tensors, density, keep=rng.choice(list(tensors), 5))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(slicing, "SLICED_NBYTES", 0)
                newest = store.publish(f"v{len(store.versions())}", tensors, mode="delta").version
        version = cut_version(receiver, newest, shards, held=held, live=lambda: live)
        assert version.by_delta
        shard = check_manifest(version, by_hand(tensors, *where))
        assert (shard.kind, shard.base.version, shard.base.root_digest) == (
            "delta", held.shard.version, held.shard.root_digest,
        )  # fmt: skip
        changes = version.changes(shard)
        assert (changes.base_root, changes.new_root) == (held.shard.root_digest, "")
        assert changes.base_root.startswith("sums:")
        delta.apply(live, changes)  # it compares the root of what it is applied to
        assert same(live, by_hand(tensors, *where))
        held = held_now(version, live)


@pytest.mark.parametrize("packing", ["classes", "gaps"])
@pytest.mark.parametrize("mode", ["copy", "swap", "delta", "auto"])
def test_a_delta_that_does_not_start_at_what_is_held_is_cut_whole(mode, packing, tmp_path, rng):
    store = Store(tmp_path, delta=DeltaPolicy(packing=packing, max_share=1))
    receiver = FileReceiver(store)
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    for number in (1, 2):
        tensors = next_tensors(rng, tensors)
        store.publish(f"v{number}", tensors, mode="delta")
    shards = shards_of(1, 2)
    fresh = cut_version(receiver, "v2", shards, mode=mode)
    assert not fresh.by_delta
    assert same(dict(parameters(fresh)), by_hand(tensors, 1, 2))
    other = next_tensors(rng, tensors)
    elsewhere = Store(tmp_path / "elsewhere")
    elsewhere.publish("v1", other)
    held = held_now(cut_version(FileReceiver(elsewhere), "v1", shards))
    again = cut_version(receiver, "v2", shards, mode=mode, held=held)  # the same name, but other bytes
    assert not again.by_delta
    check_manifest(again, by_hand(tensors, 1, 2))


@pytest.mark.parametrize("as_delta", [False, True])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (2, 3)])
def test_in_place_proves_first_and_streams_afterwards(rank, ranks, as_delta, store, receiver, rng):
    first = random_tensors(rng)
    store.publish("v0", first)
    tensors = next_tensors(rng, first)
    store.publish("v1", tensors, mode="delta" if as_delta else "full")
    shards, buffers = shards_of(rank, ranks), Buffers()
    held = held_now(cut_version(receiver, "v0", shards))
    version = cut_version(receiver, "v1", shards, held=held, mode="inplace", buffers=buffers)
    assert buffers.nbytes == 0  # memory is short where weights are streamed: nothing is kept for the next time
    shard = check_manifest(version, by_hand(tensors, rank, ranks))
    assert (shard.kind, version.by_delta) == ("full", False)
    fetched = version.nbytes
    assert same(streamed(version, shard), by_hand(tensors, rank, ranks))
    assert version.nbytes == 2 * fetched
    some = streamed(version, shard, names={"qkv", "norm"})
    assert {name for name, array in some.items() if array.nbytes} == {"qkv", "norm"}
    before = version.manifest("v0", deadline=soon())
    assert (before.root_digest, before.kind) == (held.shard.root_digest, "full")
    assert same(streamed(version, before), by_hand(first, rank, ranks))


def test_what_was_held_is_streamed_from_where_it_still_is(tmp_path, store, receiver, rng):
    first, second = random_tensors(rng), random_tensors(rng)
    start = Store(tmp_path / "start")
    start.publish("v0", first)
    store.publish("v1", second)
    shards = shards_of(0, 2)
    held = held_now(cut_version(FileReceiver(start), "v0", shards))
    version = cut_version(receiver, "v1", shards, held=held, mode="inplace", restore=FileReceiver(start))
    assert same(streamed(version, held.shard), by_hand(first, 0, 2))


def test_a_held_delta_can_be_streamed_again(store, receiver, rng):
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    shards = shards_of(0, 2)
    held = held_now(cut_version(receiver, "v0", shards))
    middle = next_tensors(rng, tensors)
    store.publish("v1", middle, mode="delta")
    held = held_now(cut_version(receiver, "v1", shards, held=held), by_hand(middle, 0, 2))
    assert held.shard.kind == "delta"
    store.publish("v2", next_tensors(rng, middle), mode="full")
    version = cut_version(receiver, "v2", shards, held=held, mode="inplace")
    before = version.manifest("v1", deadline=soon())
    assert (before.kind, before.base, before.root_digest) == ("full", None, held.shard.root_digest)
    assert same(streamed(version, before), by_hand(middle, 0, 2))


@pytest.mark.parametrize("mode", ["copy", "inplace"])
@pytest.mark.parametrize(("source", "target"), [(DType.BF16, DType.F32), (DType.F32, DType.BF16), (DType.F64, DType.F16)])
def test_floats_are_converted(source, target, mode, store, receiver, rng):
    tensors = random_tensors(rng, source)
    tensors["gate"][0, 0] = 1e6  # too large for F16
    store.publish("v", tensors)
    version = cut_version(receiver, "v", shards_of(1, 2, target), mode=mode)
    with np.errstate(all="ignore"):
        converted = {n: a if n == "table" else a.astype(target.numpy) for n, a in tensors.items()}
    expected = by_hand(converted, 1, 2)
    shard = check_manifest(version, expected)
    assert same(streamed(version, shard), expected)


def test_a_converted_version_is_not_followed_by_its_deltas(store, receiver, rng):
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    shards = shards_of(0, 2, DType.F32)
    held = held_now(cut_version(receiver, "v0", shards))
    new = next_tensors(rng, tensors)
    store.publish("v1", new, mode="delta")
    version = cut_version(receiver, "v1", shards, held=held)
    assert not version.by_delta
    converted = {n: a if n == "table" else a.astype(np.float32) for n, a in new.items()}
    assert same(dict(parameters(version)), by_hand(converted, 0, 2))


def test_a_delta_reads_its_payload_and_nothing_else(store, receiver, rng):
    class PayloadsOnly(FileReceiver):
        """A source whose states nobody may ask for."""

        def opened_state(self, *_, **__):
            raise AssertionError("a state was read")

    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    shards = shards_of(0, 1)
    held = held_now(cut_version(receiver, "v0", shards))
    new = tensors | {"k": next_tensors(rng, {"k": tensors["k"]}, density=0.5)["k"]}
    manifest = store.publish("v1", new, mode="delta")
    told = []
    version = cut_version(PayloadsOnly(store), "v1", shards, held=held, told=told)
    changes = version.changes(version.manifest("v1", deadline=soon()))
    assert changes.tensors.keys() == {"qkv"}
    nbytes = manifest.payloads[0].nbytes - HEAD_NBYTES  # the manifest says enough to do without
    assert (version.nbytes, told[-1]) == (nbytes, (nbytes,) * 2)
    check_manifest(version, by_hand(new, 0, 1))
    live = {name: array.copy() for name, array in by_hand(tensors, 0, 1).items()}
    delta.apply(live, changes)
    assert same(live, by_hand(new, 0, 1))


def test_tied_names_are_one_tensor(store, receiver, rng):
    tensors = random_tensors(rng)
    shards = shards_of(0, 2)
    assert store.publish("v", tensors | {"head": tensors["embed"]}).tied == {"head": "embed"}
    assert same(dict(parameters(cut_version(receiver, "v", shards))), by_hand(tensors, 0, 2))
    assert store.publish("w", {"head": tensors["embed"]} | tensors).tied == {"embed": "head"}
    version = cut_version(receiver, "w", shards)
    assert same(dict(parameters(version)), by_hand(tensors, 0, 2))
    new = next_tensors(rng, tensors)
    store.publish("x", {"head": new["embed"]} | new, mode="delta")
    version = cut_version(receiver, "x", shards, held=held_now(version))
    assert version.by_delta
    assert "emb" in version.changes(version.manifest("x", deadline=soon())).tensors
    check_manifest(version, by_hand(new, 0, 2))


@pytest.mark.parametrize(
    "unlike",
    [{"tied": {"other": "q"}}, {"root_digest": "xxh3-128:00"}],
    ids=lambda unlike: next(iter(unlike)),
)
def test_a_delta_is_not_taken_from_anything_but_its_base(unlike, store, receiver, rng):
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    shards = shards_of(0, 2)
    held = held_now(cut_version(receiver, "v0", shards))
    new = next_tensors(rng, tensors)
    store.publish("v1", new, mode="delta")
    same_bytes = HeldVersion(replace(held.full, version="another name"), held.shard, held.source)
    assert cut_version(receiver, "v1", shards, held=same_bytes).by_delta
    other = HeldVersion(replace(held.full, **unlike), held.shard, held.source)
    assert not cut_version(receiver, "v1", shards, held=other).by_delta
    trusted = HeldVersion(held.full, held.shard, held.source, proved=False)
    assert not cut_version(receiver, "v1", shards, held=trusted).by_delta
    relaid = HeldVersion(held.full, replace(held.shard, tensors=held.shard.tensors[1:]), held.source)
    assert not cut_version(receiver, "v1", shards, held=relaid).by_delta


def test_a_tensor_that_changed_only_on_other_ranks_changes_nothing_here(store, receiver, rng):
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    shards = shards_of(0, 2)
    held = held_now(cut_version(receiver, "v0", shards))
    new = tensors | {"q": tensors["q"].copy()}
    new["q"].view(np.uint16)[-1] += 1
    manifest = store.publish("v1", new, mode="delta")
    version = cut_version(receiver, "v1", shards, held=held)
    changes = version.changes(version.shard)
    assert (changes.tensors, changes.base_root) == ({}, held.shard.root_digest)
    assert version.nbytes == manifest.payloads[0].nbytes - HEAD_NBYTES
    check_manifest(version, by_hand(new, 0, 2))
    assert held_now(version, by_hand(new, 0, 2)).shard.root_digest == held.shard.root_digest


def test_a_version_that_was_published_anew_is_decoded_anew(store, receiver, rng):
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    shards = shards_of(0, 2)
    serving = held_now(cut_version(receiver, "v0", shards))
    for held in (serving, None):
        new = next_tensors(rng, tensors)
        store.publish("v1", new, mode="delta")
        version = cut_version(receiver, "v1", shards, held=held)  # the receiver remembers what it decoded
        check_manifest(version, by_hand(new, 0, 2))
        store.announce("v0")
        shutil.rmtree(store.path / "versions" / "v1")


def test_a_version_without_digests_is_cut_on_trust(store, rng):
    tensors = random_tensors(rng)
    manifest = store.publish("v", tensors)
    entries = tuple(replace(entry, digest="", sum="") for entry in manifest.tensors)
    trusted = replace(manifest, algorithm=None, root_digest="", tensors=entries)
    version = cut_version(MixedReceiver(trusted, tensors, rng), "v", shards_of(0, 2), checksum=False)
    check_manifest(version, by_hand(tensors, 0, 2))


def test_a_file_source_can_tell_states(receiver):
    assert isinstance(receiver, StateReceiver)
