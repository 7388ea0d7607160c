"""The kernels compiled by Numba, kept in a cache on disk. They release the interpreter, so threads run side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numpy.typing import NDArray

from weightcast.tensors.kernels import NO_ROOM, NO_SUMS, Bits, ClassWalk, Counts, Found, Indices, Numbers, Summing
from weightcast.tensors.kernels.class_loops import loops_for
from weightcast.tensors.kernels.find_loops import LOOPS
from weightcast.tensors.kernels.jit import (
    I64,
    INDEX_TYPES,
    LANE_TYPES,
    U8,
    U32,
    U64,
    compiled,
    prefetch,
    read_of,
    trailing_zeros,
    write_of,
)
from weightcast.tensors.kernels.numbers import ESCAPE, FLOORS, MAX_WIDTH, WIDTHS, check_bits, check_steps
from weightcast.tensors.kernels.sum_loops import BY_LANE, sum_changes, sum_rows
from weightcast.tensors.kernels.sum_tables import TABLES
from weightcast.tensors.lanes import SIGNED, LaneKind, Lanes, Steps

__all__ = [
    "class_gaps",
    "count_unlike",
    "find",
    "find_by_class",
    "find_with_gaps",
    "fold",
    "moved",
    "place",
    "put_numbers",
    "put_steps",
    "scatter",
    "sum_changes",
    "sum_rows",
    "take_numbers",
    "take_steps",
]

_SMALL = 4096
_SMALL_SYMBOLS = (np.searchsorted(FLOORS, np.arange(_SMALL), side="right") - 1).astype(np.uint8)
_COUNTS: Any = types.UniTuple(I64, 2)
_MOVES = types.Array(I64, 2, "C", readonly=True, aligned=False)
_TAKEN = {-1: "a byte is not a symbol", -2: "a number has more than 32 bits", -3: "a change lies outside of its block"}
_WINDOW = 1 << 15  # lanes that are added up at once: their totals stay in the cache
_AHEAD = 64  # how many changes ahead memory is asked for: scattered stores wait for memory, not for the processor


@compiled(I64(read_of(U32), read_of(I64), read_of(U8), types.boolean, read_of(U8), read_of(U8), write_of(U8), write_of(U32)))
def _put_numbers(
    values: Any, counts: Any, shifts: Any, lanes: Any, small: Any, widths: Any, symbols: Any, words: Any
) -> Any:
    """Returns how many bits were written. `small` has the symbols of small numbers; eight bits more are 64 symbols more."""
    word, filled, written, total = np.uint64(0), np.uint64(0), 0, np.uint64(0)
    at = 0
    for group in range(counts.size):
        shift, before = np.uint32(shifts[group]), np.uint32(0xFFFF_FFFF)
        for _ in range(counts[group]):
            value = values[at]
            if lanes:
                value, before = np.uint32(value - before - np.uint32(1)), value
            large, symbol = value >> shift, np.int64(0)
            while large >= np.uint32(_SMALL):
                large >>= np.uint32(8)
                symbol += 64
            symbol += small[large]
            symbols[at] = symbol
            width = np.uint64(widths[symbol]) + np.uint64(shift)
            word |= (np.uint64(value) & ((np.uint64(1) << width) - np.uint64(1))) << filled
            filled += width
            total += width
            if filled >= np.uint64(32):
                words[written] = word & np.uint64(0xFFFF_FFFF)
                written += 1
                word >>= np.uint64(32)
                filled -= np.uint64(32)
            at += 1
    words[written] = word
    return total


@compiled(I64(read_of(U8), read_of(I64), read_of(U8), read_of(I64), read_of(U32), read_of(U8), read_of(U32), write_of(U32)))
def _take_numbers(
    symbols: Any, counts: Any, shifts: Any, room: Any, floors: Any, widths: Any, words: Any, values: Any
) -> Any:
    """Returns how many bits were read; less than 0 for what `_TAKEN` says. With `room` the numbers are gaps between lanes of
    blocks with so many lanes, and `values` are the lanes.
    """
    word, filled, read, total = np.uint64(0), np.uint64(0), 0, np.int64(0)
    at = 0
    for group in range(counts.size):
        shift, lane = np.uint64(shifts[group]), np.int64(-1)
        for _ in range(counts[group]):
            symbol = symbols[at]
            if symbol >= widths.size:
                return np.int64(-1)
            width = np.uint64(widths[symbol]) + shift
            if width > np.uint64(MAX_WIDTH):
                return np.int64(-2)
            total += np.int64(width)
            if filled < width:
                if read < words.size:  # else there are too few bits, which the caller sees by their count
                    word |= np.uint64(words[read]) << filled
                read += 1
                filled += np.uint64(32)
            number = (np.uint64(floors[symbol]) << shift) | (word & ((np.uint64(1) << width) - np.uint64(1)))
            word >>= width
            filled -= width
            if room.size:
                lane += np.int64(number) + 1
                if lane >= room[group]:
                    return np.int64(-3)
                values[at] = lane
            else:
                values[at] = number
            at += 1
    return total


@compiled(*(I64(read_of(t), write_of(U8), write_of(U32)) for t in LANE_TYPES))
def _put_steps(steps: Any, nibbles: Any, large: Any) -> int:
    """Returns how many steps are large."""
    found = 0
    for at in range(steps.size):
        step = np.int64(steps[at])
        value = (step << 1) ^ (step >> 63)
        value -= 1
        if value >= ESCAPE:
            large[found] = value - ESCAPE
            found += 1
            value = np.int64(ESCAPE)
        if at & 1:
            nibbles[at >> 1] |= value << 4
        else:
            nibbles[at >> 1] = value
    return found


@compiled(*(I64(read_of(U8), read_of(U32), U64, write_of(t)) for t in LANE_TYPES))
def _take_steps(nibbles: Any, large: Any, most: Any, steps: Any) -> int:
    """Returns how many steps are large; -1 if one does not fit into a lane."""
    found = 0
    for at in range(steps.size):
        value = np.uint64(nibbles[at >> 1] >> np.uint8(4 * (at & 1))) & np.uint64(15)
        if value == np.uint64(ESCAPE):
            if found < large.size:
                value += np.uint64(large[found])
            found += 1
            if value > most:
                return -1
        value += np.uint64(1)
        steps[at] = np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1))
    return found


@compiled(
    *(
        _COUNTS(read_of(i), read_of(t), write_of(I64), read_of(I64), write_of(t), write_of(U64), write_of(i), write_of(t))
        for t in LANE_TYPES
        for i in INDEX_TYPES
    )
)
def _fold(
    indices: Any, steps: Any, cursors: Any, ends: Any, totals: Any, marks: Any, out_indices: Any, out_steps: Any
) -> Any:
    """Adds up runs that lie one after the other in `indices` and `steps`, in windows of as many lanes as `totals` has.

    Returns how many changes were written, and how many lanes were met.
    """
    written, met, window, one = np.uint64(0), 0, np.uint64(totals.size), np.uint64(1)
    while True:
        found, low = False, np.uint64(0)
        for run in range(cursors.size):
            if cursors[run] < ends[run]:
                first = np.uint64(indices[np.uint64(cursors[run])])
                if not found or first < low:
                    found, low = True, first
        if not found:
            return np.int64(written), met
        start = low - low % window
        for run in range(cursors.size):
            at, end = np.uint64(cursors[run]), np.uint64(ends[run])
            while at < end:  # unsigned numbers as indices: the compiler adds no case for those below 0
                lane = np.uint64(indices[at]) - start
                if lane >= window:
                    break
                totals[lane] += steps[at]
                marks[lane >> np.uint64(6)] |= one << (lane & np.uint64(63))
                at += one
            cursors[run] = at
        for word in range(marks.size):
            left = marks[word]
            marks[word] = np.uint64(0)
            while left:
                lane = (np.uint64(word) << np.uint64(6)) + trailing_zeros(left)
                left &= left - one
                met += 1
                total = totals[lane]
                out_indices[written], out_steps[written] = start + lane, total
                written += np.uint64(total != 0)
                totals[lane] = 0


@compiled(
    *(
        types.void(read_of(i), read_of(t), _MOVES, write_of(o), write_of(t), write_of(I64))
        for t in LANE_TYPES
        for i in INDEX_TYPES
        for o in INDEX_TYPES
    )
)
def _place(indices: Any, steps: Any, moves: Any, placed: Any, taken: Any, ends: Any) -> None:
    written, at = np.uint64(0), np.uint64(0)
    for move in range(moves.shape[0]):
        start, row, skip, width = moves[move, 1], moves[move, 2], moves[move, 3], moves[move, 4]
        stride, corner, step = moves[move, 5], moves[move, 6], moves[move, 7]
        begin, end, base = np.int64(0), np.int64(0), np.int64(0)
        for _ in range(moves[move, 0]):
            lane = np.int64(indices[at]) + start
            if lane >= end or lane < begin:  # in another row than the change before
                number = lane // row
                begin = number * row
                end, base = begin + row, number * stride + corner
            inside = lane - begin - skip
            if 0 <= inside < width:
                placed[written], taken[written] = base + inside * step, steps[at]
                written += np.uint64(1)
            at += np.uint64(1)
        ends[move] = written


@compiled(
    *(types.void(read_of(t), read_of(i), read_of(t), I64, write_of(t), write_of(t)) for t in LANE_TYPES for i in INDEX_TYPES)
)
def _moved(lanes: Any, indices: Any, steps: Any, flip: Any, before: Any, values: Any) -> None:
    ahead = max(0, indices.size - _AHEAD)
    for at in range(indices.size):
        if at < ahead:
            prefetch(lanes, np.uint64(indices[at + _AHEAD]))
        before[at] = lanes[np.uint64(indices[at])]
        value = np.int64(before[at])
        if value < 0:
            value ^= flip
        values[at] = value + steps[at]  # wraps round
        if values[at] < 0:
            values[at] ^= flip


@compiled(*(types.void(write_of(t), read_of(i), read_of(t)) for t in LANE_TYPES for i in INDEX_TYPES))
def _scatter(lanes: Any, indices: Any, values: Any) -> None:
    ahead = max(0, indices.size - _AHEAD)
    for at in range(ahead):
        prefetch(lanes, np.uint64(indices[at + _AHEAD]))
        lanes[np.uint64(indices[at])] = values[at]
    for at in range(ahead, indices.size):
        lanes[np.uint64(indices[at])] = values[at]


@compiled(*(I64(read_of(t), read_of(i), read_of(t)) for t in LANE_TYPES for i in INDEX_TYPES))
def _count_unlike(lanes: Any, indices: Any, values: Any) -> int:
    ahead, unlike = max(0, indices.size - _AHEAD), 0
    for at in range(indices.size):
        if at < ahead:
            prefetch(lanes, np.uint64(indices[at + _AHEAD]))
        unlike += lanes[np.uint64(indices[at])] != values[at]
    return unlike


def _flip(kind: LaneKind) -> int:
    """What maps a negative lane: all bits but the sign, or none for a kind that is ordered as it is."""
    return (1 << (8 * kind.nbytes - 1)) - 1 if kind.signed_magnitude else 0


def _words(lanes: Lanes, kind: LaneKind) -> NDArray[np.uint64]:
    """The lanes that fill words of eight bytes, as such."""
    per_word = 8 // kind.nbytes
    return lanes[: lanes.size // per_word * per_word].view(np.uint64)


def find(old: Lanes, new: Lanes, kind: LaneKind, summing: Summing = NO_SUMS) -> Found:
    """See `Kernels.find`."""
    room, loop = old.size // 16 + 64, LOOPS[kind.nbytes]
    words = new.view(f"u{min(kind.nbytes, 2)}")[np.newaxis]
    while True:
        indices, steps = np.empty(room, dtype=np.uint32), np.empty(room, dtype=kind.signed)
        lanes = old.view(kind.signed), new.view(kind.signed), words
        found, total, grown = loop(*lanes, _flip(kind), *summing, TABLES, BY_LANE, indices, steps)
        if found <= room:
            return Found(indices[:found].copy(), steps[:found].copy(), total, grown)
        room = found


def find_with_gaps(
    old: Lanes, new: Lanes, kind: LaneKind, since: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], Steps, Numbers, NDArray[np.uint8]]:
    """See `Kernels.find_with_gaps`."""
    words = _words(old, kind), _words(new, kind)
    room = old.size // 4 + 64
    while True:
        counted = since.copy()
        indices, gaps = np.empty(room, dtype=np.uint32), np.empty(room, dtype=np.uint32)
        steps, classes = np.empty(room, dtype=kind.signed), np.empty(room, dtype=np.uint8)
        lanes = old.view(kind.signed), new.view(kind.signed)
        found = loops_for(kind).find(*lanes, *words, _flip(kind), counted, indices, gaps, steps, classes)
        if found <= room:
            since[:] = counted
            return indices[:found].copy(), steps[:found].copy(), gaps[:found].copy(), classes[:found].copy()
        room = found


def class_gaps(old: Lanes, indices: Indices, kind: LaneKind, since: NDArray[np.uint32]) -> tuple[Numbers, NDArray[np.uint8]]:
    """See `Kernels.class_gaps`."""
    gaps, classes = np.empty(indices.size, dtype=np.uint32), np.empty(indices.size, dtype=np.uint8)
    loops_for(kind).gaps(old.view(kind.signed), indices, since, gaps, classes)
    return gaps, classes


def find_by_class(
    old: Lanes, kind: LaneKind, gaps: NDArray[np.uint32], walk: ClassWalk, changes: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """See `Kernels.find_by_class`."""
    indices, positions = np.empty(changes, dtype=np.uint32), np.empty(changes, dtype=np.int64)
    found = loops_for(kind).walk(old.view(kind.signed), gaps, walk.cursor, walk.left, indices, positions)
    if found != changes:
        raise ValueError(f"a block has {found} changes, not {changes}")
    return indices, positions


def put_numbers(
    values: Numbers, counts: Counts, shifts: NDArray[np.uint8], *, lanes: bool = False
) -> tuple[NDArray[np.uint8], Bits]:
    """See `Kernels.put_numbers`."""
    symbols, words = np.empty(values.size, dtype=np.uint8), np.empty(values.size + 1, dtype="<u4")
    bits = _put_numbers(values, counts, shifts, lanes, _SMALL_SYMBOLS, WIDTHS, symbols, words)
    return symbols, words.view(np.uint8)[: (bits + 7) // 8].copy()


def take_numbers(
    symbols: NDArray[np.uint8], counts: Counts, shifts: NDArray[np.uint8], bits: Bits, room: Counts = NO_ROOM
) -> Numbers:
    """See `Kernels.take_numbers`."""
    words = np.zeros(bits.size // 4 + 1, dtype="<u4")
    words.view(np.uint8)[: bits.size] = bits
    values = np.empty(symbols.size, dtype=np.uint32)
    asked = _take_numbers(symbols, counts, shifts, room, FLOORS, WIDTHS, words, values)
    if asked < 0:
        raise ValueError(_TAKEN[asked])
    check_bits(bits, asked)
    return values


def put_steps(steps: Steps) -> tuple[NDArray[np.uint8], Numbers]:
    """See `Kernels.put_steps`."""
    nibbles, large = np.empty((steps.size + 1) // 2, dtype=np.uint8), np.empty(steps.size, dtype=np.uint32)
    found = _put_steps(steps, nibbles, large)
    return nibbles, large[:found]


def take_steps(nibbles: NDArray[np.uint8], large: Numbers, changes: int, kind: LaneKind) -> Steps:
    """See `Kernels.take_steps`."""
    steps: Steps = np.empty(changes, dtype=kind.signed)
    found = _take_steps(nibbles, large, (1 << 8 * kind.nbytes) - 2, steps)
    check_steps(nibbles, changes, found, large.size)
    return steps


def fold(changes: tuple[Indices, Steps], ends: Counts, *, apart: bool = False) -> tuple[Indices, Steps]:
    """See `Kernels.fold`."""
    indices, steps = changes
    totals, marks = np.zeros(_WINDOW, dtype=steps.dtype), np.zeros(_WINDOW // 64, dtype=np.uint64)
    folded, added = np.empty(indices.size, dtype=indices.dtype), np.empty(steps.size, dtype=steps.dtype)
    written, met = _fold(indices, steps, np.concatenate([[0], ends[:-1]]), ends, totals, marks, folded, added)
    if apart and met < indices.size:
        raise ValueError("changes overlap")
    if 2 * written < indices.size:  # else to copy costs more than the memory that it gives back
        return folded[:written].copy(), added[:written].copy()
    return folded[:written], added[:written]


def place(changes: tuple[Indices, Steps], moves: NDArray[np.int64], out: tuple[Indices, Steps]) -> Counts:
    """See `Kernels.place`."""
    ends = np.empty(len(moves), dtype=np.int64)
    _place(*changes, moves, *out, ends)
    return ends


def moved(lanes: Lanes, indices: Indices, steps: Steps, kind: LaneKind) -> tuple[Lanes, Lanes]:
    """See `Kernels.moved`."""
    before, after = np.empty(indices.size, dtype=kind.signed), np.empty(indices.size, dtype=kind.signed)
    _moved(lanes.view(kind.signed), indices, steps, _flip(kind), before, after)
    return before.view(kind.unsigned), after.view(kind.unsigned)


def scatter(lanes: Lanes, indices: Indices, values: Lanes) -> None:
    """See `Kernels.scatter`."""
    signed = SIGNED[lanes.itemsize]
    _scatter(lanes.view(signed), indices, values.view(signed))


def count_unlike(lanes: Lanes, indices: Indices, values: Lanes) -> int:
    """See `Kernels.count_unlike`."""
    signed = SIGNED[lanes.itemsize]
    return int(_count_unlike(lanes.view(signed), indices, values.view(signed)))
