"""Run by the tests: one rank of several that share a host copy.

    python -m process.host_rank NAME SOURCE HOLD

It is told what to do, one JSON object a line, and tells how that went. As long as the file HOLD is there, it does not say
whether a version fits; it makes HOLD.seen when it is asked.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from .children import TESTS

sys.path.insert(0, str(TESTS / "unit"))

from ipc_pairs import mappings

from weightcast.clock import Deadline
from weightcast.delta.memory import HostMemory
from weightcast.engines.host.copy import HostCopy, StagedVersion, Wanted
from weightcast.engines.host.keeper import SharedHostCopy
from weightcast.errors import WeightcastError
from weightcast.tensors.digest import array_digest
from weightcast.wire.manifest import Manifest

ALARM_S = 100
GRACE_S = 0.5


class Rank:
    """What it does is a method each, and what they return is told."""

    def __init__(self, name: str, source: str, hold: Path) -> None:
        self._source, self._hold = source, hold
        self._staged: StagedVersion | None = None
        self._copy = SharedHostCopy(
            name, lambda make: HostCopy(name=name, make_buffers=make), self._fits, grace_s=GRACE_S
        )  # fmt: skip

    def _fits(self, manifest: Manifest) -> None:
        while self._hold.exists():
            self._hold.with_suffix(".seen").touch()
            time.sleep(0.01)

    def stage(self, version: str, timeout: float = 30.0) -> dict[str, Any]:
        self._staged = None
        wanted = Wanted(self._source, version)
        self._staged = self._copy.stage(wanted, fits=lambda _: None, deadline=Deadline.after(timeout))
        return {"version": self._staged.manifest.version, "former": self._digests(self._staged.former), **self.look()}

    def look(self) -> dict[str, Any]:
        assert self._staged is not None
        return {"digests": self._digests(self._staged.arrays), "mapped": sorted(set(mappings()))}

    def halt(self, writes: int) -> None:
        """Stop for good in the middle of a delta, after so many writes into memory and half of the next one."""
        write, left = HostMemory.write, iter(range(writes))

        def slow(memory: HostMemory, indices: Any, values: Any) -> None:
            if next(left, None) is None:
                half = len(values) // 2
                write(memory, indices[:half], values[:half])
                self._hold.with_suffix(".seen").touch()
                time.sleep(ALARM_S)
            write(memory, indices, values)

        HostMemory.write = slow  # type: ignore[method-assign]

    def scribble(self) -> None:
        assert self._staged is not None
        for array in self._staged.arrays.values():
            array.reshape(-1).view(np.uint8)[...] = 0xAB

    def commit(self) -> None:
        assert self._staged is not None
        self._copy.commit(self._staged)
        self._staged = None

    def fork(self) -> int:
        """A child that does nothing, as those that load data do, for as long as this process is waited for."""
        child = os.fork()
        if child == 0:
            time.sleep(ALARM_S)
            os._exit(0)
        return child

    def close(self) -> dict[str, Any]:
        self._staged = None
        self._copy.close()
        deadline = Deadline.after(10)
        while mappings() and deadline.remaining():
            time.sleep(0.01)
        return {"mapped": mappings(), "threads": [one.name for one in threading.enumerate() if "keeper" in one.name]}

    @staticmethod
    def _digests(arrays: Any) -> dict[str, str]:
        return {name: array_digest(array) for name, array in arrays.items()}


def main() -> None:
    """Do as told."""
    signal.alarm(ALARM_S)  # whoever waits for a line of this process waits no longer than this
    rank = Rank(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    for line in sys.stdin:
        told = json.loads(line)
        try:
            found = {"did": getattr(rank, told.pop("do"))(**told)}
        except WeightcastError as error:
            found = {"error": error.code, "message": str(error)}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
