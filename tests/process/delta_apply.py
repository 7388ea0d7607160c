"""Run by the tests: kills a process that applies an edit to shared memory, wherever it is, and recovers from its journal.

    python -m process.delta_apply MATRIX DIRECTORY [--sampled]

Prints one JSON object. weightcast is imported once; whoever is killed is a fork of this process, stopped at a chosen point,
or not at all, and then killed by its process id.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weightcast import delta
from weightcast.delta.memory import LaneMemory, memory_of
from weightcast.errors import DeltaCorrupt
from weightcast.tensors.dtypes import DType
from weightcast.tensors.spec import TensorSpec

CHILD_LIMIT_S = 90
LARGE_LANES = 1 << 21  # long enough to be killed in the middle of, without being told to stop

Point = tuple[int, str]  # the number of a write, and "before", "within" or "after" it
Act = Callable[[Mapping[str, LaneMemory]], None]


# -- states in a file that processes share -----------------------------------------------------------------------------


class Shared:
    """Tensors that lie one after the other in a file, mapped by whoever looks at them."""

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        self.path, self.specs = path, specs

    def arrays(self) -> dict[str, Any]:
        room = np.memmap(self.path, dtype=np.uint8, mode="r+")
        arrays, at = {}, 0
        for name, spec in self.specs.items():
            arrays[name] = room[at : at + spec.nbytes].view(spec.dtype.numpy).reshape(spec.shape)
            at += spec.nbytes
        return arrays

    def memories(self) -> dict[str, LaneMemory]:
        return {name: memory_of(name, array) for name, array in self.arrays().items()}

    def fill(self, state: Mapping[str, Any]) -> None:
        self.path.write_bytes(b"".join(state[name].tobytes() for name in self.specs))

    def judge(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
        """For each tensor, whether it is Old, New, Equal in both, or a Mix."""
        letters = ""
        for name, array in self.arrays().items():
            found, before, after = (one.tobytes() for one in (array, old[name], new[name]))
            letters += "E" if found == before == after else "O" if found == before else "N" if found == after else "M"
        return letters


def sample(*, large: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two states: sparse changes, changes everywhere, tensors that stay, wide elements, one element."""
    rng = np.random.default_rng(5)
    kinds: list[tuple[DType, tuple[int, ...], float]] = [
        (DType.BF16, (40, 30), 0.05), (DType.F32, (300,), 1.0), (DType.BF16, (10,), 0.0), (DType.F8_E4M3, (500,), 0.02),
        (DType.I64, (60,), 0.1), (DType.F16, (20, 20), 0.5), (DType.U8, (1,), 1.0), (DType.BF16, (31, 17), 0.1),
    ]  # fmt: skip
    if large:
        kinds = [(DType.U16, (LARGE_LANES,), 1.0), (DType.U8, (LARGE_LANES,), 0.2), (DType.U16, (LARGE_LANES,), 1.0)]
    old, new = {}, {}
    for number, (dtype, shape, density) in enumerate(kinds):
        count = int(np.prod(shape))
        lanes = rng.integers(0, 1 << (8 * dtype.itemsize), count, dtype=f"u{dtype.itemsize}", endpoint=False)
        steps = rng.integers(1, 9, count).astype(lanes.dtype) * (rng.random(count) < density)
        old[f"t{number}"] = lanes.view(dtype.numpy).reshape(shape)
        new[f"t{number}"] = (lanes + steps.astype(lanes.dtype)).view(dtype.numpy).reshape(shape)
    return old, new


# -- those who are killed ----------------------------------------------------------------------------------------------


class Stopping:
    """Memory whose owner stops at a chosen write: before it, when half of it is done, or after it."""

    def __init__(self, memory: LaneMemory, counter: list[int], point: Point, stop: Callable[[], None]) -> None:
        self.spec = memory.spec
        self._memory, self._counter, self._point, self._stop = memory, counter, point, stop

    def read(self, indices: Any) -> Any:
        return self._memory.read(indices)

    def moved(self, indices: Any, steps: Any) -> Any:
        return self._memory.moved(indices, steps)

    def write(self, indices: Any, values: Any) -> None:
        number, self._counter[0] = self._counter[0], self._counter[0] + 1
        here = self._point[1] if number == self._point[0] else ""
        if here == "before":
            self._stop()
        if here == "within":
            half = (len(values) + 1) // 2
            places = np.arange(half, dtype=np.uint32) if indices is None else indices[:half]
            self._memory.write(places, values[:half])
            self._stop()
        self._memory.write(indices, values)
        if here == "after":
            self._stop()


def killed(work: Callable[[Callable[[], None]], None], *, after_s: float | None = None) -> None:
    """Fork; the child works until it calls `stop` (or for a while), and is killed there by its process id."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            signal.alarm(CHILD_LIMIT_S)

            def stop() -> None:
                os.write(writer, b"!")
                while True:
                    signal.pause()

            work(stop)
        finally:
            os._exit(1)
    os.close(writer)
    try:
        if after_s is None:
            assert os.read(reader, 1) == b"!", "the child ended before it came to where it was to be killed"
        else:
            os.read(reader, 1)
            time.sleep(after_s)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reader)
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the child ended with {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def apply_until(shared: Shared, packed: bytes, journal: Path, point: Point, stop: Callable[[], None]) -> None:
    """What a receiver does: work the edit out, put it on a medium, and only then write."""
    memories = shared.memories()
    edit = delta.prepare(memories, delta.decode(packed, shared.arrays(), threads=1))
    write_synced(journal, edit.to_journal())
    counter = [0]
    edit.finish({name: Stopping(memory, counter, point, stop) for name, memory in memories.items()})
    stop()


def recover_until(shared: Shared, journal: Path, forward: bool, point: Point, stop: Callable[[], None]) -> None:
    """What whoever comes next does."""
    edit = delta.Edit.from_journal(journal.read_bytes())
    counter = [0]
    memories = {name: Stopping(memory, counter, point, stop) for name, memory in shared.memories().items()}
    (edit.finish if forward else edit.undo)(memories)
    stop()


# -- the matrices ------------------------------------------------------------------------------------------------------


class Matrix:
    """One directory, one pair of states, and what was found wrong."""

    def __init__(self, directory: Path, *, large: bool = False) -> None:
        self.old, self.new = sample(large=large)
        self.packed = delta.encode(self.old, self.new, threads=1)
        specs = delta.decode(self.packed, self.old, threads=1).specs
        self.shared = Shared(directory / "weights", specs)
        self.journal = directory / "journal"
        self.writes = sum(self.old[name].tobytes() != self.new[name].tobytes() for name in specs)
        self.points: list[Point] = [(at, moment) for at in range(self.writes) for moment in ("before", "within", "after")]
        self.left: Counter[str] = Counter()
        self.problems: list[str] = []
        self.kills = 0

    def start(self) -> None:
        self.shared.fill(self.old)
        self.journal.unlink(missing_ok=True)

    def kill(self, work: Callable[[Callable[[], None]], None], **how: float) -> str:
        killed(work, **how)
        self.kills += 1
        found = self.shared.judge(self.old, self.new)
        self.left[found] += 1
        return found

    def recover(self, where: str, directions: list[bool]) -> None:
        """Finish or undo from the file, as often as asked; the state must be exactly new or old after each."""
        for number, forward in enumerate(directions):
            edit = delta.Edit.from_journal(self.journal.read_bytes())
            (edit.finish if forward else edit.undo)(self.shared.memories())
            found = self.shared.judge(self.old, self.new)
            if set(found) - set("NE" if forward else "OE"):
                self.problems.append(f"{where}: {'finish' if forward else 'undo'} {number} left {found}")

    def report(self) -> dict[str, Any]:
        return {"kills": self.kills, "left": self.left, "problems": self.problems, "writes": self.writes}


RECOVERIES = [[True], [False], [True, True, False, False, True], [False, False, True, True, False]]


def apply_killed(directory: Path, *, sampled: bool) -> dict[str, Any]:
    """Killed at every point of an apply, then finished or undone; in a sample one after the other."""
    matrix = Matrix(directory)
    for number, point in enumerate(matrix.points):
        for directions in RECOVERIES[number % len(RECOVERIES) :][:1] if sampled else RECOVERIES:
            matrix.start()
            found = matrix.kill(lambda stop, p=point: apply_until(matrix.shared, matrix.packed, matrix.journal, p, stop))
            matrix.recover(f"killed {point[1]} write {point[0]} ({found})", directions)
    return matrix.report()


def recovery_killed(directory: Path, *, sampled: bool) -> dict[str, Any]:
    """Those who recover are killed too, one after the other, going either way; the last one is not."""
    matrix = Matrix(directory)
    choice = random.Random(7)
    for number, point in enumerate(matrix.points):
        for forward in (number % 2 == 0,) if sampled else (True, False):
            matrix.start()
            matrix.kill(lambda stop, p=point: apply_until(matrix.shared, matrix.packed, matrix.journal, p, stop))
            for _ in range(2):
                way, there = choice.random() < 0.5, choice.choice(matrix.points)
                matrix.kill(lambda stop, w=way, t=there: recover_until(matrix.shared, matrix.journal, w, t, stop))
            matrix.recover(f"killed {point} and twice more", [forward, not forward])
    return matrix.report()


def journal_killed(directory: Path, *, sampled: bool) -> dict[str, Any]:
    """Killed while the journal is written: what there is of it is refused, and nothing was touched."""
    matrix = Matrix(directory)
    matrix.start()
    memories = matrix.shared.memories()
    whole = delta.prepare(memories, delta.decode(matrix.packed, matrix.old, threads=1)).to_journal()
    step = len(whole) // (5 if sampled else 20)
    lengths = sorted({0, 1, 31, 32, 33, len(whole) // 2, len(whole) - 1, *range(40, len(whole), step)})
    for length in lengths:
        matrix.start()

        def work(stop: Callable[[], None], length: int = length) -> None:
            edit = delta.prepare(matrix.shared.memories(), delta.decode(matrix.packed, matrix.shared.arrays(), threads=1))
            write_synced(matrix.journal, edit.to_journal()[:length])
            stop()

        found = matrix.kill(work)
        if set(found) - set("OE"):
            matrix.problems.append(f"after {length} bytes of the journal the state is {found}")
        try:
            delta.Edit.from_journal(matrix.journal.read_bytes())
            matrix.problems.append(f"{length} of {len(whole)} bytes pass for a journal")
        except DeltaCorrupt:
            pass
    return matrix.report()


def any_moment(directory: Path, *, sampled: bool) -> dict[str, Any]:
    """Killed at no point in particular, while going back and forth as fast as it can."""
    matrix = Matrix(directory, large=True)
    choice = random.Random(11)
    matrix.start()
    edit = delta.prepare(matrix.shared.memories(), delta.decode(matrix.packed, matrix.old, threads=1))
    journal = edit.to_journal()
    for number in range(60):
        matrix.start()

        def work(stop: Callable[[], None]) -> None:
            memories = matrix.shared.memories()
            write_synced(matrix.journal, journal)
            os.closerange(3, 64)  # the pipe among them: the parent starts to count
            while True:
                edit.finish(memories)
                edit.undo(memories)

        found = matrix.kill(work, after_s=choice.uniform(0, 0.04))
        matrix.recover(f"killed at some moment ({found})", [number % 2 == 0, number % 2 == 1])
        if number >= (3 if sampled else 11) and any(len(set(left)) > 1 or "M" in left for left in matrix.left):
            break
    return matrix.report()


MATRICES = {
    "apply": apply_killed,
    "recovery": recovery_killed,
    "journal": journal_killed,
    "any_moment": any_moment,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("matrix", choices=MATRICES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sampled", action="store_true")
    chosen = parser.parse_args()
    print(json.dumps(MATRICES[chosen.matrix](chosen.directory, sampled=chosen.sampled)))


if __name__ == "__main__":
    main()
