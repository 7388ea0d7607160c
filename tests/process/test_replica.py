"""A replica that is well: it starts, answers, counts, drains and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile

import psutil
import pytest
import zmq

from weightcast.engines.embedded.messages import PROTOCOL, Describe, Sampling, Submit, front_end_address
from weightcast.engines.embedded.replica import run
from weightcast.engines.embedded.replica.status import Limits, ReplicaState
from weightcast.errors import (
    CommitFailed,
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    ReplicaFailed,
    VersionFileInvalid,
    WrongState,
)

from .replicas import (
    PATIENCE_S,
    PROGRAM,
    in_loop,
    model_dir,
    new_replica,
    read,
    request,
    run_root,
    running,
    until,
    write_script,
    write_weights,
)
from .scripted_rank import ECHO, SLOW, STREAM, WAIT

__all__ = ["model_dir", "run_root"]  # fixtures


@in_loop
async def test_a_replica_starts_answers_and_closes(model_dir, run_root):
    replica = new_replica(model_dir)
    assert replica.status.state is ReplicaState.STARTING
    with pytest.raises(NotReady, match="STARTING"):
        replica.limits  # noqa: B018 - reading it is the test
    await replica.start()
    status = replica.status
    assert (status.state, status.version, status.restarts, status.in_flight) == (ReplicaState.READY, "step_7", 0, 0)
    assert status.healthy
    assert status.root_digest.startswith("sums:")
    assert [psutil.Process(pid).ppid() for pid in status.pids] == [os.getpid()] * 2
    assert replica.limits == Limits(max_length=128, blocks=64, block_size=16, vocab_size=1000, moe=False)
    (run_dir,) = run_root.iterdir()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700

    outputs = await read(replica.submit(request(1, ECHO, 11, 12)))
    assert [output.tokens for output in outputs] == [(ECHO,), (11,), (12,)]
    assert [output.finish for output in outputs] == [None, None, "stop"]
    assert {output.version for output in outputs} == {"step_7"}

    await replica.close(drain_s=1)
    await replica.close(drain_s=1)
    assert replica.status.state is ReplicaState.CLOSED
    assert replica.status.pids == ()
    with pytest.raises(NotReady, match="CLOSED"):
        replica.submit(request(2, ECHO))
    with pytest.raises(WrongState, match="CLOSED"):
        await replica.start()


@in_loop
async def test_many_answers_at_once_each_get_their_own_outputs(model_dir):
    async with running(model_dir, ranks=1) as replica:
        prompts = {number: (ECHO, *range(number, number + 20)) for number in range(64)}
        answers = await asyncio.gather(
            *(read(replica.submit(request(number, *prompt))) for number, prompt in prompts.items())
        )
        for prompt, outputs in zip(prompts.values(), answers, strict=True):
            assert tuple(token for output in outputs for token in output.tokens) == prompt
        assert replica.status.in_flight == 0


@in_loop
async def test_without_a_version_file_the_root_digest_is_the_version(model_dir):
    (model_dir / "version.yaml").unlink()
    async with running(model_dir, ranks=1) as replica:
        assert replica.status.version == replica.status.root_digest != ""


@in_loop
async def test_more_requests_than_allowed_are_refused_and_a_finished_one_makes_room(model_dir):
    async with running(model_dir, ranks=1, max_requests=2) as replica:
        first, _second = replica.submit(request(1, WAIT)), replica.submit(request(2, WAIT))
        with pytest.raises(Overloaded, match="2 requests"):
            replica.submit(request(3, ECHO))
        assert replica.status.in_flight == 2
        first.cancel()
        assert len(await read(replica.submit(request(3, ECHO)))) == 1


def test_a_replica_that_could_take_no_request_is_refused(model_dir):
    with pytest.raises(InvalidInput, match="max_requests"):
        new_replica(model_dir, max_requests=0)


@in_loop
async def test_an_id_that_is_in_flight_cannot_be_used_again(model_dir):
    async with running(model_dir, ranks=1) as replica:
        answer = replica.submit(request(1, WAIT))
        with pytest.raises(InvalidInput, match="request-1"):
            replica.submit(request(1, ECHO))
        answer.close()


@pytest.mark.parametrize("wrong", [{"seed": "1"}, {"seed": 1 << 70}, {"max_tokens": None}, {"stop_tokens": (object(),)}])
@in_loop
async def test_a_request_that_no_rank_could_read_harms_nobody_else(model_dir, wrong):
    async with running(model_dir, ranks=1) as replica:
        sampling = Sampling(**({"max_tokens": 3} | wrong))
        with pytest.raises(InvalidInput, match="request 'x' cannot be sent to the ranks"):
            replica.submit(Submit(id="x", prompt=(ECHO,), sampling=sampling))
        assert replica.status.in_flight == 0
        assert len(await read(replica.submit(request(1, ECHO)))) == 1


@in_loop
async def test_cancelling_tells_the_rank_once_and_ends_the_answer(model_dir):
    async with running(model_dir, ranks=1) as replica:
        answer = replica.submit(request(1, STREAM))
        assert (await anext(answer)).tokens == (5,)
        answer.cancel()
        answer.cancel()
        assert replica.status.in_flight == 0
        outputs = await read(answer)
        assert [output.finish for output in outputs[-1:]] == ["abort"]
        assert outputs[-1].reason == "the request was cancelled"
        with pytest.raises(StopAsyncIteration):
            await anext(answer)
        async with replica.submit(request(2, WAIT)):
            pass
        finished = replica.submit(request(3, ECHO))
        await until(lambda: replica.status.in_flight == 0)
        finished.close()
        (seen,) = await replica.command(Describe(), timeout_s=PATIENCE_S)
        assert seen["cancelled"] == ["request-1", "request-2"]


@in_loop
async def test_a_reader_that_is_cancelled_leaves_the_answer_readable(model_dir):
    async with running(model_dir, ranks=1) as replica:
        answer = replica.submit(request(1, WAIT))
        reader = asyncio.create_task(anext(answer))
        await asyncio.sleep(0)
        with pytest.raises(InvalidInput, match="reader"):
            await anext(answer)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        answer.cancel()
        assert [output.finish for output in await read(answer)] == ["abort"]


@in_loop
async def test_closing_waits_for_requests_and_takes_no_new_ones(model_dir):
    async with running(model_dir, ranks=1) as replica:
        answer = replica.submit(request(1, SLOW, 3))
        closing = asyncio.create_task(replica.close(drain_s=PATIENCE_S))
        await asyncio.sleep(0)
        assert replica.status.state is ReplicaState.DRAINING
        with pytest.raises(NotReady, match="DRAINING"):
            replica.submit(request(2, ECHO))
        with pytest.raises(NotReady, match="DRAINING"):
            await replica.command(Describe(), timeout_s=1)
        assert [output.finish for output in await read(answer)] == [None, "stop"]
        await closing


@in_loop
async def test_requests_that_outlast_the_drain_end_with_a_reason(model_dir):
    async with running(model_dir) as replica:
        answer = replica.submit(request(1, WAIT))
        await replica.close(drain_s=0.05)
        (last,) = await read(answer)
        assert (last.finish, last.reason, last.version) == ("abort", "the server is shutting down", "step_7")


@in_loop
async def test_a_second_close_hurries_the_first_and_cancelling_one_does_not_stop_it(model_dir):
    async with running(model_dir, ranks=1) as replica:
        answer = replica.submit(request(1, WAIT))
        patient = asyncio.create_task(replica.close(drain_s=3600))
        await asyncio.sleep(0.01)
        patient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await patient
        await replica.close(drain_s=0)
        assert [output.finish for output in await read(answer)] == ["abort"]
        assert replica.status.state is ReplicaState.CLOSED


@in_loop
async def test_closing_a_replica_that_was_never_started_or_is_starting_leaves_nothing(model_dir):
    await new_replica(model_dir).close(drain_s=1)
    write_script(model_dir, rank_1={"start": "never"})
    replica = new_replica(model_dir)
    starting = asyncio.create_task(replica.start())
    await until(lambda: len(replica.status.pids) == 2)
    await replica.close(drain_s=1)
    with pytest.raises(NotReady, match="closed while it started"):
        await starting


@in_loop
async def test_cancelling_the_start_leaves_nothing(model_dir, run_root):
    write_script(model_dir, rank_0={"start": "never"})
    replica = new_replica(model_dir)
    starting = asyncio.create_task(replica.start())
    await until(lambda: len(replica.status.pids) == 2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert replica.status.pids == ()
    assert not list(run_root.iterdir())
    assert replica.status.state is ReplicaState.FAILED


@pytest.mark.parametrize(
    ("how", "end"),
    [
        ({}, "ended with exit code 0"),
        ({"shutdown": "ignore"}, "was ended by signal SIGTERM"),
        ({"shutdown": "ignore", "sigterm": "ignore"}, "was ended by signal SIGKILL"),
    ],
    ids=["told", "asked", "killed"],
)
@in_loop
async def test_ranks_leave_when_told_and_are_made_to_if_they_do_not(model_dir, how, end, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "weightcast")
    monkeypatch.setattr(run, "SHUTDOWN_S", 5.0 if not how else 0.5)
    monkeypatch.setattr(run, "TERMINATE_S", 0.5)
    write_script(model_dir, rank_1=how)
    async with running(model_dir) as replica:
        pids = replica.status.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)
    events = [record.msg for record in caplog.records if record.name.startswith("weightcast.")]
    reaped = {one.fields["rank"]: one.fields["how"] for one in events if one.name == "rank reaped"}
    assert reaped == {0: "ended with exit code 0", 1: end}


@in_loop
async def test_ranks_are_out_of_reach_of_the_terminal(model_dir):
    async with running(model_dir) as replica:
        assert {os.getsid(pid) for pid in replica.status.pids} == set(replica.status.pids)


def test_ranks_do_not_outlive_a_front_end_that_is_killed_and_the_next_one_cleans_up(model_dir, run_root):
    code = f"""
import asyncio, sys, tempfile
sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r})
tempfile.tempdir = {str(run_root)!r}
from pathlib import Path
from process.replicas import new_replica
async def main():
    replica = new_replica(Path({str(model_dir)!r}), heartbeat_s=0.5)
    await replica.start()
    print(*replica.status.pids, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as front_end:
        try:
            pids = [int(pid) for pid in front_end.stdout.readline().split()]
        finally:
            front_end.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    gone = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(gone, timeout=PATIENCE_S)[1]
    (left,) = run_root.iterdir()
    os.utime(left, (0, 0))  # as if it had happened long ago
    asyncio.run(start_and_close(model_dir))


@in_loop
async def test_the_directory_of_a_replica_that_lives_is_not_taken_for_a_leftover(model_dir, run_root):
    async with running(model_dir, ranks=1) as first:
        (run_dir,) = run_root.iterdir()
        os.utime(run_dir, (0, 0))  # it has served for long
        async with running(model_dir, ranks=1):
            assert run_dir in run_root.iterdir()
            assert len(list(run_root.iterdir())) == 2
        assert len(await read(first.submit(request(1, ECHO)))) == 1


@in_loop
async def test_a_stranger_at_the_socket_is_not_listened_to(model_dir, run_root, caplog):
    async with running(model_dir, ranks=1) as replica:
        (run_dir,) = run_root.iterdir()
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.IDENTITY, b"rank-1")
            stranger.connect(front_end_address(run_dir))
            stranger.send(b"anything")
            await until(lambda: "message dropped  sender=b'rank-1'" in caplog.text)
        assert len(await read(replica.submit(request(1, ECHO)))) == 1
        assert replica.status.restarts == 0


async def start_and_close(model_dir):
    async with running(model_dir, ranks=1):
        pass


# -- starts that fail ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        (
            {"rank_0": {"start": "fail"}, "rank_1": {"start": "fail"}},
            ReplicaFailed,
            r"rank 0 .* unsupported_model: rank 0 cannot run this.*rank 1 .* unsupported_model: rank 1 cannot run this",
        ),
        ({"rank_1": {"start": "fail"}}, ReplicaFailed, r"rank 1 \(pid \d+\) reported unsupported_model"),
        ({"rank_1": {"start": "exit"}}, ReplicaFailed, r"rank 1 \(pid \d+\) ended with exit code 7"),
        ({"rank_1": {"start": "protocol"}}, ReplicaFailed, rf"speaks protocol {PROTOCOL + 1} instead of {PROTOCOL}"),
        ({"rank_1": {"load": "version"}}, CommitFailed, "report other versions: {1: 'another'}.* All ranks went back"),
        (
            {"rank_0": {"start": "twice"}, "rank_1": {"start": "never"}},
            ReplicaFailed,
            "rank 0 .* said twice that it is ready",
        ),
        ({"rank_1": {"start": "limits"}}, ReplicaFailed, r"has blocks=6[45], and rank \d 6[45]"),
        ({"rank_1": {"load": "corrupt"}}, DigestMismatch, r"(?s)staging step_7 failed on 1 of .* 1: this rank got other"),
        ({"rank_0": {"start": "stop"}}, ReplicaFailed, r"rank 0 .* hangs: no heartbeat for \d\.\d s while starting"),
    ],
    ids=["both fail", "fail", "exit", "protocol", "version", "ready twice", "limits", "weights changed", "stopped"],
)
@in_loop
async def test_a_start_that_fails_says_why_and_leaves_nothing(model_dir, run_root, script, error, message):
    write_script(model_dir, **script)
    replica = new_replica(model_dir, heartbeat_s=0.5)
    with pytest.raises(error, match=message):
        await replica.start()
    assert replica.status.state is ReplicaState.FAILED
    assert replica.status.pids == ()
    assert not list(run_root.iterdir())
    await replica.close(drain_s=1)


@in_loop
async def test_a_start_that_takes_too_long_names_the_ranks_that_are_late(model_dir):
    write_script(model_dir, rank_1={"start": "never"})
    replica = new_replica(model_dir, start_timeout_s=2)
    with pytest.raises(DeadlineExceeded, match=r"rank\(s\) 1 did not finish within 2 s"):
        await replica.start()


@in_loop
async def test_a_program_that_cannot_be_started_is_named(model_dir):
    with pytest.raises(ReplicaFailed, match="rank 0 could not be started as /no/such/program"):
        await new_replica(model_dir, program=("/no/such/program",)).start()
    with pytest.raises(ReplicaFailed, match="ended with exit code 1"):
        await new_replica(model_dir, program=("/bin/false",)).start()


@in_loop
async def test_a_directory_without_a_checkpoint_is_refused_before_any_process(model_dir):
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(NotFound, match=r"no \.safetensors"):
        await new_replica(model_dir, program=("/no/such/program",)).start()
    write_weights(model_dir, 1)
    (model_dir / "version.yaml").write_text("nothing")
    with pytest.raises(VersionFileInvalid):
        await new_replica(model_dir, program=("/no/such/program",)).start()


@in_loop
async def test_a_temporary_directory_with_a_long_path_is_refused_with_a_way_out(model_dir, run_root, monkeypatch):
    deep = run_root / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(InvalidInput, match=r"107 bytes.*set TMPDIR"):
        await new_replica(model_dir, program=PROGRAM).start()
    assert not list(deep.iterdir())
    deep.rmdir()
    deep.parent.rmdir()
