"""One delta for a receiver that is behind, folded by a depot and fetched like any other file."""

import threading
from urllib.parse import urlencode

import pytest
from delta_samples import same
from question_depots import depot_over, soon
from shard_models import next_tensors, random_tensors

from weightcast import DeltaPolicy, Store, delta
from weightcast.clock import Deadline
from weightcast.depot import catching_up
from weightcast.depot.once import Once, Turns
from weightcast.errors import DeadlineExceeded, InvalidInput, NotFound, SourceFailed, WeightcastError
from weightcast.store import folding
from weightcast.tensors.digest import bytes_digest
from weightcast.transports.http.client import DepotClient, version_path
from weightcast.transports.http.questions import ask_shortcut
from weightcast.wire.depot import PIECE_NBYTES
from weightcast.wire.manifest import decode_manifest

FULL, DELTA = "full", "delta"


@pytest.fixture
def states(rng):
    """The states of seven versions that follow one another."""
    states = [random_tensors(rng)]
    for _ in range(6):
        states.append(next_tensors(rng, states[-1], density=0.03, keep=("q", "norm")))
    return dict(enumerate(states))


def publish(store, states, modes, packing="classes"):
    """Versions v0, v1 … of these kinds, each by a publisher of its own."""
    for number, mode in enumerate(modes):
        Store(store.path, delta=DeltaPolicy(packing=packing)).publish(f"v{number}", states[number], mode)


def short_of(served, version, held, *, sliced=False, **more):
    clients = [served.client]
    manifest, held_manifest = served.manifest(version), served.manifest(held)
    return ask_shortcut(clients, manifest, held_manifest, sliced=sliced, deadline=soon(), **more)


def payload_of(served, short):
    data = bytearray(short.payload.nbytes)
    served.client.read(short, short.payload.file, 0, memoryview(data), deadline=soon())
    assert bytes_digest(data) == short.payload.digest
    return bytes(data)


def check_leads(served, short, before, after, *, base=True):
    """The payload leads from one state to the other bit for bit; without its base if it must."""
    decoded = delta.decode(payload_of(served, short), before if base else None)
    assert (decoded.base_root, decoded.new_root) == (short.base.root_digest, short.root_digest)
    arrays = {name: array.copy() for name, array in before.items()}
    delta.move(arrays, decoded)
    assert same(arrays, after)


@pytest.mark.parametrize(
    ("modes", "held", "wanted"),
    [
        ([FULL, DELTA, DELTA, DELTA], 0, 3),  # all deltas
        ([FULL, DELTA, DELTA, DELTA], 1, 3),  # from one in the middle
    ],
)
@pytest.mark.parametrize("sliced", [False, True])
def test_one_delta_leads_from_what_is_held_to_the_version(store, states, modes, held, wanted, sliced):
    publish(store, states, modes)
    with depot_over(store.path) as served:
        short = short_of(served, f"v{wanted}", f"v{held}", sliced=sliced, limit=1 << 20)
        full = served.manifest(f"v{wanted}")
        assert (short.version, short.root_digest, short.kind) == (full.version, full.root_digest, "delta")
        assert (short.sequence, short.tied, short.metadata) == (full.sequence, full.tied, full.metadata)
        assert {(entry.spec, entry.digest) for entry in short.tensors} == {(e.spec, e.digest) for e in full.tensors}
        assert short.base.root_digest == served.manifest(f"v{held}").root_digest
        check_leads(served, short, states[held], states[wanted], base=not sliced)


@pytest.mark.parametrize("packing", ["classes", "gaps"])
def test_a_single_stored_delta_is_used_as_it_is_or_packed_again_for_slices(store, states, packing):
    publish(store, states, [FULL, DELTA], packing)
    with depot_over(store.path) as served:
        stored = served.manifest("v1")
        assert short_of(served, "v1", "v0") is None  # there is one already
        short = short_of(served, "v1", "v0", sliced=True)
        assert (short == stored) == (packing == "gaps")
        check_leads(served, short, states[0], states[1], base=False)


def test_what_is_not_cheaper_is_not_offered(store, states):
    publish(store, states, [FULL, DELTA, DELTA, DELTA])
    with depot_over(store.path) as served:
        short = short_of(served, "v3", "v0")
        assert short.payload.nbytes <= sum(served.manifest(f"v{number}").payload.nbytes for number in (1, 2, 3))
        assert short_of(served, "v3", "v0", limit=short.payload.nbytes) == short
        assert short_of(served, "v3", "v0", limit=short.payload.nbytes - 1) is None
        assert short_of(served, "v3", "v0", sliced=True, limit=10) is None


@pytest.mark.parametrize(
    ("modes", "held", "wanted"),
    [
        ([FULL, DELTA, FULL, DELTA], 1, 3),  # across a full version
        ([FULL, DELTA, FULL], 0, 2),  # to a full version
        ([FULL, FULL], 0, 1),
        ([FULL, DELTA, DELTA, FULL], 3, 1),  # backwards
    ],
)
@pytest.mark.parametrize("sliced", [False, True])
def test_a_depot_makes_no_delta_between_versions_that_no_stored_deltas_join(
    store, states, monkeypatch, modes, held, wanted, sliced
):
    publish(store, states, modes)
    worked = []
    monkeypatch.setattr(catching_up, "delta_between", lambda *_, **__: worked.append(1) or b"")
    with depot_over(store.path) as served:
        assert short_of(served, f"v{wanted}", f"v{held}", sliced=sliced) is None
        with pytest.raises(NotFound, match=f"no deltas lead .*v{wanted}|v{wanted} is a full version: no deltas lead"):
            question(served, f"v{wanted}", served.manifest(f"v{held}").root_digest)
    assert not worked


def test_a_depot_that_does_not_hold_the_versions_has_no_delta(store, states):
    publish(store, states, [FULL, DELTA, DELTA])
    with depot_over(store.path.parent / "empty") as empty, depot_over(store.path) as served:
        held, wanted = served.manifest("v0"), served.manifest("v2")
        assert short_of(served, "v0", "v0") is None
        assert ask_shortcut([empty.client], wanted, held, sliced=False, deadline=soon()) is None
        Store(store.path.parent / "empty").publish("v0", states[0], FULL)
        assert ask_shortcut([empty.client], wanted, held, sliced=False, deadline=soon()) is None


@pytest.mark.parametrize("packing", ["classes", "gaps"])
def test_deltas_are_folded_in_the_packing_that_they_are_stored_in(store, states, packing):
    publish(store, states, [FULL, DELTA, DELTA], packing)
    with depot_over(store.path) as served:
        assert delta.inspect(payload_of(served, short_of(served, "v2", "v0"))).packing == packing
        assert delta.inspect(payload_of(served, short_of(served, "v2", "v0", sliced=True))).packing == "gaps"


def question(served, version, held_root, **query):
    path = f"{version_path(version, 'delta')}?{urlencode({'from': held_root, **query})}"
    with served.client.stream("GET", path, None, deadline=soon()) as response:
        return decode_manifest(response.read(), path)


def test_a_question_that_makes_no_sense_is_refused(store, states):
    publish(store, states, [FULL, DELTA])
    with depot_over(store.path) as served:
        with pytest.raises(InvalidInput, match=r"from=.*packing=zip.*limit=-1"):
            question(served, "v1", "", packing="zip", limit="-1")
        with pytest.raises(NotFound, match="no deltas lead from"):
            question(served, "v1", "xxh3-128:" + "0" * 32)
        with pytest.raises(NotFound, match="no deltas lead from"):
            question(served, "v1", served.manifest("v1").root_digest)
        with pytest.raises(NotFound):
            question(served, "v9", "xxh3-128:" + "0" * 32)


def test_many_ask_at_once_and_one_works(store, states, monkeypatch):
    publish(store, states, [FULL, DELTA, DELTA, DELTA])
    worked = []
    between = catching_up.delta_between

    def counted(*args, **more):
        worked.append(more["packing"])
        return between(*args, **more)

    monkeypatch.setattr(catching_up, "delta_between", counted)
    with depot_over(store.path) as served:
        found = []
        askers = [
            threading.Thread(target=lambda turn=turn: found.append(short_of(served, "v3", "v0", sliced=bool(turn % 2))))
            for turn in range(8)
        ]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(60)
        assert len({short.payload.file for short in found}) == 2
        assert len(found) == 8
        assert sorted(worked) == ["classes", "gaps"]


def test_work_that_fails_is_tried_again_by_the_next_who_asks(store, states, monkeypatch):
    publish(store, states, [FULL, DELTA, DELTA])
    between = catching_up.delta_between
    broken = threading.Event()

    def failing(*args, **more):
        if not broken.is_set():
            broken.set()
            raise WeightcastError("something broke")
        return between(*args, **more)

    monkeypatch.setattr(catching_up, "delta_between", failing)
    with depot_over(store.path) as served:
        with pytest.raises(SourceFailed, match="something broke"):
            question(served, "v2", served.manifest("v0").root_digest)
        check_leads(served, short_of(served, "v2", "v0"), states[0], states[2])


def test_what_was_asked_for_last_is_kept_within_the_room_that_there_is():
    once, worked = Once(10, len), []

    def ask(key, nbytes=4):
        return once.get(key, lambda: (worked.append(key), "x" * nbytes)[1], deadline=soon(), what="working")

    for key in ("a", "b", "a", "c", "a", "b"):  # b was the oldest when c came, and c when b came again
        assert ask(key) == "xxxx"
    assert worked == ["a", "b", "c", "b"]
    assert [key for key, _ in once.kept()] == ["a", "b"]
    assert once.peek("a") == "xxxx"
    assert once.peek("c") is None
    ask("d")
    assert [key for key, _ in once.kept()] == ["a", "d"]
    assert len(ask("large", 11)) == 11
    assert once.kept() == []


def test_whoever_waits_for_another_or_for_a_turn_stops_at_the_deadline():
    once, turns = Once(10), Turns(1)
    begun, free = threading.Event(), threading.Event()

    def work():
        begun.set()
        free.wait(30)
        return 1

    def hold():
        with turns.taken(deadline=soon(), what="holding"):
            once.get("key", work, deadline=soon(), what="working")

    holder = threading.Thread(target=hold)
    holder.start()
    begun.wait(30)
    with pytest.raises(DeadlineExceeded, match="waiting for it"):
        once.get("key", work, deadline=Deadline.after(0.15), what="waiting for it")
    with pytest.raises(DeadlineExceeded, match="a turn"), turns.taken(deadline=Deadline.after(0.15), what="a turn"):
        pytest.fail("two have a turn")
    free.set()
    holder.join(30)
    assert once.get("key", lambda: 2, deadline=soon(), what="asking") == 1
    with turns.taken(deadline=soon(), what="a turn"):
        pass


def test_the_oldest_deltas_are_dropped_when_there_is_no_more_room(store, states):
    publish(store, states, [FULL, DELTA, DELTA, DELTA])
    with depot_over(store.path) as served:
        nbytes = sum(short_of(served, "v3", f"v{number}", sliced=True).payload.nbytes for number in (0, 1, 2))
        encoded = len(served.client.manifest("v3", deadline=soon()).tensors) * 400
    with depot_over(store.path, keep_nbytes=nbytes + encoded) as served:
        shorts = [short_of(served, "v3", f"v{number}", sliced=True, limit=1 << 30) for number in (0, 1, 2)]
        weights = sum(one.nbytes for _, one in served.questions._catch_ups._worked.kept())
        assert weights <= nbytes + encoded
        payload_of(served, shorts[2])
        with pytest.raises(NotFound):
            payload_of(served, shorts[0])
        check_leads(served, short_of(served, "v3", "v0", sliced=True), states[0], states[3], base=False)
    with depot_over(store.path, keep_nbytes=4096) as served:
        assert short_of(served, "v3", "v0") is None


def test_a_payload_has_ranges_and_piece_digests_like_every_file(store, states):
    publish(store, states, [FULL, DELTA, DELTA])
    with depot_over(store.path) as served:
        short = short_of(served, "v2", "v0")
        whole = payload_of(served, short)
        middle = bytearray(100)
        served.client.read(short, short.payload.file, 50, memoryview(middle), deadline=soon())
        assert bytes(middle) == whole[50:150]
        pieces = served.client.piece_digests(short, short.payload.file, deadline=soon())
        assert pieces.digests == (bytes_digest(whole),)
        assert pieces.piece_nbytes == PIECE_NBYTES
        stored = served.manifest("v2")
        served.client.piece_digests(stored, stored.payload.file, deadline=soon())
        data = bytearray(stored.payload.nbytes)
        served.client.read(stored, stored.payload.file, 0, memoryview(data), deadline=soon())
        assert bytes_digest(data) == stored.payload.digest
        assert served.manifest("v2") == stored
        with pytest.raises(NotFound):
            served.client.read(short, "catch-up-00.bin", 0, memoryview(middle), deadline=soon())


@pytest.mark.parametrize("moment", ["before the chains are read", "before the parts are opened"])
def test_versions_that_leave_the_store_meanwhile_are_not_found(store, states, monkeypatch, moment):
    publish(store, states, [FULL, DELTA, DELTA, FULL])
    with depot_over(store.path) as served:
        kept = short_of(served, "v2", "v1", sliced=True)
        manifest, held = served.manifest("v2"), served.manifest("v0")
        module, name = (catching_up, "delta_between") if "chains" in moment else (folding, "opened_state")
        before = getattr(module, name)

        def too_late(*args, **more):
            store.gc(keep_last=1)
            return before(*args, **more)

        monkeypatch.setattr(module, name, too_late)
        with pytest.raises(NotFound, match="v2 is not in"):
            question(served, "v2", held.root_digest)
        assert store.versions() == ["v3"]
        payload_of(served, kept)
        assert ask_shortcut([served.client], manifest, held, sliced=False, deadline=soon()) is None


def test_the_wait_for_an_answer_ends_with_the_deadline(store, states, monkeypatch):
    publish(store, states, [FULL, DELTA, DELTA])
    free = threading.Event()
    between = catching_up.delta_between

    def slow(*args, **more):
        free.wait(30)
        return between(*args, **more)

    monkeypatch.setattr(catching_up, "delta_between", slow)
    with depot_over(store.path) as served:
        manifest, held = served.manifest("v2"), served.manifest("v0")
        try:
            with pytest.raises(DeadlineExceeded):
                ask_shortcut([served.client], manifest, held, sliced=False, deadline=Deadline.after(0.3))
        finally:
            free.set()
        assert short_of(served, "v2", "v0") is not None


def test_other_depots_are_asked_and_none_that_answers_is_no_reason_to_fail(store, states, tmp_path):
    publish(store, states, [FULL, DELTA, DELTA])
    poor = Store(tmp_path / "poor")
    poor.publish("v0", states[0], FULL)
    gone = DepotClient("http://127.0.0.1:9", connect_s=1)
    with depot_over(store.path) as rich, depot_over(poor.path) as other:
        manifest, held = rich.manifest("v2"), rich.manifest("v0")
        for clients in ([gone, rich.client], [other.client, rich.client]):
            assert ask_shortcut(clients, manifest, held, sliced=False, deadline=soon()) is not None
        for clients in ([gone, other.client], [gone]):
            assert ask_shortcut(clients, manifest, held, sliced=False, deadline=soon()) is None


def test_a_depot_that_answers_with_another_delta_has_failed(store, states):
    from weightcast.depot.exchange import Reply, Route
    from weightcast.depot.server import Depot
    from weightcast.depot.stored import StoredShelf
    from weightcast.wire.manifest import encode_manifest

    publish(store, states, [FULL, DELTA, DELTA])
    answers = []

    def answer(_request, _stack):
        data = encode_manifest(store.manifest(answers[0]))
        return Reply(200, (data,), len(data))

    routes = [Route("GET", "/v1/versions/{version}/delta", answer)]
    with StoredShelf(store.path) as shelf, Depot(shelf, routes=routes) as depot:
        client = DepotClient(depot.url)
        for wrong in ("v0", "v1", "v2"):
            answers[:] = [wrong]
            with pytest.raises(SourceFailed, match="was asked for a delta"):
                ask_shortcut([client], store.manifest("v2"), store.manifest("v0"), sliced=False, deadline=soon())
        with depot_over(store.path) as served:
            clients = [client, served.client]
            assert ask_shortcut(clients, store.manifest("v2"), store.manifest("v0"), sliced=False, deadline=soon())
        client.close()
