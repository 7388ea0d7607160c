"""A trainer lends its own tensors: receivers get all of them as they were lent, or fail."""

import threading
import time
from contextlib import closing

import numpy as np
import pytest

from weightcast.clock import Deadline
from weightcast.depot.nixl_holds import Holds
from weightcast.errors import Conflict, DeadlineExceeded, InvalidInput, NotFound, SourceFailed
from weightcast.transports.nixl.receiver import NixlReceiver

from . import sample
from .nixl_stand import MIB, large, memories, needs_nixl, served, soon, wrong

pytestmark = needs_nixl
TENSORS = large(7)


@pytest.fixture(scope="module")
def depot(tmp_path_factory):
    from weightcast import Store

    store = Store(tmp_path_factory.mktemp("nixl") / "store")
    store.publish("lent", TENSORS, "full")
    sample.publish(store.path, "odd")
    with served(store, holds=Holds(seconds=20.0, grace_s=0.2)) as one:
        yield one


@pytest.fixture(scope="module")
def receivers(depot):
    two = [NixlReceiver(depot.url, mode="gdr", bucket_nbytes=MIB, stall_s=20.0) for _ in range(2)]
    yield two
    for one in two:
        one.close()


@pytest.fixture
def lent(depot, receivers):
    """Tensors of the trainer's own, and how to lend them."""
    manifest = receivers[0].manifest("lent", deadline=soon())
    tensors = {name: tensor.copy() for name, tensor in TENSORS.items()}
    made = []

    def lend(seconds=30.0):
        made.append(depot.leases.lend("lent", manifest, tensors, seconds))
        return made[-1]

    yield manifest, tensors, lend
    for lease in made:
        lease.end()
    wait_until(lambda: len(depot.leases.holds) == 0)


def wait_until(happened):
    deadline = soon()
    while not happened():
        deadline.check("what the test waits for")
        time.sleep(0.02)


def test_two_receivers_read_what_is_lent_at_the_same_time_without_a_copy(lent, receivers):
    manifest, tensors, lend = lent
    lease = lend()
    rooms = [memories(manifest) for _ in receivers]

    def receive(receiver, room):
        for _ in receiver.landings(manifest, room, deadline=soon()):
            pass

    threads = [threading.Thread(target=receive, args=pair) for pair in zip(receivers, rooms, strict=True)]
    for thread in threads:
        thread.start()
    lease.wait(receivers=2, deadline=soon())
    assert lease.confirmed == 2
    assert lease.end() == 0  # nobody was cut off
    for name in tensors:
        tensors[name][:] = 0
    for thread in threads:
        thread.join()
    assert [wrong(manifest, room) for room in rooms] == [[], []]


@pytest.mark.parametrize("way", ["landings", "pieces"])
def test_a_receiver_in_the_middle_fails_when_the_trainer_takes_its_tensors_back_and_changes_them(lent, receivers, way):
    manifest, tensors, lend = lent
    lease = lend()
    room = memories(manifest)
    going = getattr(receivers[0], way)(manifest, *([room] if way == "landings" else []), deadline=soon())
    next(going)
    assert lease.end() == 1
    for name in tensors:
        tensors[name][:] = 255
    with pytest.raises(SourceFailed, match=r"took its tensors back|nothing is known"):
        for _ in going:
            pass
    assert lease.confirmed == 0
    with pytest.raises(NotFound):
        next(receivers[0].pieces(manifest, deadline=soon()))


def test_a_lease_ends_by_itself_and_whoever_is_late_fails(lent, receivers):
    manifest, _, lend = lent
    lease = lend(seconds=2.0)
    going = receivers[0].pieces(manifest, deadline=soon())
    next(going)
    with pytest.raises(DeadlineExceeded, match="0 have read it"):
        lease.wait(receivers=1, deadline=soon())
    assert not lease.active
    with pytest.raises(SourceFailed):
        for _ in going:
            pass
    assert lease.confirmed == 0


def test_waiting_for_receivers_has_a_deadline_of_its_own(lent):
    _, _, lend = lent
    lease = lend()
    with pytest.raises(DeadlineExceeded):
        lease.wait(receivers=1, deadline=Deadline.after(0.05))
    assert lease.active


def test_tensors_of_any_kind_can_be_lent_and_their_memory_is_let_go_of(depot):
    torch = pytest.importorskip("torch")
    import gc
    import weakref

    with closing(NixlReceiver(depot.url, mode="gdr")) as receiver:
        manifest = receiver.manifest("odd", deadline=soon())
        tensors = {name: np.array(tensor, order="C") for name, tensor in sample.tensors("odd").items()}
        tensors["embed.weight"] = torch.from_numpy(tensors["embed.weight"].copy())
        watched = weakref.ref(tensors["block.0.weight"])
        with depot.leases.lend("odd", manifest, tensors, 30.0):
            tensors.clear()
            gc.collect()
            room = memories(manifest)
            for _ in receiver.landings(manifest, room, deadline=soon()):
                pass
            assert wrong(manifest, room) == []
            assert watched() is not None
        gc.collect()
        assert watched() is None


def test_what_cannot_be_lent_is_refused_with_every_reason(lent, depot):
    manifest, tensors, lend = lent
    bad = dict(tensors)
    bad["layer.0"] = tensors["layer.0"].T
    bad["layer.1"] = tensors["layer.1"].view(np.int16)
    bad["layer.2"] = np.zeros((4, MIB), np.uint8)[:, ::2]
    del bad["layer.3"]
    with pytest.raises(InvalidInput) as caught:
        depot.leases.lend("lent", manifest, bad, 5.0)
    assert all(f"layer.{index}" in str(caught.value) for index in range(4))
    for version, seconds in (("lent", 0.0), ("lent", float("nan")), ("other", 5.0)):
        with pytest.raises(InvalidInput):
            depot.leases.lend(version, manifest, tensors, seconds)
    lend()
    with pytest.raises(Conflict):
        lend()
