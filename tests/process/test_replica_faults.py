"""A replica whose ranks die, hang or talk nonsense: everybody who waits is told, and it comes back by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from weightcast.engines.base import UpdateRequest
from weightcast.engines.embedded.messages import Describe
from weightcast.engines.embedded.replica.answers import Answers
from weightcast.engines.embedded.replica.backoff import Backoff
from weightcast.engines.embedded.replica.status import ReplicaState
from weightcast.errors import NotReady, ReplicaFailed

from .children import end
from .replicas import (
    PATIENCE_S,
    PROGRAM,
    in_loop,
    model_dir,
    open_files,
    read,
    request,
    run_root,
    running,
    until,
    write_script,
    write_weights,
)
from .scripted_rank import DIE, ECHO, EXIT, FRAMES, GARBAGE, IMPOSTOR, STAND_STILL, TELL, UNHEARD, WAIT

__all__ = ["model_dir", "run_root"]  # fixtures

CUT_SHORT = tuple(b"\x81\xa4type\xa9Heart")
WRONG_TYPE = tuple(b"\x82\xa4type\xa7Outputs\xa7outputs\x01")
UNKNOWN_TAG = tuple(b"\x81\xa4type\xa3Foo")
NOT_TEXT = tuple(b"\x81\xa4type\xa2\xff\xfe")


async def back_again(replica, pids, *, restarts=1):
    """Wait until the replica serves again, with other processes, and that it does."""
    await until(lambda: replica.status.restarts == restarts and replica.status.healthy, replica)
    assert not set(pids) & set(replica.status.pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert replica.status.version == "step_7"
    assert [output.tokens for output in await read(replica.submit(request(1000 + restarts, ECHO)))] == [(ECHO,)]


@pytest.mark.parametrize("rank", [0, 1])
@in_loop
async def test_a_killed_rank_ends_all_that_waits_and_the_replica_comes_back(model_dir, run_root, rank):
    async with running(model_dir) as replica:
        pids, (run_dir,) = replica.status.pids, run_root.iterdir()
        answers = [replica.submit(request(number, WAIT)) for number in range(4)]
        os.kill(pids[rank], signal.SIGKILL)
        for answer in answers:
            (last,) = await read(answer)
            assert (last.finish, last.tokens, last.version) == ("error", (), "step_7")
            assert last.reason == f"rank {rank} (pid {pids[rank]}) was ended by signal SIGKILL."
        assert replica.status.state is ReplicaState.RESTARTING
        assert "SIGKILL" in replica.status.reason
        assert not replica.status.healthy
        assert replica.status.in_flight == 0
        with pytest.raises(NotReady, match=r"RESTARTING.*SIGKILL"):
            replica.submit(request(9, ECHO))
        await back_again(replica, pids)
        assert not run_dir.exists()


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ((DIE,), "was ended by signal SIGKILL"),
        ((EXIT,), "ended with exit code 3"),
        ((TELL,), "reported commit_failed: out of luck"),
        ((FRAMES,), "sent a message of 2 frames instead of 1"),
        ((GARBAGE,), "sent 0 bytes that are no message"),
        ((GARBAGE, *CUT_SHORT), "bytes that are no message: Input data was truncated"),
        ((GARBAGE, *WRONG_TYPE), "bytes that are no message: Expected `array`, got `int`"),
        ((GARBAGE, *UNKNOWN_TAG), "bytes that are no message: Invalid value 'Foo'"),
        ((GARBAGE, *NOT_TEXT), "bytes that are no message"),
        ((IMPOSTOR,), "sent a Heartbeat in the name of rank 1"),
        ((UNHEARD,), "acknowledged command 99, which was never given"),
    ],
    ids=[
        "dies",
        "exits",
        "says why",
        "frames",
        "empty",
        "cut short",
        "wrong type",
        "unknown",
        "not text",
        "impostor",
        "unheard",
    ],
)
@in_loop
async def test_what_a_rank_does_wrong_is_told_to_those_who_wait(model_dir, prompt, reason):
    async with running(model_dir, ranks=1) as replica:
        pids = replica.status.pids
        waiting = replica.submit(request(1, WAIT))
        (last,) = await read(replica.submit(request(2, *prompt)))
        assert last.finish == "error"
        assert last.reason.startswith(f"rank 0 (pid {pids[0]}) ")
        assert reason in last.reason
        assert [output.reason for output in await read(waiting)] == [last.reason]
        await back_again(replica, pids)


@in_loop
async def test_a_rank_that_is_stopped_is_noticed_killed_and_reaped(model_dir):
    async with running(model_dir, heartbeat_s=0.5) as replica:
        pids = replica.status.pids
        waiting = replica.submit(request(1, WAIT))
        os.kill(pids[1], signal.SIGSTOP)
        (last,) = await read(waiting)
        assert last.reason.startswith(f"rank 1 (pid {pids[1]}) hangs: no heartbeat for")
        await back_again(replica, pids)


@in_loop
async def test_a_rank_that_is_busy_and_gets_nowhere_is_noticed(model_dir):
    async with running(model_dir, ranks=1, heartbeat_s=0.5) as replica:
        pids = replica.status.pids
        (last,) = await read(replica.submit(request(1, STAND_STILL)))
        assert "hangs: busy without progress for" in last.reason
        await back_again(replica, pids)


@in_loop
async def test_a_front_end_that_was_blocked_does_not_blame_the_ranks(model_dir):
    async with running(model_dir, heartbeat_s=0.5) as replica:
        pids = replica.status.pids
        time.sleep(1.5)
        await read(replica.submit(request(1, ECHO)))
        await asyncio.sleep(0.6)
        assert (replica.status.pids, replica.status.restarts) == (pids, 0)


def test_a_front_end_that_was_suspended_does_not_blame_the_ranks(model_dir, run_root, start):
    front_end = start("replica_probe", model_dir, run_root)
    assert front_end.stdout.readline().strip() == "READY"
    os.kill(front_end.pid, signal.SIGSTOP)
    time.sleep(1.5)  # three heartbeat periods
    os.kill(front_end.pid, signal.SIGCONT)
    output, errors = front_end.communicate("end\n", timeout=PATIENCE_S)
    end(front_end)
    assert (output.strip(), front_end.returncode) == ("restarts 0", 0), errors


@in_loop
async def test_a_stopped_rank_cannot_keep_a_replica_from_closing(model_dir, monkeypatch):
    monkeypatch.setattr("weightcast.engines.embedded.replica.run.SHUTDOWN_S", 0.2)
    monkeypatch.setattr("weightcast.engines.embedded.replica.run.TERMINATE_S", 0.2)
    async with running(model_dir) as replica:
        pids = replica.status.pids
        os.kill(pids[0], signal.SIGSTOP)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@in_loop
async def test_a_rank_that_cannot_be_reached_is_noticed_by_sending(model_dir):
    async with running(model_dir, ranks=1) as replica:
        pids, accepted = replica.status.pids, []
        os.kill(pids[0], signal.SIGKILL)

        def submit_until_refused():
            """Without a turn of the event loop, which would learn of the death."""
            for number in range(200):
                accepted.append(replica.submit(request(number, WAIT)))
                time.sleep(0.01)

        with pytest.raises(NotReady, match="rank 0 cannot be reached"):
            submit_until_refused()
        for answer in accepted:
            assert [output.finish for output in await read(answer)] == ["error"]
        await back_again(replica, pids)


@in_loop
async def test_a_rank_that_dies_while_the_replica_drains_is_not_started_again(model_dir):
    async with running(model_dir) as replica:
        pids = replica.status.pids
        answer = replica.submit(request(1, WAIT))
        closing = asyncio.create_task(replica.close(drain_s=3600))
        await asyncio.sleep(0.01)
        os.kill(pids[1], signal.SIGKILL)
        assert [output.finish for output in await read(answer)] == ["error"]
        await closing
        assert replica.status.state is ReplicaState.CLOSED
        assert replica.status.restarts == 0


@in_loop
async def test_a_replica_can_be_closed_at_any_moment_of_a_restart(model_dir):
    for delay_s in (0, 0.002, 0.01, 0.03, 0.06, 0.1):
        async with running(model_dir) as replica:
            os.kill(replica.status.pids[0], signal.SIGKILL)
            await until(lambda replica=replica: not replica.status.healthy)
            await asyncio.sleep(delay_s)
        assert replica.status.state is ReplicaState.CLOSED


@in_loop
async def test_whatever_a_rank_started_ends_with_it(model_dir):
    program = ("/bin/sh", "-c", f"sleep 3600 & exec {PROGRAM[0]} {PROGRAM[1]}")
    async with running(model_dir, ranks=1, program=program) as replica:
        for restarts in (1, 2):
            (pid,) = replica.status.pids
            (sleeper,) = psutil.Process(pid).children()
            os.kill(pid, signal.SIGKILL)
            await until(lambda restarts=restarts: replica.status.restarts == restarts, replica)
            await until(lambda sleeper=sleeper: not sleeper.is_running() or sleeper.status() == psutil.STATUS_ZOMBIE)
        (sleeper,) = psutil.Process(replica.status.pids[0]).children()
    await until(lambda: not sleeper.is_running() or sleeper.status() == psutil.STATUS_ZOMBIE)


# -- coming back ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_replica_whose_committed_version_is_gone_says_so_and_recovers_when_it_is_back(model_dir):
    async with running(model_dir, ranks=1) as replica:
        pids, root = replica.status.pids, replica.status.root_digest
        for spoil in (lambda: write_weights(model_dir, 2.0), (model_dir / "model.safetensors").unlink):
            spoil()
            os.kill(replica.status.pids[0], signal.SIGKILL)
            await until(lambda: replica.status.state is ReplicaState.FAILED, replica)
            assert "version step_7 could not be loaded again" in replica.status.reason
            assert str(model_dir) in replica.status.reason
            assert len(replica.status.pids) == 1, "the rank that waits for weights"
            with pytest.raises(NotReady, match=r"(?s)FAILED.*could not be loaded again"):
                replica.submit(request(5, ECHO))
            write_weights(model_dir, 1.0)
            await until(lambda: replica.status.healthy, replica)
        assert replica.status.root_digest == root
        await back_again(replica, pids, restarts=2)


@pytest.mark.parametrize("gone", ["config.json", "the directory"])
@in_loop
async def test_a_model_that_was_replaced_on_disk_is_not_served_and_is_once_it_is_put_back(model_dir, gone):
    (model_dir / "config.json").write_text("{}")
    async with running(model_dir, ranks=1) as replica:
        pids, aside = replica.status.pids, model_dir.with_name("aside")
        if gone == "config.json":
            (model_dir / "config.json").write_text('{"rope_theta": 2}')
        else:
            model_dir.rename(aside)
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: replica.status.state is ReplicaState.FAILED, replica)
        assert "config.json" in replica.status.reason
        assert (replica.status.version, replica.status.pids) == ("step_7", ())
        with pytest.raises(NotReady, match=r"FAILED.*put it back"):
            replica.submit(request(5, ECHO))
        with pytest.raises(NotReady, match=r"FAILED.*put it back"):
            replica.begin_recovery(UpdateRequest())
        if gone == "config.json":
            (model_dir / "config.json").write_text("{}")
        else:
            aside.rename(model_dir)
        await back_again(replica, pids)


@in_loop
async def test_the_bytes_of_a_version_count_and_not_what_its_directory_is_called(model_dir):
    async with running(model_dir, ranks=1) as replica:
        pids = replica.status.pids
        (model_dir / "version.yaml").write_text("step: 8\nversion: step_8\n")
        (model_dir / "model.safetensors").touch()
        os.kill(pids[0], signal.SIGKILL)
        await back_again(replica, pids)


@in_loop
async def test_a_restart_that_fails_is_tried_again_until_it_works(model_dir):
    async with running(model_dir, ranks=1) as replica:
        pids = replica.status.pids
        write_script(model_dir, rank_0={"start": "fail"})
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: "unsupported_model" in replica.status.reason, replica)
        assert replica.status.state is ReplicaState.RESTARTING
        write_script(model_dir)
        await back_again(replica, pids)


@in_loop
async def test_twenty_restarts_leave_nothing_behind(model_dir, run_root):
    async with running(model_dir, ranks=1, backoff=Backoff(healthy_s=0)) as replica:
        files = threads = children = 0
        for restarts in range(1, 21):
            pids = replica.status.pids
            os.kill(pids[0], signal.SIGKILL)
            await until(lambda restarts=restarts: replica.status.restarts == restarts, replica)
            if restarts == 1:
                files, threads, children = open_files(), threading.active_count(), len(psutil.Process().children())
        assert open_files() <= files
        assert threading.active_count() <= max(threads, (os.cpu_count() or 1) + 8)  # those of the default executor
        assert len(list(run_root.iterdir())) == 1
        assert len(psutil.Process().children()) <= children + 1
        await back_again(replica, pids, restarts=20)


# -- our own mistakes ----------------------------------------------------------------------------------------------------


@in_loop
async def test_a_bug_in_the_front_end_fails_the_start_instead_of_being_lost(model_dir, monkeypatch, caplog):
    def broken(self, outputs):
        raise RuntimeError("a bug of ours")

    async with running(model_dir, ranks=1) as replica:
        pids = replica.status.pids
        with monkeypatch.context() as patch:
            patch.setattr(Answers, "deliver", broken)
            (last,) = await read(replica.submit(request(1, ECHO)))
        assert last.reason == "the front end itself failed: RuntimeError: a bug of ours"
        assert "front end crashed" in caplog.text
        await back_again(replica, pids)


class BrokenBackoff(Backoff):
    def next_s(self):
        raise RuntimeError("a bug of ours")


@in_loop
async def test_a_bug_in_the_supervisor_is_a_failed_state(model_dir, caplog):
    async with running(model_dir, ranks=1, backoff=BrokenBackoff()) as replica:
        answer = replica.submit(request(1, DIE))
        assert [output.finish for output in await read(answer)] == ["error"]
        await until(lambda: replica.status.state is ReplicaState.FAILED, replica)
        assert replica.status.reason == "the supervisor failed: RuntimeError: a bug of ours"
        assert "supervisor crashed" in caplog.text


@in_loop
async def test_a_restart_that_fails_in_an_unknown_way_is_logged_and_tried_again(model_dir, monkeypatch, caplog):
    async with running(model_dir, ranks=1) as replica:
        pids = replica.status.pids
        with monkeypatch.context() as patch:
            patch.setattr("weightcast.engines.embedded.replica.run.Channel", lambda *_, **__: 1 / 0)
            os.kill(pids[0], signal.SIGKILL)
            await until(lambda: replica.status.state is ReplicaState.FAILED, replica)
            assert "ZeroDivisionError" in replica.status.reason
        assert "restart crashed" in caplog.text
        await back_again(replica, pids)


@in_loop
async def test_commands_end_when_a_rank_is_lost(model_dir):
    write_script(model_dir, rank_1={"commands": "ignore"})
    async with running(model_dir) as replica:
        pids = replica.status.pids
        first, second = (asyncio.create_task(replica.command(Describe(), timeout_s=3600)) for _ in range(2))
        await asyncio.sleep(0.05)
        os.kill(pids[0], signal.SIGKILL)
        for command in (first, second):
            with pytest.raises(ReplicaFailed, match=r"rank 0 .* SIGKILL"):
                await command
        await until(lambda: replica.status.healthy, replica)


def test_importing_the_replica_does_not_load_torch():
    code = "import sys, weightcast.engines.embedded.replica.replica; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "False"
