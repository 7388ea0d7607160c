"""A connection to shared memory is kept between updates, and closed whenever it must be."""

import gc

import numpy as np
import pytest
from mapped_sources import Slab

from weightcast import LiveModel, State
from weightcast.clock import Deadline
from weightcast.errors import (
    CommitFailed,
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    SourceFailed,
    UpdateCancelled,
    VersionDoesNotFit,
    VersionNotFound,
)
from weightcast.transports import registry
from weightcast.transports.kept import KeptReceiver


def tensors_of(number):
    return {"w": np.full(3000, number, np.float32)}


class Slabs:
    """Publishers by path; every receiver that was opened for one of them is remembered."""

    def __init__(self):
        self.opened = []

    def open(self, path, options, rank):
        slab = Slab(**{f"v{number}": tensors_of(number) for number in range(5)})
        slab.path, slab.rank = str(path), rank
        self.opened.append(slab)
        return slab

    @property
    def closed(self):
        return [slab.closed for slab in self.opened]


class Plain:
    """A source that has nothing mapped: everything comes in pieces."""

    url = "plain://"

    def __init__(self, slab):
        self._slab, self.closed = slab, 0
        self.newest, self.manifest, self.pieces = slab.newest, slab.manifest, slab.pieces

    def close(self):
        self.closed += 1


@pytest.fixture
def slabs(monkeypatch):
    slabs = Slabs()
    monkeypatch.setitem(registry._SCHEMES, "slab", slabs.open)
    return slabs


@pytest.fixture
def live(slabs):
    return LiveModel(tensors_of(9), source="slab:///here", rank=0)


def test_it_is_opened_once_for_many_updates(slabs, live):
    for number in range(5):
        live.update(f"v{number}", commit="swap" if number % 2 else "copy")
        live.update(f"v{number}")  # nothing to do, and that is fine too
    assert slabs.closed == [0]
    live.close()
    live.close()
    assert slabs.closed == [1]
    live.update("v1")  # the model is as good as before
    assert slabs.closed == [1, 0]
    with live:
        live.update("v2")
    assert slabs.closed == [1, 1]


def test_a_model_that_goes_closes_it(slabs):
    live = LiveModel(tensors_of(9), source="slab:///here")
    live.update("v1")
    del live
    gc.collect()
    assert slabs.closed == [1]


def test_another_source_closes_it(slabs, live, store):
    live.update("v1")
    live.update("v2", source="slab:///there")
    assert slabs.closed == [1, 0]
    store.publish("f", tensors_of(7))
    live.update("f", source=store)
    assert slabs.closed == [1, 1]
    live.update("v3")
    live.update("v4", source=slabs.open("mine", {}, 0))  # one that the caller opened
    assert slabs.closed == [1, 1, 1, 0]


def test_clearing_closes_it(slabs, live):
    live.update("v1")
    live.clear()
    assert slabs.closed == [1]
    live.update("v2")
    assert live.state is State.READY


def refuse():
    raise SourceFailed("it was overwritten")


def damage(slab):
    slab.arrays["v2"]["w"][5] = 7


@pytest.mark.parametrize(
    ("fault", "error", "options"),
    [
        (lambda slab: setattr(slab, "after", refuse), SourceFailed, {"version": "v2"}),
        (damage, DigestMismatch, {"version": "v2"}),
        (lambda slab: slab.add("v2", {"other": np.zeros(3)}), VersionDoesNotFit, {"version": "v2"}),
        (Slab.newest, DeadlineExceeded, {"version": "v2", "timeout": 0}),
    ],
)
def test_an_error_closes_it_and_the_next_update_opens_another(fault, error, options, slabs, live):
    live.update("v1")
    fault(slabs.opened[0])
    with pytest.raises(error):
        live.update(**options)
    assert slabs.closed == [1]
    live.update("v2")
    assert slabs.closed == [1, 0]


def test_a_publisher_that_was_started_anew_is_found_again(slabs, live):
    live.update("v1")
    slabs.opened[0].closed = 1  # its other end has gone
    live.update("v2")
    assert slabs.closed == [2, 0]
    assert live.version == "v2"


def test_an_error_of_a_new_connection_is_not_tried_again(slabs, live):
    with pytest.raises(VersionNotFound):
        live.update("v7")
    assert slabs.closed == [1]
    live.update("v1")
    with pytest.raises(VersionNotFound):
        live.update("v7")
    assert slabs.closed == [1, 1, 1]


@pytest.mark.parametrize("error", [DeadlineExceeded("asking", 1), UpdateCancelled("no"), KeyboardInterrupt()])
def test_what_is_not_the_connections_fault_is_raised_at_once(error, slabs):
    kept = KeptReceiver()

    def ask(receiver):
        raise error

    use, answer = kept.open("slab:///here", rank=3, ask=Slab.newest)
    assert (answer, use.receiver.rank, use.kept) == ("v4", 3, False)
    with use:
        pass
    with pytest.raises(type(error)):
        kept.open("slab:///here", rank=3, ask=ask)
    assert slabs.closed == [1]


def test_ranks_have_connections_of_their_own(slabs):
    kept = KeptReceiver()
    for rank in (0, 1, 1):
        with kept.open("slab:///here", rank=rank, ask=Slab.newest)[0] as receiver:
            assert receiver.rank == rank
    assert slabs.closed == [1, 0]


def test_two_uses_at_once_have_two_connections_and_one_is_kept(slabs):
    kept = KeptReceiver()
    first, second = (kept.open("slab:///here", rank=0, ask=Slab.newest)[0] for _ in range(2))
    with first, second:
        assert slabs.closed == [0, 0]
    assert sorted(slabs.closed) == [0, 1]


def test_sources_without_shared_memory_are_closed_after_each_update(monkeypatch, slabs):
    opened = []

    def open_plain(path, options, rank):
        opened.append(Plain(slabs.open(path, options, rank)))
        return opened[-1]

    monkeypatch.setitem(registry._SCHEMES, "plain", open_plain)
    live = LiveModel(tensors_of(9), source="plain:///here")
    for number in range(3):
        live.update(f"v{number}")
    assert [one.closed for one in opened] == [1, 1, 1]


def test_a_receiver_that_the_caller_opened_stays_his(slabs):
    slab = slabs.open("mine", {}, 0)
    with LiveModel(tensors_of(9), source=slab) as live:
        live.update("v1")
        live.update("v2", commit="inplace")
        slab.after = refuse
        with pytest.raises(SourceFailed):
            live.update("v3")
    assert slab.closed == 0


# -- in place: the source is needed until the update has ended -----------------------------------------------------------


def test_a_commit_in_place_has_the_connection_for_itself_until_it_has_ended(slabs, live):
    live.update("v1")
    staged = live.stage("v2", commit="inplace")
    assert slabs.closed == [0]
    live.enter(staged)
    live.prove()
    assert slabs.closed == [0]
    live.settle()
    assert slabs.closed == [1]
    live.abandon(live.stage("v3", commit="inplace"))
    assert slabs.closed == [1, 1]


def test_a_commit_in_place_that_fails_is_undone_by_the_connection_and_then_closes_it(slabs):
    model = tensors_of(9)
    live = LiveModel(model, source="slab:///here")
    live.update("v1")
    damage(slabs.opened[0])
    with pytest.raises(CommitFailed):
        live.update("v2", commit="inplace")
    assert slabs.closed == [1]
    assert (live.version, live.state, model["w"].tolist()) == ("v1", State.READY, [1.0] * 3000)


def test_a_model_that_waits_for_its_way_back_keeps_the_connection(slabs):
    model = tensors_of(9)
    live = LiveModel(model, source="slab:///here")
    live.update("v1")
    slab = slabs.opened[0]
    damage(slab)
    good = slab.arrays["v1"]["w"].copy()
    slab.arrays["v1"]["w"][...] = 3
    with pytest.raises(CommitFailed):
        live.update("v2", commit="inplace")
    assert (live.state, slabs.closed) == (State.FAILED, [0])
    slab.arrays["v1"]["w"][...] = good
    assert live.recover()
    assert (live.version, slabs.closed) == ("v1", [1])


def test_a_source_that_cannot_be_opened_says_so(live):
    with pytest.raises(InvalidInput):
        live.update("v1", source="file://elsewhere/here")
    with pytest.raises(InvalidInput):
        live.update("v1", source="none:///here")
    assert live.update("v1", timeout=Deadline.after(5).remaining()).version == "v1"
