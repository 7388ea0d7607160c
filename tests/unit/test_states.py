"""The state table: what may follow what, and who is refused."""

import itertools

import pytest

from weightcast.errors import UpdateInProgress, WrongState
from weightcast.worker.states import RESTING, LegacyStatus, Lifecycle, State


def test_a_whole_update_and_a_clear_go_through():
    life = Lifecycle(State.CLEARED)
    life.begin("stage", State.STAGING)
    for state in (State.STAGED, State.COMMITTING, State.READY):
        life.move("x", state)
    assert life.resting is State.READY
    life.begin("clear", State.CLEARING)
    life.move("clear", State.CLEARED)
    assert life.state is State.CLEARED


@pytest.mark.parametrize("busy", sorted(set(State) - RESTING))
def test_a_second_operation_is_refused_while_one_runs(busy):
    life = Lifecycle(busy)
    for to in (State.STAGING, State.COMMITTING, State.CLEARING):
        with pytest.raises(UpdateInProgress, match=busy):
            life.begin("update", to)
    assert life.state is busy


def test_only_the_drawn_arrows_exist():
    arrows = set()
    for before, after in itertools.product(State, State):
        life = Lifecycle(before)
        try:
            life.move("x", after)
            arrows.add((before, after))
        except WrongState:
            assert life.state is before
    starts = {(rest, start) for rest in RESTING for start in (State.STAGING, State.COMMITTING, State.CLEARING)}
    ends = {(busy, rest) for busy in (State.STAGING, State.STAGED, State.COMMITTING) for rest in RESTING}
    steps = {(State.STAGING, State.STAGED), (State.STAGED, State.COMMITTING)}
    clears = {(State.CLEARING, State.CLEARED), (State.CLEARING, State.FAILED)}
    assert arrows == starts | ends | steps | clears


def test_the_legacy_integers_follow_from_the_state():
    expected = {
        State.READY: 0, State.COMMITTING: 1, State.CLEARING: -1, State.CLEARED: -2, State.FAILED: 2,
    }  # fmt: skip
    for state, number in expected.items():
        assert Lifecycle(state).legacy == number
    for origin, number in (
        (State.READY, LegacyStatus.NORMAL),
        (State.CLEARED, LegacyStatus.UPDATING),
        (State.FAILED, LegacyStatus.FAILED),
    ):
        life = Lifecycle(origin)
        life.begin("stage", State.STAGING)
        assert life.legacy == number
