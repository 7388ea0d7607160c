"""The small parts of a replica's front end."""

import asyncio
import logging

import pytest

from weightcast.clock import Deadline
from weightcast.engines.base import Pin
from weightcast.engines.embedded.messages import Report, Sampling, Submit
from weightcast.engines.embedded.replica.answers import Answers
from weightcast.engines.embedded.replica.gate import Gate
from weightcast.engines.embedded.replica.job_board import JobBoard
from weightcast.engines.embedded.replica.replica import Replica
from weightcast.engines.embedded.replica.served import Served, StateDir, check_transfer
from weightcast.engines.embedded.replica.verdicts import joined_error
from weightcast.engines.embedded.settings import EngineSettings
from weightcast.errors import (
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    ReplicaFailed,
    StorageFailed,
    UpdateCancelled,
)
from weightcast.store import files
from weightcast.wire.manifest import Manifest


def request(name):
    return Submit(id=name, prompt=(1,), sampling=Sampling(max_tokens=1))


def test_requests_wait_at_a_closed_gate_and_go_on_in_their_order():
    gate, sent = Gate(), []
    gate.close()
    for name in "abc":
        gate.hold(request(name))
    assert gate.forget("b")
    assert not gate.forget("b")
    gate.open(lambda one: sent.append(one.id))
    assert (sent, gate.closed) == (["a", "c"], False)
    gate.open(lambda one: sent.append(one.id))
    assert sent == ["a", "c"]


def test_the_errors_of_ranks_are_one_of_the_kind_that_caused_the_others():
    stopped = (UpdateCancelled.code, "was told to stop")
    error = joined_error("staging v2", {0: stopped, 1: (DigestMismatch.code, "bytes differ")}, 4)
    assert type(error) is DigestMismatch
    assert str(error) == "staging v2 failed on 2 of 4 rank(s): rank 1: bytes differ\nrank 0: was told to stop"
    assert type(joined_error("staging", {0: stopped}, 1)) is UpdateCancelled


def test_an_error_that_several_ranks_have_is_told_once():
    same, other = (DigestMismatch.code, "bytes differ:\n  w"), (DigestMismatch.code, "other bytes differ")
    error = joined_error("staging v2", {2: same, 0: same, 1: other}, 4)
    assert str(error) == "staging v2 failed on 3 of 4 rank(s): ranks 0, 2: bytes differ:\n  w\nrank 1: other bytes differ"


def on_board(scenario):
    async def run():
        return await scenario(JobBoard(2))

    return asyncio.run(run())


def test_a_job_is_done_when_all_ranks_are_and_reports_may_come_early():
    async def scenario(board):
        seen = []
        board.report(Report(rank=0, job=7, done=True, result="zero", nbytes=5, total=5))
        waiting = asyncio.create_task(board.wait(7, "work", Deadline.after(5), lambda *numbers: seen.append(numbers)))
        await asyncio.sleep(0)
        board.report(Report(rank=1, job=7, nbytes=1, total=5))
        await asyncio.sleep(0.01)
        board.report(Report(rank=1, job=8, done=True, result="another job's"))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        board.report(Report(rank=1, job=7, done=True, result="one", nbytes=5, total=5))
        return await waiting, seen

    results, seen = on_board(scenario)
    assert results == ["zero", "one"]
    assert (6, 10) in seen


def test_one_rank_that_fails_ends_the_waiting():
    async def scenario(board):
        board.report(Report(rank=1, job=1, done=True, error=("digest_mismatch", "bytes differ")))
        with pytest.raises(DigestMismatch, match="rank 1: bytes differ"):
            await board.wait(1, "staging", Deadline.after(5))

    on_board(scenario)


def test_a_job_that_takes_too_long_names_the_ranks():
    async def scenario(board):
        board.report(Report(rank=0, job=1, done=True))
        with pytest.raises(DeadlineExceeded, match=r"staging on rank\(s\) 1"):
            await board.wait(1, "staging", Deadline.after(0.01))

    on_board(scenario)


def test_lost_ranks_end_every_job():
    async def scenario(board):
        waiting = asyncio.create_task(board.wait(1, "staging", Deadline.after(5)))
        await asyncio.sleep(0)
        board.fail(ReplicaFailed("rank 1 died"))
        with pytest.raises(ReplicaFailed):
            await waiting

    on_board(scenario)


def test_old_reports_are_forgotten():
    async def scenario(board):
        for job in range(1, 100):
            board.report(Report(rank=0, job=job))
        assert len(board._latest) == 16

    on_board(scenario)


def test_waiting_for_some_answers_is_not_waiting_for_all():
    async def run():
        answers = Answers(4)
        old, new = (answers.open(name, "v1", lambda _: None) for name in ("old", "new"))
        waiting = asyncio.create_task(answers.gone([old]))
        await asyncio.sleep(0)
        assert not waiting.done()
        old.cancel("enough")
        await asyncio.wait_for(waiting, 1)
        assert [one.reason async for one in old] == ["enough"]
        assert list(answers) == [new]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("source", "mode"),
    [
        ("file:///s", "auto"),
        ("/s", "auto"),
        ("snapshot:///s?id=0", "snapshot"),
        ("nixl://h:1", "gdr"),
        ("https://h", "http"),
    ],
)
def test_a_way_of_transfer_goes_with_its_sources(source, mode):
    check_transfer(source, mode)


@pytest.mark.parametrize(("source", "mode"), [("file:///s", "rdma"), ("/s", "http"), ("nixl://h:1", "ipc")])
def test_a_way_of_transfer_that_the_source_does_not_have_is_refused(source, mode):
    with pytest.raises(InvalidInput, match=f"transfer_mode '{mode}'"):
        check_transfer(source, mode)


def version(name, sequence=0, created_s=0.0, root="r"):
    return Manifest(
        version=name, sequence=sequence, step=0, kind="full", created_s=created_s, algorithm="xxh3-128",
        root_digest=f"{root}-{name}", parts=(), tensors=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("newest", "ends"),
    [
        (version("step_6", 6, 60.0), True),
        (version("step_5", 5, 50.0), False),  # what was moved away from
        (version("step_4", 4, 40.0), False),  # what is pinned
        (version("step_3", 3, 30.0), False),  # an older one was announced
        (version("step_10", 6, 60.0), True),  # the order is that of publication, not of names
        (version("step_5", 5, 70.0, root="other"), True),  # it was removed and published again
        (version("step_7", 1, 70.0), True),  # by a trainer that was started again, and counts anew
    ],
)
def test_a_pin_ends_with_what_is_newer_than_what_was_moved_away_from(newest, ends):
    pin = Pin(
        version="step_4", away_from="step_5", why="rollback", since=0.0, sequence=5, created_s=50.0, root_digest="r-step_5"
    )
    assert pin.ends_with(newest) is ends


@pytest.mark.parametrize(("newest", "ends"), [("step_4", False), ("step_5", False), ("step_6", True)])
def test_a_source_without_an_order_has_another_version_or_the_same(newest, ends):
    pin = Pin(version="step_4", away_from="step_5", why="explicit", since=0.0, root_digest="r-step_5")
    assert pin.ends_with(version(newest)) is ends


@pytest.mark.parametrize("before", ["step_1", None])
def test_a_state_that_could_not_be_made_safe_is_taken_back(tmp_path, monkeypatch, before):
    state = StateDir(tmp_path, config="c", follows="")
    if before is not None:
        state.write(Served(version(before), "file:///store"), None)
    failures = iter([True])

    def sync_dir(path, sync=files.sync_dir):
        if next(failures, False):
            raise StorageFailed("sync directory", path, OSError(5, "Input/output error"))
        sync(path)

    monkeypatch.setattr(files, "sync_dir", sync_dir)
    with pytest.raises(StorageFailed):
        state.write(Served(version("step_2"), "file:///store"), None)
    found = state.read()
    assert (found and found[0].version) == before
    state.close()


def test_a_replica_that_has_failed_says_so_once_and_in_one_line(caplog):
    replica = Replica(EngineSettings(model_dir="/nowhere"))
    with caplog.at_level(logging.DEBUG):
        replica.fail("two tensors differ:\n  w\n  b")
        replica.fail("two tensors still differ:\n  w\n  b")
    said = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [str(record.msg) for record in said] == ['replica failed  why="two tensors differ: (and 2 more lines)"']
    assert replica.status.reason == "two tensors still differ:\n  w\n  b"
