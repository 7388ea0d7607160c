"""Processes that share one host copy: one memory for all of them, and whoever dies or hangs takes nobody along."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from .children import TESTS

sys.path.insert(0, str(TESTS / "unit"))

from depot_stand import eventually
from host_copies import published, state

from weightcast.tensors.digest import array_digest


class Told:
    """A rank, and what it says."""

    def __init__(self, child) -> None:
        self.child = child

    def tell(self, do, **options):
        print(json.dumps({"do": do, **options}), file=self.child.stdin, flush=True)

    def hear(self):
        line = self.child.stdout.readline()
        assert line, self.child.stderr.read()[-4000:]
        return json.loads(line)

    def __call__(self, do, **options):
        self.tell(do, **options)
        said = self.hear()
        assert "error" not in said, said
        return said["did"]

    def refused(self):
        return self.hear()["error"]

    def send(self, number):
        os.kill(self.child.pid, number)
        if number == signal.SIGKILL:
            self.child.wait(20)


@pytest.fixture
def store(tmp_path, request):
    """Full versions, unless deltas matter: a process takes a second to get ready for its first one."""
    return published(tmp_path / "store", getattr(request, "param", "fffff"))


@pytest.fixture
def hold(tmp_path):
    return tmp_path / "hold"


@pytest.fixture
def ranks(start, store, hold, tmp_path):
    """The first has staged step_0, so it is the keeper."""
    name = f"test-{os.getpid()}-{tmp_path.name}"
    made = [Told(start("host_rank", name, f"file://{store.path}", hold)) for _ in range(3)]
    for one in made:
        one("stage", version="step_0")
    yield made
    hold.unlink(missing_ok=True)
    for one in made:
        if one.child.poll() is None:
            one.send(signal.SIGCONT)


def digests(number):
    return {name: array_digest(array) for name, array in state(number).items() if name != "head"}


def stuck(hold, *waiting):
    """Let ranks ask for step_1 while the keeper does not get on with it."""
    hold.touch()
    for one in waiting:
        one.tell("stage", version="step_1")
    eventually(hold.with_suffix(".seen").exists, "the question")


@pytest.mark.parametrize("store", ["fddfd"], indirect=True)
def test_ranks_share_one_memory_and_cannot_spoil_it(ranks):
    for one in ranks:
        one("commit")
    for number, before in ((1, 0), (2, 1), (3, 2), (4, 3)):
        said = [one("stage", version=f"step_{number}") for one in ranks]
        assert [one["digests"] for one in said] == [digests(number)] * 3
        assert [one["former"] for one in said] == [digests(before)] * 3
        for one in said[1:]:  # the keeper also has memory that waits for a whole version
            assert set(one["mapped"]) <= set(said[0]["mapped"])
            assert len(one["mapped"]) == (2 if number == 3 else 1)
        ranks[1]("scribble")
        assert ranks[1]("look")["digests"] != digests(number)
        assert [ranks[at]("look")["digests"] for at in (0, 2)] == [digests(number)] * 2
        for one in ranks:
            one("commit")
    assert len(said[0]["mapped"]) == 2
    for one in ranks:
        assert one("close") == {"mapped": [], "threads": []}


def test_a_keeper_that_is_killed_is_noticed_at_once_and_another_takes_its_place(ranks, hold):
    keeper, second, third = ranks
    child = keeper("fork")  # it must not keep the place of its parent
    stuck(hold, second)

    keeper.send(signal.SIGKILL)

    assert second.refused() == "source_failed"
    hold.unlink()
    assert third("look")["digests"] == digests(0)  # what was staged outlives its keeper
    said = [one("stage", version="step_2") for one in (second, third)]
    assert [one["digests"] for one in said] == [digests(2)] * 2
    assert said[0]["mapped"] == said[1]["mapped"]
    os.kill(child, signal.SIGKILL)
    for one in (second, third):
        one("commit")
    assert third("stage", version="step_3")["former"] == digests(2)


@pytest.mark.parametrize("store", ["fdd"], indirect=True)
@pytest.mark.parametrize("reading", [False, True], ids=["nobody reads", "a rank reads"])
def test_a_keeper_that_is_killed_while_it_writes_a_delta_leaves_nothing_torn_behind(ranks, hold, reading):
    keeper, second, third = ranks
    for one in ranks[: 2 if reading else 3]:
        one("commit")
    keeper("halt", writes=1)
    keeper.tell("stage", version="step_1")
    eventually(hold.with_suffix(".seen").exists, "the first half of a write")
    second.tell("stage", version="step_1")

    keeper.send(signal.SIGKILL)

    answer = second.hear()
    if "error" in answer:
        assert answer["error"] == "source_failed"
    else:  # it asked only after the keeper had died, and keeps the copy itself now
        assert answer["did"]["digests"] == digests(1)
    if reading:
        assert third("look")["digests"] == digests(0)
    for number in (1, 2):
        assert [one("stage", version=f"step_{number}")["digests"] for one in (second, third)] == [digests(number)] * 2
        for one in (second, third):
            one("commit")


def test_followers_that_die_leave_the_others_alone(ranks, hold):
    keeper, second, third = ranks
    stuck(hold, second, third)
    second.send(signal.SIGKILL)
    hold.unlink()
    assert third.hear()["did"]["digests"] == digests(1)
    third.send(signal.SIGKILL)
    for number in (1, 3):
        assert keeper("stage", version=f"step_{number}")["digests"] == digests(number)
        keeper("commit")
    assert len(keeper("stage", version="step_4")["mapped"]) <= 3


def test_a_keeper_that_is_stopped_is_not_waited_for_beyond_the_deadline(ranks):
    keeper, second, third = ranks
    keeper.send(signal.SIGSTOP)
    for one in (second, third):
        one.tell("stage", version="step_1", timeout=0.2)
    assert [second.refused(), third.refused()] == ["deadline_exceeded"] * 2
    keeper.send(signal.SIGCONT)
    assert [one("stage", version="step_1")["digests"] for one in ranks] == [digests(1)] * 3
