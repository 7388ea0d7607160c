"""Relays that are killed and replicas that start again, in processes of their own."""

import os
import random
import shutil
import signal
import threading
import time

import pytest

from relays import PIECE_NBYTES, Stand, check_same, tensors, wait_for
from weightcast import Store
from weightcast.clock import Deadline
from weightcast.errors import WeightcastError
from weightcast.transports.http.client import DepotClient

from .children import report_of

LARGE = {"count": 3, "nbytes": 7_000_000}  # several pieces as depots make them


@pytest.fixture
def stand(memory_dir):
    stand = Stand(memory_dir)
    yield stand
    stand.close()


def kill(child):
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def sealed(path):
    return path.is_dir() and Store(path).versions()


def test_a_relay_that_is_killed_leaves_garbage_and_goes_on_where_it_was(stand, start):
    stand.store.publish("v1", tensors(1))
    (part,) = stand.store.manifest("v1").parts
    shelf, relay = stand.tampered(), stand.path / "relay"
    shelf.allow({part.file: 6 * PIECE_NBYTES})
    child = start("relay_process", relay, stand.depot(shelf).url)
    client = DepotClient(child.stdout.readline().strip())
    wait_for(lambda: client.catalogue(deadline=Deadline.after(5)).versions)
    memory = memoryview(bytearray(6 * PIECE_NBYTES))
    client.read(stand.store.manifest("v1"), part.file, 0, memory, deadline=Deadline.after(20))
    client.close()
    kill(child)
    assert Store(relay).versions() == []
    shutil.copytree(relay, stand.path / "copy")
    assert Store(stand.path / "copy", lock_timeout=1).gc().garbage == ["v1"]
    assert not any((stand.path / "copy" / "versions").iterdir())
    again = stand.tampered()
    start("relay_process", relay, stand.depot(again).url)
    wait_for(lambda: sealed(relay))
    check_same(stand.store.path, relay, "v1")
    assert again.sent == {part.file: part.nbytes - 6 * PIECE_NBYTES}


def test_a_relay_that_is_killed_again_and_again_never_has_a_version_that_lies(stand, start, form):
    kills, chance = (4 if form == "sampled" else 40), random.Random(5)
    state = tensors(1, **LARGE)
    stand.store.publish("v1", state, part_nbytes=9_000_000)
    state["layer.1"][7] += 1
    stand.store.publish("v2", state, "delta")
    source, relay = start("depot_process", stand.store.path), stand.path / "relay"
    url, seen = source.stdout.readline().strip(), set()
    for _ in range(kills):
        child = start("relay_process", relay, url)
        child.stdout.readline()
        time.sleep(chance.uniform(0, 0.2))
        kill(child)
        found = tuple(Store(relay).versions()) if relay.is_dir() else ()
        seen.add(found)
        assert found in ((), ("v1",), ("v1", "v2"))
        for version in found:
            assert Store(relay).verify(version).problems == []
        if found == ("v1", "v2") and chance.random() < 0.7:
            shutil.rmtree(relay)
    start("relay_process", relay, url)
    wait_for(lambda: sealed(relay) == ["v1", "v2"] and (relay / "version.yaml").exists(), lambda: (sealed(relay), seen))
    wait_for(lambda: Store(relay).newest() == "v2")
    check_same(stand.store.path, relay, "v1")
    check_same(stand.store.path, relay, "v2")


def test_a_restarted_replica_recovers_from_a_neighbour_without_the_trainer(stand, start):
    manifest = stand.store.publish("v1", tensors(1, **LARGE))
    trainer = start("depot_process", stand.store.path)
    url = trainer.stdout.readline().strip()
    neighbour = start("relay_process", stand.path / "relay", url)
    near = neighbour.stdout.readline().strip()
    wait_for(lambda: sealed(stand.path / "relay"))
    first = report_of("relay_replica", near, LARGE["count"], LARGE["nbytes"])
    kill(trainer)
    shutil.rmtree(stand.store.path)
    again = report_of("relay_replica", near, LARGE["count"], LARGE["nbytes"])
    assert first == again == {"version": "v1", "root_digest": manifest.root_digest}


def test_a_relay_that_is_killed_in_the_middle_is_routed_around(stand, start):
    """publisher → first → second: the first is killed while both fill, and the second goes on with the publisher."""
    stand.store.publish("v1", tensors(1))
    (part,) = stand.store.manifest("v1").parts
    shelf = stand.tampered()
    shelf.allow({part.file: 5 * PIECE_NBYTES})
    publisher = stand.depot(shelf).url
    first = start("relay_process", stand.path / "first", publisher)
    mirror = stand.mirror(first.stdout.readline().strip(), publisher, stall_s=10.0, give_up_s=30.0)
    wait_for(lambda: mirror.newest() is not None, mirror.problems)
    with mirror.holding("v1") as holding:
        holding.views(part.file, 0, 5 * PIECE_NBYTES, deadline=Deadline.after(20))
    before = shelf.sent[part.file]
    kill(first)
    threading.Timer(0.2, lambda: shelf.allow(None)).start()
    wait_for(lambda: sealed(mirror.path), lambda: (mirror.offers(), mirror.problems()))
    check_same(stand.store.path, mirror.path, "v1")
    assert shelf.sent[part.file] <= before + part.nbytes  # of the second, nothing that had come was fetched again
    with pytest.raises(WeightcastError):
        DepotClient(next(iter(mirror.problems()))).catalogue(deadline=Deadline.after(2))
