"""Relays that follow real depots over real sockets: what comes, what is given on, and what is refused."""

import os
import shutil
import threading
import time

import numpy as np
import pytest

from relays import (
    PIECE_NBYTES,
    Stand,
    check_same,
    complete,
    fails_with_source_failed,
    read_through,
    tensors,
    wait_complete,
    wait_for,
    wait_problem,
)
from weightcast import LiveModel, Store
from weightcast.clock import Deadline
from weightcast.depot.mirror import Mirror
from weightcast.errors import InvalidInput, SourceFailed, VersionNotFound
from weightcast.store import layout
from weightcast.store.lock import exclusive
from weightcast.transports.http.access import Access
from weightcast.transports.http.client import DepotClient


@pytest.fixture
def stand(tmp_path):
    stand = Stand(tmp_path)
    yield stand
    stand.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith(("mirror", "depot"))]
    assert not left


def part_of(store, version="v1"):
    return store.manifest(version).parts[0].file


def wait_came(mirror, part, pieces, version="v1"):
    """Wait until the first pieces of a file have come to a relay."""
    wait_for(lambda: mirror.newest() is not None and mirror.newest().version == version)
    with mirror.holding(version) as holding:
        read_through(holding, part, 0, pieces * PIECE_NBYTES, seconds=20)


def flip(file, at, times=1 << 30):
    """Change one byte of a file, so many times."""
    left = [times]

    def change(name, start, data):
        if name != file or not start <= at < start + len(data) or not left[0]:
            return data
        left[0] -= 1
        return data[: at - start] + bytes([data[at - start] ^ 1]) + data[at - start + 1 :]

    return change


# -- following -----------------------------------------------------------------------------------------------------------


def test_versions_go_through_a_chain_of_relays_with_what_they_are_built_on(stand):
    urls, mirrors = [stand.depot().url], []
    for _ in range(3):
        mirrors.append(stand.mirror(*reversed(urls)))
        urls.append(stand.depot(mirrors[-1]).url)
    state = tensors(1)
    stand.store.publish("v1", state, files={"config.json": b"{}", "empty.txt": b""}, part_nbytes=300_000)
    for mirror in mirrors:
        wait_complete(mirror, "v1")
    state["layer.1"][5] += 1
    assert stand.store.publish("v2", state, "delta").kind == "delta"
    for mirror in mirrors:
        wait_complete(mirror, "v2")
        check_same(stand.store.path, mirror.path, "v1")
        check_same(stand.store.path, mirror.path, "v2")
        wait_for(lambda mirror=mirror: mirror.problems() == {}, mirror.problems)
    late = stand.mirror(urls[-1])  # begins with the delta, and needs its base
    wait_complete(late, "v2")
    np.testing.assert_array_equal(Store(late.path).load("v2")["layer.1"], state["layer.1"])


def test_a_model_is_updated_from_a_relay_while_the_version_still_comes(stand):
    shelf = stand.tampered()
    mirror = stand.mirror(stand.depot(shelf).url)
    state = tensors(1)
    stand.store.publish("v1", state)
    part = part_of(stand.store)
    shelf.allow({part: 3 * PIECE_NBYTES})
    relay = stand.depot(mirror)
    wait_for(lambda: mirror.newest() is not None)
    client, manifest = DepotClient(relay.url), stand.store.manifest("v1")
    (offer,) = client.catalogue(deadline=Deadline.after(5)).versions
    assert not offer.complete
    memory = memoryview(bytearray(3 * PIECE_NBYTES))
    client.read(manifest, part, 0, memory, deadline=Deadline.after(5))
    assert bytes(memory) == (stand.store.path / "versions/v1" / part).read_bytes()[: len(memory)]
    assert not complete(mirror, "v1")
    assert Store(mirror.path).versions() == []
    client.close()
    live = LiveModel({name: np.zeros_like(array) for name, array in state.items()})
    threading.Timer(0.3, lambda: shelf.allow(None)).start()
    live.update(source=relay.url, timeout=20)
    assert live.root_digest() == manifest.root_digest
    wait_complete(mirror, "v1")


def test_an_older_version_is_followed_where_it_was_announced(stand):
    stand.store.publish("v1", tensors(1), "full")
    mirror = stand.mirror(stand.depot().url)
    wait_complete(mirror, "v1")
    stand.store.publish("v2", tensors(2), "full")
    wait_complete(mirror, "v2")
    stand.store.announce("v1")
    wait_for(lambda: mirror.newest().version == "v1")
    assert Store(mirror.path).newest() == "v1"
    assert Store(mirror.path).versions() == ["v1", "v2"]


def test_an_upstream_whose_news_are_late_is_not_followed_back(stand):
    late = Store(stand.path / "late")
    stand.store.publish("v1", tensors(1), "full")
    shutil.copytree(stand.store.path, late.path)
    for number in (2, 3):
        stand.store.publish(f"v{number}", tensors(number), "full")
    near = stand.tampered(late.path)
    mirror = stand.mirror(stand.depot(near).url, stand.depot().url)
    wait_complete(mirror, "v3")  # the second upstream knows more than the first
    shutil.copytree(stand.store.path / "versions/v2", late.path / "versions/v2")
    late.announce("v2")
    time.sleep(1.5)
    assert mirror.newest().version == "v3"
    assert Store(mirror.path).newest() == "v3"


def test_a_trainer_that_began_anew_is_followed(stand, tmp_path):
    depot_path = stand.store.path
    for number in (1, 2, 3):
        stand.store.publish(f"old_{number}", tensors(number), "full")
    mirror = stand.mirror(stand.depot().url)
    wait_complete(mirror, "old_3")
    depot_path.rename(tmp_path / "gone")
    Store(depot_path).publish("new_1", tensors(9), "full")
    wait_complete(mirror, "new_1")


def test_a_relay_keeps_the_last_versions_and_what_is_protected(stand):
    mirror = stand.mirror(stand.depot().url, keep_last=2, protect=lambda: ["v1"])
    for number in range(1, 6):
        stand.store.publish(f"v{number}", tensors(number), "full")
        wait_complete(mirror, f"v{number}")
    wait_for(lambda: Store(mirror.path).versions() == ["v1", "v4", "v5"], lambda: Store(mirror.path).versions())


def test_a_relay_waits_for_whoever_has_its_store(stand):
    mirror_path = stand.path / "relay"
    mirror_path.mkdir()
    stand.store.publish("v1", tensors(1))
    with exclusive(layout.lock_path(mirror_path), Deadline.after(1)):
        mirror = stand.mirror(stand.depot().url, path=mirror_path)
        assert "another process" in wait_problem(mirror, "mirror")
        assert mirror.newest() is None
    wait_complete(mirror, "v1")
    wait_for(lambda: mirror.problems() == {}, mirror.problems)


def test_other_bytes_under_the_same_name_are_not_taken(stand):
    mine = Store(stand.path / "relay")
    mine.publish("v1", tensors(7))
    stand.store.publish("v0", tensors(3), "full")
    stand.store.publish("v1", tensors(1), "full")
    mirror = stand.mirror(stand.depot().url, path=mine.path)
    assert "never changes" in wait_problem(mirror, "v1")
    assert mine.verify("v1").problems == []
    np.testing.assert_array_equal(mine.load("v1")["layer.0"], tensors(7)["layer.0"])


def test_a_damaged_manifest_in_the_relays_store_is_fetched_again(stand):
    stand.store.publish("v1", tensors(1))
    first = stand.mirror(stand.depot().url)
    wait_complete(first, "v1")
    first.close()
    (first.path / "versions/v1/manifest.json").write_bytes(b"{}")
    wait_complete(stand.mirror(stand.depot().url, path=first.path), "v1")
    check_same(stand.store.path, first.path, "v1")


@pytest.mark.parametrize(
    ("urls", "settings"),
    [([], {}), (["ftp://x"], {}), (["http://127.0.0.1:1"], {"keep_last": 0}), (["http://127.0.0.1:1"], {"stall_s": 0}),
     (["http://127.0.0.1:1"], {"connections": 0})],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(tmp_path, urls, settings):
    with pytest.raises(InvalidInput):
        Mirror(tmp_path, urls, **settings)


def test_a_wrong_token_is_a_problem_and_the_right_one_is_not(stand):
    depot = stand.depot(token="right")
    stand.store.publish("v1", tensors(1))
    refused = stand.mirror(depot.url, access=Access(token="wrong"))
    assert "token" in wait_problem(refused, depot.url)
    wait_complete(stand.mirror(depot.url, access=Access(token="right")), "v1")


# -- bytes that are wrong ------------------------------------------------------------------------------------------------


def test_a_byte_that_was_flipped_on_the_way_is_fetched_again(stand):
    stand.store.publish("v1", tensors(1))
    shelf = stand.tampered()
    shelf.change = flip(part_of(stand.store), 300_000, times=1)
    mirror = stand.mirror(stand.depot(shelf).url)
    wait_complete(mirror, "v1")
    check_same(stand.store.path, mirror.path, "v1")
    assert shelf.sent[part_of(stand.store)] == stand.store.manifest("v1").parts[0].nbytes + PIECE_NBYTES


def test_a_piece_that_one_upstream_has_wrong_comes_from_another(stand):
    stand.store.publish("v1", tensors(1))
    part = part_of(stand.store)
    near, far = stand.tampered(), stand.tampered()
    near.change = flip(part, 300_000)
    mirror = stand.mirror(stand.depot(near).url, stand.depot(far).url)
    wait_complete(mirror, "v1")
    check_same(stand.store.path, mirror.path, "v1")
    assert far.sent == {part: PIECE_NBYTES}


@pytest.mark.parametrize("upstreams", [1, 2])
def test_a_version_that_is_wrong_everywhere_is_given_up_and_never_offered(stand, upstreams):
    stand.store.publish("v0", tensors(5))
    shelves = [stand.tampered() for _ in range(upstreams)]
    mirror = stand.mirror(*(stand.depot(shelf).url for shelf in shelves))
    wait_complete(mirror, "v0")
    for shelf in shelves:
        shelf.allow({})
    stand.store.publish("v1", tensors(1), "full")
    part, ends = part_of(stand.store), []
    for shelf in shelves:
        shelf.change = flip(part, 300_000)
        shelf.allow({part: 0})
    client = DepotClient(stand.depot(mirror).url, stall_s=20)
    wait_for(lambda: mirror.newest().version == "v1")
    memory, manifest = memoryview(bytearray(10)), stand.store.manifest("v1")
    reader = fails_with_source_failed(
        lambda: client.read(manifest, part, 300_000, memory, deadline=Deadline.after(20)), ends
    )
    time.sleep(0.1)
    for shelf in shelves:
        shelf.allow(None)
    reader.join(timeout=15)
    assert not reader.is_alive()
    assert "given up" in str(ends[0][0])
    assert "other bytes" in wait_problem(mirror, "v1")
    assert mirror.newest().version == "v0"
    assert [offer.version for offer in mirror.offers()] == ["v0"]
    assert Store(mirror.path).versions() == ["v0"]
    with pytest.raises(VersionNotFound):
        client.manifest("v1", deadline=Deadline.after(5))
    client.close()
    sent = [dict(shelf.sent) for shelf in shelves]
    time.sleep(0.7)
    assert [dict(shelf.sent) for shelf in shelves] == sent  # it is not tried again and again
    for shelf in shelves:
        shelf.change = lambda _file, _start, data: data
    stand.store.publish("v2", tensors(2), "full")
    wait_complete(mirror, "v2")


# -- upstreams that fail -------------------------------------------------------------------------------------------------


def test_an_upstream_that_dies_is_routed_around_in_the_middle_of_a_version(stand):
    stand.store.publish("v1", tensors(1))
    part = part_of(stand.store)
    near, far = stand.tampered(), stand.tampered()
    near.allow({part: 5 * PIECE_NBYTES})
    dying = stand.depot(near)
    mirror = stand.mirror(dying.url, stand.depot(far).url, give_up_s=10.0, stall_s=10.0)
    wait_came(mirror, part, 5)
    dying.close()
    wait_complete(mirror, "v1")
    check_same(stand.store.path, mirror.path, "v1")
    assert far.sent[part] == stand.store.manifest("v1").parts[0].nbytes - 5 * PIECE_NBYTES
    assert dying.url in mirror.problems()


def test_an_upstream_that_hangs_is_routed_around(stand):
    stand.store.publish("v1", tensors(1))
    part = part_of(stand.store)
    near, far = stand.tampered(), stand.tampered()
    near.allow({part: 5 * PIECE_NBYTES})
    mirror = stand.mirror(stand.depot(near).url, stand.depot(far).url, stall_s=0.3, give_up_s=20.0)
    wait_complete(mirror, "v1")
    assert far.sent[part] == stand.store.manifest("v1").parts[0].nbytes - 5 * PIECE_NBYTES


def test_an_interrupted_version_goes_on_with_the_pieces_that_are_there(stand):
    stand.store.publish("v1", tensors(1))
    part, nbytes = part_of(stand.store), stand.store.manifest("v1").parts[0].nbytes
    shelf = stand.tampered()
    shelf.allow({part: 6 * PIECE_NBYTES})
    first = stand.mirror(stand.depot(shelf).url)
    wait_came(first, part, 6)
    began = time.monotonic()
    first.close()
    assert time.monotonic() - began < 5
    again = stand.tampered()
    wait_complete(stand.mirror(stand.depot(again).url, path=first.path), "v1")
    check_same(stand.store.path, first.path, "v1")
    assert again.sent == {part: nbytes - 6 * PIECE_NBYTES}  # the small files had come as well


def test_a_version_that_stops_coming_is_given_up_and_taken_when_it_is_there_again(stand):
    stand.store.publish("v1", tensors(1))
    shelf = stand.tampered()
    shelf.allow({part_of(stand.store): 0})
    mirror = stand.mirror(stand.depot(shelf).url, stall_s=0.3, give_up_s=0.5)
    assert "nothing of version v1 has come" in wait_problem(mirror, "v1")
    wait_for(lambda: mirror.offers() == [])
    shelf.allow(None)
    wait_complete(mirror, "v1")
    wait_for(lambda: mirror.problems() == {}, mirror.problems)


@pytest.mark.slow
def test_relays_that_mirror_each_other_do_not_wait_for_ever(stand):
    stand.store.publish("v1", tensors(1))
    part = part_of(stand.store)
    shelf = stand.tampered()
    shelf.allow({part: 3 * PIECE_NBYTES})
    publisher = stand.depot(shelf)
    quick = {"stall_s": 0.4, "give_up_s": 1.5}
    gate = stand.mirror(publisher.url)  # only to have a port that can be known beforehand
    gate_depot = stand.depot(gate)
    port = gate_depot.port
    gate_depot.close()
    gate.close()
    one = stand.mirror(publisher.url, f"http://127.0.0.1:{port}", **quick)
    other = stand.mirror(stand.depot(one).url, **quick)
    stand.depot(other, listen=f"127.0.0.1:{port}")
    wait_for(lambda: len(other.offers()) == 1 and len(one.offers()) == 1)
    publisher.close()
    for mirror in (one, other):
        wait_problem(mirror, "v1")
    time.sleep(0.5)
    wait_for(lambda: one.offers() == other.offers() == [], lambda: (one.problems(), other.problems()))
    again = stand.depot(listen=f"127.0.0.1:{publisher.port}")
    assert again.url == publisher.url
    for mirror in (one, other):
        wait_complete(mirror, "v1", timeout=40)


def test_a_full_disk_is_a_problem_of_the_version_and_not_of_the_relay(stand, monkeypatch):
    status = os.statvfs(stand.path)
    stand.store.publish("v1", tensors(1))
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*status[:4], 1, *status[5:])))
    mirror = stand.mirror(stand.depot().url)
    assert "are free" in wait_problem(mirror, "v1")
    wait_for(lambda: mirror.offers() == [])
    monkeypatch.undo()
    wait_complete(mirror, "v1")


def test_closing_does_not_wait_for_what_does_not_come(stand):
    stand.store.publish("v1", tensors(1))
    shelf = stand.tampered()
    shelf.allow({part_of(stand.store): 0})
    mirror = stand.mirror(stand.depot(shelf).url, stall_s=60, give_up_s=600)
    relay, ends = stand.depot(mirror), []
    wait_for(lambda: mirror.newest() is not None)
    with mirror.holding("v1") as holding:
        part = part_of(stand.store)
        reader = fails_with_source_failed(lambda: holding.views(part, 0, 10, deadline=Deadline.after(60)), ends)
        time.sleep(0.1)
        began = time.monotonic()
        mirror.close()
        reader.join(timeout=10)
        assert time.monotonic() - began < 10
    assert isinstance(ends[0][0], SourceFailed)
    mirror.close()
    relay.close()
