"""Boxes of tensors that a depot cuts, asked for over real sockets."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from delta_samples import pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from question_depots import SharesShelf, cut_out, depot_of_shares, depot_over, memories_for, random_box, soon

from weightcast import Store, delta
from weightcast.clock import Deadline
from weightcast.depot import boxes, reading
from weightcast.depot.exchange import Reply, Route
from weightcast.depot.reading import LyingTensors, MovedTensors, box_blocks
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.errors import (
    Conflict,
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    NotFound,
    SourceFailed,
    UpdateCancelled,
    WeightcastError,
)
from weightcast.tensors.boxes import Box
from weightcast.tensors.digest import bytes_digest
from weightcast.tensors.dtypes import DType
from weightcast.transports.http import questions
from weightcast.transports.http.client import DepotClient, version_path
from weightcast.transports.http.questions import fetch_boxes
from weightcast.wire.depot import DIGESTS_HEADER, BoxOf, BoxQuery
from weightcast.wire.manifest import TensorEntry

SHAPES = [(), (0,), (1,), (17,), (3, 5), (40, 24), (2, 3, 4), (3, 0, 2), (2, 1, 3, 5)]


@pytest.fixture
def small_blocks(monkeypatch):
    """So small that every box takes several, also in the middle of a row."""
    monkeypatch.setattr(reading, "BLOCK_NBYTES", 200)
    monkeypatch.setattr("weightcast.depot.boxes.BOUNCE_NBYTES", 200)


def tensors_of_all_kinds(rng):
    tensors = {}
    for dtype in DType:
        for number, shape in enumerate(SHAPES):
            tensors[f"{dtype}.{number}"] = pair(rng, dtype, shape)[0]
    return tensors


def fetched(clients, manifest, wanted):
    return dict(fetch_boxes(clients, manifest, wanted, deadline=soon()))


def check_fetched(tensors, wanted, told):
    assert told.keys() == set(range(len(wanted)))
    for index, (asked, memory) in enumerate(wanted):
        assert memory.tobytes() == cut_out(tensors[asked.tensor], asked.box), asked
        assert told[index] == bytes_digest(memory.data), asked


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_boxes_of_all_dtypes_and_shapes_come_bit_for_bit_with_the_digests_of_their_bytes(store, rng, mode, small_blocks):
    before = tensors_of_all_kinds(rng)
    after = {name: pair(rng, DType(name.partition(".")[0]), array.shape)[0] for name, array in before.items()}
    store.publish("v1", after if mode == "full" else before, "full")
    if mode == "delta":
        Store(store.path).publish("v2", after, "auto")
        Store(store.path).publish("v3", {**after, "U8.4": after["U8.4"] + 1}, "delta")
        after["U8.4"] = after["U8.4"] + 1
    with depot_over(store.path) as served:
        manifest = served.manifest(store.newest())
        wanted = memories_for(after, [(name, random_box(rng, array.shape)) for name, array in after.items()])
        wanted += memories_for(after, [(name, Box.whole(array.shape)) for name, array in after.items()])
        check_fetched(after, wanted, fetched([served.client], manifest, wanted))


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), nbytes=st.sampled_from([8, 24, 64, 1 << 20]))
def test_a_box_of_a_delta_version_is_cut_in_small_parts_and_has_all_changes_in_it(monkeypatch, data, seed, nbytes):
    rng = np.random.default_rng(seed)
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=4)))
    dtype = data.draw(st.sampled_from(list(DType)))
    before, after = pair(rng, dtype, shape, density=data.draw(st.sampled_from([0.0, 0.1, 0.9])), far=True)
    entry = TensorEntry(name="w", dtype=dtype, shape=shape, part=0, offset=0, nbytes=after.nbytes, digest="")
    shelf = SharesShelf(None, {"w": (Box.whole(shape), before)})
    monkeypatch.setattr(reading, "BLOCK_NBYTES", nbytes)
    changes = delta.decode(delta.encode({"w": before}, {"w": after}, threads=1), {"w": before}, threads=1)
    box = random_box(rng, shape)
    with shelf.holding("v1") as full:
        tensors = MovedTensors(None, LyingTensors(full, soon()), changes)
        blocks = [bytes(block) for block in box_blocks(tensors, entry, box, np.empty(nbytes, np.uint8))]
    assert b"".join(blocks) == cut_out(after, box)
    assert all(0 < len(block) <= nbytes for block in blocks)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    seed=st.integers(0, 1 << 30),
    block=st.sampled_from([8, 40, 256]),
    waste=st.sampled_from([0, 16, 1 << 20]),
)
def test_a_box_of_a_tensor_in_a_file_is_read_in_bounded_ranges(monkeypatch, data, seed, block, waste):
    rng = np.random.default_rng(seed)
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=4)))
    array = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
    entry = TensorEntry(name="w", dtype=DType.U16, shape=shape, part=0, offset=5, nbytes=array.nbytes, digest="")
    stored, ranges = b"12345" + array.tobytes(), []

    def views(file, start, stop, *, deadline):
        ranges.append((start, stop))
        return [memoryview(stored)[start:stop]]

    manifest = SimpleNamespace(tensors=(entry,), parts=(SimpleNamespace(file="part"),))
    holding = SimpleNamespace(in_files=True, manifest=manifest, views=views)
    monkeypatch.setattr(reading, "BLOCK_NBYTES", block)
    monkeypatch.setattr(reading, "_WASTE_NBYTES", waste)
    box = random_box(rng, shape)
    parts = [found.tobytes() for _, found in LyingTensors(holding, soon()).parts(entry, box)]
    assert b"".join(parts) == cut_out(array, box)
    assert all(0 < stop - start <= block for start, stop in ranges)


def test_contiguous_boxes_are_sent_from_where_they_lie_and_others_through_one_buffer(rng):
    array = rng.integers(0, 1 << 16, (64, 64), dtype=np.uint16)
    bounce = np.empty(1024, np.uint8)
    rows = [np.frombuffer(block, np.uint8) for block in reading.byte_blocks(array[3:40], bounce, lambda: None)]
    assert all(np.shares_memory(block, array) for block in rows)
    for strided in (array[:, 5:9], array.T, array[::2, ::3], array[:, ::-1]):
        blocks = []
        for block in reading.byte_blocks(strided, bounce, lambda: None):
            assert np.shares_memory(np.frombuffer(block, np.uint8), bounce)
            blocks.append(bytes(block))
        assert b"".join(blocks) == np.ascontiguousarray(strided).tobytes()


def test_tied_names_and_empty_questions_are_answered(store, rng):
    weights = rng.normal(size=(6, 4)).astype(np.float32)
    store.publish("v1", {"embed": weights, "head": weights})
    with depot_over(store.path) as served:
        manifest = served.manifest("v1")
        assert manifest.tied
        wanted = memories_for(
            {"embed": weights, "head": weights}, [("head", Box((1, 1), (3, 2))), ("embed", Box((0, 0), (2, 4)))]
        )
        check_fetched({"embed": weights, "head": weights}, wanted, fetched([served.client], manifest, wanted))
        assert fetched([served.client], manifest, []) == {}


def test_everything_that_is_wrong_with_a_question_is_listed(store, rng, monkeypatch):
    store.publish("v1", {"w": rng.normal(size=(6, 4))})
    asked = [
        BoxOf("w", Box((0, 0), (7, 4))),
        BoxOf("none", Box((), ())),
        BoxOf("w", Box((1,), (1,))),
        BoxOf("w", Box((0, 0), (1, 1))),
    ]
    with depot_over(store.path) as served:
        manifest = served.manifest("v1")
        with pytest.raises(InvalidInput) as caught:
            served.client.ask(
                "POST", version_path("v1", "boxes"), BoxQuery(manifest.root_digest, tuple(asked)), dict, deadline=soon()
            )
        assert all(part in str(caught.value) for part in ("shape=(7, 4)", "'none' is not a tensor", "start=(1,)"))
        assert "shape=(1, 1)" not in str(caught.value)
        with pytest.raises(Conflict, match="root digest"):
            served.client.ask("POST", version_path("v1", "boxes"), BoxQuery("xxh3-128:00", ()), dict, deadline=soon())
        with pytest.raises(NotFound):
            served.client.ask("POST", version_path("v2", "boxes"), BoxQuery("xxh3-128:00", ()), dict, deadline=soon())
        monkeypatch.setattr(boxes, "MAX_BOXES", 9)
        many = BoxQuery(manifest.root_digest, (BoxOf("w", Box((0, 0), (0, 0))),) * 10)
        with pytest.raises(InvalidInput, match="at once"):
            served.client.ask("POST", version_path("v1", "boxes"), many, dict, deadline=soon())
        for body in (b"{", b'{"root_digest":"x","boxes":[{"tensor":"w","box":{"start":[-1],"shape":[1]}}]}', b"[]"):
            with pytest.raises(InvalidInput):
                served.client.ask("POST", version_path("v1", "boxes"), msgspec.Raw(body), dict, deadline=soon())


def test_memory_of_another_size_than_its_box_is_refused_before_anything_is_asked(store, rng):
    store.publish("v1", {"w": rng.normal(size=(6, 4))})
    with depot_over(store.path) as served:
        manifest = served.manifest("v1")
        wanted = [
            (BoxOf("w", Box((0, 0), (2, 2))), np.empty(33, np.uint8)),
            (BoxOf("x", Box((), ())), np.empty(1, np.uint8)),
        ]
        before = served.depot.stats().requests
        with pytest.raises(InvalidInput, match=r"has 32 bytes, its memory 33.*'x' has None bytes"):
            fetched([served.client], manifest, wanted)
        assert served.depot.stats().requests == before


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_a_depot_whose_copy_is_damaged_says_so_instead_of_hashing_the_damage(store, rng, kind):
    state = {"w": rng.normal(size=(64, 4)).astype(np.float32), "v": rng.normal(size=8).astype(np.float32)}
    store.publish("v1", state, "full")
    if kind == "delta":
        changed = state["w"].copy()
        changed[0, 0] += 1
        Store(store.path).publish("v2", {**state, "w": changed}, "delta")
    full = store.manifest("v1")
    entry = full.by_name()["w"]
    with (store.path / "versions/v1" / full.parts[0].file).open("r+b") as file:
        file.seek(entry.offset + 500)
        file.write(b"\xaa")
    with depot_over(store.path) as served:
        manifest = served.manifest(store.newest())
        good = memories_for(state, [("v", Box((2,), (3,)))])
        check_fetched(state, good, fetched([served.client], manifest, good))
        with pytest.raises(DigestMismatch, match="w: expected"):
            fetched([served.client], manifest, memories_for(state, [("w", Box((0, 0), (1, 2)))]))


def test_several_depots_share_the_work_and_stand_in_for_each_other(store, rng, monkeypatch):
    monkeypatch.setattr(questions, "BATCH_NBYTES", 256)
    state = {f"w{number}": rng.normal(size=(40, 30)).astype(np.float32) for number in range(30)}
    store.publish("v1", state)
    places = [(name, random_box(rng, (40, 30))) for name in state for _ in range(3)]
    with depot_over(store.path) as one, depot_over(store.path) as other:
        manifest = one.manifest("v1")
        wanted = memories_for(state, places)
        check_fetched(state, wanted, fetched([one.client, other.client], manifest, wanted))
        assert min(one.depot.stats().requests, other.depot.stats().requests) > 5
        gone = DepotClient("http://127.0.0.1:9", connect_s=1)
        wanted = memories_for(state, places)
        check_fetched(state, wanted, fetched([gone, one.client], manifest, wanted))
        wanted = memories_for(state, places)
        told = {}
        for index, digest in fetch_boxes([one.client, other.client], manifest, wanted, deadline=soon()):
            told[index] = digest
            one.depot.close()
        check_fetched(state, wanted, told)
        with pytest.raises(SourceFailed, match="at every depot"):
            fetched([gone, one.client], manifest, memories_for(state, places))


def test_publishers_that_hold_parts_of_a_version_are_asked_until_one_has_the_box(store, rng):
    state = {"w": rng.normal(size=(8, 6)).astype(np.float32), "b": rng.normal(size=4).astype(np.float32)}
    manifest = store.publish("v1", state)
    upper = {"w": (Box((0, 0), (5, 6)), state["w"][:5])}
    lower = {"w": (Box((3, 2), (5, 4)), np.asfortranarray(state["w"][3:, 2:])), "b": (Box((0,), (4,)), state["b"])}
    with depot_of_shares(manifest, upper) as one, depot_of_shares(manifest, lower) as other:
        for box in [
            ("w", Box((1, 1), (3, 3))),
            ("w", Box((6, 3), (2, 2))),
            ("b", Box((1,), (2,))),
            ("w", Box((7, 0), (1, 0))),
        ]:
            wanted = memories_for(state, [box])
            check_fetched(state, wanted, fetched([one.client, other.client], manifest, wanted))
        with pytest.raises(NotFound, match=r"(?s)here is Box.*at every|at every.*here is Box") as caught:
            fetched([one.client, other.client], manifest, memories_for(state, [("w", Box((0, 0), (8, 1)))]))
        assert str(caught.value).count("does not have what was asked for") == 2
        with pytest.raises(NotFound, match="nothing of it is here"):
            fetched([one.client], manifest, memories_for(state, [("b", Box((0,), (1,)))]))


@contextmanager
def depot_with(store, answer):
    """A depot that answers questions for boxes as it likes."""
    routes = [Route("POST", "/v1/versions/{version}/boxes", answer)]
    with StoredShelf(store.path) as shelf, Depot(shelf, routes=routes) as depot:
        client = DepotClient(depot.url)
        yield client, depot
        client.close()


def test_closing_the_iterator_ends_its_threads_though_the_depot_is_silent(store, rng):
    free = threading.Event()

    def silent(_request, _stack):
        free.wait(30)
        raise NotFound("nothing")

    state = {"w": rng.normal(size=(4, 4)).astype(np.float32)}
    store.publish("v1", state)
    with depot_with(store, silent) as (client, _):
        manifest = client.manifest("v1", deadline=soon())
        wanted = memories_for(state, [("w", Box.whole((4, 4)))])
        with pytest.raises(DeadlineExceeded):
            dict(fetch_boxes([client], manifest, wanted, deadline=Deadline.after(0.2)))
        stopped = threading.Event()
        threading.Timer(0.2, stopped.set).start()
        with pytest.raises(UpdateCancelled):
            dict(fetch_boxes([client], manifest, wanted, deadline=Deadline.after(30, cancelled=stopped)))
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch fetching boxes")]
        free.set()


def test_a_depot_that_failed_is_left_alone_while_another_answers(store, rng, monkeypatch):
    monkeypatch.setattr(questions, "BATCH_NBYTES", 1)
    asked = []

    def broken(_request, _stack):
        asked.append(1)
        raise WeightcastError("broken")

    state = {f"w{number}": rng.normal(size=(4, 4)).astype(np.float32) for number in range(30)}
    store.publish("v1", state)
    with depot_with(store, broken) as (client, _), depot_over(store.path) as served:
        wanted = memories_for(state, [(name, Box.whole((4, 4))) for name in state])
        check_fetched(state, wanted, fetched([client, served.client], served.manifest("v1"), wanted))
        assert len(asked) <= 2  # threads that had begun
        asked.clear()
        wanted = memories_for(state, [(name, Box.whole((4, 4))) for name in state])
        told = dict(fetch_boxes([served.client, client], served.manifest("v1"), wanted, deadline=soon(), spread=1))
        check_fetched(state, wanted, told)
        assert not asked


def test_the_changes_of_a_version_are_folded_from_those_of_one_before_it(store, rng, monkeypatch):
    state = {"w": rng.normal(size=(40, 4)).astype(np.float32)}
    for number in range(4):
        state = {"w": state["w"] + np.eye(40, 4, k=-number, dtype=np.float32)}
        Store(store.path).publish(f"v{number}", state, "auto" if number else "full")
    steps = []
    fold_deltas = reading.fold_deltas

    def counted(path, deltas, *args, **more):
        steps.append([manifest.version for manifest in deltas])
        return fold_deltas(path, deltas, *args, **more)

    monkeypatch.setattr(reading, "fold_deltas", counted)
    with depot_over(store.path) as served:
        for version in ("v2", "v3", "v3", "v1", "v2"):
            wanted = memories_for(store.load(version), [("w", Box((1, 1), (30, 2)))])
            check_fetched(store.load(version), wanted, fetched([served.client], served.manifest(version), wanted))
    assert steps == [["v1", "v2"], ["v3"], ["v1"], ["v2"]]


@pytest.mark.parametrize("lie", ["short", "long", "no digests", "other digests", "no json"])
def test_an_answer_that_does_not_make_sense_is_the_depots_failure(store, rng, lie):
    state = {"w": rng.normal(size=(4, 4)).astype(np.float32)}
    store.publish("v1", state)
    tail = msgspec.json.encode([bytes_digest(state["w"].tobytes())] * (2 if lie == "other digests" else 1))
    body = {"short": state["w"].tobytes()[:-4], "long": state["w"].tobytes() + b"1234"}.get(lie, state["w"].tobytes())
    tail = b"x" * len(tail) if lie == "no json" else tail

    def answer(_request, _stack):
        headers = {} if lie == "no digests" else {DIGESTS_HEADER: str(len(tail))}
        return Reply(200, (body, tail), len(body) + len(tail), headers)

    with (
        StoredShelf(store.path) as shelf,
        Depot(shelf, routes=[Route("POST", "/v1/versions/{version}/boxes", answer)]) as depot,
    ):
        client = DepotClient(depot.url)
        wanted = memories_for(state, [("w", Box.whole((4, 4)))])
        with pytest.raises(SourceFailed):
            fetched([client], client.manifest("v1", deadline=soon()), wanted)
        client.close()
