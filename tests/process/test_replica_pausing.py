"""Pausing, sleeping and waking a replica: who waits, who is ended, and what holds when ranks are lost meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import get_args

import pytest

from weightcast.engines.base import PauseMode, UpdateRequest
from weightcast.engines.embedded.messages import Describe
from weightcast.engines.embedded.replica.status import ReplicaState
from weightcast.errors import DeadlineExceeded, NotReady, ReplicaFailed, StorageFailed, WrongState

from .replicas import PATIENCE_S, in_loop, model_dir, read, request, run_root, running, until, write_script, write_weights
from .scripted_rank import ECHO, SLOW, WAIT

__all__ = ["model_dir", "run_root"]  # fixtures


async def told(replica, rank=0):
    """The commands that a rank was given beside those that bring weights."""
    return (await replica.command(Describe(), timeout_s=PATIENCE_S))[rank]["actions"]


async def pause(replica, mode="keep", **options):
    await replica.pause(mode, **{"timeout_s": PATIENCE_S} | options)


async def resume(replica):
    await replica.resume(timeout_s=PATIENCE_S)


async def sleep(replica, *tags, mode="keep"):
    return await replica.sleep(tags, mode, timeout_s=PATIENCE_S)


async def wake(replica, *tags):
    return await replica.wake(tags, timeout_s=PATIENCE_S)


async def answers(replica, number):
    """Whether a request goes through to the ranks and back."""
    return [output.finish for output in await read(replica.submit(request(number, ECHO)))] == ["stop"]


# -- pause and resume ------------------------------------------------------------------------------------------------------


@in_loop
async def test_requests_wait_while_a_replica_is_paused_and_come_through_in_their_order(model_dir):
    async with running(model_dir) as replica:
        kept = replica.submit(request(0, SLOW))
        await pause(replica)
        await pause(replica, "abort")
        assert replica.is_paused
        assert (replica.status.state, replica.status.paused, replica.status.healthy) == (ReplicaState.READY, True, False)
        waiting = [replica.submit(request(number, ECHO, number)) for number in (1, 2, 3)]
        given_up = replica.submit(request(4, ECHO))
        given_up.cancel()
        await asyncio.sleep(0.1)
        assert replica.status.in_flight >= 3
        await resume(replica)
        await resume(replica)
        assert not replica.is_paused
        for number, answer in enumerate(waiting, start=1):
            assert [output.tokens for output in await read(answer)] == [(ECHO,), (number,)]
        assert [output.finish for output in await read(kept)] == ["stop"]
        actions = await told(replica)
        assert actions == ["Freeze", "Thaw", "Thaw", "Describe"]
        assert (await replica.command(Describe(), timeout_s=PATIENCE_S))[0]["cancelled"] == [], "it never came to the ranks"


@in_loop
async def test_pausing_with_abort_ends_what_runs_with_what_it_has(model_dir):
    async with running(model_dir) as replica:
        running_ones = [replica.submit(request(number, WAIT)) for number in range(3)]
        await pause(replica, "abort")
        for answer in running_ones:
            (last,) = await read(answer)
            assert (last.finish, last.reason) == ("abort", "the engine is paused")
        assert replica.status.in_flight == 0
        await resume(replica)
        assert await answers(replica, 9)
        (seen, _) = await replica.command(Describe(), timeout_s=PATIENCE_S)
        assert seen["cancelled"] == ["request-0", "request-1", "request-2"]


@in_loop
async def test_pausing_with_wait_lets_what_runs_end_and_holds_what_comes(model_dir):
    async with running(model_dir) as replica:
        first = replica.submit(request(1, SLOW))
        pausing = asyncio.create_task(pause(replica, "wait"))
        await asyncio.sleep(0)
        late = replica.submit(request(2, ECHO))
        await pausing
        assert [output.finish for output in await read(first)] == ["stop"]
        assert replica.status.in_flight == 1
        await resume(replica)
        assert [output.finish for output in await read(late)] == ["stop"]


@in_loop
async def test_a_pause_that_cannot_wait_any_longer_leaves_everything_going_on(model_dir):
    async with running(model_dir) as replica:
        stuck = replica.submit(request(1, WAIT))
        pausing = asyncio.create_task(pause(replica, "wait", timeout_s=0.3))
        await asyncio.sleep(0)
        late = replica.submit(request(2, ECHO))
        with pytest.raises(DeadlineExceeded, match="running requests"):
            await pausing
        assert not replica.is_paused
        assert [output.finish for output in await read(late)] == ["stop"]
        assert await told(replica) == ["Describe"], "no rank was asked to freeze"
        stuck.close()


@in_loop
async def test_calls_that_would_disturb_each_other_take_turns_and_do_not_wait_for_ever(model_dir):
    async with running(model_dir) as replica:
        stuck = replica.submit(request(1, WAIT))
        first = asyncio.create_task(pause(replica, "wait"))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded, match="waiting for an earlier call"):
            await replica.sleep(["weight"], "keep", timeout_s=0.1)
        stuck.cancel()
        await first
        assert (replica.is_paused, replica.status.state) == (True, ReplicaState.READY)


@pytest.mark.parametrize(
    ("how", "error"), [("deadline", DeadlineExceeded), ("cancelled", asyncio.CancelledError), ("lost", ReplicaFailed)]
)
@in_loop
async def test_a_freeze_that_only_some_ranks_did_stops_nobody(model_dir, how, error):
    async with running(model_dir) as replica:
        write_script(model_dir, rank_1={"commands": "ignore"})
        pausing = asyncio.create_task(pause(replica, timeout_s=0.3 if how == "deadline" else PATIENCE_S))
        await asyncio.sleep(0.05)
        if how == "cancelled":
            pausing.cancel()
        elif how == "lost":
            os.kill(replica.status.pids[1], signal.SIGKILL)
        with pytest.raises(error):
            await pausing
        write_script(model_dir)
        await until(lambda: replica.status.healthy, replica)
        assert not replica.is_paused
        assert await answers(replica, 1)
        assert await told(replica) == (["Describe"] if how == "lost" else ["Freeze", "Thaw", "Describe"])


@in_loop
async def test_a_resume_that_fails_leaves_the_replica_paused(model_dir):
    async with running(model_dir) as replica:
        await pause(replica)
        waiting = replica.submit(request(1, ECHO))
        write_script(model_dir, rank_0={"commands": "ignore"})
        with pytest.raises(DeadlineExceeded, match="Thaw"):
            await replica.resume(timeout_s=0.2)
        assert replica.is_paused
        write_script(model_dir)
        await resume(replica)
        assert [output.finish for output in await read(waiting)] == ["stop"]


@pytest.mark.parametrize("mode", get_args(PauseMode))
@in_loop
async def test_a_replica_that_was_paused_is_so_after_a_restart(model_dir, mode):
    async with running(model_dir) as replica:
        await pause(replica, mode)
        waiting = replica.submit(request(1, ECHO))
        os.kill(replica.status.pids[1], signal.SIGKILL)
        assert [output.finish for output in await read(waiting)] == ["error"]
        await until(lambda: replica.status.restarts == 1, replica)
        assert (replica.is_paused, replica.status.state) == (True, ReplicaState.READY)
        late = replica.submit(request(2, ECHO))
        assert await told(replica) == ["Freeze", "Describe"]
        await resume(replica)
        assert [output.finish for output in await read(late)] == ["stop"]


@in_loop
async def test_closing_a_paused_replica_ends_what_waits(model_dir):
    async with running(model_dir) as replica:
        await pause(replica)
        waiting = replica.submit(request(1, WAIT))
        await replica.close(drain_s=0.05)
        assert [output.finish for output in await read(waiting)] == ["abort"]


# -- aborting --------------------------------------------------------------------------------------------------------------


@in_loop
async def test_requests_are_aborted_by_their_ids_whether_they_run_or_wait(model_dir):
    async with running(model_dir) as replica:
        ones = [replica.submit(request(number, WAIT)) for number in (1, 2, 12)]
        await pause(replica)
        waits = replica.submit(request(3, ECHO))
        report = await replica.abort_requests(["request-1", "request-3", "nobody"], timeout_s=1)
        assert [(one.request_id, one.output_token_count) for one in report.aborted] == [("request-1", 0), ("request-3", 0)]
        assert report.not_found == ["nobody"]
        for answer in (ones[0], waits):
            assert [(output.finish, output.reason) for output in await read(answer)] == [
                ("abort", "the request was aborted on demand")
            ]
        report = await replica.abort_requests(["request"], timeout_s=1)
        assert {one.request_id for one in report.aborted} == {"request-2", "request-12"}, "the answers to one call"
        assert await replica.abort_requests(None, timeout_s=1) == await replica.abort_requests([], timeout_s=1)
        assert replica.status.in_flight == 0


# -- sleep and wake --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tags", "state"),
    [
        (("kv_cache",), ReplicaState.SLEEPING),
        (("weight",), ReplicaState.CLEARED),
        (("weight", "kv_cache"), ReplicaState.CLEARED),
    ],
    ids=["caches", "weights", "both"],
)
@in_loop
async def test_a_replica_sleeps_and_wakes_up_to_the_same_version(model_dir, tags, state):
    async with running(model_dir) as replica:
        for _ in range(2):
            for rank, entry in enumerate(await sleep(replica, *tags)):
                assert (entry["rank"], entry["asleep"]) == (rank, sorted(tags))
        status = replica.weights
        assert (status.state, status.asleep, status.paused) == (state, tuple(sorted(tags)), True)
        with pytest.raises(NotReady, match=f"{state}.*asleep"):
            replica.submit(request(1, ECHO))
        with pytest.raises(WrongState, match="resume"):
            await resume(replica)
        for tag in tags[:-1]:
            (first, _) = await wake(replica, tag)
            assert first["asleep"] == sorted(set(tags) - {tag})
            assert replica.is_paused
        await wake(replica, *tags)
        await wake(replica, *tags)
        assert (replica.status.state, replica.status.version) == (ReplicaState.READY, "step_7")
        assert not replica.is_paused
        assert await answers(replica, 2)
        actions = await told(replica)
        assert actions.count("Freeze") == actions.count("Thaw") == 1


@in_loop
async def test_waking_up_does_not_end_a_pause_that_somebody_asked_for(model_dir):
    async with running(model_dir) as replica:
        await pause(replica)
        await sleep(replica, "weight")
        await wake(replica, "weight")
        assert (replica.is_paused, replica.status.state) == (True, ReplicaState.READY)
        await sleep(replica, "kv_cache")
        await pause(replica)
        await wake(replica, "kv_cache")
        assert replica.is_paused
        await resume(replica)
        assert await answers(replica, 1)


@in_loop
async def test_a_pause_on_top_of_sleep_stays_when_it_wakes(model_dir):
    async with running(model_dir) as replica:
        kept = replica.submit(request(1, WAIT))
        await sleep(replica, "kv_cache")
        await pause(replica, "wait")  # what is frozen cannot end: it is not waited for
        await wake(replica, "kv_cache")
        assert replica.is_paused
        await resume(replica)
        kept.close()


@in_loop
async def test_what_runs_is_ended_or_kept_over_a_sleep_as_was_asked(model_dir):
    async with running(model_dir) as replica:
        ended = replica.submit(request(1, WAIT))
        await sleep(replica, "kv_cache", mode="abort")
        assert [output.reason for output in await read(ended)] == ["the engine was put to sleep"]
        await wake(replica, "kv_cache")
        kept = replica.submit(request(2, SLOW))
        await sleep(replica, "weight")
        await wake(replica, "weight")
        assert [output.finish for output in await read(kept)] == ["stop"]


@pytest.mark.parametrize("tags", [("kv_cache",), ("weight",), ("weight", "kv_cache")], ids="+".join)
@in_loop
async def test_ranks_that_are_lost_in_their_sleep_sleep_on(model_dir, tags):
    async with running(model_dir) as replica:
        await sleep(replica, *tags)
        state = replica.status.state
        os.kill(replica.status.pids[0], signal.SIGKILL)
        await until(lambda: replica.status.restarts == 1, replica)
        assert (replica.status.state, replica.weights.asleep) == (state, tuple(sorted(tags)))
        held = (await replica.look_at_weights()).ranks
        assert {rank.version for rank in held} == {"" if "weight" in tags else "step_7"}
        await wake(replica, *tags)
        assert replica.status.healthy
        assert await answers(replica, 1)


@in_loop
async def test_weights_that_are_gone_when_it_wakes_are_told_and_it_sleeps_on(model_dir):
    async with running(model_dir) as replica:
        await sleep(replica, "weight", "kv_cache")
        (model_dir / "model.safetensors").unlink()
        with pytest.raises(StorageFailed, match=r"model\.safetensors is not there"):
            await wake(replica, "weight", "kv_cache")
        assert (replica.status.state, replica.weights.asleep) == (ReplicaState.CLEARED, ("weight",))
        write_weights(model_dir, 1.0)
        await wake(replica, "weight")
        assert replica.status.healthy
        assert await answers(replica, 1)


@in_loop
async def test_waking_up_what_failed_does_not_make_it_whole(model_dir):
    async with running(model_dir, ranks=1) as replica:
        (model_dir / "model.safetensors").unlink()
        os.kill(replica.status.pids[0], signal.SIGKILL)
        await until(lambda: replica.status.state is ReplicaState.FAILED, replica)
        for calls in (("wake", "weight"), ("sleep", "kv_cache"), ("wake", "kv_cache")):
            await until(lambda: replica.status.state is ReplicaState.FAILED, replica)  # it tries to load now and then
            await (wake if calls[0] == "wake" else sleep)(replica, calls[1])
            assert replica.status.resting is ReplicaState.FAILED  # whatever it tries at this moment
            with pytest.raises(NotReady, match="FAILED"):
                replica.submit(request(1, ECHO))
        await sleep(replica, "weight")
        assert replica.status.state is ReplicaState.CLEARED
        write_weights(model_dir, 1.0)
        await wake(replica, "weight", "kv_cache")
        assert replica.status.healthy
        assert await answers(replica, 2)


@in_loop
async def test_a_call_that_is_given_up_while_weights_come_back_can_be_made_again(model_dir):
    async with running(model_dir) as replica:
        write_script(model_dir, rank_1={"load": "slow proof"})
        for delay_s in (0, 0.005, 0.1, 0.3):  # before the first command, and before, amid and behind the proof
            await sleep(replica, "weight")
            waking = asyncio.create_task(wake(replica, "weight"))
            await asyncio.sleep(delay_s)
            waking.cancel()
            await asyncio.wait([waking])
            assert replica.status.state in (ReplicaState.CLEARED, ReplicaState.READY)
            await wake(replica, "weight")
            assert replica.status.healthy, replica.status
        assert await answers(replica, 1)


@in_loop
async def test_nothing_can_be_asked_of_ranks_that_restart(model_dir):
    async with running(model_dir) as replica:
        write_script(model_dir, rank_0={"start": "never"})
        os.kill(replica.status.pids[0], signal.SIGKILL)
        await until(lambda: replica.status.state is ReplicaState.RESTARTING, replica)
        for call in (pause(replica), resume(replica), sleep(replica, "weight"), wake(replica, "weight")):
            with pytest.raises(NotReady, match="RESTARTING"):
                await call
        with pytest.raises(NotReady, match="RESTARTING"):
            replica.begin_update(UpdateRequest(source="file:///nowhere"))
        assert not replica.is_paused
