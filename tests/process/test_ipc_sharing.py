"""Several engines, trainer ranks and their children on one host: real processes that share memory, and die of themselves."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from .ipc_peers import peers, receiver, trainer, until
from .test_ipc_faults import check_all_right, check_both_ways_work, check_right

DEADLINE_S = 15.0
SOON_S = 5.0  # far from the deadline, on a machine that may be busy


@pytest.fixture
def make():
    with peers() as maker:
        yield maker


@pytest.fixture
def root(memory_dir):
    yield memory_dir / "run"
    assert not list(memory_dir.iterdir())


@pytest.fixture
def end_later():
    """Processes that a peer started."""
    pids: list[int] = []
    yield pids.append
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def memory_of(one):
    """The inodes of the shared memory that a process has mapped."""
    lines = Path(f"/proc/{one.pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:weightcast" in line}


def test_all_engines_of_a_host_read_the_same_memory(make, root):
    train, reading = make(trainer), [make(receiver) for _ in range(4)]
    train.ask("start", root, {})
    for one in reading:
        one.ask("start", root)
    for seed in (1, 2, 3, 4):
        for one in reading:
            one.tell("held", seed, DEADLINE_S)
        train.ask("publish", seed)
        check_all_right(*reading)
    slabs = memory_of(train)
    assert len(slabs) == 2
    assert all(memory_of(one) == slabs for one in reading)
    for one in reading:
        one.ask("close")
        assert not memory_of(one)
    train.ask("close")


def test_an_idle_receiver_lets_go_of_what_a_killed_trainer_left(make, root):
    """Nobody asks it for anything meanwhile."""
    train, reading = make(trainer), make(receiver)
    train.ask("start", root, {})
    reading.ask("start", root)
    before = reading.ask("state")
    check_both_ways_work(train, [reading], 1)
    assert memory_of(reading)
    train.kill()
    until(lambda: not memory_of(reading) and not root.exists(), timeout=SOON_S)
    assert reading.ask("state")["threads"] == before["threads"]


def test_when_both_sides_are_killed_the_next_trainer_finds_the_place_free(make, root):
    train, reading, again, late = make(trainer), make(receiver), make(trainer), make(receiver)
    train.ask("start", root, {})
    reading.ask("start", root)
    check_both_ways_work(train, [reading], 1)
    os.kill(reading.pid, signal.SIGSTOP)
    train.kill()
    reading.kill()
    until(lambda: train.heard() == ("dead",) and reading.heard() == ("dead",))
    assert root.exists()  # nobody was there to notice
    again.ask("start", root, {})
    late.ask("start", root)
    check_both_ways_work(again, [late], 1)
    again.ask("close")


@pytest.mark.parametrize("mode", ["held", "stream", "wait"])
def test_a_child_of_the_trainer_does_not_hide_its_death(make, root, end_later, mode):
    """A worker that loads data inherits every descriptor of the trainer, and outlives it."""
    train, again, reading = make(trainer), make(trainer), make(receiver)
    train.ask("start", root, {})
    reading.ask("start", root)
    check_both_ways_work(train, [reading], 1)
    end_later(train.ask("fork_sleeper"))
    reading.tell(*(("wait", "v2", DEADLINE_S) if mode == "wait" else (mode, 9, DEADLINE_S)))
    time.sleep(0.1)
    killed = time.monotonic()
    train.kill()
    answer = reading.heard()
    assert answer[0] == "SourceFailed"
    assert answer[-1] - killed < SOON_S
    until(lambda: not memory_of(reading) and not root.exists(), timeout=SOON_S)
    again.ask("start", root, {})
    check_both_ways_work(again, [reading], 3)
    again.ask("close")


def test_a_child_of_a_receiver_does_not_hide_its_death(make, root, end_later):
    train, reading = make(trainer), make(receiver)
    train.ask("start", root, {})
    reading.ask("start", root)
    check_both_ways_work(train, [reading], 1)
    end_later(reading.ask("fork_sleeper"))
    reading.kill()
    until(lambda: train.ask("receivers") == 0, timeout=SOON_S)
    train.ask("close")


def test_a_child_of_the_trainer_harms_nothing_when_it_ends(make, root):
    train, reading = make(trainer), make(receiver)
    train.ask("start", root, {})
    reading.ask("start", root)
    for seed in (1, 3, 5):
        check_both_ways_work(train, [reading], seed)
        train.ask("fork_and_collect")
        reading.ask("fork_and_collect")
    train.ask("close")


def test_one_dead_trainer_rank_is_an_error_and_its_successor_is_found(make, root):
    ranks, reading = [make(trainer), make(trainer)], make(receiver)
    for rank, one in enumerate(ranks):
        one.ask("start", root, {"rank": rank, "ranks": 2})
    reading.ask("start", root)
    ranks[0].ask("publish_part", 1, 0)
    ranks[1].ask("publish_part", 1, 1)
    assert check_right(reading.ask_any("held", 1, DEADLINE_S))
    reading.tell("wait", "v1", DEADLINE_S)
    time.sleep(0.1)
    killed = time.monotonic()
    ranks[1].kill()
    answer = reading.heard()
    assert answer[0] == "SourceFailed"
    assert answer[-1] - killed < SOON_S
    ranks[0].ask("publish_part", 2, 0)
    assert reading.ask_any("held", 2, DEADLINE_S)[0] == "SourceFailed"
    until(lambda: not (root / "rank-1").exists())
    again = make(trainer)
    again.ask("start", root, {"rank": 1, "ranks": 2})
    again.ask("publish_part", 2, 1)
    assert check_right(reading.ask_any("held", 2, DEADLINE_S))
    for one in (ranks[0], again):
        one.ask("close")


def test_a_trainer_rank_that_is_killed_in_a_stream_ends_it_while_the_other_one_stalls(make, root):
    """As trainer ranks do that wait for each other in a collective."""
    ranks, reading = [make(trainer), make(trainer)], make(receiver)
    for rank, one in enumerate(ranks):
        one.ask("start", root, {"rank": rank, "ranks": 2})
    reading.ask("start", root)
    for rank, one in enumerate(ranks):
        one.tell("stream_part_slowly", 1, rank)
    reading.tell("stream", 1, DEADLINE_S)
    time.sleep(0.6)
    killed = time.monotonic()
    ranks[1].kill()
    answer = reading.heard()
    assert answer[0] == "SourceFailed"
    assert answer[-1] - killed < SOON_S
    assert ranks[0].heard()[0] == "ReceiversLost"
    ranks[0].ask("close")


@pytest.mark.parametrize("mode", ["held", "stream"])
def test_a_trainer_that_overwrites_its_tensors_at_once_changes_nothing_for_any_receiver(make, root, mode):
    train, reading = make(trainer), [make(receiver) for _ in range(2)]
    train.ask("start", root, {"hold_s": 10, "stall_s": 10})
    for one in reading:
        one.ask("start", root)
    for seed in range(1, 9):
        for one in reading:
            one.tell(mode, seed, DEADLINE_S)
        train.ask("overwrite_after", mode, seed, len(reading))
        check_all_right(*reading)
    train.ask("close")
