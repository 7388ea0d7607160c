"""An apply that fails or dies anywhere can be finished or undone: the state is exactly old or exactly new, in the end."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from weightcast import delta
from weightcast.delta.memory import memory_of

from .children import report_of
from .delta_apply import sample


class Broke(Exception):
    """What happens to memory."""


class Faults:
    """Fails at chosen writes, counted over all tensors; when half of the values are there, or before any is."""

    def __init__(self, *numbers: int, half: bool = False) -> None:
        self.numbers, self.half, self.count = set(numbers), half, 0

    def strikes(self) -> bool:
        self.count += 1
        return self.count - 1 in self.numbers


class Flaky:
    """Memory that fails when it is told to."""

    def __init__(self, memory, faults):
        self.spec, self._memory, self._faults = memory.spec, memory, faults

    def read(self, indices):
        return self._memory.read(indices)

    def moved(self, indices, steps):
        return self._memory.moved(indices, steps)

    def write(self, indices, values):
        if self._faults.strikes():
            if self._faults.half:
                half = (len(values) + 1) // 2
                self._memory.write(np.arange(half, dtype=np.uint32) if indices is None else indices[:half], values[:half])
            raise Broke(self.spec.name)
        self._memory.write(indices, values)


class Bench:
    """A state in memory, an edit of it, and what each tensor is at the moment."""

    def __init__(self):
        self.old, self.new = sample()
        self.state = {name: array.copy() for name, array in self.old.items()}
        self.changed = [name for name in self.old if self.old[name].tobytes() != self.new[name].tobytes()]
        packed = delta.encode(self.old, self.new)
        self.edit = delta.prepare(self.memories(), delta.decode(packed, self.state))

    def memories(self, faults=None):
        plain = {name: memory_of(name, array) for name, array in self.state.items()}
        return {name: Flaky(memory, faults) for name, memory in plain.items()} if faults else plain

    def letters(self):
        """Old, New or Mixed, for each tensor that changes."""
        letters = ""
        for name in self.changed:
            found = self.state[name].tobytes()
            letters += "O" if found == self.old[name].tobytes() else "N" if found == self.new[name].tobytes() else "M"
        return letters

    def check(self, letter):
        assert set(self.letters()) == {letter}
        same = self.new if letter == "N" else self.old
        assert all(array.tobytes() == same[name].tobytes() for name, array in self.state.items())

    def act(self, forward, faults=None):
        """Whether it came through."""
        try:
            (self.edit.finish if forward else self.edit.undo)(self.memories(faults))
        except Broke:
            return False
        return True


WRITES = sum(old.tobytes() != new.tobytes() for old, new in zip(*map(dict.values, sample()), strict=True))


# -- exceptions ----------------------------------------------------------------------------------------------------


@pytest.mark.untraced
@pytest.mark.parametrize("half", [False, True], ids=["before", "within"])
@pytest.mark.parametrize("at", range(WRITES))
@pytest.mark.parametrize("first", [True, False], ids=["finish", "undo"])
def test_a_write_that_fails_is_made_good_by_the_next_attempt_in_either_direction(first, at, half):
    for then in (True, False):
        bench = Bench()
        if not first:
            bench.edit.finish(bench.memories())
        assert not bench.act(first, Faults(at, half=half))
        passed, rest = bench.letters()[:at], bench.letters()[at + 1 :]
        assert set(passed) <= {"N" if first else "O"}
        assert set(rest) <= {"O" if first else "N"}
        for _ in range(3):
            assert bench.act(then)
            bench.check("N" if then else "O")


@pytest.mark.untraced
@pytest.mark.parametrize("half", [False, True], ids=["before", "within"])
@pytest.mark.parametrize("at", range(WRITES))
def test_failing_again_and_again_loses_nothing(at, half):
    """The finish fails, the undo fails too, at every other place, and so on: the first that comes through has it right."""
    for other in range(WRITES):
        for ending in (True, False):
            bench = Bench()
            assert not bench.act(True, Faults(at, half=half))
            assert not bench.act(False, Faults(other, half=half))
            assert not bench.act(True, Faults(other, half=not half))
            assert not bench.act(ending, Faults(at))
            assert bench.act(ending)
            bench.check("N" if ending else "O")


@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(40))
def test_any_story_ends_well(seed):
    choice = random.Random(seed)
    bench = Bench()
    for _ in range(choice.randint(1, 12)):
        faults = [number for number in range(WRITES) if choice.random() < 0.2]
        bench.act(choice.random() < 0.5, Faults(*faults, half=choice.random() < 0.5))
    ending = choice.random() < 0.5
    assert bench.act(ending)
    bench.check("N" if ending else "O")


@pytest.mark.untraced
@pytest.mark.parametrize("half", [False, True], ids=["before", "within"])
@pytest.mark.parametrize("at", range(WRITES))
def test_apply_undoes_a_failure_at_any_write(at, half, monkeypatch):
    bench = Bench()
    packed = delta.encode(bench.old, bench.new)
    faults = Faults(at, half=half)
    module = sys.modules["weightcast.delta.apply"]
    monkeypatch.setattr(module, "memory_of", lambda name, tensor: Flaky(memory_of(name, tensor), faults))
    with pytest.raises(Broke):
        delta.apply(bench.state, packed)
    bench.check("O")
    delta.apply(bench.state, packed)
    bench.check("N")


# -- what others do, to show that these tests can fail ---------------------------------------------------------------


class XorDelta:
    """The way of a peer: differences are combined with what is there, tensor by tensor, and checked at the end."""

    def __init__(self, old, new):
        self._old, self._new = old, new
        self._masks = {name: self._bits(old[name]) ^ self._bits(new[name]) for name in old}

    @staticmethod
    def _bits(array):
        return array.reshape(-1).view(np.uint8)

    def apply(self, state, stop_before=None):
        for number, (name, mask) in enumerate(self._masks.items()):
            if number == stop_before:
                raise Broke(name)
            bits = self._bits(state[name])
            bits ^= mask
        if any(state[name].tobytes() != self._new[name].tobytes() for name in state):
            raise ValueError("the checksum of the new state is wrong")


def letters(state, old, new):
    known = {name: {old[name].tobytes(): "O", new[name].tobytes(): "N"} for name in state}
    return "".join(known[name].get(array.tobytes(), "M") for name, array in state.items())


@pytest.fixture
def eight(rng):
    """Eight tensors that all change."""
    old = {f"t{number}": rng.integers(0, 1 << 16, 100, dtype=np.uint16) for number in range(8)}
    return old, {name: array + np.uint16(1) for name, array in old.items()}


def test_a_naive_delta_that_was_cut_off_never_converges(eight):
    old, new = eight
    state = {name: array.copy() for name, array in old.items()}
    naive = XorDelta(old, new)
    with pytest.raises(Broke):
        naive.apply(state, stop_before=3)
    seen = [letters(state, old, new)]
    for _ in range(10):
        with pytest.raises(ValueError, match="checksum"):
            naive.apply(state)
        seen.append(letters(state, old, new))
    assert seen == ["NNNOOOOO", "OOONNNNN"] * 5 + ["NNNOOOOO"]


def test_the_same_story_with_an_edit_converges_at_once(eight):
    old, new = eight
    state = {name: array.copy() for name, array in old.items()}
    memories = {name: memory_of(name, array) for name, array in state.items()}
    edit = delta.prepare(memories, delta.decode(delta.encode(old, new), old))
    faults = Faults(3)
    with pytest.raises(Broke):
        edit.finish({name: Flaky(memory, faults) for name, memory in memories.items()})
    assert letters(state, old, new) == "NNNOOOOO"
    for _ in range(3):
        edit.finish(memories)
        assert letters(state, old, new) == "NNNNNNNN"


# -- kills ---------------------------------------------------------------------------------------------------------


def check(report, record_property, at_least):
    summary = f"{report['kills']} kills, which left {report['left']}"
    record_property("kills", summary)
    print(summary)
    assert not report["problems"], f"{len(report['problems'])} problems after {summary}:\n" + "\n".join(report["problems"])
    assert report["kills"] >= at_least


def matrix_of(name, form, memory_dir):
    """The report of a matrix, in its sampled or its full form."""
    return report_of("delta_apply", name, memory_dir, *(["--sampled"] if form == "sampled" else []))


def test_an_apply_killed_anywhere_is_finished_or_undone_from_its_journal(form, memory_dir, record_property):
    report = matrix_of("apply", form, memory_dir)

    check(report, record_property, at_least=(1 if form == "sampled" else 4) * 3 * report["writes"])
    kinds = "".join(report["left"])
    assert "M" in kinds, "no kill was in the middle of a tensor"
    assert any({"O", "N"} <= set(left) for left in report["left"]), "no kill was between tensors"


def test_those_who_recover_may_be_killed_as_well(form, memory_dir, record_property):
    report = matrix_of("recovery", form, memory_dir)

    check(report, record_property, at_least=(1 if form == "sampled" else 2) * 3 * 3 * report["writes"])


def test_a_kill_before_the_journal_is_whole_leaves_the_old_state_and_no_journal(form, memory_dir, record_property):
    report = matrix_of("journal", form, memory_dir)

    check(report, record_property, at_least=10 if form == "sampled" else 20)
    assert set("".join(report["left"])) <= {"O", "E"}


def test_a_kill_at_any_moment_is_recovered_from(form, memory_dir, record_property):
    report = matrix_of("any_moment", form, memory_dir)

    check(report, record_property, at_least=4 if form == "sampled" else 12)
    assert any("M" in left or {"O", "N"} <= set(left) for left in report["left"]), "no kill was in the middle of anything"
