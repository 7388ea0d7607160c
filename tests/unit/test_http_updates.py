"""Models and ranks that are updated from a depot end with the same bytes as from the store itself, for fewer of them."""

from contextlib import closing
from math import prod

import numpy as np
import pytest
from delta_samples import same
from served_depots import depot_over
from shard_models import (
    by_hand,
    check_manifest,
    cut_version,
    held_now,
    next_tensors,
    parameters,
    random_tensors,
    shards_of,
)

from weightcast import DeltaPolicy, LiveModel, Store, delta
from weightcast.errors import DigestMismatch
from weightcast.store.acks import Acks
from weightcast.transports.file import FileReceiver
from weightcast.transports.http.receiver import HttpReceiver

RANKS = [(0, 1), (0, 2), (1, 2), (2, 3)]


@pytest.fixture
def depot(store):
    store.path.mkdir(exist_ok=True)
    with depot_over(store.path) as served:
        yield served


@pytest.fixture
def receiver(depot):
    with closing(HttpReceiver([depot.depot.url])) as receiver:
        yield receiver


def own_nbytes(shards, tensors):
    """Bytes of the boxes that a rank holds, each once."""
    boxes = {(p.source, p.box) for one in shards.held for p in one.placements}
    return sum(prod(box.shape) * tensors[name].dtype.itemsize for name, box in boxes)


@pytest.mark.parametrize(("rank", "ranks"), RANKS)
def test_a_rank_receives_its_boxes_and_nothing_else(rank, ranks, store, receiver, rng):
    tensors, shards = random_tensors(rng), shards_of(rank, ranks)
    store.publish("v", tensors)
    told = []
    version = cut_version(receiver, "v", shards, told=told)
    assert same(dict(parameters(version)), by_hand(tensors, rank, ranks))
    check_manifest(version, parameters(version))
    assert version.nbytes == own_nbytes(shards, tensors)
    assert told[-1] == (version.nbytes, version.nbytes)


@pytest.mark.parametrize(("rank", "ranks"), RANKS)
@pytest.mark.parametrize("packing", ["classes", "gaps"])
def test_a_rank_takes_deltas_on_what_it_holds_without_the_state(rank, ranks, packing, store, rng):
    store = Store(store.path, delta=DeltaPolicy(packing=packing, max_share=1))
    first = random_tensors(rng)
    store.publish("v0", first)
    with depot_over(store.path) as served, closing(HttpReceiver([served.depot.url])) as receiver:
        held = held_now(cut_version(receiver, "v0", shards_of(rank, ranks)))
        tensors = first
        for name in ("v1", "v2", "v3"):
            tensors = next_tensors(rng, tensors, keep=("norm", "k"))
            assert store.publish(name, tensors).kind == "delta"
        version = cut_version(receiver, "v3", shards_of(rank, ranks), held=held)
        by_file = cut_version(FileReceiver(store), "v3", shards_of(rank, ranks), held=held)
    assert version.by_delta == (packing == "gaps")  # classes that are not cut are decoded along the whole base
    assert version.shard == by_file.shard
    check_manifest(version, by_hand(tensors, rank, ranks))
    if not version.by_delta:
        assert same(dict(parameters(version)), by_hand(tensors, rank, ranks))
        return
    changes, others = version.changes(version.shard), by_file.changes(by_file.shard)
    assert changes.tensors.keys() == others.tensors.keys()
    for name, one in changes.tensors.items():
        assert np.array_equal(one.indices, others.tensors[name].indices)
        assert np.array_equal(one.steps, others.tensors[name].steps)
    moved = {name: array.copy() for name, array in by_hand(first, rank, ranks).items()}
    delta.move(moved, changes)
    assert same(moved, by_hand(tensors, rank, ranks))


def test_a_rank_that_holds_nothing_loads_a_delta_version_as_the_state_it_leads_to(store, rng):
    store = Store(store.path, delta=DeltaPolicy(max_share=1))
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    tensors = next_tensors(rng, tensors)
    assert store.publish("v1", tensors).kind == "delta"
    with depot_over(store.path) as served, closing(HttpReceiver([served.depot.url])) as receiver:
        version = cut_version(receiver, "v1", shards_of(1, 2))
    assert not version.by_delta
    assert same(dict(parameters(version)), by_hand(tensors, 1, 2))


def test_a_damaged_part_is_not_taken_by_a_rank(store, receiver, rng):
    tensors = random_tensors(rng)
    manifest = store.publish("v", tensors)
    entry = next(entry for entry in manifest.tensors if entry.name == "norm")  # whole on every rank
    part = store.path / "versions" / "v" / manifest.parts[entry.part].file
    data = bytearray(part.read_bytes())
    data[entry.offset] ^= 1
    part.write_bytes(data)
    with pytest.raises(DigestMismatch, match=f"bytes 0 to .* of {manifest.parts[0].file}"):
        cut_version(receiver, "v", shards_of(0, 2))


@pytest.mark.parametrize("commit", ["copy", "swap", "inplace"])
def test_a_model_follows_a_depot(commit, store, depot, rng):
    tensors = {"a": rng.normal(size=(300, 41)).astype(np.float32), "b": rng.normal(size=7).astype(np.float32)}
    model = {name: np.zeros_like(array) for name, array in tensors.items()}
    with LiveModel(model, source=depot.depot.url) as live:
        for number in range(3):
            tensors = {name: array + 1 for name, array in tensors.items()}
            manifest = store.publish(f"v{number}", tensors, mode="full")
            result = live.update(commit=commit)
            assert (result.version, live.root_digest()) == (f"v{number}", manifest.root_digest)
            assert same(model, tensors)
        assert live.update(commit=commit).mode == "none"


@pytest.mark.parametrize("full", [None, 2], ids=["deltas", "a full version between"])
def test_a_model_that_is_behind_catches_up_by_deltas_if_deltas_lead_there(store, rng, full):
    store = Store(store.path, delta=DeltaPolicy(max_share=1))
    tensors = {"w": rng.normal(size=(200, 100)).astype(np.float32)}
    model = {"w": np.zeros((200, 100), dtype=np.float32)}
    store.publish("v0", tensors)
    with depot_over(store.path) as served, LiveModel(model, source=served.depot.url) as live:
        live.update()
        for number in range(1, 5):
            tensors = {"w": tensors["w"].copy()}
            tensors["w"][number] += 1
            store.publish(f"v{number}", tensors, mode="full" if number == full else "auto")
        result = live.update()
        assert (result.mode, result.version) == ("delta" if full is None else "copy", "v4")
        assert (result.bytes < tensors["w"].nbytes / 10) == (full is None)
    assert same(model, tensors)


def test_what_a_model_serves_is_acknowledged_and_kept(store, rng):
    store = Store(store.path, delta=DeltaPolicy(max_share=1))
    tensors = {"w": rng.normal(size=(50, 40)).astype(np.float32)}
    store.publish("v0", tensors)
    model = {"w": np.zeros((50, 40), dtype=np.float32)}
    with (
        depot_over(store.path, acks=Acks(store.path)) as served,
        LiveModel(model, source=served.depot.url, name="m") as live,
    ):
        live.update()
        for number in range(1, 6):
            store.publish(f"v{number}", tensors | {"w": tensors["w"] + number}, mode="full")
        kept = store.gc(keep_last=1).kept
        assert "v0" in kept
        live.update()
        assert "v0" not in store.gc(keep_last=1).kept


def test_a_damaged_part_at_one_depot_is_mended_from_another(tmp_path, rng, caplog):
    tensors = {"w": rng.normal(size=(400, 4096)).astype(np.float32), "b": rng.normal(size=9).astype(np.float32)}
    good, bad = Store(tmp_path / "good"), Store(tmp_path / "bad")
    manifest = good.publish("v", tensors)
    bad.publish("v", tensors)
    part = bad.path / "versions" / "v" / manifest.parts[0].file
    data = bytearray(part.read_bytes())
    for at in range(manifest.parts[0].header_nbytes, len(data), 1 << 18):
        data[at] ^= 4
    part.write_bytes(data)
    model = {name: np.zeros_like(array) for name, array in tensors.items()}
    with depot_over(bad.path) as first, depot_over(good.path) as second:
        both = f"http://{first.depot.url[7:]},{second.depot.url[7:]}?spread=1"
        with LiveModel(model, source=both) as live:
            live.update()
    assert same(model, tensors)
    assert "tensor mended" in caplog.text


def test_what_no_depot_has_right_is_refused(store, depot, rng):
    tensors = {"w": rng.normal(size=(40, 4096)).astype(np.float32)}
    manifest = store.publish("v", tensors)
    part = store.path / "versions" / "v" / manifest.parts[0].file
    data = bytearray(part.read_bytes())
    data[manifest.tensors[0].offset + 5000] ^= 1
    part.write_bytes(data)
    model = {"w": np.zeros((40, 4096), dtype=np.float32)}
    with LiveModel(model, source=depot.depot.url) as live, pytest.raises(DigestMismatch, match="w"):
        live.update()
    assert not model["w"].any()
