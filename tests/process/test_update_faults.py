"""Updates in which something goes wrong, on real ranks: one whole version is served afterwards, or FAILED until one call."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from http_depots import depots
from weightcast import Store
from weightcast.control.statuses import status_of
from weightcast.engines.base import UpdateRequest
from weightcast.engines.states import ReplicaState
from weightcast.errors import (
    CommitFailed,
    DeadlineExceeded,
    DigestMismatch,
    ReplicaFailed,
    UpdateCancelled,
    UpdateInProgress,
    WrongState,
)

from . import test_update_source_faults as sources
from .http_proxy import Fault, Proxy
from .update_fault_cases import matrix, sample
from .update_fault_moves import both_ranks, failed, kill, met, on_stand, one_after_another, recover, slow, stand
from .update_fault_stand import SLACK_S
from .update_fault_world import DELTA_1, FULL_A, FULL_B, PROMPTS

__all__ = ["stand"]  # a fixture

CASES = matrix()


@slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@on_stand
async def test_after_a_fault_one_whole_version_is_served(stand, case):
    await stand.run(case)


@slow
@both_ranks
@pytest.mark.parametrize("commit", ["copy", "swap", "inplace"])
@on_stand
async def test_a_byte_that_is_read_wrong_once_is_read_again(stand, rank, commit):
    await stand.bring_to(FULL_A)
    stand.plant((rank, {"point": "read bytes", "do": "flip", "at": 4}))
    await stand.update(FULL_B, commit=commit)
    assert not stand.clear_faults()
    await stand.judge(FULL_B)


# -- cancelled, doubled, out of time -------------------------------------------------------------------------------------


@slow
@both_ranks
@pytest.mark.parametrize("point", ["staged", "read", "cut"])
@on_stand
async def test_an_update_can_be_cancelled_while_it_is_staged(stand, rank, point):
    await stand.bring_to(FULL_A)
    flying, task = await stand.fly()
    for again in (False, True):
        status = await met(stand, rank, point, UpdateRequest(version=FULL_B, timeout_s=SLACK_S))
        with pytest.raises(UpdateInProgress):
            stand.replica.begin_update(UpdateRequest(version=FULL_B))
        calls = [stand.replica.cancel_update(status.id) for _ in range(1 + again)]
        async with asyncio.timeout(SLACK_S):
            ended = await asyncio.gather(*calls)
        assert {one.phase for one in ended} == {"cancelled"}
        with pytest.raises(UpdateCancelled):
            await stand.replica.finish_update(status.id)
        with pytest.raises(WrongState):
            await stand.replica.cancel_update(status.id)
        assert stand.replica.status.state is ReplicaState.READY
        stand.go_on(rank)
        assert not stand.clear_faults()
        await stand.judge(FULL_A)
    await stand.update(FULL_B, commit="swap")
    await stand.judge(FULL_B)
    await stand.land(flying, task)


@slow
@on_stand
async def test_a_commit_that_waits_for_an_endless_request_can_be_cancelled_and_ends_by_the_deadline(stand):
    await stand.bring_to(FULL_A)
    flying, task = await stand.fly(tokens=3000)
    status = stand.replica.begin_update(UpdateRequest(version=FULL_B, pause="wait"))
    await stand.until(lambda: stand.replica.status.state is ReplicaState.STAGED)
    waiting = stand.submit(PROMPTS[1], 3)
    with pytest.raises(UpdateInProgress):
        stand.replica.begin_update(UpdateRequest(version=FULL_B))
    assert (await stand.replica.cancel_update(status.id)).phase == "cancelled"
    error = await stand.fails(UpdateRequest(version=FULL_B, pause="wait", timeout_s=1.0))
    assert (type(error), status_of(type(error))) == (DeadlineExceeded, 504)
    assert not task.done()
    async with asyncio.timeout(SLACK_S):
        assert [output async for output in waiting][-1].finish == "length"
    await stand.judge(FULL_A)
    await stand.land(flying, task)
    await stand.update(FULL_B, pause="wait")


@slow
@both_ranks
@on_stand
async def test_a_commit_cannot_be_cancelled_nor_doubled_and_ends(stand, rank):
    await stand.bring_to(FULL_A)
    status = await met(stand, rank, "apply begins", UpdateRequest(version=FULL_B, timeout_s=SLACK_S))
    with pytest.raises(WrongState):
        await stand.replica.cancel_update(status.id)
    with pytest.raises(UpdateInProgress):
        stand.replica.begin_update(UpdateRequest(version=FULL_B))
    stand.go_on(rank)
    assert (await stand.replica.finish_update(status.id)).phase == "done"
    assert not stand.clear_faults()
    await stand.judge(FULL_B)


# -- caches --------------------------------------------------------------------------------------------------------------


@slow
@both_ranks
@pytest.mark.parametrize("point", ["apply", "prove"])
@on_stand
async def test_a_commit_that_freed_the_caches_and_failed_leaves_no_wrong_keys_and_values(stand, rank, point):
    await stand.bring_to(FULL_A)
    await stand.judge(FULL_A)  # its prompts are cached now
    flying, task = await stand.fly()
    stand.plant((rank, {"point": point, "do": "raise"}))
    await stand.fails(UpdateRequest(version=FULL_B, release_cache=True, timeout_s=SLACK_S))
    assert not stand.clear_faults()
    await stand.land(flying, task)  # what runs is kept, unless it has seen what could not be proved
    await stand.judge(FULL_A)


# -- ends that no rank may tell differently ------------------------------------------------------------------------------


@slow
@both_ranks
@on_stand
async def test_a_rank_that_refuses_to_settle_does_not_leave_the_replica_stuck(stand, rank):
    await stand.bring_to(FULL_A)
    stand.plant((rank, {"point": "settle", "do": "raise", "error": "CommitFailed"}))
    error = await stand.fails(UpdateRequest(version=FULL_B, timeout_s=SLACK_S))
    assert (type(error), status_of(type(error))) == (ReplicaFailed, 503)
    await stand.judge(FULL_B)  # all had proved it
    await stand.update(FULL_A)


@slow
@both_ranks
@on_stand
async def test_live_weights_that_rot_after_an_update_are_found_by_verifying_and_mended_by_one_call(stand, rank):
    await stand.bring_to(FULL_A)
    stand.plant((rank, {"point": "settled memory", "do": "flip"}))
    await stand.update(FULL_B)
    assert not stand.clear_faults()
    with pytest.raises(DigestMismatch, match=f"rank {rank}"):
        await stand.replica.verify(timeout_s=SLACK_S)
    await failed(stand)
    await recover(stand)
    await stand.judge(FULL_B)


@slow
@both_ranks
@pytest.mark.parametrize("version", [FULL_B, DELTA_1])
@on_stand
async def test_live_weights_that_rot_are_found_by_the_scrubber_and_mended_by_one_call(stand, rank, version):
    await stand.bring_to(FULL_A)
    stand.plant((rank, {"point": "settled memory", "do": "flip"}))
    await stand.update(version)
    assert not stand.clear_faults()
    await stand.until(lambda: stand.replica.status.state is ReplicaState.FAILED)
    assert f"rank {rank}" in stand.replica.status.reason
    assert "suspect" in stand.replica.status.reason
    await failed(stand)
    await recover(stand)
    await stand.judge(version)


@slow
@both_ranks
@pytest.mark.parametrize("commit", ["copy", "delta", "swap"])
@on_stand
async def test_a_rollback_that_fails_is_mended_by_one_call(stand, rank, commit):
    await stand.bring_to(FULL_A)
    stand.plant((rank, {"point": "undo", "at": "middle", "do": "raise"}))
    await stand.update(DELTA_1 if commit == "delta" else FULL_B, commit=commit)
    with pytest.raises(CommitFailed):
        await stand.replica.rollback(timeout_s=SLACK_S)
    await failed(stand)
    await stand.update(FULL_A)
    await stand.judge(FULL_A)


# -- ranks that are killed at rest ---------------------------------------------------------------------------------------


@slow
@both_ranks
@pytest.mark.parametrize("tags", [("weight",), ("kv_cache",), ("weight", "kv_cache")], ids="+".join)
@on_stand
async def test_a_rank_that_is_killed_in_its_sleep_sleeps_on_and_wakes(stand, rank, tags):
    await stand.bring_to(FULL_B)
    await stand.replica.sleep(tags, "abort", timeout_s=SLACK_S)
    state = stand.replica.status.state
    assert state is (ReplicaState.CLEARED if "weight" in tags else ReplicaState.SLEEPING)
    await kill(stand, rank)
    assert stand.replica.status.state is state
    assert stand.replica.weights.asleep == tuple(sorted(tags))
    assert stand.replica.is_paused
    looked = await stand.replica.look_at_weights()
    assert {one.version for one in looked.ranks} == {"" if "weight" in tags else FULL_B}
    await stand.replica.wake(tags, timeout_s=SLACK_S)
    assert not stand.replica.is_paused
    await stand.judge(FULL_B)


@slow
@both_ranks
@on_stand
async def test_a_rank_that_is_killed_while_paused_stays_paused(stand, rank):
    await stand.bring_to(FULL_B)
    await stand.replica.pause("keep", timeout_s=SLACK_S)
    await kill(stand, rank)
    assert stand.replica.is_paused
    waiting = stand.submit(PROMPTS[0], 3)
    await stand.update(FULL_A)
    assert stand.replica.is_paused
    await stand.replica.resume(timeout_s=SLACK_S)
    async with asyncio.timeout(SLACK_S):
        outputs = [output async for output in waiting]
    assert {output.version for output in outputs} == {FULL_A}
    await stand.judge(FULL_A)


@slow
@both_ranks
@on_stand
async def test_a_rank_that_is_killed_while_failed_brings_the_committed_version_back(stand, rank):
    await stand.bring_to(FULL_A)
    stand.plant((0, {"point": "apply", "at": "middle", "do": "raise"}), (0, {"point": "undo begins", "do": "raise"}))
    await stand.fails(UpdateRequest(version=FULL_B, timeout_s=SLACK_S))
    assert not stand.clear_faults()
    await failed(stand)
    await kill(stand, rank)
    await stand.judge(FULL_A)


@slow
@both_ranks
@on_stand
async def test_ranks_that_are_lost_with_the_source_of_their_version_are_mended_by_any_other_source(stand, rank):
    store = stand.world.copy()
    await stand.update(FULL_A, source=f"file://{store}")
    await stand.update(FULL_B, source=f"file://{store}")
    shutil.rmtree(store)
    await kill(stand, rank)
    await failed(stand)
    await asyncio.sleep(0.5)  # it is tried again and again meanwhile
    await recover(stand, source=stand.world.source)
    await stand.judge(FULL_B)


@slow
@both_ranks
@on_stand
async def test_a_rank_that_is_killed_while_the_source_is_asked_fails_the_update_and_no_other(stand, rank):
    await stand.bring_to(FULL_A)
    late = Fault("delay", path=f"/versions/{FULL_B}", seconds=3.0)
    with depots(Store(stand.world.copy())) as [depot], Proxy(depot.url, late) as proxy:
        status = stand.replica.begin_update(UpdateRequest(version=FULL_B, source=proxy.url, timeout_s=60.0))
        await asyncio.sleep(0.1)
        await kill(stand, rank)
        with pytest.raises(ReplicaFailed):
            await stand.replica.finish_update(status.id)
    assert late.struck
    await stand.judge(FULL_A)
    await stand.update(FULL_B)


@slow
@both_ranks
@pytest.mark.parametrize("phase", ["staged", "waiting"])
@on_stand
async def test_a_rank_that_is_killed_while_a_commit_waits_for_requests_ends_them_all(stand, rank, phase):
    await stand.bring_to(FULL_A)
    flying, task = await stand.fly(tokens=3000)
    status = stand.replica.begin_update(UpdateRequest(version=FULL_B, pause="wait", timeout_s=60.0))
    await stand.until(lambda: stand.replica.status.state is ReplicaState.STAGED)
    waiting = stand.submit(PROMPTS[1], 3) if phase == "waiting" else None
    await kill(stand, rank)
    with pytest.raises(ReplicaFailed, match="SIGKILL"):
        await stand.replica.finish_update(status.id)
    await stand.land(flying, task)
    assert flying.outputs[-1].finish == "error"
    if waiting is not None:
        assert [output async for output in waiting][-1].finish == "error"
    await stand.judge(FULL_A)


@slow
@both_ranks
@on_stand
async def test_a_wake_up_that_fails_can_be_repeated(stand, rank):
    await stand.bring_to(FULL_B)
    await stand.replica.sleep(["weight"], "abort", timeout_s=SLACK_S)
    stand.plant((rank, {"point": "read", "at": 3, "do": "raise", "error": "OSError"}))
    with pytest.raises(Exception, match="Input/output error"):
        await stand.replica.wake(["weight"], timeout_s=SLACK_S)
    assert not stand.clear_faults()
    assert stand.replica.status.state is ReplicaState.CLEARED
    await stand.replica.wake(["weight"], timeout_s=SLACK_S)
    await stand.judge(FULL_B)


# -- a replica that has failed -------------------------------------------------------------------------------------------


async def tear(stand, rank):
    """From full_a to no whole version."""
    await stand.bring_to(FULL_A)
    stand.plant((rank, {"point": "apply", "at": "middle", "do": "raise"}), (rank, {"point": "undo begins", "do": "raise"}))
    await stand.fails(UpdateRequest(version=FULL_B, timeout_s=SLACK_S))
    await failed(stand)


@slow
@both_ranks
@pytest.mark.parametrize("tags", [("kv_cache",), ("weight",), ("weight", "kv_cache")], ids="+".join)
@on_stand
async def test_sleep_does_not_hide_that_a_replica_has_failed(stand, rank, tags):
    await tear(stand, rank)
    await stand.replica.sleep(tags, "abort", timeout_s=SLACK_S)
    if "weight" not in tags:  # otherwise the wake-up brings the version back
        with pytest.raises(WrongState, match="without weights"):
            await stand.replica.wake(tags, timeout_s=SLACK_S)
        await failed(stand)
        await recover(stand)
    await stand.replica.wake(tags, timeout_s=SLACK_S)
    assert not stand.replica.is_paused
    await stand.judge(FULL_A)


@slow
@both_ranks
@on_stand
async def test_a_failed_replica_that_is_paused_recovers_and_stays_paused(stand, rank):
    await tear(stand, rank)
    await stand.replica.pause("keep", timeout_s=SLACK_S)
    await failed(stand)
    await recover(stand)
    waiting = stand.submit(PROMPTS[0], 3)
    assert stand.replica.is_paused
    await stand.replica.resume(timeout_s=SLACK_S)
    async with asyncio.timeout(SLACK_S):
        assert {output.version async for output in waiting} == {FULL_A}
    await stand.judge(FULL_A)


@slow
@both_ranks
@on_stand
async def test_a_recovery_that_fails_leaves_the_replica_failed_and_the_next_one_works(stand, rank):
    await tear(stand, rank)
    for fault in ({"point": "read", "at": 3}, {"point": "apply", "at": "middle"}, {"point": "prove"}):
        stand.plant((rank, {"do": "raise", "error": "OSError", **fault}))
        await stand.fails(UpdateRequest(version=FULL_B, timeout_s=SLACK_S))
        await failed(stand)
        assert not stand.clear_faults()
    await recover(stand)
    await stand.judge(FULL_A)


# -- every day -----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@on_stand
async def test_after_a_sample_of_all_faults_one_whole_version_is_served(stand):
    await one_after_another(
        stand,
        *sources.EVERY_DAY,
        *((test_after_a_fault_one_whole_version_is_served, {"case": case}) for case in sample(CASES)),
        (test_an_update_can_be_cancelled_while_it_is_staged, {"rank": 1, "point": "cut"}),
        (test_a_commit_that_waits_for_an_endless_request_can_be_cancelled_and_ends_by_the_deadline, {}),
        (test_a_commit_cannot_be_cancelled_nor_doubled_and_ends, {"rank": 0}),
        (test_a_commit_that_freed_the_caches_and_failed_leaves_no_wrong_keys_and_values, {"rank": 1, "point": "apply"}),
        (test_live_weights_that_rot_after_an_update_are_found_by_verifying_and_mended_by_one_call, {"rank": 0}),
        (test_a_rollback_that_fails_is_mended_by_one_call, {"rank": 1, "commit": "copy"}),
        (test_sleep_does_not_hide_that_a_replica_has_failed, {"rank": 0, "tags": ("kv_cache",)}),
    )
