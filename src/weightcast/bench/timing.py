"""Timing on a machine that others use too: what is compared runs in turn, so that their noise hits all of it alike.

Speeds are compared by the minima over the rounds. In one run of 60 rounds on a shared machine (1 % of 134 million elements)
these were the more stable: from one window of 15 rounds to the next a ratio of minima varied by 1 to 3 %, one of medians
by 6 to 20 %. Much of that is the system time NumPy's search takes for fresh memory: from 16 to over 200 ms. Minima do not
help where a core is taken throughout the run, nor against differences between one run and the next.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

Task = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """The seconds that one task took, round by round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """What it usually takes here and now."""
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        """What it takes undisturbed: what speeds are computed from."""
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """How far the middle half of the rounds lies apart, over the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median


def cpu_s(pid: int) -> float:
    """The CPU seconds of a process so far: of all its threads, those that have ended included, and of no child."""
    return time.clock_gettime(~pid << 3 | 2)  # what clock_getcpuclockid(3) makes of a process on Linux


def interleaved(tasks: Mapping[str, Task], *, rounds: int) -> dict[str, Timing]:
    """Warm up every task once, then run all in turn, A B C A B C …, `rounds` times. Results are dropped off the clock."""
    for task in tasks.values():
        task()
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    with _no_garbage_collection():
        for _ in range(rounds):
            for name, task in tasks.items():
                seconds[name].append(_clocked(task))
    return {name: Timing(tuple(taken)) for name, taken in seconds.items()}


def _clocked(task: Task) -> float:
    started = time.perf_counter()
    result = task()
    taken = time.perf_counter() - started
    del result  # only now: giving memory back is no part of the task
    return taken


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
