"""Who serves which version: told to a depot, kept in the store, and followed by gc."""

from __future__ import annotations

import os
import threading
import time

import msgspec
import pytest
from depot_stand import WAIT_S, ask, serving, tensors

from weightcast import Store
from weightcast.cli.main import main
from weightcast.errors import InvalidInput
from weightcast.store.acks import (
    MAX_PINNED_PER_CLIENT,
    MAX_RECEIVERS_PER_CLIENT,
    PINNED_S,
    Acks,
    served_versions,
)
from weightcast.store.layout import RECEIVERS
from weightcast.wire.depot import Ack, Acknowledged

ROOT = f"xxh3-128:{'0' * 32}"


def ack(receiver="gen-0", version="step_1", root=ROOT):
    return Ack(receiver, version, root)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    for step in range(1, 6):
        store.publish(f"step_{step}", tensors(step), mode="full")
    return store


def told(acks):
    return {(one.receiver, one.version) for one in acks.receivers()}


def test_receivers_tell_a_depot_where_they_are_and_it_tells_all(store):
    with serving(store, acks=Acks(store.path)) as depot:
        answers = [
            ask(depot, "/v1/acks", "POST", msgspec.json.encode(one))
            for one in (ack(), ack("gen-1"), ack("gen-0", "step_2"), ack("gen-2", "step_3"), ack("gen-2", ""))
        ]
        found = msgspec.json.decode(ask(depot, "/v1/receivers").body, type=list[Acknowledged])

    assert [(answer.status, answer.body) for answer in answers] == [(204, b"")] * 5
    assert [(one.receiver, one.version, one.root_digest) for one in found] == [
        ("gen-0", "step_2", ROOT),
        ("gen-1", "step_1", ROOT),
    ]
    assert all(0 <= one.age_s < WAIT_S for one in found)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"[]", b"nonsense", b'{"receiver": 1, "version": "step_1", "root_digest": ""}',
        msgspec.json.encode(ack("")), msgspec.json.encode(ack("a\nb")), msgspec.json.encode(ack("x" * 300)),
        msgspec.json.encode(ack(version="../x")), msgspec.json.encode(ack(root="nonsense")),
    ],
)  # fmt: skip
def test_what_is_no_acknowledgement_is_refused(store, body):
    with serving(store) as depot:
        answer = ask(depot, "/v1/acks", "POST", body)
        assert (answer.status, answer.json["code"]) == (422, "invalid_input")
        assert ask(depot, "/v1/receivers").json == []


def test_gc_keeps_what_receivers_serve_unless_it_is_told_not_to(store, capsys):
    Acks(store.path).note(ack(version="step_2"))

    report = store.gc(keep_last=1)
    assert store.versions() == ["step_2", "step_5"]
    assert report.kept["step_2"] == "a receiver serves it"
    assert main(["store", "gc", str(store.path), "--keep-last", "1"]) == 0
    assert "kept step_2: a receiver serves it" in capsys.readouterr().out
    assert store.versions() == ["step_2", "step_5"]
    assert main(["store", "gc", str(store.path), "--keep-last", "1", "--ignore-receivers"]) == 0
    assert store.versions() == ["step_5"]


def test_a_version_that_no_receiver_serves_any_more_may_go(store):
    acks = Acks(store.path)
    acks.note(ack(version="step_2"))
    acks.note(ack(version="step_4"))

    store.gc(keep_last=1)

    assert store.versions() == ["step_4", "step_5"]


def test_the_base_of_a_served_delta_stays_with_it(tmp_path):
    store, state = Store(tmp_path / "store"), tensors()
    store.publish("step_1", state)
    for step in (2, 3):
        state["a"][step] += 1
        store.publish(f"step_{step}", state, mode="delta")
    store.publish("step_4", tensors(4), mode="full")
    Acks(store.path).note(ack(version="step_2"))

    store.gc(keep_last=1)

    assert store.versions() == ["step_1", "step_2", "step_4"]


def test_a_depot_that_starts_again_knows_its_receivers_and_two_depots_share_them(store):
    first, second = Acks(store.path), Acks(store.path)
    first.note(ack("gen-0", "step_1"))
    second.note(ack("gen-1", "step_2"))
    first.note(ack("gen-2", "step_3"))
    second.note(ack("gen-0", "step_4"))

    everything = {("gen-0", "step_4"), ("gen-1", "step_2"), ("gen-2", "step_3")}
    assert told(first) == told(second) == told(Acks(store.path)) == everything
    assert served_versions(store.path) == {"step_2", "step_3", "step_4"}


def test_a_receiver_that_is_not_heard_of_any_more_is_forgotten(store):
    acks = Acks(store.path, ttl_s=0.3)
    acks.note(ack())
    assert told(acks) == {("gen-0", "step_1")}
    time.sleep(0.35)
    assert told(acks) == told(Acks(store.path, ttl_s=0.3)) == set()


def test_a_receiver_that_repeats_itself_is_written_down_now_and_then_and_not_forgotten(store):
    acks = Acks(store.path, ttl_s=1.5, refresh_s=0.4)
    written = set()
    end = time.monotonic() + 1.8
    while time.monotonic() < end:
        acks.note(ack())
        written.add((store.path / RECEIVERS).stat().st_mtime_ns)
        time.sleep(0.01)
    assert 3 <= len(written) <= 6
    assert told(Acks(store.path, ttl_s=1.5)) == {("gen-0", "step_1")}


def test_only_so_many_receivers_are_remembered(store):
    acks = Acks(store.path, most=10)
    for index in range(30):
        acks.note(ack(f"gen-{index}"))
    assert told(acks) == told(Acks(store.path, most=10)) == {(f"gen-{index}", "step_1") for index in range(20, 30)}


def test_many_threads_tell_at_once_and_all_is_kept(store):
    acks = Acks(store.path)
    tellers = [
        threading.Thread(target=lambda index=index: [acks.note(ack(f"gen-{index}", f"step_{step}")) for step in (1, 2)])
        for index in range(40)
    ]
    for teller in tellers:
        teller.start()
    for teller in tellers:
        teller.join(WAIT_S)

    assert told(acks) == told(Acks(store.path)) == {(f"gen-{index}", "step_2") for index in range(40)}


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "newer"])
def test_a_damaged_file_is_reported_ignored_and_written_anew(store, caplog, damage):
    Acks(store.path).note(ack(version="step_2"))
    path = store.path / RECEIVERS
    data = path.read_bytes()
    damaged = {
        "flipped": data.replace(b"step_2", b"step_3"),
        "cut": data[:-20],
        "empty": b"",
        "newer": b"\x00" * 100,
    }
    path.write_bytes(damaged[damage])

    acks = Acks(store.path)
    assert told(acks) == set()
    assert RECEIVERS in caplog.text
    store.gc(keep_last=2)
    assert store.versions() == ["step_4", "step_5"]
    acks.note(ack("gen-1", "step_4"))
    assert told(Acks(store.path)) == {("gen-1", "step_4")}


def test_a_store_that_cannot_be_written_does_not_keep_receivers_from_telling(tmp_path, caplog):
    acks = Acks(tmp_path / "none")
    acks.note(ack())
    acks.note(ack("gen-1"))

    assert told(acks) == {("gen-0", "step_1"), ("gen-1", "step_1")}
    assert caplog.text.count("not kept") == 1


def test_without_a_store_all_is_in_memory(tmp_path):
    acks = Acks(None)
    acks.note(ack())
    assert acks.protected() == {"step_1"}
    with pytest.raises(InvalidInput):
        acks.note(ack(version="a/b"))


def put_ahead(store, seconds):
    """Rewrite the file as a depot would have whose clock went ahead."""
    from weightcast.store.acks import _File
    from weightcast.wire.seal import seal, unseal

    path = store.path / RECEIVERS
    file = unseal(path.read_bytes(), path, _File, newest=1)
    ahead = tuple(msgspec.structs.replace(one, heard_s=one.heard_s + seconds) for one in file.receivers)
    path.write_bytes(seal(msgspec.structs.replace(file, receivers=ahead)))


def test_a_clock_that_was_put_back_neither_keeps_a_receiver_for_ever_nor_what_it_said_before(store):
    Acks(store.path).note(ack())
    put_ahead(store, 1000)
    acks = Acks(store.path)
    assert acks.receivers()[0].age_s == 0
    acks.note(ack(version="step_2"))
    assert told(acks) == told(Acks(store.path)) == {("gen-0", "step_2")}
    put_ahead(store, 10_000)
    assert told(Acks(store.path)) == set()


def test_one_client_has_few_receivers_and_does_not_push_out_those_of_others(store):
    acks = Acks(store.path)
    acks.note(ack("honest", "step_1"), "10.0.0.1")
    for index in range(MAX_RECEIVERS_PER_CLIENT + 50):
        acks.note(ack(f"many-{index}", "step_2"), "10.0.0.2")

    for one in (acks, Acks(store.path)):
        names = {receiver for receiver, _ in told(one)}
        assert len(names) == MAX_RECEIVERS_PER_CLIENT + 1
        assert {"honest", f"many-{MAX_RECEIVERS_PER_CLIENT + 49}"} <= names
        assert "many-0" not in names


def test_acknowledgements_of_many_clients_keep_few_versions(tmp_path, monkeypatch):
    monkeypatch.setattr("weightcast.store.acks.MAX_PINNED", 6)
    monkeypatch.setattr("weightcast.store.acks.MAX_PINNED_PER_CLIENT", 2)
    store = Store(tmp_path / "store")
    acks = Acks(store.path)
    for step in range(12):
        store.publish(f"step_{step}", tensors(step), mode="full")
        acks.note(ack(f"gen-{step}", f"step_{step}"), f"10.0.0.{step // 3}")

    assert acks.protected() == served_versions(store.path) == {f"step_{step}" for step in (4, 5, 7, 8, 10, 11)}


def test_an_acknowledgement_of_a_version_that_is_not_there_keeps_no_place(store):
    acks = Acks(store.path)
    acks.note(ack("gen-0", "step_1"), "10.0.0.1")
    for index in range(MAX_PINNED_PER_CLIENT + 5):
        acks.note(ack(f"gen-{index + 1}", f"none_{index}"), "10.0.0.1")

    assert acks.protected() == {"step_1"}


def test_no_acknowledgement_keeps_a_version_for_longer_than_it_is_said(store):
    acks = Acks(store.path)
    for step in (1, 2):
        acks.note(ack(f"gen-{step}", f"step_{step}"))
    published_s = time.time() - PINNED_S - 1
    os.utime(store.path / "versions" / "step_1" / "manifest.json", (published_s, published_s))
    acks.note(ack("gen-1", "step_1"))

    store.gc(keep_last=1)

    assert store.versions() == ["step_2", "step_5"]


def test_gc_leaves_what_a_depot_writes_aside_and_removes_what_a_publisher_left(store):
    for name in (".receivers.json.tmp", ".version.yaml.tmp"):
        (store.path / name).write_text("half of it")
    assert store.gc(keep_last=2).garbage == [".version.yaml.tmp"]
    assert (store.path / ".receivers.json.tmp").exists()
    Acks(store.path).note(ack("gen-1", "step_5"))
    assert not (store.path / ".receivers.json.tmp").exists()
