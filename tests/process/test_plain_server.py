"""A plain server of a store's files, which knows nothing of versions, is a complete source."""

from __future__ import annotations

import sys
from contextlib import closing

import numpy as np
import pytest

from relays import check_same, wait_complete
from weightcast import DeltaPolicy, LiveModel, Store
from weightcast.clock import Deadline
from weightcast.depot.mirror import Mirror
from weightcast.errors import DeadlineExceeded, DigestMismatch, NotFound, VersionNotFound, VersionNotSet
from weightcast.transports.http.receiver import HttpReceiver

from .children import TESTS
from .follow_stand import FollowStand
from .plain_servers import NGINX, nginx_server, static_server

sys.path.insert(0, str(TESTS / "unit"))

from shard_models import by_hand, cut_version, held_now, next_tensors, parameters, random_tensors, shards_of

SERVERS = [
    static_server,
    pytest.param(nginx_server, marks=pytest.mark.skipif(NGINX is None, reason="nginx is not installed (nginx-light)")),
]


@pytest.fixture(params=SERVERS, ids=["static", "nginx"])
def serving(request):
    return request.param


@pytest.fixture
def store(memory_dir):
    store = Store(memory_dir / "store", delta=DeltaPolicy(max_share=1))
    store.path.mkdir()
    return store


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline.after(seconds)


def changed(tensors: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    after = {name: array.copy() for name, array in tensors.items()}
    for array in after.values():
        array.reshape(-1)[number::97] += 1
    return after


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(one[name].tobytes() == array.tobytes() for name, array in other.items())


def test_a_model_loads_and_takes_full_versions_and_deltas_through_folds_and_gc(serving, store):
    rng = np.random.default_rng(3)
    tensors = {"w": rng.standard_normal((700, 1000), dtype=np.float32), "b": rng.standard_normal(9, dtype=np.float32)}
    model = {name: np.zeros_like(array) for name, array in tensors.items()}
    with serving(store.path) as url, LiveModel(model, source=url) as live:
        with pytest.raises(VersionNotSet, match=r"version\.yaml"):
            live.update()
        store.publish("v0", tensors)
        assert live.update().mode == "copy"
        assert same(model, tensors)
        for number, kind in enumerate(["delta", "full", "delta", "delta"], start=1):
            tensors = changed(tensors, number)
            assert store.publish(f"v{number}", tensors, kind).kind == kind
            assert live.update().mode == ("delta" if kind == "delta" else "copy")
            assert same(model, tensors)
        tensors = changed(tensors, 5)
        store.publish("v5", tensors, "delta")
        with closing(HttpReceiver([url])) as receiver:
            before = receiver.manifest("v5", deadline=soon())
            store.fold("v5")
            store.gc(keep_last=1, ignore_receivers=True)
            memory = {before.payloads[0].file: np.zeros(before.payloads[0].nbytes, np.uint8)}
            with pytest.raises(NotFound):  # the payload that the manifest named is gone: who has it reads it again
                list(receiver.landings(before, memory, deadline=soon()))
            with pytest.raises(VersionNotFound):
                receiver.manifest("v4", deadline=soon())
        assert live.update("v5").version == "v5"
        assert same(model, tensors)


def test_a_new_version_is_waited_for_by_looking_again(serving, store):
    store.publish("v0", {"w": np.ones(4, np.float32)})
    with serving(store.path) as url, closing(HttpReceiver([url])) as receiver:
        assert receiver.newest() == "v0"
        with pytest.raises(DeadlineExceeded):
            receiver.wait_newer("v0", deadline=soon(0.3))
        store.publish("v1", {"w": np.zeros(4, np.float32)}, "full")
        assert receiver.wait_newer("v0", deadline=soon()) == "v1"
        receiver.acknowledge(receiver.manifest("v1", deadline=soon()), "somebody", deadline=soon())  # is not an error


def test_a_wrong_byte_is_found_and_said(serving, store):
    tensors = {"w": np.arange(1 << 20, dtype=np.float32)}
    manifest = store.publish("v0", tensors)
    part = store.path / "versions" / "v0" / manifest.parts[0].file
    data = bytearray(part.read_bytes())
    data[3_000_000] ^= 1
    part.write_bytes(data)
    model = {"w": np.zeros(1 << 20, np.float32)}
    with (
        serving(store.path) as url,
        LiveModel(model, source=url) as live,
        pytest.raises(DigestMismatch, match="w: expected"),
    ):
        live.update()
    assert not model["w"].any()


@pytest.mark.parametrize("packing", ["classes", "gaps"])
def test_ranks_take_their_slices_of_full_versions_and_deltas(serving, store, packing):
    store = Store(store.path, delta=DeltaPolicy(packing=packing, max_share=1))
    rng = np.random.default_rng(5)
    tensors = random_tensors(rng)
    manifest = store.publish("v0", tensors)
    with serving(store.path) as url, closing(HttpReceiver([url])) as receiver:
        held = [held_now(cut_version(receiver, "v0", shards_of(rank, 2))) for rank in (0, 1)]
        for version in ("v1", "v2"):
            tensors = next_tensors(rng, tensors)
            store.publish(version, tensors, "delta")
        for rank in (0, 1):
            version = cut_version(receiver, "v2", shards_of(rank, 2), held=held[rank])
            assert version.by_delta == (packing == "gaps")  # classes that are not cut need the whole base
            fresh = cut_version(receiver, "v2", shards_of(rank, 2))
            assert same(dict(parameters(fresh)), by_hand(tensors, rank, 2))
        part = store.path / "versions" / "v0" / manifest.parts[0].file
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(data)
        for rank in (0, 1):
            with pytest.raises(DigestMismatch, match=f"of {manifest.parts[0].file}"):
                cut_version(receiver, "v0", shards_of(rank, 2))


def test_a_relay_mirrors_it(serving, store, memory_dir):
    tensors = {"w": np.arange(3 << 19, dtype=np.float32)}
    store.publish("v0", tensors)
    with serving(store.path) as url, closing(Mirror(memory_dir / "relay", [url], poll_s=0.2)) as mirror:
        wait_complete(mirror, "v0")
        store.publish("v1", changed(tensors, 1), "delta")
        wait_complete(mirror, "v1")
        for version in ("v0", "v1"):
            check_same(store.path, mirror.path, version)


def test_a_server_of_two_ranks_follows_it(serving, memory_dir):
    stand = FollowStand(memory_dir)
    try:
        with serving(stand.store.path) as url:
            stand.start(source=url, state=False)
            for _ in range(2):
                version = stand.publish()
                stand.server.wait_for(lambda v=version: stand.server.health()["version"] == v, f"version {version}", 60)
    finally:
        if stand.server is not None:
            stand.server.end()
