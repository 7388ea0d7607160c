"""The table of what a replica may do, and errors that crossed a process."""

import pytest

from weightcast import errors
from weightcast.control.statuses import status_of
from weightcast.engines.states import TABLE, UPDATING, Operation, ReplicaState, refusal
from weightcast.worker.states import LegacyStatus

ALL = [(operation, state) for operation in Operation for state in ReplicaState]


def status(operation, state):
    """The HTTP status of an operation in a state; 200 if it is allowed."""
    error = refusal(operation, state, "a reason")
    return 200 if error is None else status_of(type(error))


def test_every_state_has_a_row():
    assert set(TABLE) == set(ReplicaState)


@pytest.mark.parametrize(("operation", "state"), ALL)
def test_what_is_refused_is_refused_with_the_state_and_the_right_status(operation, state):
    error = refusal(operation, state, "a reason")
    if operation in TABLE[state].allowed:
        assert error is None
        return
    assert state in str(error)
    away = TABLE[state].away or operation is Operation.GENERATE
    assert status(operation, state) == (503 if away else 409)


def test_only_whole_weights_and_caches_answer_requests():
    answering = {state for state in ReplicaState if status(Operation.GENERATE, state) == 200}
    assert answering == {ReplicaState.READY, *UPDATING}
    assert {state for state in ReplicaState if TABLE[state].healthy} == answering


def test_an_update_begins_in_resting_states_and_nowhere_else():
    resting = {state for state in ReplicaState if TABLE[state].resting}
    assert {state for state in ReplicaState if status(Operation.UPDATE, state) == 200} == resting
    assert resting == {ReplicaState.READY, ReplicaState.SLEEPING, ReplicaState.CLEARED, ReplicaState.FAILED}
    assert isinstance(refusal(Operation.UPDATE, ReplicaState.STAGING, ""), errors.UpdateInProgress)


def test_resuming_is_refused_until_everything_is_resident():
    assert {status(Operation.RESUME, state) for state in (ReplicaState.SLEEPING, ReplicaState.CLEARED)} == {409}
    assert status(Operation.RESUME, ReplicaState.FAILED) == 409


def test_an_update_can_be_cancelled_only_before_its_commit():
    cancellable = {state for state in ReplicaState if status(Operation.CANCEL, state) == 200}
    assert cancellable == {ReplicaState.STAGING, ReplicaState.STAGED}


def test_the_legacy_integers_follow_from_the_state():
    assert {state: int(row.legacy) for state, row in TABLE.items()} == {
        ReplicaState.STARTING: 1, ReplicaState.READY: 0, ReplicaState.STAGING: 0, ReplicaState.STAGED: 0,
        ReplicaState.COMMITTING: 1, ReplicaState.SLEEPING: 0, ReplicaState.CLEARED: -2, ReplicaState.FAILED: 2,
        ReplicaState.RESTARTING: 1, ReplicaState.DRAINING: 0, ReplicaState.CLOSED: -2,
    }  # fmt: skip
    assert TABLE[ReplicaState.CLEARED].legacy is LegacyStatus.CLEARED


def test_an_error_of_another_process_keeps_its_class_and_its_words():
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, errors.WeightcastError):
            error = errors.rebuilt(cls.code, "words")
            assert type(error).code == cls.code
            assert str(error) == "words"
    assert type(errors.rebuilt("unheard of", "words")) is errors.WeightcastError
