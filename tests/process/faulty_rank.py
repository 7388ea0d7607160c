"""A real rank that fails once, where and how it is told: `Replica(program=(sys.executable, "…/faulty_rank.py"))`.

Faults lie in the model directory, one file `fault-<rank>-<n>.json` each, and are read when an update begins to be staged. A
fault is renamed to `struck-…` before it strikes, so it strikes once, and a rank that was started again is healthy.
"""

from __future__ import annotations

import functools
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightcast import errors
from weightcast.engines.embedded.ranks import live, part, process
from weightcast.engines.embedded.ranks.group import RankGroup
from weightcast.store import byte_file
from weightcast.tensors.flat import Array, Piece, Pieces, flat_bytes
from weightcast.transports.file import FileReceiver
from weightcast.worker.commits.delta import DeltaCommit, DeltaSwapCommit
from weightcast.worker.commits.inplace import StreamedCommit
from weightcast.worker.commits.staged import CopyCommit, StagedCommit, SwapCommit
from weightcast.worker.stager import Stager
from weightcast.worker.targets.torch_target import TorchSlot

ERRORS: dict[str, Callable[[], BaseException]] = {
    "OSError": lambda: OSError(5, "Input/output error"),
    "RuntimeError": lambda: RuntimeError("out of luck"),
    "MemoryError": MemoryError,
    "CommitFailed": lambda: errors.CommitFailed("the rank says so."),
}


@dataclass
class Fault:
    """`at` counts the times that the point is passed, from 0; in the writing of parameters it may be a place."""

    path: Path
    point: str
    do: str
    at: int | str = 0
    error: str = "RuntimeError"
    seconds: float = 3600.0


class Faults:
    """The faults of this rank: those that are armed, and how often each point was passed since."""

    def __init__(self) -> None:
        self.armed: list[Fault] = []
        self.passed: dict[str, int] = {}
        self.directory = Path()
        self.rank = 0
        self.writing = ""  # "apply" or "undo", while parameters are written
        self.total = 0

    def arm(self) -> None:
        """Read what is to go wrong from here on."""
        found = sorted(self.directory.glob(f"fault-{self.rank}-*.json"))
        self.armed = [Fault(path=path, **json.loads(path.read_text())) for path in found]
        self.passed = {}

    def due(self, point: str, *dos: str) -> Fault | None:
        """The fault that strikes at this passing of the point, if it is one of these kinds (none given: any but those that
        need the thing that they spoil).
        """
        if not self.armed:
            return None
        number = self.passed[point] = self.passed.get(point, -1) + 1
        places = {"first": 0, "middle": self.total // 2, "last": self.total - 1}
        for fault in self.armed:
            at = places[fault.at] if isinstance(fault.at, str) else fault.at
            fits = fault.do in dos if dos else fault.do in ("raise", "kill", "hang", "meet")
            if fault.point == point and at == number and fits:
                self.armed.remove(fault)
                fault.path.rename(fault.path.with_name(f"struck-{fault.path.name}"))
                return fault
        return None

    def strike(self, point: str) -> None:
        """Fail, if it is time to."""
        fault = self.due(point)
        if fault is None:
            return
        if fault.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.do == "hang":
            time.sleep(fault.seconds)
        if fault.do == "raise":
            raise ERRORS[fault.error]()
        if fault.do == "meet":
            self.meet(fault)

    def meet(self, fault: Fault) -> None:
        """Tell the test that the point is reached, by a file, and go on when it has removed that."""
        here = self.directory / f"here-{fault.path.name}"
        here.touch()
        end = time.monotonic() + 30.0
        while here.exists() and time.monotonic() < end:
            time.sleep(0.005)


FAULTS = Faults()


def flip(array: Array) -> None:
    """Change one bit in the middle of some memory."""
    flat = flat_bytes(array)
    flat[len(flat) // 2] ^= 0x10


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Have `wrapper(real, …)` called instead of a function or method."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(real, *args, **kwargs)

    setattr(owner, name, call)


def before(point: str) -> Callable[..., Any]:
    """A wrapper that may fail before the real thing is done."""

    def wrapper(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        FAULTS.strike(point)
        return real(*args, **kwargs)

    return wrapper


# -- reading the source --------------------------------------------------------------------------------------------------


class Reading:
    """`os` as the one file sees it that reads parts and payloads: refuses to read, hangs, or gives wrong bytes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        point = {"apply": "stream", "undo": "stream back"}.get(FAULTS.writing, "read")
        FAULTS.strike(point)
        got = os.preadv(fd, buffers, offset)
        if FAULTS.due(f"{point} bytes", "flip"):
            flip(np.frombuffer(buffers[0], dtype=np.uint8))
        return got


def ranges(real: Callable[..., Iterator[int]], *args: Any, **kwargs: Any) -> Iterator[int]:
    """The ranges of a source of which the first does not come, or one does that nobody asked for."""
    fault = FAULTS.due("pieces", "skip", "grow")
    for number, index in enumerate(real(*args, **kwargs)):
        if number or fault is None or fault.do != "skip":
            yield index
    if fault is not None and fault.do == "grow":
        yield 1 << 40


def pieces(real: Callable[..., Pieces], *args: Any, **kwargs: Any) -> Pieces:
    """The pieces of a source that leaves a tensor out, or makes one longer than it is."""
    stream = real(*args, **kwargs)
    fault = FAULTS.due("pieces", "skip", "grow")
    if fault is None:
        return stream
    return _without_first(stream) if fault.do == "skip" else _grown(stream)


def _without_first(stream: Pieces) -> Iterator[Piece]:
    first = next(stream)
    yield from (piece for piece in stream if piece.tensor != first.tensor)


def _grown(stream: Pieces) -> Iterator[Piece]:
    first = next(stream)
    yield Piece(first.tensor, first.offset, memoryview(bytes(first.data) + bytes(64)))
    yield from stream


# -- staging -------------------------------------------------------------------------------------------------------------


def armed_stage(real: Callable[..., None], *args: Any) -> None:
    FAULTS.arm()
    real(*args)


def cut(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    version = real(*args, **kwargs)
    FAULTS.strike("cut")
    if FAULTS.due("cut memory", "flip"):
        flip(next(iter(version._arrays.values())))
    return version


def staged(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    prepared = real(*args, **kwargs)
    FAULTS.strike("staged")
    if FAULTS.due("staged memory", "flip"):
        spoil(prepared.commit)
    return prepared


def spoil(commit: Any) -> None:
    """Change a bit of what is going to be written, after it was verified."""
    if isinstance(commit, DeltaCommit):
        flip(commit._edits[0][1].after)
    elif isinstance(commit, CopyCommit):
        flip(next(iter(commit._verified.arrays.values())))


# -- the commit ----------------------------------------------------------------------------------------------------------


def counted(phase: str) -> Callable[..., Any]:
    """While the real thing runs, ticks count as passings of `phase`."""

    def wrapper(real: Callable[..., None], commit: StagedCommit, *args: Any) -> None:
        FAULTS.writing, FAULTS.total = phase, steps(commit, phase)
        FAULTS.passed.pop(phase, None)
        try:
            FAULTS.strike(f"{phase} begins")
            real(commit, *args)
        finally:
            FAULTS.writing = ""

    return wrapper


def steps(commit: StagedCommit, phase: str) -> int:
    """How many ticks it will be."""
    if isinstance(commit, StreamedCommit):
        return 2 * len(commit._plan.landings)  # each parameter comes in one piece and is then hashed
    if phase == "undo":
        return len(commit._undo)
    return len(commit._edits) if isinstance(commit, DeltaCommit) else len(commit._plan.landings)


def new_part(real: Callable[..., None], self: part.Part, *args: Any, tick: Callable[[], None], **kwargs: Any) -> None:
    def told() -> None:
        tick()
        if FAULTS.writing:
            FAULTS.strike(FAULTS.writing)

    real(self, *args, tick=told, **kwargs)
    self._live._holding._post_load = lambda: FAULTS.strike("post")


def half_written(real: Callable[..., None], slot: TorchSlot, data: Array) -> None:
    """Write half of a parameter, and fail."""
    if FAULTS.writing == "apply" and FAULTS.due("write", "half"):
        half = data.copy().reshape(-1)
        half[len(half) // 2 :] = slot.live().reshape(-1)[len(half) // 2 :]
        real(slot, half.reshape(data.shape))
        raise ERRORS["MemoryError"]()
    real(slot, data)


def prove(real: Callable[..., None], self: part.Part) -> None:
    FAULTS.strike("prove")
    if FAULTS.due("live memory", "flip"):
        rot(self)
    real(self)


def settle(real: Callable[..., Any], self: part.Part) -> Any:
    FAULTS.strike("settle")
    result = real(self)
    FAULTS.strike("settled")
    if FAULTS.due("settled memory", "flip"):
        rot(self)
    return result


def rot(self: part.Part) -> None:
    """Change a bit of the largest parameter."""
    flip(max(self._live._slots(), key=lambda slot: slot.spec.nbytes).live())


def main() -> None:
    """The program of a rank, with faults."""
    data = sys.stdin.buffer.read()
    settings = json.loads(data)
    FAULTS.directory, FAULTS.rank = Path(settings["engine"]["model_dir"]), settings["rank"]
    byte_file.os = Reading()
    around(FileReceiver, "pieces", pieces)
    around(FileReceiver, "ranges", ranges)
    around(live.LiveWeights, "stage", armed_stage)
    around(part.Part, "fetch", before("fetch"))
    around(part, "cut", cut)
    around(Stager, "stage", staged)
    around(live.LiveWeights, "commit", before("commit"))
    for kind in (CopyCommit, SwapCommit, DeltaCommit, DeltaSwapCommit, StreamedCommit):
        around(kind, "apply", counted("apply"))
    for kind in (StagedCommit, StreamedCommit):
        around(kind, "undo", counted("undo"))
    around(part.Part, "__init__", new_part)
    around(TorchSlot, "write", half_written)
    around(RankGroup, "agree", before("agree"))
    around(part.Part, "prove", prove)
    around(part.Part, "settle", settle)

    sys.stdin = io.TextIOWrapper(io.BytesIO(data))
    process.main()


if __name__ == "__main__":
    main()
