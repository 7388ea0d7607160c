"""The loops that touch every lane or every change: compiled by Numba where it is installed, else NumPy; the same bytes."""

from __future__ import annotations

import importlib.util
import time
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from weightcast import logs
from weightcast.errors import MissingExtra
from weightcast.tensors.lanes import LaneKind, Lanes, Steps

log = logs.get(__name__)

Indices = NDArray[Any]
Numbers = NDArray[np.uint32]
Counts = NDArray[np.int64]
Bits = NDArray[np.uint8]
Backend = Literal["compiled", "numpy"]

_WORTH_LOADING = 16 << 20  # bytes of work in NumPy that take about as long as loading the compiled kernels
_worked = 0  # bytes of work that this process has done in NumPy

NO_ROOM: Counts = np.zeros(0, dtype=np.int64)

ENDLESS = 0xFFFF_FFFF  # a gap that no chunk is long enough for


class Rows(NamedTuple):
    """How lanes move from one array to another whose rows have another length.

    Rows have `length` lanes. Of each, `width` lanes from `skip` on are taken. The first of these in row r goes to lane
    `corner + r · stride`.
    """

    length: int
    skip: int
    width: int
    stride: int
    corner: int


ALL_ROWS = Rows(1 << 62, 0, 1 << 62, 0, 0)


class Summing(NamedTuple):
    """What is summed of lanes that follow one another in a tensor: all (`whole`), the changes (`grown`), or both.

    `first` is the index of the first lane.
    """

    first: int
    whole: bool
    grown: bool
    seeds: NDArray[np.uint64]


NO_SUMS = Summing(0, whole=False, grown=False, seeds=np.zeros(0, dtype=np.uint64))


class Found(NamedTuple):
    """Changes, and what was summed: the two sums of all lanes, and by how much they grow where lanes change."""

    indices: NDArray[np.uint32]
    steps: Steps
    whole: tuple[int, int]
    grown: tuple[int, int]


class Kernels(Protocol):
    """What the codec needs done fast. Arguments were checked before: a kernel trusts lengths, not contents."""

    def find(self, old: Lanes, new: Lanes, kind: LaneKind, summing: Summing = NO_SUMS) -> Found:
        """The indices of lanes that differ, by how much their mapped integers do, and the sums that are wanted."""

    def find_with_gaps(
        self, old: Lanes, new: Lanes, kind: LaneKind, since: NDArray[np.uint32]
    ) -> tuple[NDArray[np.uint32], Steps, Numbers, NDArray[np.uint8]]:
        """`find` and `class_gaps` at once: indices, steps, gaps, classes."""

    def class_gaps(
        self, old: Lanes, indices: Indices, kind: LaneKind, since: NDArray[np.uint32]
    ) -> tuple[Numbers, NDArray[np.uint8]]:
        """For each change, how many unchanged lanes of its class lie between it and the class's change before; its class.

        `since` counts, per class, unchanged lanes since the last change; it is carried from block to block.
        """

    def find_by_class(
        self, old: Lanes, kind: LaneKind, gaps: NDArray[np.uint32], walk: ClassWalk, changes: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """The opposite of `class_gaps` for one block: the indices of its changes, and where each stands in class order.

        Raises `ValueError` if the block does not hold exactly `changes` of them.
        """

    def put_numbers(
        self, values: Numbers, counts: Counts, shifts: NDArray[np.uint8], *, lanes: bool = False
    ) -> tuple[NDArray[np.uint8], Bits]:
        """Numbers as symbols and packed low bits. They are in groups, which have `counts` of them and a shift each.

        With `lanes` the values of each group are lanes that change, and the numbers are the gaps between them.
        docs/delta-format.md has the code.
        """

    def take_numbers(
        self, symbols: NDArray[np.uint8], counts: Counts, shifts: NDArray[np.uint8], bits: Bits, room: Counts = NO_ROOM
    ) -> Numbers:
        """The opposite of `put_numbers`. With `room` the numbers are gaps in blocks of so many lanes: returns the lanes.

        Raises `ValueError` for a byte that is no symbol, for more or fewer bits than the symbols ask for, and for a lane
        outside of its block.
        """

    def put_steps(self, steps: Steps) -> tuple[NDArray[np.uint8], Numbers]:
        """Steps that are not 0 as half bytes, and what is left of the large ones."""

    def take_steps(self, nibbles: NDArray[np.uint8], large: Numbers, changes: int, kind: LaneKind) -> Steps:
        """The opposite of `put_steps`. Raises `ValueError` for steps that cannot be."""

    def fold(self, changes: tuple[Indices, Steps], ends: Counts, *, apart: bool = False) -> tuple[Indices, Steps]:
        """Runs of changes together: sorted union of the indices, steps added, those that cancel left out.

        The runs lie one after the other in `changes`, up to `ends`; the indices of each are sorted. With `apart`, raises
        `ValueError` if a lane is in two runs.
        """

    def place(self, changes: tuple[Indices, Steps], moves: NDArray[np.int64], out: tuple[Indices, Steps]) -> Counts:
        """Write the changes that boxes take, at their lanes there, to `out`; returns where those of each move end.

        Each move is a row: how many of the changes it is about, the lane that their indices count from, its `Rows`, and how
        far neighbours in a row lie apart in the end. `out` has room for all changes.
        """

    def moved(self, lanes: Lanes, indices: Indices, steps: Steps, kind: LaneKind) -> tuple[Lanes, Lanes]:
        """The lanes at `indices` as they are, and after these steps. `lanes` is not changed."""

    def scatter(self, lanes: Lanes, indices: Indices, values: Lanes) -> None:
        """Write values at indices. The caller has checked that the indices lie inside."""

    def count_unlike(self, lanes: Lanes, indices: Indices, values: Lanes) -> int:
        """How many lanes at indices are not these values. The caller has checked that the indices lie inside."""

    def sum_rows(self, rows: NDArray[Any], first: int, step: int, seeds: NDArray[np.uint64]) -> tuple[int, int]:
        """The two sums of rows of words. A word has 16 bits, or 8 that are zero-extended.

        The first word has index `first`, and the first of each next row an index larger by `step`. The words of a row lie
        together in memory.
        """

    def sum_changes(
        self, indices: Indices, before: Lanes, after: Lanes, seeds: NDArray[np.uint64], rows: Rows = ALL_ROWS
    ) -> tuple[int, int]:
        """By how much the two sums grow where lanes change. A lane of 32 bits is two words.

        With `rows` only lanes of a box count, each with the index that it has in the tensor.
        """


class ClassWalk:
    """Where `find_by_class` stands in the gap list of each class; carried from block to block of a chunk.

    `gaps` handed to the kernel hold, for each class in turn, its gaps and then one `ENDLESS`.
    """

    def __init__(self, starts: NDArray[np.int64], gaps: NDArray[np.uint32]) -> None:
        self.cursor = starts.copy()  # which gap of `gaps` each class counts down
        self.left = gaps[starts].copy()  # unchanged lanes of each class before its next change


@cache
def installed() -> Backend:
    """The backend that is used where none is asked for."""
    return "compiled" if importlib.util.find_spec("numba") else "numpy"


def kernels(backend: Backend | None = None) -> Kernels:
    """The kernels of a backend. The first call in a process loads the compiled ones from their cache on disk."""
    return _kernels(backend or installed())


@cache
def _kernels(backend: Backend) -> Kernels:
    if backend == "numpy":
        from weightcast.tensors.kernels import plain  # noqa: PLC0415 - one of two is needed

        return cast("Kernels", plain)
    if not importlib.util.find_spec("numba"):
        raise MissingExtra("numba", "fast", "the compiled delta codec")
    started = time.monotonic()
    from weightcast.tensors.kernels import compiled, jit  # noqa: PLC0415 - numba is an extra, and slow to import

    ms, anew = logs.ms(time.monotonic() - started), jit.count_compiled()
    if anew:
        log.info("kernels compiled", kernels=anew, ms=ms)
    else:
        log.debug("kernels loaded", ms=ms)
    global _worked  # noqa: PLW0603 - see `kernels_for`
    _worked = _WORTH_LOADING
    return cast("Kernels", compiled)


def kernels_for(nbytes: int) -> Kernels:
    """Kernels for so many bytes of work. A process that does little never loads the compiled ones, which takes longer."""
    global _worked  # noqa: PLW0603 - a count for the process; a race only moves the moment of loading
    if _worked < _WORTH_LOADING:
        _worked += nbytes
    return kernels("numpy" if _worked < _WORTH_LOADING else None)


def warm_up() -> Backend:
    """Compile the kernels, or load them from their cache on disk, so that no update has to. Says which backend is used."""
    chosen = installed()
    kernels(chosen)
    return chosen
