"""The host copy: where versions come from, what the engine was started with, and who asks meanwhile."""

import logging
import shutil
import threading
from urllib.parse import urlsplit

import pytest
from depot_stand import ask, eventually, serving
from host_copies import (
    WAIT_S,
    Running,
    anything,
    bits,
    bring,
    check_held,
    copy_in,
    published,
    stage,
    state,
    wanted,
)
from shares_world import model, publish, trainers

from weightcast import Store
from weightcast.clock import Deadline
from weightcast.engines.host.copy import HostCopy
from weightcast.engines.host.shared import SharedBuffers
from weightcast.errors import (
    BaseVersionMismatch,
    DeadlineExceeded,
    NotFound,
    UpdateCancelled,
    WrongState,
)
from weightcast.publish.depot_publisher import DepotPublisher
from weightcast.publish.publisher import Publisher


@pytest.fixture
def store(tmp_path):
    return published(tmp_path / "store")


@pytest.fixture
def made():
    """The buffers that a copy made."""
    return []


@pytest.fixture(params=["own", "shared"])
def copy(request, made):
    with copy_in(request.param, made) as one:
        yield one


@pytest.fixture
def own(made):
    with copy_in("own", made) as one:
        yield one


# -- what the engine was started with -------------------------------------------------------------------------------


def checkpoint(tmp_path, number, **options):
    store = Store(tmp_path / f"checkpoint-{number}")
    store.publish("base", state(number, **options), mode="full")
    return f"checkpoint://{store.path / 'versions' / 'base'}"


@pytest.fixture
def orphan(store):
    """A store whose first version is gone: step_1 is a delta on it."""
    shutil.rmtree(store.path / "versions" / "step_0")
    return store


def test_a_delta_stands_on_what_the_engine_was_started_with(orphan, tmp_path):
    copy = HostCopy(name="engine", make_buffers=SharedBuffers, seed=checkpoint(tmp_path, 0))
    for number in (1, 2):
        staged = stage(copy, orphan, number)
        assert bits(staged.arrays) == bits(state(number))
        assert bits(staged.former) == bits(state(number - 1))
        copy.commit(staged)
    check_held(copy, orphan, 2)
    copy.close()


@pytest.mark.parametrize("seed", ["none", "nowhere", "another version", "another shape", "damaged"])
def test_without_its_base_a_delta_is_refused_as_such(orphan, tmp_path, seed):
    if seed in ("none", "nowhere"):
        url = f"checkpoint://{tmp_path}/nowhere" if seed == "nowhere" else None
    else:
        url = checkpoint(tmp_path, 5 if seed == "another version" else 0, side=60 if seed == "another shape" else 50)
    if seed == "damaged":
        part = next((tmp_path / "checkpoint-0").rglob("*.safetensors"))
        part.write_bytes(part.read_bytes()[:-1000])
    copy = HostCopy(name="engine", seed=url)
    for _ in range(2):
        with pytest.raises(BaseVersionMismatch, match="step_0"):
            stage(copy, orphan, 1)
    assert bits(bring(copy, orphan, 3).arrays) == bits(state(3))
    assert bits(bring(copy, orphan, 4).arrays) == bits(state(4))
    copy.close()


# -- threads -------------------------------------------------------------------------------------------------------


def test_many_threads_that_ask_at_once_get_one_version_that_came_once(own, made, store):
    barrier = threading.Barrier(6)

    def ask_for():
        barrier.wait(WAIT_S)
        return stage(own, store, 3)

    found = [one.result() for one in [Running(ask_for) for _ in range(6)]]
    assert len({id(one) for one in found}) == 1
    assert bits(found[0].arrays) == bits(state(3))
    assert made[0].taken_nbytes == sum(array.nbytes for name, array in state(0).items() if name != "head")
    for one in found:
        own.commit(one)
    check_held(own, store, 3)


@pytest.fixture
def busy(own, made, store):
    """A copy that holds step_0 and has begun to stage step_3, as far as its first tensor. Setting the gate lets it go on."""
    bring(own, store, 0)
    gate, asked = made[0].gate, made[0].asked
    gate.clear()
    asked.clear()
    running = Running(stage, own, store, 3)
    assert asked.wait(WAIT_S)
    yield gate, running
    gate.set()


def test_whoever_waits_for_his_turn_gives_up_in_time_or_when_he_is_told(own, store, busy):
    gate, running = busy
    with pytest.raises(DeadlineExceeded, match="step_4"):
        own.stage(wanted(store, 4), fits=anything, deadline=Deadline.after(0.05))
    stop = threading.Event()
    waiting = Running(own.stage, wanted(store, 4), fits=anything, deadline=Deadline.after(60, cancelled=stop))
    stop.set()
    with pytest.raises(UpdateCancelled):
        waiting.result()
    gate.set()
    own.commit(running.result())
    check_held(own, store, 3)


def test_committing_and_abandoning_do_not_wait_for_what_is_being_staged(own, made, store):
    bring(own, store, 1)
    old, gate, asked = stage(own, store, 0), made[0].gate, made[0].asked
    gate.clear()
    asked.clear()
    running = Running(stage, own, store, 3)
    assert asked.wait(WAIT_S)

    own.abandon(old)
    with pytest.raises(WrongState, match="step_0"):
        own.commit(old)

    assert (own.held.version, running.over) == ("step_1", False)
    gate.set()
    own.commit(running.result())
    check_held(own, store, 3)


def test_what_is_staged_can_be_committed_while_another_version_is_looked_at(own, store):
    looked, go_on = threading.Event(), threading.Event()

    def look(manifest):
        looked.set()
        assert go_on.wait(WAIT_S)

    bring(own, store, 0)
    staged = stage(own, store, 1)
    running = Running(own.stage, wanted(store, 2), fits=look, deadline=Deadline.after(WAIT_S))
    assert looked.wait(WAIT_S)
    own.commit(staged)
    assert (own.held.version, running.over) == ("step_1", False)
    go_on.set()
    assert bits(running.result().former) == bits(state(1))


def test_closing_does_not_wait_either_and_what_comes_later_is_dropped(own, made, store, busy):
    gate, running = busy
    own.close()
    assert own.held is None
    gate.set()
    with pytest.raises(UpdateCancelled):
        running.result()
    assert bits(bring(own, store, 3).arrays) == bits(state(3))
    assert len(made) == 2


# -- sources -------------------------------------------------------------------------------------------------------


def test_versions_come_from_a_depot_and_it_is_told_what_is_served(copy, store):
    with serving(store) as depot:
        for number in (0, 1, 3):
            staged = stage(copy, depot.url, number)
            assert bits(staged.arrays) == bits(state(number))
            copy.commit(staged)

            def told(number=number):
                found = ask(depot, "/v1/receivers").json
                return [(one["receiver"], one["version"]) for one in found] == [("engine", f"step_{number}")]

            eventually(told, f"the acknowledgement of step_{number}")
        copy.close()


def test_a_depot_that_is_gone_does_not_hold_up_a_commit(copy, store, caplog):
    with serving(store) as depot:
        staged = stage(copy, depot.url, 0)
    with caplog.at_level(logging.WARNING):
        copy.commit(staged)
        copy.close()
    assert "acknowledgement failed" in caplog.text
    assert bits(bring(copy, store, 0).arrays) == bits(state(0))


def test_what_was_abandoned_is_not_acknowledged(copy, store):
    with serving(store) as depot:
        copy.abandon(stage(copy, depot.url, 0))
        copy.close()
        assert ask(depot, "/v1/receivers").json == []


def test_a_trainer_that_publishes_knows_that_it_was_taken(copy):
    with DepotPublisher("127.0.0.1:0") as publisher:
        for number in range(3):
            publication = publisher.publish(f"step_{number}", state(number))
            assert bits(bring(copy, publisher.url).arrays) == bits(state(number))
            publication.wait(1, timeout=WAIT_S)
        copy.close()


def test_versions_that_several_trainers_share_come_once(own, made):
    with trainers(2, deltas=None) as publishers:  # of so little they would publish changes beside it
        url = "shares+http://" + ",".join(urlsplit(one.url).netloc for one in publishers)
        for number in range(3):
            arrays = model(number)
            publish(publishers, f"step_{number}", arrays)
            staged = stage(own, url)
            assert bits(staged.arrays) == bits(arrays)
            assert stage(own, url) is staged
            own.commit(staged)
            assert stage(own, url).manifest == own.held == staged.manifest
            assert made[0].taken_nbytes == (number + 1) * sum(array.nbytes for array in arrays.values())
        own.close()


def test_versions_come_out_of_shared_memory(copy, publisher):
    for number in range(3):
        publisher.publish(f"step_{number}", state(number))
        staged = stage(copy, publisher.url)
        assert stage(copy, publisher.url) is staged
        assert bits(staged.arrays) == bits(state(number))
        copy.commit(staged)
    copy.close()


def test_a_stream_is_taken_once_however_many_ask_for_it(copy, root):
    with Publisher(root, bucket_nbytes=4096, hold_s=10, stall_s=5) as publisher:
        for number in range(2):
            streaming = Running(publisher.stream, f"step_{number}", state(number), timeout=WAIT_S)

            taking = [Running(take, copy, publisher.url, f"step_{number}") for _ in range(3)]
            found = {id(one.result()): one.result() for one in taking}
            streaming.result()
            (staged,) = found.values()
            assert staged.manifest.sealed
            assert bits(staged.arrays) == bits(state(number))
            assert stage(copy, publisher.url, number) is staged
            copy.commit(staged)
            assert bits(stage(copy, publisher.url, number).arrays) == bits(state(number))
        copy.close()


def take(copy, url, version):
    """Stage a version as soon as it is offered."""
    deadline = Deadline.after(WAIT_S)
    while True:
        try:
            return copy.stage(wanted(url, version), fits=anything, deadline=deadline)
        except NotFound:
            deadline.check(f"waiting for {version}")
