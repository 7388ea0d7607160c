"""How fast deltas are made, read and applied, as ratios to what NumPy takes to find and to scatter the same changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from weightcast import delta
from weightcast.bench.rivals import RIVALS, Rival
from weightcast.bench.timing import Task, Timing, interleaved
from weightcast.delta.memory import memory_of
from weightcast.errors import Corrupt
from weightcast.tensors.flat import Array

FIND, APPLY = "find_numpy", "apply"
FIND_TWO_THREADS = "find_numpy_two_threads"  # says whether the machine had a second core to spare
SCATTER, NARROW_SCATTER = "scatter_numpy_int64", "scatter_numpy_uint32"
_LIMITED_BY_SCATTER = (SCATTER, NARROW_SCATTER, APPLY)
_TENSOR = "weights"
_PACKINGS: tuple[delta.Packing, ...] = get_args(delta.Packing)


@dataclass(frozen=True)
class SpeedRow:
    """One operation on one workload. Speeds are in bytes of the base, whatever of it the operation touches.

    `ms` and `gb_per_s` are those of the fastest round; `over_limit` is the speed over that of `limit`, an operation of
    NumPy; `spread` is the range of the middle half of the rounds over their median.
    """

    workload: str
    operation: str
    elements: int
    density: float
    rounds: int
    ms: float
    median_ms: float
    spread: float
    gb_per_s: float
    limit: str
    over_limit: float
    kind: Literal["speed"] = "speed"


def speed_rows(workload: str, old: Array, new: Array, *, rounds: int) -> Iterator[SpeedRow]:
    """A row for each operation on one flat tensor of 16-bit elements."""
    changes = int(np.count_nonzero(old.view(np.uint16) != new.view(np.uint16)))
    timings = interleaved(_tasks(old, new), rounds=rounds)
    for operation, timing in timings.items():
        limit = SCATTER if operation in _LIMITED_BY_SCATTER else FIND
        yield SpeedRow(
            workload=workload,
            operation=operation,
            elements=old.size,
            density=changes / old.size,
            rounds=rounds,
            ms=timing.minimum * 1e3,
            median_ms=timing.median * 1e3,
            spread=timing.spread,
            gb_per_s=old.nbytes / timing.minimum / 1e9,
            limit=limit,
            over_limit=_faster(timing, timings[limit]),
        )


def _faster(timing: Timing, than: Timing) -> float:
    return than.minimum / timing.minimum


def _rival_encode(rival: Rival, old: Mapping[str, Array], new: Mapping[str, Array]) -> Task:
    return lambda: rival.encode(old, new)


def _tasks(old: Array, new: Array) -> Mapping[str, Task]:
    """What is timed, in this order: whatever scatters comes after a pass over all elements, which empties the caches."""
    before, after = {_TENSOR: old}, {_TENSOR: new}
    patterns, wanted = old.view(np.uint16), new.view(np.uint16)
    blobs = {packing: delta.encode(before, after, packing=packing) for packing in _PACKINGS}
    roots = delta.inspect(blobs["gaps"])
    target = {_TENSOR: old.copy()}
    memories = {_TENSOR: memory_of(_TENSOR, target[_TENSOR])}
    edit = delta.prepare(memories, delta.decode(blobs["classes"], before))
    edit.finish(memories)
    live = target[_TENSOR].view(np.uint16)
    if not np.array_equal(live, wanted):
        raise Corrupt("the delta does not give back the weights bit for bit: its speed means nothing.")
    indices = np.flatnonzero(patterns != wanted)
    narrow, values = indices.astype(np.uint32), wanted[indices]

    def find() -> object:
        return np.flatnonzero(patterns != wanted)

    def find_on_two_threads() -> object:
        with ThreadPoolExecutor(2) as pool:
            halves = zip(np.array_split(patterns, 2), np.array_split(wanted, 2), strict=True)
            return list(pool.map(lambda half: np.flatnonzero(half[0] != half[1]), halves))

    def encode(packing: delta.Packing, threads: int) -> Task:
        return lambda: delta.encode(
            before, after, packing=packing, threads=threads, base_root=roots.base_root, new_root=roots.new_root
        )

    def decode(packing: delta.Packing, threads: int) -> Task:
        return lambda: delta.decode(blobs[packing], before, threads=threads)

    def scatter_int64() -> None:
        live[indices] = values

    def scatter_uint32() -> None:
        live[narrow] = values

    return {
        FIND: find,
        FIND_TWO_THREADS: find_on_two_threads,
        SCATTER: scatter_int64,
        "encode_gaps": encode("gaps", 1),
        APPLY: lambda: edit.finish(memories),
        "encode_classes": encode("classes", 1),
        NARROW_SCATTER: scatter_uint32,
        "encode_gaps_two_threads": encode("gaps", 2),
        "encode_classes_two_threads": encode("classes", 2),
        "decode_classes": decode("classes", 1),
        "decode_classes_two_threads": decode("classes", 2),
        "decode_gaps": decode("gaps", 1),
        "decode_gaps_two_threads": decode("gaps", 2),
        **{f"encode_{rival.name}": _rival_encode(rival, before, after) for rival in RIVALS},
    }
