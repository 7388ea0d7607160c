"""The kernels compiled by Numba, kept in a cache on disk. They release the interpreter, so threads run side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numpy.typing import NDArray

from weightcast.tensors.kernels import Bits, ClassWalk, Indices, Numbers
from weightcast.tensors.kernels.class_loops import loops_for
from weightcast.tensors.kernels.jit import I64, INDEX_TYPES, LANE_TYPES, U8, U32, U64, compiled, prefetch, read_of, write_of
from weightcast.tensors.kernels.numbers import FLOORS, MAX_WIDTH, WIDTHS, check_bits
from weightcast.tensors.kernels.sum_loops import sum_changes, sum_rows
from weightcast.tensors.lanes import SIGNED, LaneKind, Lanes, Steps

__all__ = [
    "class_gaps",
    "find",
    "find_by_class",
    "find_with_gaps",
    "merge",
    "moved",
    "put_numbers",
    "scatter",
    "sum_changes",
    "sum_rows",
    "take_numbers",
]

_SMALL = 4096
_SMALL_SYMBOLS = (np.searchsorted(FLOORS, np.arange(_SMALL), side="right") - 1).astype(np.uint8)
_AHEAD = 64  # how many changes ahead memory is asked for: scattered stores wait for memory, not for the processor


@compiled(*(I64(read_of(t), read_of(t), read_of(U64), read_of(U64), I64, write_of(U32), write_of(t)) for t in LANE_TYPES))
def _find(old: Any, new: Any, old_words: Any, new_words: Any, flip: Any, indices: Any, steps: Any) -> int:
    """Counts all changes and writes as many as there is room for. Words are the same memory, eight bytes at a time."""
    found = 0
    per_word = 8 // old.itemsize
    fours = old_words.size // 4
    for four in range(fours + 1):
        first, last = 4 * four, 4 * four + 4
        if four == fours:
            last = old_words.size + 1  # and the lanes that do not fill a word
        elif (
            (old_words[first] ^ new_words[first])
            | (old_words[first + 1] ^ new_words[first + 1])
            | (old_words[first + 2] ^ new_words[first + 2])
            | (old_words[first + 3] ^ new_words[first + 3])
        ) == np.uint64(0):
            continue
        for word in range(first, last):
            if word < old_words.size and old_words[word] == new_words[word]:
                continue
            for at in range(word * per_word, min((word + 1) * per_word, old.size)):
                if old[at] != new[at]:
                    if found < indices.size:
                        x, y = np.int64(old[at]), np.int64(new[at])
                        if x < 0:
                            x ^= flip
                        if y < 0:
                            y ^= flip
                        indices[found] = at
                        steps[found] = y - x
                    found += 1
    return found


@compiled(I64(read_of(U32), read_of(U8), read_of(U8), read_of(U8), write_of(U8), write_of(U32)))
def _put_numbers(values: Any, shifts: Any, small: Any, widths: Any, symbols: Any, words: Any) -> Any:
    """Returns how many bits were written. `small` has the symbols of small numbers; eight bits more are 64 symbols more."""
    word, filled, written, total = np.uint64(0), np.uint64(0), 0, np.uint64(0)
    for at in range(values.size):
        large, symbol = values[at] >> shifts[at], np.int64(0)
        while large >= np.uint32(_SMALL):
            large >>= np.uint32(8)
            symbol += 64
        symbol += small[large]
        symbols[at] = symbol
        width = np.uint64(widths[symbol]) + np.uint64(shifts[at])
        word |= (np.uint64(values[at]) & ((np.uint64(1) << width) - np.uint64(1))) << filled
        filled += width
        total += width
        if filled >= np.uint64(32):
            words[written] = word & np.uint64(0xFFFF_FFFF)
            written += 1
            word >>= np.uint64(32)
            filled -= np.uint64(32)
    words[written] = word
    return total


@compiled(I64(read_of(U8), read_of(U8), read_of(U32), read_of(U8), read_of(U32), write_of(U32)))
def _take_numbers(symbols: Any, shifts: Any, floors: Any, widths: Any, words: Any, values: Any) -> Any:
    """Returns how many bits were read; less than 0 at a byte that is no symbol, or a number that is too wide."""
    word, filled, read, total = np.uint64(0), np.uint64(0), 0, np.int64(0)
    for at in range(symbols.size):
        symbol = symbols[at]
        if symbol >= widths.size:
            return np.int64(-1)
        shift = np.uint64(shifts[at])
        width = np.uint64(widths[symbol]) + shift
        if width > np.uint64(MAX_WIDTH):
            return np.int64(-2)
        total += np.int64(width)
        if filled < width:
            if read < words.size:  # else there are too few bits, which the caller sees by their count
                word |= np.uint64(words[read]) << filled
            read += 1
            filled += np.uint64(32)
        values[at] = (np.uint64(floors[symbol]) << shift) | (word & ((np.uint64(1) << width) - np.uint64(1)))
        word >>= width
        filled -= width
    return total


@compiled(
    *(I64(read_of(i), read_of(t), read_of(i), read_of(t), write_of(i), write_of(t)) for t in LANE_TYPES for i in INDEX_TYPES)
)
def _merge(a_indices: Any, a_steps: Any, b_indices: Any, b_steps: Any, indices: Any, steps: Any) -> int:
    a = b = merged = 0
    while a < a_indices.size or b < b_indices.size:
        if b == b_indices.size or (a < a_indices.size and a_indices[a] < b_indices[b]):
            indices[merged], steps[merged] = a_indices[a], a_steps[a]
            a += 1
        elif a == a_indices.size or b_indices[b] < a_indices[a]:
            indices[merged], steps[merged] = b_indices[b], b_steps[b]
            b += 1
        else:
            indices[merged], steps[merged] = a_indices[a], a_steps[a] + b_steps[b]
            a += 1
            b += 1
        if steps[merged] != 0:
            merged += 1
    return merged


@compiled(
    *(types.void(read_of(t), read_of(i), read_of(t), I64, write_of(t), write_of(t)) for t in LANE_TYPES for i in INDEX_TYPES)
)
def _moved(lanes: Any, indices: Any, steps: Any, flip: Any, before: Any, values: Any) -> None:
    ahead = max(0, indices.size - _AHEAD)
    for at in range(indices.size):
        if at < ahead:
            prefetch(lanes, np.intp(indices[at + _AHEAD]))
        before[at] = lanes[np.intp(indices[at])]
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
        prefetch(lanes, np.intp(indices[at + _AHEAD]))
        lanes[np.intp(indices[at])] = values[at]
    for at in range(ahead, indices.size):
        lanes[np.intp(indices[at])] = values[at]


def _flip(kind: LaneKind) -> int:
    """What maps a negative lane: all bits but the sign, or none for a kind that is ordered as it is."""
    return (1 << (8 * kind.nbytes - 1)) - 1 if kind.signed_magnitude else 0


def _words(lanes: Lanes, kind: LaneKind) -> NDArray[np.uint64]:
    """The lanes that fill words of eight bytes, as such."""
    per_word = 8 // kind.nbytes
    return lanes[: lanes.size // per_word * per_word].view(np.uint64)


def find(old: Lanes, new: Lanes, kind: LaneKind) -> tuple[NDArray[np.uint32], Steps]:
    """See `Kernels.find`."""
    words = _words(old, kind), _words(new, kind)
    room = old.size // 4 + 64  # only what is written costs memory
    while True:
        indices, steps = np.empty(room, dtype=np.uint32), np.empty(room, dtype=kind.signed)
        found = _find(old.view(kind.signed), new.view(kind.signed), *words, _flip(kind), indices, steps)
        if found <= room:
            return indices[:found].copy(), steps[:found].copy()
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


def put_numbers(values: Numbers, shifts: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], Bits]:
    """See `Kernels.put_numbers`."""
    symbols, words = np.empty(values.size, dtype=np.uint8), np.empty(values.size + 1, dtype="<u4")
    bits = _put_numbers(values, shifts, _SMALL_SYMBOLS, WIDTHS, symbols, words)
    return symbols, words.view(np.uint8)[: (bits + 7) // 8].copy()


def take_numbers(symbols: NDArray[np.uint8], shifts: NDArray[np.uint8], bits: Bits) -> Numbers:
    """See `Kernels.take_numbers`."""
    words = np.zeros(bits.size // 4 + 1, dtype="<u4")
    words.view(np.uint8)[: bits.size] = bits
    values = np.empty(symbols.size, dtype=np.uint32)
    asked = _take_numbers(symbols, shifts, FLOORS, WIDTHS, words, values)
    if asked < 0:
        raise ValueError("a byte is not a symbol" if asked == -1 else "a number has more than 32 bits")
    check_bits(bits, asked)
    return values


def merge(a: tuple[Indices, Steps], b: tuple[Indices, Steps]) -> tuple[Indices, Steps]:
    """See `Kernels.merge`."""
    room = a[0].size + b[0].size + 1  # a step that cancels is written once more before it is passed over
    indices, steps = np.empty(room, dtype=a[0].dtype), np.empty(room, dtype=a[1].dtype)
    merged = _merge(*a, *b, indices, steps)
    return indices[:merged].copy(), steps[:merged].copy()


def moved(lanes: Lanes, indices: Indices, steps: Steps, kind: LaneKind) -> tuple[Lanes, Lanes]:
    """See `Kernels.moved`."""
    before, after = np.empty(indices.size, dtype=kind.signed), np.empty(indices.size, dtype=kind.signed)
    _moved(lanes.view(kind.signed), indices, steps, _flip(kind), before, after)
    return before.view(kind.unsigned), after.view(kind.unsigned)


def scatter(lanes: Lanes, indices: Indices, values: Lanes) -> None:
    """See `Kernels.scatter`."""
    signed = SIGNED[lanes.itemsize]
    _scatter(lanes.view(signed), indices, values.view(signed))
