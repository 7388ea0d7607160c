"""Whether anything is left behind by the fault trials: threads, open files, child processes, here and in the depots."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .fault_hosts import DepotChild

QUIET_S = 20.0
SPARE_THREADS, SPARE_FILES = 2, 4  # what may still be on its way out, or comes and goes
MAPPED = 64  # files that a depot has mapped, once every version has been asked for


class Growth:
    """Remembers how much there was, and compares."""

    def __init__(self, depots: Mapping[str, DepotChild], quiet: Callable[[], bool]) -> None:
        """`quiet` lets go of everything that is only kept for later, and tells whether it is gone."""
        self._depots, self._quiet = depots, quiet
        self._before = self._counted()
        self._sizes: dict[str, tuple[int, tuple[int, int]]] = {}

    def looked(self) -> dict[str, object]:
        """What there is now, and what of it is too much."""
        problems: list[str] = []
        until = time.monotonic() + QUIET_S
        while True:
            quiet, now = self._quiet(), self._counted()
            grown = [name for name, spare in _SPARES.items() if now[name] > self._before[name] + spare]
            if (quiet and not grown) or time.monotonic() > until:
                break
            time.sleep(0.1)
        if not quiet:
            problems.append("connections or reads are left")
        problems += [f"{name} grew from {self._before[name]} to {now[name]}" for name in grown]
        problems += self._depots_grown(until)
        return {**now, "problems": problems}

    def _depots_grown(self, until: float) -> list[str]:
        problems = []
        for name, depot in self._depots.items():
            if not depot.alive:
                continue
            now = depot.size()
            starts, (threads, files) = self._sizes.get(name, (0, now))
            if starts != depot.starts:
                self._sizes[name] = depot.starts, now
                continue
            while (now[0] > threads + SPARE_THREADS or now[1] > files + MAPPED) and time.monotonic() < until:
                time.sleep(0.1)
                now = depot.size()
            if now[0] > threads + SPARE_THREADS or now[1] > files + MAPPED:
                problems.append(f"depot {name} grew from {(threads, files)} threads and files to {now}")
        return problems

    def _counted(self) -> dict[str, int]:
        gc.collect()
        own = Path("/proc/self")
        children = (own / "task" / str(os.getpid()) / "children").read_text().split()
        depots = [depot for depot in self._depots.values() if depot.alive]
        return {
            "threads": len(list((own / "task").iterdir())),
            "files": len(list((own / "fd").iterdir())) - 2 * len(depots),  # each has two pipes to us
            "other children": len(children) - len(depots),
        }


_SPARES = {"threads": SPARE_THREADS, "files": SPARE_FILES, "other children": 0}
