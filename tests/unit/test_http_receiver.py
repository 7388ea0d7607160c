"""Receiving versions from depots that work."""

import ssl
import threading
import time
import weakref
from collections import defaultdict
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace

from http_depots import CERT, KEY, Scripted, depots, expected, memories, publish, soon, version, wrong
from weightcast import LiveModel, Store
from weightcast.clock import Deadline
from weightcast.errors import (
    AccessRefused,
    DeadlineExceeded,
    InvalidInput,
    ManifestCorrupt,
    SourceFailed,
    UpdateCancelled,
    VersionNotFound,
    VersionNotSet,
)
from weightcast.store.layout import MANIFEST
from weightcast.tensors.digest import Hasher
from weightcast.transports.base import (
    AcknowledgingReceiver,
    LandingReceiver,
    MendingReceiver,
    Range,
    Receiver,
    StateReceiver,
)
from weightcast.transports.http.receiver import HttpReceiver
from weightcast.transports.pieces import WrongPieces, proved_ranges
from weightcast.transports.registry import open_receiver
from weightcast.wire.manifest import BaseRef, encode_manifest


@pytest.fixture
def receiving(store):
    """A receiver of some depots over the store, with small buckets."""
    made = []

    def receive(urls, **settings):
        made.append(HttpReceiver(urls, **{"connections": 2, "stall_s": 5.0, **settings}))
        return made[-1]

    yield receive
    for receiver in made:
        receiver.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith(("fetch", "ask"))]
    assert not left


def test_a_receiver_of_depots_is_every_kind_of_receiver():
    receiver = HttpReceiver(["http://127.0.0.1:1"])

    for kind in (Receiver, LandingReceiver, MendingReceiver, StateReceiver, AcknowledgingReceiver):
        assert isinstance(receiver, kind)


@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("count", [1, 2])
def test_every_byte_lands_once_where_it_was_wanted_and_in_order(store, receiving, connections, count):
    publish(store)
    with depots(store, count) as served:
        receiver = receiving([depot.url for depot in served], connections=connections)
        manifest = receiver.manifest(receiver.newest(), deadline=soon())
        memory = memories(manifest)
        told, hashers = defaultdict(int), defaultdict(Hasher)
        for name, offset, nbytes in receiver.landings(manifest, memory, deadline=soon()):
            assert offset == told[name]
            told[name] += nbytes
            hashers[name].update(memory[name].data[offset : offset + nbytes])

    assert manifest == store.manifest("step_1")
    assert wrong(memory, expected(store, manifest)) == []
    assert told == {entry.name: entry.nbytes for entry in manifest.tensors if entry.nbytes}
    assert all(hashers[entry.name].digest() == entry.digest for entry in manifest.tensors if entry.nbytes)


@pytest.mark.parametrize("bucket_nbytes", [1 << 16, 300_001, 64 << 20])
def test_pieces_come_through_a_few_buckets_that_are_used_again(store, receiving, bucket_nbytes):
    publish(store)
    with depots(store) as served:
        receiver = receiving([served[0].url], bucket_nbytes=bucket_nbytes, prefetch=1)
        manifest = receiver.manifest("step_1", deadline=soon())
        memory, told, buckets = memories(manifest), defaultdict(int), set()
        for piece in receiver.pieces(manifest, deadline=soon()):
            assert piece.offset == told[piece.tensor]
            told[piece.tensor] += len(piece.data)
            memory[piece.tensor][piece.offset : piece.offset + len(piece.data)] = piece.data
            buckets.add(id(piece.data.obj))

    assert wrong(memory, expected(store, manifest)) == []
    assert told == {entry.name: entry.nbytes for entry in manifest.tensors if entry.nbytes}
    assert len(buckets) <= 3


def test_only_the_named_tensors_come_and_neighbours_come_with_one_request(store, receiving):
    publish(store)
    names = {"layer.003.norm", "layer.004.norm", "layer.005.norm", "scalar", "nothing"}
    with depots(store) as served:
        receiver = receiving([served[0].url])
        manifest = receiver.manifest("step_1", deadline=soon())
        pieces = [(piece.tensor, bytes(piece.data)) for piece in receiver.pieces(manifest, deadline=soon(), names=names)]
    stats = served[0].stats()

    right = expected(store, manifest)
    assert sorted(pieces) == sorted((name, right[name]) for name in names - {"nothing"})
    assert stats.requests == 1 + 2  # the manifest, the three neighbours, and the scalar
    assert stats.sent_nbytes < 5000 + len(manifest.tensors) * 250


def test_the_payload_of_a_delta_lands_as_one_tensor(store, receiving):
    state = version(1, mib=1.0)
    store.publish("step_1", state, "full")
    state["head"][::100] *= 2
    store.publish("step_2", state, "delta")
    with depots(store) as served:
        receiver = receiving([served[0].url])
        manifest = receiver.manifest("step_2", deadline=soon())
        memory = memories(manifest)
        assert {landed.name for landed in receiver.landings(manifest, memory, deadline=soon())} == {
            manifest.payloads[0].file
        }
        pieces = list(receiver.pieces(manifest, deadline=soon(), names=[manifest.payloads[0].file]))

    assert wrong(memory, expected(store, manifest)) == []
    assert [piece.tensor for piece in pieces] == [manifest.payloads[0].file]


def test_a_model_is_updated_from_depots_by_their_url(store):
    publish(store)
    with depots(store, 2) as served:
        source = f"http://{','.join(depot.url.removeprefix('http://') for depot in served)}?connections=1&prefetch=1"
        model = {name: np.zeros_like(array) for name, array in version(0).items()}
        LiveModel(model, source=source).update()

    assert all(model[name].tobytes() == array.tobytes() for name, array in version(0).items())


def test_encrypted_depots_with_a_token_are_received_from_by_their_url(store, tmp_path):
    publish(store, mib=3.0)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERT, KEY)
    with depots(store, tls=context, token=token.read_text()) as served:
        with closing(open_receiver(f"{served[0].url}?ca_file={CERT}&token_file={token}", rank=0)) as receiver:
            manifest = receiver.manifest(receiver.newest(), deadline=soon())
            memory = memories(manifest)
            for _ in receiver.landings(manifest, memory, deadline=soon()):
                pass
            assert wrong(memory, expected(store, manifest)) == []
        with closing(open_receiver(f"{served[0].url}?ca_file={CERT}", rank=0)) as receiver, pytest.raises(AccessRefused):
            next(receiver.landings(manifest, memory, deadline=soon()))


def test_memories_that_do_not_fit_are_all_listed_before_anything_is_asked(store, receiving):
    manifest = publish(store)
    memory = memories(manifest)
    memory["head"] = memory["head"][1:]
    memory["embed"].flags.writeable = False
    memory["layer.weight"] = np.zeros(2 * manifest.transfers()["layer.weight"].nbytes, np.uint8)[::2]
    receiver = receiving(["http://127.0.0.1:1"])

    with pytest.raises(InvalidInput, match=r"(?s)head has \d+ bytes.*embed.*layer\.weight"):
        next(receiver.landings(manifest, memory, deadline=soon()))
    with pytest.raises(InvalidInput, match="no gone, lost"):
        next(receiver.pieces(manifest, deadline=soon(), names=["lost", "gone"]))


def test_a_version_without_any_bytes_is_received_without_a_request(store, receiving):
    store.publish("step_1", {"nothing": np.empty((0, 2), dtype=np.float32)})
    receiver = receiving(["http://127.0.0.1:1"])
    manifest = store.manifest("step_1")

    assert list(receiver.landings(manifest, memories(manifest), deadline=soon())) == []
    assert list(receiver.pieces(manifest, deadline=soon())) == []


# -- what there is ----------------------------------------------------------------------------------------------------


def test_the_newest_version_is_that_of_the_depot_that_is_ahead(tmp_path, store, receiving):
    behind = Store(tmp_path / "behind")
    for one, last in ((behind, 1), (store, 3)):
        for step in range(1, last + 1):
            one.publish(f"step_{step}", {"a": np.full(4, step, dtype=np.float32)}, "full")
    with depots(behind) as late, depots(store) as ahead:
        receiver = receiving([late[0].url, ahead[0].url])
        assert receiver.newest() == "step_3"
        assert receiver.manifest("step_3", deadline=soon()).version == "step_3"
        ahead[0].close()
        assert receiver.newest() == "step_1"


def test_a_depot_without_a_version_says_so_and_one_that_has_not_the_version_too(tmp_path, receiving):
    store = Store(tmp_path / "empty")
    with depots(store, 2) as served:
        receiver = receiving([depot.url for depot in served])
        with pytest.raises(VersionNotSet):
            receiver.newest()
        with pytest.raises(VersionNotFound, match=served[1].url):
            receiver.manifest("step_7", deadline=soon())


def test_whoever_waits_is_told_of_a_new_version_as_soon_as_there_is_one(store, receiving):
    publish(store, mib=0.1)
    with depots(store, 2) as served:
        receiver = receiving([depot.url for depot in served])
        assert receiver.wait_newer(None, deadline=soon()) == "step_1"
        later = threading.Timer(0.3, publish, (store, "step_2"), {"mib": 0.1})
        later.start()
        assert receiver.wait_newer("step_1", deadline=soon()) == "step_2"
        later.join()
        assert served[0].stats().requests <= 6  # and not one after the other all the time
        with pytest.raises(DeadlineExceeded, match="waiting for a newer version than step_2"):
            receiver.wait_newer("step_2", deadline=soon(0.3))


def test_waiting_goes_on_while_nothing_is_published_and_ends_when_all_depots_are_gone(tmp_path, receiving):
    store = Store(tmp_path / "later")
    with depots(store) as served:
        receiver = receiving([served[0].url, "http://127.0.0.1:1"])
        later = threading.Timer(0.3, publish, (store,), {"mib": 0.1})
        later.start()
        assert receiver.wait_newer(None, deadline=soon()) == "step_1"
        later.join()
    with pytest.raises(SourceFailed, match=r"127\.0\.0\.1:1\b"):
        receiver.wait_newer("step_1", deadline=soon())


def test_a_depot_that_is_behind_is_not_taken_for_news(tmp_path, store, receiving):
    behind = Store(tmp_path / "behind")
    for one, last in ((behind, 1), (store, 2)):
        for step in range(1, last + 1):
            publish(one, f"step_{step}", mib=0.1)
    with depots(behind) as late, depots(store) as ahead:
        receiver = receiving([late[0].url, ahead[0].url])
        assert receiver.newest() == "step_2"
        ahead[0].close()
        with pytest.raises(DeadlineExceeded):
            receiver.wait_newer("step_2", deadline=soon(1.5))


# -- stopping ---------------------------------------------------------------------------------------------------------


def test_cancelling_interrupts_a_transfer_within_a_moment_and_nothing_is_written_afterwards(store, receiving):
    publish(store)
    cancelled = threading.Event()
    with depots(store) as served:
        receiver = receiving([served[0].url])
        manifest = receiver.manifest("step_1", deadline=soon())
        memory = memories(manifest)
        landings = receiver.landings(manifest, memory, deadline=Deadline.after(30, cancelled=cancelled))
        next(landings)
        cancelled.set()
        with pytest.raises(UpdateCancelled):
            list(landings)
        _check_untouched(memory)


def test_closing_the_iterator_ends_all_threads_and_nothing_is_written_afterwards(store, receiving):
    publish(store)
    with depots(store, 2) as served:
        receiver = receiving([depot.url for depot in served])
        manifest = receiver.manifest("step_1", deadline=soon())
        memory = memories(manifest)
        for iterator in (
            receiver.landings(manifest, memory, deadline=soon()),
            receiver.pieces(manifest, deadline=soon()),
        ):
            with closing(iterator):
                next(iterator)
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("fetch")]
        _check_untouched(memory)


def _check_untouched(memory):
    for array in memory.values():
        array[:] = 0x5A
    time.sleep(0.2)
    assert all((array == 0x5A).all() for array in memory.values())


def test_what_landed_is_let_go_of(store, receiving):
    publish(store)
    with depots(store) as served:
        receiver = receiving([served[0].url])
        manifest = receiver.manifest("step_1", deadline=soon())
        memory = memories(manifest)
        refs = [weakref.ref(array) for array in memory.values()]
        landings = receiver.landings(manifest, memory, deadline=soon())
        next(landings)
        del memory
        assert sum(ref() is not None for ref in refs) == len(refs)
        list(landings)
        del landings
        assert not any(ref() is not None for ref in refs)


# -- questions --------------------------------------------------------------------------------------------------------


def test_all_depots_hear_which_version_is_served_and_one_that_is_gone_is_only_logged(store, receiving, caplog):
    manifest = publish(store, mib=0.1)
    with depots(store, 2) as served:
        receiver = receiving([*(depot.url for depot in served), "http://127.0.0.1:1"])
        receiver.acknowledge(manifest, "replica-0", deadline=soon())
        heard = [[(one.receiver, one.version) for one in depot.acks.receivers()] for depot in served]

    assert heard == [[("replica-0", "step_1")]] * 2
    assert "127.0.0.1:1" in caplog.text


@pytest.mark.parametrize("count", [1, 2])
def test_any_ranges_of_files_are_fetched_those_that_overlap_too(store, receiving, rng, count):
    manifest = publish(store)
    files = {part.file: (store.path / "versions" / "step_1" / part.file).read_bytes() for part in manifest.parts}
    with depots(store, count) as served:
        receiver = receiving(["http://127.0.0.1:1", *(depot.url for depot in served)])
        wanted = []
        for file, data in files.items():
            for start, stop in np.sort(rng.integers(0, len(data), (30, 2))).tolist():
                wanted.append(Range(file, start, np.zeros(min(stop - start, 200_000), np.uint8)))
        for fetch in (receiver.ranges, partial(proved_ranges, receiver)):
            for one in wanted:
                one.memory[:] = 0
            told = sorted(fetch(manifest, wanted, deadline=soon()))
            assert told == list(range(len(wanted)))
            assert all(one.memory.tobytes() == files[one.file][one.start :][: len(one.memory)] for one in wanted)


def test_small_ranges_of_a_file_come_with_one_request_and_those_that_did_not_come_are_asked_for_again(store, receiving):
    manifest = publish(store)
    file = manifest.parts[0].file
    data = (store.path / "versions" / "step_1" / file).read_bytes()
    wanted = [Range(file, 10_000 * number, np.zeros(5_000, np.uint8)) for number in range(20)]
    head = (
        b"HTTP/1.1 206 Partial Content\r\nContent-Type: multipart/byteranges; boundary=x\r\nContent-Length: 200000\r\n\r\n"
    )
    part = b"--x\r\nContent-Range: bytes 0-4999/%d\r\n\r\n" % len(data) + data[:5_000]
    with depots(store) as served, Scripted(head + part + b"\r\n--x\r\n", keep=False) as broken:
        for urls in ([served[0].url], [broken.url, served[0].url]):
            for one in wanted:
                one.memory[:] = 0
            before = served[0].stats().requests
            receiver = receiving(urls, connections=1, spread=1)
            assert sorted(receiver.ranges(manifest, wanted, deadline=soon())) == list(range(20))
            assert all(one.memory.tobytes() == data[one.start :][:5_000] for one in wanted)
            assert served[0].stats().requests == before + 1


def test_a_piece_that_a_depot_has_wrong_comes_from_another_and_one_that_all_have_wrong_is_refused(tmp_path, receiving):
    stores = [Store(tmp_path / name) for name in ("bad", "good")]
    manifest, _ = (publish(store) for store in stores)
    part = manifest.parts[0]
    path = stores[0].path / "versions" / "step_1" / part.file
    right = path.read_bytes()
    path.write_bytes(right[:1_500_000] + bytes([right[1_500_000] ^ 1]) + right[1_500_001:])
    whole = Range(part.file, 0, np.zeros(part.nbytes, np.uint8))
    edge = Range(part.file, 1_600_000, np.zeros(10, np.uint8))  # in the wrong piece, but right by itself
    with depots(stores[0]) as (bad,), depots(stores[1]) as (good,):
        receiver = receiving([bad.url, good.url], spread=1)
        for wanted in (whole, edge):
            assert list(proved_ranges(receiver, manifest, [wanted], deadline=soon())) == [0]
            assert wanted.memory.tobytes() == right[wanted.start :][: len(wanted.memory)]
        alone = receiving([bad.url])
        with pytest.raises(WrongPieces, match=r"bytes 1048576 to 2097152 of model-00001") as refused:
            list(proved_ranges(alone, manifest, [edge], deadline=soon()))
    assert refused.value.files == {part.file}


def test_bases_that_lead_in_a_circle_are_refused_at_once(store, receiving):
    one = store.publish("step_1", version(mib=0.1), "full")
    two = store.publish("step_2", version(mib=0.1), "delta")
    circle = replace(two, version="step_1", base=BaseRef(version="step_2", root_digest=two.root_digest))
    assert one.root_digest == two.root_digest
    first, second = (store.path / "versions" / name for name in ("step_1", "step_2"))
    (first / MANIFEST).write_bytes(encode_manifest(circle))
    (first / two.payloads[0].file).write_bytes((second / two.payloads[0].file).read_bytes())
    with depots(store) as served:
        receiver = receiving([served[0].url])
        state = receiver.opened_state(receiver.manifest("step_2", deadline=soon()), deadline=soon(3))
        with pytest.raises(ManifestCorrupt, match="bases lead back to step_2"), state:
            pass
