"""What an operator decides while something else goes on: the last decision counts, rollbacks and updates never mix."""

from __future__ import annotations

import asyncio

import pytest

from weightcast.engines.base import UpdateRequest
from weightcast.engines.states import ReplicaState
from weightcast.errors import NotFound, UpdateInProgress, WrongState

from .update_fault_moves import met, on_stand, stand
from .update_fault_stand import SLACK_S
from .update_fault_world import DELTA_1, FULL_A, FULL_B

__all__ = ["stand"]  # a fixture


async def at_full_b(stand) -> None:
    """Serve the newest version, with full_a held."""
    await stand.bring_to(FULL_A)
    await stand.bring_to(FULL_B)


@on_stand
async def test_of_two_rollbacks_at_once_one_goes_back(stand):
    await at_full_b(stand)
    rollbacks = [stand.replica.rollback(timeout_s=SLACK_S) for _ in range(2)]
    first, second = await asyncio.gather(*rollbacks, return_exceptions=True)
    assert first.version == FULL_A
    assert isinstance(second, NotFound | WrongState), second
    await stand.judge(FULL_A)


@on_stand
async def test_no_update_begins_in_a_rollback(stand):
    await at_full_b(stand)
    rollback = asyncio.create_task(stand.replica.rollback(timeout_s=SLACK_S))
    await asyncio.sleep(0)
    with pytest.raises(UpdateInProgress):
        stand.replica.begin_update(UpdateRequest(version=DELTA_1, timeout_s=SLACK_S))
    assert stand.replica.status.healthy
    assert (await rollback).version == FULL_A
    await stand.judge(FULL_A)


@on_stand
async def test_a_rollback_that_waited_is_refused_if_an_update_has_begun(stand):
    await at_full_b(stand)
    flying, task = await stand.fly()
    pause = asyncio.create_task(stand.replica.pause("wait", timeout_s=SLACK_S))
    await stand.until(lambda: stand.replica.gate.closed)
    rollback = asyncio.create_task(stand.replica.rollback(timeout_s=SLACK_S))
    await asyncio.sleep(0)
    status = await met(stand, 1, "fetch", UpdateRequest(version=DELTA_1, timeout_s=SLACK_S))
    flying.answer.cancel()
    await task
    await pause
    with pytest.raises(WrongState):
        await rollback
    assert stand.replica.status.state is ReplicaState.STAGING
    stand.go_on(1)
    await stand.replica.finish_update(status.id)
    await stand.replica.resume(timeout_s=SLACK_S)
    await stand.judge(DELTA_1)


@on_stand
async def test_a_rollback_that_is_given_up_leaves_nothing_undecided(stand):
    await at_full_b(stand)
    rollback = asyncio.create_task(stand.replica.rollback(timeout_s=SLACK_S))
    await asyncio.sleep(0)
    assert stand.replica.status.state is ReplicaState.COMMITTING
    rollback.cancel()
    await asyncio.wait([rollback])
    assert stand.replica.status.state is ReplicaState.FAILED
    status = stand.replica.begin_recovery(UpdateRequest(timeout_s=SLACK_S))
    await stand.replica.finish_update(status.id)
    await stand.judge(FULL_B)


async def resume_and_finish(stand, status):
    """Resume following while the update waits, let it end, and see that it left no pin."""
    await stand.replica.resume_following(timeout_s=SLACK_S)
    stand.go_on(1)
    await stand.replica.finish_update(status.id)
    assert stand.replica.weights.pin is None
    await stand.judge(FULL_A)


@on_stand
async def test_an_update_pins_nothing_if_following_is_resumed_meanwhile(stand):
    await at_full_b(stand)
    status = await met(stand, 1, "fetch", UpdateRequest(version=FULL_A, timeout_s=SLACK_S))
    await resume_and_finish(stand, status)


@on_stand
async def test_a_recovery_pins_nothing_again_if_following_is_resumed_meanwhile(stand):
    await at_full_b(stand)
    await stand.update(FULL_A)
    assert stand.replica.weights.pin is not None
    stand.replica.fail("the test says so")
    stand.plant((1, {"point": "fetch", "do": "meet"}))
    status = stand.replica.begin_recovery(UpdateRequest(timeout_s=SLACK_S))
    await stand.met(1)
    await resume_and_finish(stand, status)


@on_stand
async def test_the_follower_recovers_a_version_of_another_source_than_the_default_one(stand):
    await at_full_b(stand)
    elsewhere = stand.world.publish(FULL_A, stand.world.states[FULL_A])
    await stand.update(FULL_A, source=elsewhere)
    stand.replica.fail("the test says so")
    status = stand.replica.begin_recovery(UpdateRequest(timeout_s=SLACK_S, transfer_mode="http", follow=True))
    await stand.replica.finish_update(status.id)
    await stand.judge(FULL_A)
    assert stand.replica.weights.source == elsewhere


@on_stand
async def test_a_rollback_from_a_version_of_another_source_is_not_compared_with_its_order(stand):
    await at_full_b(stand)
    await stand.update(FULL_A)
    await stand.update("other", source=stand.world.publish("other", stand.world.states[DELTA_1]))  # the first of its store
    stand.replica._updates.newest = None  # as after a restart, while the default source is silent
    assert (await stand.replica.rollback(timeout_s=SLACK_S)).version == FULL_A
    assert not await stand.replica.ends_pin(FULL_B)
    pin = stand.replica.weights.pin
    assert (pin.version, pin.away_from) == (FULL_A, FULL_B)
    await stand.judge(FULL_A)
