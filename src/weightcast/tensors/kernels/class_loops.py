"""The loops that look at the class of every lane, compiled for each kind: as constants, shift and mask cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba.core import types

from weightcast.tensors.dtypes import DType
from weightcast.tensors.kernels.jit import I64, LANE_TYPES, U8, U32, U64, compiled, read_of, write_of
from weightcast.tensors.lanes import LaneKind, kind_of


class ClassLoops(NamedTuple):
    """See `find_with_gaps`, `class_gaps` and `find_by_class` of `Kernels`."""

    find: Callable[..., int]
    gaps: Callable[..., None]
    walk: Callable[..., int]


def _finder(lane: Any, shift: int, mask: int) -> Callable[..., int]:
    bits, per_word, tables, count = lane.bitwidth, 64 // lane.bitwidth, 4, mask + 1

    @compiled(
        I64(
            read_of(lane),
            read_of(lane),
            read_of(U64),
            read_of(U64),
            I64,
            *3 * (write_of(U32),),
            write_of(lane),
            write_of(U8),
        )
    )
    def find(
        old: Any,
        new: Any,
        old_words: Any,
        new_words: Any,
        flip: Any,
        since: Any,
        indices: Any,
        gaps: Any,
        steps: Any,
        classes: Any,
    ) -> int:
        """`_find` and `_gap_counter` in one pass over memory. A word in which nothing differs is only counted, its lanes in
        different tables, so that lanes of one class do not wait for each other.
        """
        found = 0
        counts = np.zeros(tables * count, dtype=np.uint32)
        counts[:count] = since
        before = np.zeros(count, dtype=np.uint32)  # what all tables had counted at the last change of each class
        for word in range(old_words.size + 1):
            if word < old_words.size:
                lanes = old_words[np.uintp(word)]
                if lanes == new_words[np.uintp(word)]:
                    for place in range(per_word):
                        own = np.uintp((lanes >> np.uint64(place * bits + shift)) & np.uint64(mask))
                        counts[np.uintp(place % tables * count) + own] += np.uint32(1)
                    continue
            for at in range(word * per_word, min((word + 1) * per_word, old.size)):
                own = np.uintp((old[at] >> shift) & mask)
                if old[at] == new[at]:
                    counts[own] += np.uint32(1)
                    continue
                if found < indices.size:
                    x, y = np.int64(old[at]), np.int64(new[at])
                    if x < 0:
                        x ^= flip
                    if y < 0:
                        y ^= flip
                    counted = np.uint32(0)
                    for table in range(tables):
                        counted += counts[np.uintp(table * count) + own]
                    indices[found], steps[found] = at, y - x
                    gaps[found], classes[found] = counted - before[own], own
                    before[own] = counted
                found += 1
        for each in range(count):
            since[each] = (
                counts[each] + counts[each + count] + counts[each + 2 * count] + counts[each + 3 * count] - before[each]
            )
        return found

    return find


def _gap_counter(lane: Any, shift: int, mask: int) -> Callable[..., None]:
    @compiled(types.void(read_of(lane), read_of(U32), *2 * (write_of(U32),), write_of(U8)))
    def count(old: Any, indices: Any, since: Any, gaps: Any, classes: Any) -> None:
        start = np.int64(0)
        for change in range(indices.size + 1):
            stop = np.int64(indices[change]) if change < indices.size else old.size
            for at in range(start, stop):
                since[np.uintp((old[at] >> shift) & mask)] += np.uint32(1)  # unsigned: no test for negative indices
            if change < indices.size:
                own = np.uintp((old[stop] >> shift) & mask)
                gaps[change], classes[change] = since[own], own
                since[own] = np.uint32(0)
            start = stop + 1

    return count


def _walker(lane: Any, shift: int, mask: int) -> Callable[..., int]:
    @compiled(I64(read_of(lane), read_of(U32), write_of(I64), *2 * (write_of(U32),), write_of(I64)))
    def walk(old: Any, gaps: Any, cursor: Any, left: Any, indices: Any, positions: Any) -> int:
        """Counts all changes and writes as many as there is room for."""
        found = 0
        for at in range(old.size):
            own = np.uintp((old[at] >> shift) & mask)
            remaining = left[own]
            if remaining == 0:
                if found < indices.size:
                    indices[found], positions[found] = at, cursor[own] - np.int64(own)
                found += 1
                cursor[own] += 1
                left[own] = gaps[cursor[own]]
            else:
                left[own] = remaining - np.uint32(1)
        return found

    return walk


def _loops(lane: Any, shift: int, mask: int) -> ClassLoops:
    return ClassLoops(_finder(lane, shift, mask), _gap_counter(lane, shift, mask), _walker(lane, shift, mask))


_LOOPS = {
    (kind.nbytes, kind.shift, kind.mask): _loops(LANE_TYPES[kind.nbytes // 2], kind.shift, kind.mask)
    for kind in map(kind_of, DType)
}


def loops_for(kind: LaneKind) -> ClassLoops:
    """The loops for one kind of lanes."""
    return _LOOPS[kind.nbytes, kind.shift, kind.mask]
