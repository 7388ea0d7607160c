"""What NIXL does not promise: reads that end, peers that are alive when they have, and addresses that are still right."""

import gc
import signal
import threading
import time
import weakref

import psutil
import pytest

from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, SourceFailed, UpdateCancelled
from weightcast.transports.http.client import DepotClient, version_path
from weightcast.transports.nixl.agent import Agent
from weightcast.transports.nixl.graveyard import GRAVEYARD
from weightcast.transports.nixl.receiver import NixlReceiver
from weightcast.wire.nixl import Grant, GrantQuery

from .children import end, start_module
from .nixl_stand import MIB, DepotProcess, large, memories, needs_nixl, soon, wrong

pytestmark = needs_nixl


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    from weightcast import Store

    store = Store(tmp_path_factory.mktemp("nixl") / "store")
    store.publish("one", large(1), "full")
    store.publish("two", large(2), "full")
    return store.path


@pytest.fixture(autouse=True)
def as_between_hosts(monkeypatch):
    """Processes of one host would copy from each other's memory; children and agents of this process read it anew."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture(scope="module")
def depot(path):
    """A depot that is stopped, and goes on, in several tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        one = DepotProcess(start_module, path)
    yield one
    end(one.child)


@pytest.fixture
def receiver_of():
    """Receivers with little patience, closed at the end."""
    made = []

    def make(depot, **settings):
        made.append(NixlReceiver(depot.url, **{"stall_s": 1.0, "bucket_nbytes": MIB, **settings}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def drain(going):
    for _ in going:
        pass


def wait_until(happened):
    deadline = soon()
    while not happened():
        deadline.check("what the test waits for")
        time.sleep(0.02)


def stop(depot):
    """Stop a depot. Its threads go on until one of them has got the signal, which takes as long as an update here."""
    depot.child.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(depot.child.pid).status() == psutil.STATUS_STOPPED)


def test_memory_of_reads_that_were_given_up_is_kept_and_nothing_else_changes_when_they_land(start, path, receiver_of):
    first, second = DepotProcess(start, path), DepotProcess(start, path)
    receiver, other = receiver_of(first), receiver_of(second, stall_s=20.0)
    manifest = receiver.manifest("one", deadline=soon())
    room = memories(manifest)
    watched = [weakref.ref(memory) for memory in room.values()]
    going = receiver.landings(manifest, room, deadline=soon())
    next(going)
    agent = receiver._agents.made
    stop(first)
    with pytest.raises(SourceFailed):
        drain(going)
    assert len(GRAVEYARD) == 1
    assert GRAVEYARD.nbytes == manifest.nbytes
    assert receiver._agents.made is None
    before = {name: memory.copy() for name, memory in room.items()}
    room.clear()
    del going
    gc.collect()
    assert all(ref() is not None for ref in watched)  # nobody but the graveyard refers to them

    manifest_two = other.manifest("two", deadline=soon())
    fresh = memories(manifest_two)
    drain(other.landings(manifest_two, fresh, deadline=soon()))
    assert wrong(manifest_two, fresh) == []

    late = [ref() for ref in watched]
    first.child.send_signal(signal.SIGCONT)
    wait_until(lambda: not GRAVEYARD._graves)  # without anybody asking
    assert any((memory != old).any() for memory, old in zip(late, before.values(), strict=True))  # they did land
    assert wrong(manifest_two, fresh) == []
    assert not agent.usable  # closed once they had
    late.clear()
    gc.collect()
    assert all(ref() is None for ref in watched)
    assert first.child.poll() is None

    room = memories(manifest)
    again = receiver_of(first, stall_s=20.0)
    drain(again.landings(manifest, room, deadline=soon()))
    assert wrong(manifest, room) == []


@pytest.mark.parametrize("patient", [False, True], ids=["the depot is asked", "nothing moves"])
def test_a_depot_that_stands_still_fails_in_bounded_time(depot, receiver_of, patient, monkeypatch):
    if patient:  # only the clock tells
        monkeypatch.setattr("weightcast.transports.nixl.watch.Watch.check", lambda _self: None)
    else:  # only the questions over HTTP do
        monkeypatch.setattr("weightcast.transports.nixl.session.monotonic", lambda: 0.0)
    receiver = receiver_of(depot, stall_s=2.0)
    manifest = receiver.manifest("one", deadline=soon())
    going = receiver.pieces(manifest, deadline=soon(60))
    next(going)
    ring = list(receiver._ring[1])
    stop(depot)
    with pytest.raises(SourceFailed, match="stands still" if patient else "silent"):
        drain(going)
    assert GRAVEYARD.nbytes == 4 * MIB
    assert receiver._ring is None
    depot.child.send_signal(signal.SIGCONT)
    wait_until(lambda: len(GRAVEYARD) == 0)
    monkeypatch.undo()
    assert sum(len(piece.data) for piece in receiver.pieces(manifest, deadline=soon())) == manifest.nbytes
    assert not any(bucket is old for bucket in receiver._ring[1] for old in ring)


def test_the_deadline_and_a_cancellation_end_a_read_that_does_not_move(depot, receiver_of):
    receiver = receiver_of(depot, stall_s=30.0)
    manifest = receiver.manifest("one", deadline=soon())
    cancelled = threading.Event()
    for error, within in ((DeadlineExceeded, 3), (UpdateCancelled, 60)):
        room = memories(manifest)
        going = receiver.landings(manifest, room, deadline=Deadline.after(within, cancelled=cancelled))
        next(going)
        stop(depot)
        if error is UpdateCancelled:
            cancelled.set()
        with pytest.raises(error):
            drain(going)
        depot.child.send_signal(signal.SIGCONT)
        wait_until(lambda: len(GRAVEYARD) == 0)


def test_a_depot_that_is_killed_in_the_middle_fails_and_nothing_is_kept(start, path, receiver_of):
    depot = DepotProcess(start, path)
    receiver = receiver_of(depot, stall_s=5.0)
    manifest = receiver.manifest("one", deadline=soon())
    going = receiver.landings(manifest, memories(manifest), deadline=soon())
    next(going)
    depot.child.kill()
    with pytest.raises(SourceFailed):
        drain(going)
    wait_until(lambda: len(GRAVEYARD) == 0)


@pytest.mark.parametrize("anew", [False, True], ids=["dead", "started anew"])
def test_reads_that_are_done_do_not_count_if_the_depot_is_gone(start, path, receiver_of, anew, monkeypatch):
    monkeypatch.delenv("UCX_TLS")  # where NIXL says done of reads from a dead process
    depot = DepotProcess(start, path)
    receiver = receiver_of(depot, stall_s=30.0)  # it is not asked before the end
    manifest = receiver.manifest("one", deadline=soon())
    left = manifest.nbytes
    going = receiver.landings(manifest, memories(manifest), deadline=soon())
    while left:
        left -= next(going).nbytes
    depot.child.kill()
    depot.child.wait()
    if anew:
        again = DepotProcess(start, path, depot.listen)
    with pytest.raises(SourceFailed, match="started anew" if anew else "reached"):
        next(going)
    if anew:
        room = memories(manifest)
        drain(receiver.landings(manifest, room, deadline=soon()))
        assert wrong(manifest, room) == []
        assert again.child.poll() is None


def test_metadata_of_a_depot_that_is_gone_is_refused(start, path):
    depot = DepotProcess(start, path)
    client = DepotClient(depot.url)
    manifest = client.manifest("one", deadline=soon())
    query = GrantQuery(manifest.root_digest)
    grant = client.ask("POST", version_path("one", "nixl"), query, Grant, deadline=soon())
    client.close()
    depot.child.kill()
    depot.child.wait()
    agent = Agent()
    with pytest.raises(SourceFailed, match="started anew"):
        agent.add_peer(grant.metadata)
    agent.close()


def test_a_receiver_that_dies_in_the_middle_does_no_harm(start, depot, receiver_of):
    reader = start("nixl_reader", depot.url, "one")
    assert reader.stdout.readline().strip() == "reading"
    reader.kill()
    receiver = receiver_of(depot, stall_s=5.0)
    manifest = receiver.manifest("two", deadline=soon())
    room = memories(manifest)
    drain(receiver.landings(manifest, room, deadline=soon()))
    assert wrong(manifest, room) == []
    assert depot.child.poll() is None
