"""The limit of a commit by copy: as many processes as there are ranks, all at once, each copying a shard's worth of memory.

`Copiers` is the end of the bench, `python -m weightcast.bench.pause_copies` one of the processes. Each copies from warm
memory to warm memory, in as many arrays of the same sizes as a rank has parameters.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np

from weightcast.errors import DeadlineExceeded, ReplicaFailed

PROGRAM = (sys.executable, "-m", "weightcast.bench.pause_copies")
_PATIENCE_S = 60.0
_LEAD_S = 0.02  # until all have read when to begin


class Copiers:
    """The processes that copy. An async context manager; they end with it, or with this process."""

    def __init__(self, sizes: Sequence[Sequence[int]]) -> None:
        self._sizes = sizes  # bytes of each array, for each process
        self._children: list[asyncio.subprocess.Process] = []

    async def measure(self, rounds: int) -> list[float]:
        """Seconds that copying takes, round by round: those of the slowest process, from the moment at which all begin."""
        return [await self._round() for _ in range(rounds)]

    async def _round(self) -> float:
        begin = time.monotonic() + _LEAD_S
        for child in self._children:
            if child.stdin is not None:
                child.stdin.write(f"{begin!r}\n".encode())
        return max([float(await self._line(child)) for child in self._children])

    async def _line(self, child: asyncio.subprocess.Process) -> bytes:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                line = await child.stdout.readline() if child.stdout is not None else b""
        except TimeoutError:
            raise DeadlineExceeded("copying memory", _PATIENCE_S) from None
        if not line:
            raise ReplicaFailed("a process that copies memory for comparison has ended: is there too little of it?")
        return line

    async def __aenter__(self) -> Self:
        try:
            for sizes in self._sizes:
                child = await asyncio.create_subprocess_exec(
                    *PROGRAM,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C at the terminal reaches the bench alone
                )
                self._children.append(child)
                if child.stdin is not None:
                    child.stdin.write(json.dumps(list(sizes)).encode() + b"\n")
            for child in self._children:
                await self._line(child)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.kill()  # it holds nothing that would have to be put in order
        for child in self._children:
            await child.wait()
        self._children = []


def main() -> None:
    """Read the sizes, say that all memory is warm, then copy whenever told to, and tell the seconds. Ends with its input."""
    lines, told = sys.stdin.buffer, sys.stdout.buffer
    sizes = json.loads(lines.readline())
    pairs = [(np.ones(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8)) for nbytes in sizes]
    for source, target in pairs:
        np.copyto(target, source)  # zeroed memory is not there before it is written
    told.write(b"warm\n")
    told.flush()
    while line := lines.readline():
        begin = float(line)
        while time.monotonic() < begin:
            pass
        for source, target in pairs:
            np.copyto(target, source)
        told.write(f"{time.monotonic() - begin!r}\n".encode())
        told.flush()


if __name__ == "__main__":
    main()
