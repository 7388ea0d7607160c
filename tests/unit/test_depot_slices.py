"""Digests of a rank's parameters that a depot works out: the same that a rank takes that cuts the version itself."""

import threading

import numpy as np
import pytest
from delta_samples import same
from question_depots import depot_of_shares, depot_over, soon
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

from weightcast import Store, delta
from weightcast.depot import reading, slices
from weightcast.errors import Conflict, DigestMismatch, InvalidInput, NotFound, SourceFailed
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.digest import array_digest
from weightcast.tensors.dtypes import DType
from weightcast.tensors.spec import TensorSpec
from weightcast.transports.file import FileReceiver
from weightcast.transports.http import questions
from weightcast.transports.http.client import DepotClient, version_path
from weightcast.transports.http.questions import ask_held_digests
from weightcast.transports.http.receiver import HttpReceiver
from weightcast.wire.depot import HeldDigests, HeldQuery


def asked(served, version, held):
    return ask_held_digests([served.client], served.manifest(version), held, deadline=soon())


def digests_of(arrays):
    return {name: array_digest(array) for name, array in arrays.items()}


@pytest.mark.parametrize(("ranks", "block"), [(1, 4 << 20), (2, 400), (3, 4 << 20)])
def test_the_digests_are_those_of_a_rank_that_cuts_the_version_from_the_store(store, rng, monkeypatch, ranks, block):
    monkeypatch.setattr(reading, "BLOCK_NBYTES", block)
    tensors = random_tensors(rng)
    store.publish("v1", tensors, "full")
    for version in ("v2", "v3"):
        tensors = next_tensors(rng, tensors, keep=("up",))
        Store(store.path).publish(version, tensors, "delta")
    with depot_over(store.path) as served:
        for rank in range(ranks):
            shards = shards_of(rank, ranks)
            receiver = FileReceiver.open(store.path)
            cut = cut_version(receiver, "v3", shards)
            check_manifest(cut, by_hand(tensors, rank, ranks))
            digests = asked(served, "v3", shards.named_as(served.manifest("v3")))
            assert digests == digests_of(parameters(cut)) == digests_of(by_hand(tensors, rank, ranks))
            first = cut_version(receiver, "v1", shards)
            check_manifest(first, by_hand(store.load("v1"), rank, ranks))
            assert asked(served, "v1", shards.held) == digests_of(parameters(first))
            receiver.close()


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2), (2, 3)])
def test_a_rank_cuts_full_and_delta_versions_from_boxes_and_follows_stored_deltas_by_one(store, rng, rank, ranks):
    states = [random_tensors(rng)]
    for number, kind in enumerate(["full", "delta", "delta", "full", "delta"]):
        Store(store.path).publish(f"v{number}", states[-1], kind)
        states.append(next_tensors(rng, states[-1], keep=("up",)))
    shards = shards_of(rank, ranks)
    with depot_over(store.path) as served:
        receiver = HttpReceiver([served.depot.url])
        cuts = {version: cut_version(receiver, version, shards) for version in ("v0", "v2", "v3")}
        for version, cut in cuts.items():
            expected = by_hand(states[int(version[1])], rank, ranks)
            assert same(parameters(cut), expected)
            check_manifest(cut, expected)
        ways = {("v0", "v1"): True, ("v0", "v2"): True, ("v3", "v4"): True, ("v2", "v4"): False, ("v3", "v0"): False}
        for (held, wanted), joined in ways.items():  # stored deltas do not join all
            before, after = by_hand(states[int(held[1])], rank, ranks), by_hand(states[int(wanted[1])], rank, ranks)
            cut = cut_version(receiver, wanted, shards, held=held_now(cuts[held]), mode="delta")
            assert cut.by_delta == joined
            check_manifest(cut, after)
            if not joined:
                assert same(parameters(cut), after)
                continue
            arrays = {name: array.copy() for name, array in before.items()}
            delta.move(arrays, cut.changes(cut.shard))
            assert same(arrays, after)
        receiver.close()


@pytest.mark.parametrize("source", [DType.F32, DType.F16, DType.F64])
def test_converted_parameters_have_the_digests_of_a_rank_that_converts(store, rng, source):
    tensors = random_tensors(rng, source)
    store.publish("v1", tensors)
    shards = shards_of(1, 2, DType.BF16)
    cut = cut_version(FileReceiver.open(store.path), "v1", shards)
    with depot_over(store.path) as served:
        assert asked(served, "v1", shards.held) == digests_of(parameters(cut))


def test_the_algorithm_is_that_of_the_version(store, rng):
    state = {"w": rng.normal(size=(4, 6))}
    store.publish("v1", state, algorithm="blake3")
    held = Held.slice_of(TensorSpec("w", DType.F64, (4, 6)), Box((1, 0), (2, 6)))
    with depot_over(store.path) as served:
        assert asked(served, "v1", [held]) == {"w": array_digest(state["w"][1:3], "blake3")}


def test_all_replicas_ask_and_each_parameter_is_put_together_once(store, rng, monkeypatch):
    tensors = random_tensors(rng)
    store.publish("v1", tensors)
    placed = []
    place = slices.place
    monkeypatch.setattr(slices, "place", lambda *args: (placed.append(args[2].source), place(*args)))
    shards = shards_of(0, 2)
    with depot_over(store.path) as served:
        found = []
        askers = [threading.Thread(target=lambda: found.append(asked(served, "v1", shards.held))) for _ in range(6)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(60)
        assert len(found) == 6
        assert all(one == found[0] for one in found)
        assert len(placed) == sum(len(held.placements) for held in shards.held)
        before = len(placed)
        asked(served, "v1", shards.held)
        asked(served, "v1", shards.held[:3])
        assert len(placed) == before


def test_many_parameters_are_asked_for_in_batches_of_several_depots(store, rng, monkeypatch):
    monkeypatch.setattr(questions, "_HELD_NBYTES", 2000)
    tensors = random_tensors(rng)
    store.publish("v1", tensors)
    shards = shards_of(0, 2)
    with depot_over(store.path) as one, depot_over(store.path) as other:
        manifest = one.manifest("v1")
        expected = digests_of(by_hand(tensors, 0, 2))
        clients = [one.client, other.client, DepotClient("http://127.0.0.1:9", connect_s=1)]
        assert ask_held_digests(clients, manifest, shards.held, deadline=soon()) == expected
        assert min(one.depot.stats().requests, other.depot.stats().requests) > 2
        assert ask_held_digests(clients, manifest, (), deadline=soon()) == {}


def test_everything_that_is_wrong_with_a_question_is_listed(store, rng, monkeypatch):
    store.publish("v1", {"w": rng.normal(size=(6, 4)), "i": rng.integers(0, 9, (6, 4))})

    def held(name, shape, *placements, dtype=DType.F64):
        return Held(TensorSpec(name, dtype, shape), placements)

    whole = Box.whole((6, 4))
    wrong = (
        held("unknown", (6, 4), Placement("x", whole, (0, 0))),
        held("outside", (9, 9), Placement("w", Box((1, 0), (6, 4)), (0, 0))),
        held("small", (5, 4), Placement("w", whole, (0, 0))),
        held("turned", (6, 4), Placement("w", whole, (0, 0), True)),
        held("integers", (6, 4), Placement("i", whole, (0, 0))),
        held("huge", (1 << 40, 4)),
        held("negative", (-1, 4)),
        held("flat", (6,), Placement("w", whole, (0,))),
        held("twice", (1,)),
        held("twice", (2,)),
    )
    with depot_over(store.path) as served:
        manifest = served.manifest("v1")
        path = version_path("v1", "digests")
        with pytest.raises(InvalidInput) as caught:
            served.client.ask("POST", path, HeldQuery(manifest.root_digest, wrong), HeldDigests, deadline=soon())
        assert all(repr(one.spec.name) in str(caught.value) for one in wrong), str(caught.value)
        with pytest.raises(Conflict, match="root digest"):
            served.client.ask("POST", path, HeldQuery("xxh3-128:00", ()), HeldDigests, deadline=soon())
        monkeypatch.setattr(slices, "MAX_PARAMETERS", 9)
        many = HeldQuery(manifest.root_digest, tuple(held(f"p{number}", ()) for number in range(10)))
        with pytest.raises(InvalidInput, match="at once"):
            served.client.ask("POST", path, many, HeldDigests, deadline=soon())


def test_a_publisher_with_a_part_of_a_tensor_answers_for_what_lies_in_it(store, rng):
    state = {"w": rng.normal(size=(8, 6)).astype(np.float32)}
    manifest = store.publish("v1", state)
    spec = TensorSpec("w", DType.F32, (8, 6))
    with depot_of_shares(manifest, {"w": (Box((2, 0), (4, 6)), state["w"][2:6])}) as served:
        inside = Held.slice_of(spec, Box((3, 1), (2, 3)))
        found = ask_held_digests([served.client], manifest, [inside], deadline=soon())
        assert found == {"w": array_digest(state["w"][3:5, 1:4])}
        with pytest.raises(NotFound, match="does not have"):
            ask_held_digests([served.client], manifest, [Held.slice_of(spec, Box((0, 0), (3, 6)))], deadline=soon())


def test_damage_is_found_before_digests_are_told_of_it(store, rng):
    state = {"w": rng.normal(size=(8, 6)), "v": rng.normal(size=(3,))}
    manifest = store.publish("v1", state)
    with (store.path / "versions/v1" / manifest.parts[0].file).open("r+b") as file:
        file.seek(manifest.by_name()["w"].offset)
        file.write(b"damaged!")
    untouched = Held.slice_of(TensorSpec("w", DType.F64, (8, 6)), Box((4, 0), (1, 6)))
    with depot_over(store.path) as served:
        assert asked(served, "v1", [Held.slice_of(TensorSpec("v", DType.F64, (3,)), Box((0,), (2,)))])
        with pytest.raises(DigestMismatch, match="w: expected"):
            asked(served, "v1", [untouched])


def test_a_depot_that_tells_of_other_parameters_has_failed(store, rng):
    from weightcast.depot.exchange import Reply, Route
    from weightcast.depot.server import Depot
    from weightcast.depot.stored import StoredShelf

    store.publish("v1", {"w": rng.normal(size=(4,))})
    told = {"digests": {"w": "xxh3-128:" + "0" * 32}}
    routes = [Route("POST", "/v1/versions/{version}/digests", lambda *_: Reply.message(HeldDigests(**told)))]
    held = Held.slice_of(TensorSpec("w", DType.F64, (4,)), Box((0,), (2,)))
    with StoredShelf(store.path) as shelf, Depot(shelf, routes=routes) as depot:
        client = DepotClient(depot.url)
        manifest = client.manifest("v1", deadline=soon())
        assert ask_held_digests([client], manifest, [held], deadline=soon()) == told["digests"]
        for wrong in ({}, {"x": "xxh3-128:" + "0" * 32}, {"w": "nonsense"}):
            told["digests"] = wrong
            with pytest.raises(SourceFailed):
                ask_held_digests([client], manifest, [held], deadline=soon())
        client.close()
