"""A host copy that several share: who keeps it, and what the others see and are told."""

import errno
import gc
import itertools
import os
import threading

import numpy as np
import pytest
from depot_stand import eventually
from host_copies import WAIT_S, Running, anything, bits, bring, keepers, memfds, published, stage, state, wanted

from weightcast.clock import Deadline
from weightcast.errors import (
    DeadlineExceeded,
    InvalidInput,
    SnapshotNotFound,
    UpdateFailed,
    VersionDoesNotFit,
    VersionNotFound,
    WrongState,
)

NAMES = itertools.count()


@pytest.fixture
def store(tmp_path_factory):
    return published(tmp_path_factory.mktemp("shared") / "store")


@pytest.fixture
def name():
    return f"test-{os.getpid()}-{next(NAMES)}"


@pytest.fixture
def share(name):
    with keepers(name) as make:
        yield make


@pytest.fixture
def keeper(share, store):
    """A rank that keeps the copy, with step_0."""
    one = share()
    bring(one, store, 0)
    return one


def soon(seconds=WAIT_S, **options):
    return Deadline.after(seconds, **options)


# -- what the others see -------------------------------------------------------------------------------------------


def test_the_first_keeps_and_the_others_see_the_same_bits(share, store):
    ranks = [share() for _ in range(3)]
    for number in (0, 1, 3, 4):
        staged = [stage(rank, store, number) for rank in ranks]
        for one in staged:
            assert one.manifest == staged[0].manifest
            assert one.former_manifest == staged[0].former_manifest
            assert bits(one.arrays) == bits(state(number))
            assert bits(one.former) == bits(staged[0].former)
        for rank, one in zip(ranks, staged, strict=True):
            rank.commit(one)


def test_what_a_follower_writes_changes_nothing_elsewhere_and_nothing_later(keeper, share, store):
    follower, other = share(), share()
    for number in (1, 2, 3, 4):
        staged = [stage(one, store, number) for one in (keeper, follower, other)]
        for array in staged[1].arrays.values():
            array.reshape(-1).view(np.uint8)[...] = 0xAB
        assert bits(staged[0].arrays) == bits(staged[2].arrays) == bits(state(number))
        assert bits(stage(follower, store, number).arrays) == bits(state(number))
        for rank, one in zip((keeper, follower, other), staged, strict=True):
            rank.commit(one)


def test_what_a_follower_reads_stays_whatever_the_keeper_does_next(keeper, share, store):
    """The keeper's rank may give up and begin again while another rank still copies its layers."""
    follower = share()
    for number in (1, 3):
        mine, his = stage(keeper, store, number), stage(follower, store, number)
        keeper.abandon(mine)
        del mine
        for other in (4, 2, 3, 1):
            keeper.abandon(stage(keeper, store, other))
        assert bits(his.arrays) == bits(state(number))
        follower.abandon(his)


def test_what_a_follower_reads_stays_even_if_the_keeper_is_versions_ahead(keeper, share, tmp_path):
    store, follower = published(tmp_path / "long", "fdddddd"), share()
    bring(keeper, store, 0)
    for number in (1, 4):
        mine, his = stage(keeper, store, number), stage(follower, store, number)
        keeper.commit(mine)
        del mine
        for ahead in (number + 1, number + 2):
            bring(keeper, store, ahead)
            assert bits(his.arrays) == bits(state(number))
        follower.commit(his)


def test_memory_is_free_again_once_nobody_reads_it(keeper, share, store):
    follower = share()
    gc.collect()
    before = memfds()
    for _ in range(5):
        for number in (1, 2, 3):
            mine, his = stage(keeper, store, number), stage(follower, store, number)
            keeper.commit(mine)
            follower.commit(his)
            del mine, his
    slabs = {slab.id for one in keeper._keeper._buffers for slab in one().slabs}
    assert len(slabs) <= 3  # a follower may let go a moment after the next version has begun
    follower.close()
    keeper.close()
    eventually(lambda: memfds() < before, "the end of all shared memory")


def test_a_follower_that_forgets_what_it_staged_does_not_keep_the_memory(keeper, share, store):
    follower = share()
    stage(follower, store, 1)
    eventually(lambda: not keeper._keeper._lines, "the end of the line")
    staged = stage(follower, store, 1)
    assert keeper._keeper._lines
    follower.close()
    eventually(lambda: not keeper._keeper._lines, "the end of the line")
    assert bits(staged.arrays) == bits(state(1))


def test_a_version_of_another_shape_is_seen_beside_the_former(keeper, share, tmp_path):
    other = published(tmp_path / "other", "fd", side=60)
    follower = share()
    for number in (0, 1):
        former = state(0) if number == 0 else state(0, side=60)
        mine, his = stage(keeper, other, number), stage(follower, other, number)
        assert (bits(his.arrays), bits(his.former)) == (bits(state(number, side=60)), bits(former))
        keeper.commit(mine)
        follower.commit(his)


# -- who keeps -----------------------------------------------------------------------------------------------------


def test_threads_of_one_process_are_never_followers_of_it(share, store):
    rank, barrier = share(), threading.Barrier(6)

    def ask_for():
        barrier.wait(WAIT_S)
        return stage(rank, store, 2)

    found = [one.result() for one in [Running(ask_for) for _ in range(6)]]
    assert len({id(one) for one in found}) == 1
    rank.commit(found[0])


def test_when_the_keeper_closes_another_takes_over_and_what_was_staged_stays(keeper, share, store):
    follower = share()
    staged = stage(follower, store, 1)
    keeper.close()
    assert bits(staged.arrays) == bits(state(1))
    again = stage(follower, store, 2)
    assert follower._keeper is not None
    follower.commit(staged)  # of the former keeper: nothing to do
    follower.commit(again)
    staged = stage(keeper, store, 2)
    assert keeper._keeper is None
    assert bits(staged.arrays) == bits(state(2))


def test_a_commit_that_another_rank_overtook_says_so(keeper, share, store):
    mine = stage(keeper, store, 1)
    his = stage(share(), store, 3)
    with pytest.raises(WrongState, match="step_1"):
        keeper.commit(mine)
    assert (bits(mine.arrays), bits(his.arrays)) == (bits(state(1)), bits(state(3)))
    bring(keeper, store, 3)


def test_names_may_be_long(share, store, name):
    first, second, third = share(name=name + 200 * "x"), share(name=name + 200 * "x"), share(name=name + 200 * "y")
    for rank in (first, second, third):
        bring(rank, store, 0)
    assert [rank._keeper is not None for rank in (first, second, third)] == [True, False, True]


def test_a_copy_that_cannot_be_made_leaves_the_place_to_others(share, store):
    def fail(_):
        raise InvalidInput("no")

    with pytest.raises(InvalidInput):
        stage(share(make_copy=fail), store, 0)
    rank = share()
    bring(rank, store, 0)
    assert rank._keeper is not None


# -- errors --------------------------------------------------------------------------------------------------------


ERRORS = {
    "ours": (VersionDoesNotFit("step_1", []), VersionDoesNotFit),
    "of two kinds": (SnapshotNotFound(0, "0", ["/x"]), SnapshotNotFound),
    "of the system": (OSError(errno.EIO, "the disk is gone"), UpdateFailed),
    "of a framework": (KeyError("layer.7"), UpdateFailed),
    "memory": (MemoryError("no more"), UpdateFailed),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_a_follower_is_told_what_went_wrong_at_the_keeper(share, store, kind):
    raised, expected = ERRORS[kind]
    failing = []

    def fits(manifest):
        if failing:
            raise failing.pop()

    keeper, follower = share(fits), share()
    bring(keeper, store, 0)
    failing.append(raised)
    with pytest.raises(expected, match=str(raised.args[-1]).split("\n")[0][:20]):
        stage(follower, store, 1)
    assert bits(stage(follower, store, 1).arrays) == bits(state(1))


def test_errors_of_sources_come_through(keeper, share, store):
    follower = share()
    with pytest.raises(VersionNotFound, match="step_99"):
        stage(follower, store, 99)
    with pytest.raises(InvalidInput):
        stage(follower, "gopher://x", 1)
    with pytest.raises(DeadlineExceeded):
        follower.stage(wanted(store, 3), fits=anything, deadline=soon(0))
    bring(follower, store, 0)


def test_a_follower_that_it_does_not_fit_lets_go(keeper, share, store):
    def refuse(manifest):
        raise VersionDoesNotFit(manifest.version, [])

    with pytest.raises(VersionDoesNotFit):
        share().stage(wanted(store, 1), fits=refuse, deadline=soon())
    eventually(lambda: not keeper._keeper._lines, "the end of the line")
