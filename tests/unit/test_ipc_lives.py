"""How publishers and receivers live and end, several of them in one process: closed, forgotten, started anew."""

import gc
import logging
import threading
import time
from contextlib import suppress

import pytest
from ipc_pairs import (
    BUCKET_NBYTES,
    Running,
    copied,
    descriptors,
    held,
    in_bytes,
    mappings,
    streamed,
    until,
    weights,
    within,
)

from weightcast.errors import (
    Conflict,
    SourceFailed,
    WeightcastError,
    WrongState,
)
from weightcast.publish.publisher import Publisher
from weightcast.transports.ipc import place as places
from weightcast.transports.ipc.place import Claim, Place
from weightcast.transports.ipc.receiver import IpcReceiver


def test_a_second_publisher_in_the_same_place_is_refused_and_harms_nobody(publisher, receiver, root, monkeypatch):
    monkeypatch.setattr(places, "_CLAIM_S", 0.1)
    publisher.publish("step_1", weights(1))
    with pytest.raises(Conflict, match="another publisher lives"):
        Publisher(root)
    assert held(receiver) == in_bytes(weights(1))


def test_a_publisher_that_was_started_anew_is_found_by_the_same_receiver(root):
    receiver = IpcReceiver(root)
    for life in range(3):
        with pytest.raises(SourceFailed, match="Start the trainer"):
            receiver.newest()
        with Publisher(root, bucket_nbytes=BUCKET_NBYTES) as publisher:
            publisher.publish("step_1", weights(life))
            assert held(receiver) == in_bytes(weights(life))
            streaming = Running(publisher.stream, "step_2", weights(9))
            assert streamed(receiver, "step_2") == in_bytes(weights(9))
            streaming.result()
        assert not root.exists()
    receiver.close()
    assert not mappings()


def test_a_manifest_of_an_earlier_publisher_is_not_read_from_the_next(root):
    receiver = IpcReceiver(root)
    with Publisher(root) as publisher:
        publisher.publish("step_1", weights(1))
        manifest = receiver.manifest("step_1", deadline=within())
    with Publisher(root) as publisher:
        publisher.publish("step_1", weights(2))
        with pytest.raises(SourceFailed, match="root digest"):
            copied(receiver, manifest)
    with Publisher(root) as publisher:
        publisher.publish("step_1", dict(reversed(weights(1).items())))
        assert copied(receiver, manifest) == in_bytes(weights(1))
    receiver.close()


def test_a_reader_is_told_when_the_publisher_closes(root):
    publisher, receiver = Publisher(root), IpcReceiver(root)
    publisher.publish("step_1", weights(1))
    manifest = receiver.manifest("step_1", deadline=within())
    reading = receiver.mapped(manifest, deadline=within())
    arrays = reading.__enter__()
    publisher.close()
    until(lambda: not receiver._attached[0].alive)
    assert arrays["odd"].tobytes() == in_bytes(weights(1))["odd"]  # what is mapped stays until it was read
    with pytest.raises(SourceFailed):
        reading.__exit__(None, None, None)
    del arrays, reading
    receiver.close()
    assert not mappings()


def test_those_who_wait_are_told_when_the_publisher_closes(root):
    publisher, receiver = Publisher(root), IpcReceiver(root)
    waiting = Running(receiver.wait_newer, None, deadline=within(60))
    until(lambda: publisher.receivers == 1)
    publisher.close()
    with pytest.raises(SourceFailed, match="died while"):
        waiting.result(timeout=5)
    receiver.close()


def test_closing_twice_and_publishing_after_it(root):
    publisher, receiver = Publisher(root), IpcReceiver(root)
    publisher.publish("step_1", weights(1))
    for _ in range(2):
        receiver.close()
        publisher.close()
    with pytest.raises(WrongState):
        publisher.publish("step_2", weights(2))
    with pytest.raises(WrongState):
        publisher.stream("step_2", weights(2))
    assert not root.exists()


def test_closing_while_another_thread_publishes_ends_that_with_an_error_of_ours(root):
    for delay in (0, 0.001, 0.003, 0.01):
        publisher = Publisher(root)
        publishing = Running(publisher.publish, "step_1", weights(1, count=40))
        time.sleep(delay)
        publisher.close()
        with suppress(WrongState):
            publishing.result()
        assert not root.exists()
    assert not mappings()


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_what_is_forgotten_without_being_closed_leaves_nothing(root, in_a_cycle):
    gc.collect()
    threads, opened = threading.active_count(), descriptors()
    for _ in range(3):
        publisher, receiver = Publisher(root), IpcReceiver(root)
        publisher.publish("step_1", weights(1))
        held(receiver)
        if in_a_cycle:
            cycle = [publisher, receiver]
            cycle.append(cycle)
            del cycle
        del publisher, receiver
        gc.collect()
        until(lambda: threading.active_count() == threads)
        assert not root.exists()
        assert not mappings()
    until(lambda: descriptors() == opened)


def test_a_publisher_may_be_collected_by_its_own_thread(root):
    class Collect(logging.Handler):
        def emit(self, record):
            if threading.current_thread().name.startswith("publisher"):
                gc.collect()

    gc.collect()
    opened, talker, collect = descriptors(), logging.getLogger("weightcast.publish.desk"), Collect()
    gc.disable()
    talker.addHandler(collect)
    level = talker.level
    talker.setLevel(logging.INFO)
    try:
        cycle = [Publisher(root)]
        cycle.append(cycle)
        del cycle
        receiver = IpcReceiver(root)
        with pytest.raises(WeightcastError):
            receiver.wait_newer(None, deadline=within())
        receiver.close()
        del receiver
    finally:
        talker.setLevel(level)
        talker.removeHandler(collect)
        gc.enable()
    until(lambda: not any(thread.name.startswith("publisher") for thread in threading.enumerate()))
    until(lambda: descriptors() == opened)
    assert not root.exists()


def test_many_updates_leave_no_threads_descriptors_or_memory(publisher, receiver):
    def step(number):
        publisher.publish(f"step_{number}", weights(number))
        held(receiver)

    step(0)
    step(1)
    threads, opened, mapped = threading.active_count(), descriptors(), len(mappings())
    for number in range(2, 60):
        step(number)
    assert (threading.active_count(), descriptors(), len(mappings())) == (threads, opened, mapped)


def test_a_directory_that_the_user_made_stays(root):
    root.mkdir()
    (root / "other").touch()
    Publisher(root).close()
    assert [path.name for path in root.iterdir()] == ["other"]
    (root / "other").unlink()
    Publisher(root).close()
    assert root.exists()


def test_what_a_killed_publisher_left_is_taken_over_or_cleared_away(root):
    def leave_behind():
        claim = Claim(Place.of_rank(root, 0), token=None)
        claim.open()
        (claim.place.path / "control.sock").touch()
        claim.forget()  # what the kernel does

    leave_behind()
    with Publisher(root) as publisher:
        publisher.publish("step_1", weights(1))
        receiver = IpcReceiver(root)
        assert held(receiver) == in_bytes(weights(1))
        receiver.close()
    assert not root.exists()
    leave_behind()
    receiver = IpcReceiver(root)
    with pytest.raises(SourceFailed, match="no publisher"):
        receiver.newest()
    assert not root.exists()


def test_clearing_up_never_removes_the_place_of_a_publisher_that_came_meanwhile(root, monkeypatch):
    """Between opening the directory of a dead one and locking it, two others come: the first takes it over and leaves."""
    dead = Claim(Place.of_rank(root, 0), token=None)
    dead.forget()
    lock, made = places.fcntl.flock, []

    def slowly(descriptor, kind):
        if not made:
            made.append(None)
            Claim(Place.of_rank(root, 0), token=None).leave()
            made.append(Claim(Place.of_rank(root, 0), token=None))
        lock(descriptor, kind)

    monkeypatch.setattr(places.fcntl, "flock", slowly)
    Place.of_rank(root, 0).clear()
    assert made[1].place.path.exists()
    made[1].leave()
