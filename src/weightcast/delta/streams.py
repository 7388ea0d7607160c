"""The frame of a sparse chunk: gaps and steps as streams that zstd codes well. docs/delta-format.md has every byte."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightcast.delta.zstd import compress, decompress, stated_nbytes
from weightcast.errors import DeltaCorrupt
from weightcast.tensors.kernels import Kernels, Numbers
from weightcast.tensors.kernels.numbers import shift_for
from weightcast.tensors.lanes import UNSIGNED, Steps, from_zigzag, to_zigzag

_HEAD = struct.Struct("<7I")
_ESCAPE = 15  # a nibble that sends the reader to the stream of large steps
_MAX_SHIFT = 24


class Groups(NamedTuple):
    """Changes in the order of their groups: how many each group has, and its gaps and steps one after the other."""

    counts: NDArray[np.int64]
    gaps: Numbers
    steps: Steps


def pack_groups(groups: Groups, kernels: Kernels) -> bytes:
    """One frame."""
    ends = np.cumsum(groups.counts)
    totals = np.concatenate([[0], np.cumsum(groups.gaps, dtype=np.int64)])
    sums = totals[ends] - totals[ends - groups.counts]
    shifts = [shift_for(int(total), int(count)) if count else 0 for total, count in zip(sums, groups.counts, strict=True)]
    gap_symbols, gap_bits = kernels.put_numbers(groups.gaps, _per_change(shifts, groups.counts))
    nibbles, large = _to_nibbles(groups.steps)
    large_symbols, large_bits = kernels.put_numbers(large, np.zeros(len(large), dtype=np.uint8))
    streams = [
        compress(b"".join(_group_entry(int(n), shift) for n, shift in zip(groups.counts, shifts, strict=True))),
        compress(gap_symbols.data),
        gap_bits.tobytes(),
        compress(nibbles.data),
        compress(large_symbols.data),
        large_bits.tobytes(),
    ]
    return b"".join([_HEAD.pack(len(groups.gaps), *map(len, streams)), *streams])


def unpack_groups(frame: memoryview, *, groups: int, changes: int, width: int, kernels: Kernels) -> Groups:
    """The opposite of `pack_groups`, for a frame that must hold so many groups and changes. Believes nothing in it."""
    streams = _cut(frame, changes)
    counts, shifts = _take_group_entries(streams[0], groups)
    if int(counts.sum()) != changes:
        raise DeltaCorrupt(f"the groups of a chunk have {int(counts.sum())} changes, the table says {changes}")
    per_change = _per_change(shifts, counts)
    gap_symbols = np.frombuffer(decompress(streams[1], changes, "gap symbols"), dtype=np.uint8)
    gaps = _take_numbers(gap_symbols, per_change, streams[2], "gap", kernels)
    nibbles = np.frombuffer(decompress(streams[3], (changes + 1) // 2, "steps"), dtype=np.uint8)
    values = _from_nibbles(nibbles, changes)
    escaped = np.flatnonzero(values == _ESCAPE)
    large_symbols = np.frombuffer(decompress(streams[4], len(escaped), "large steps"), dtype=np.uint8)
    no_shifts = np.zeros(len(escaped), dtype=np.uint8)
    large = _take_numbers(large_symbols, no_shifts, streams[5], "large step", kernels)
    if len(large) and int(large.max()) > (1 << (8 * width)) - 2 - _ESCAPE:
        raise DeltaCorrupt(f"a step of {int(large.max()) + _ESCAPE} does not fit into {8 * width} bits")
    zigzag = values.astype(UNSIGNED[width]) + UNSIGNED[width].type(1)
    zigzag[escaped] += large.astype(zigzag.dtype)  # each was checked to fit
    return Groups(counts, gaps, from_zigzag(zigzag))


def _cut(frame: memoryview, changes: int) -> list[memoryview]:
    if len(frame) < _HEAD.size:
        raise DeltaCorrupt(f"a chunk of {len(frame)} bytes is too short for its head")
    stated, *sizes = _HEAD.unpack_from(frame)
    if stated != changes:
        raise DeltaCorrupt(f"a chunk says that it has {stated} changes, the table says {changes}")
    if _HEAD.size + sum(sizes) != len(frame):
        raise DeltaCorrupt(f"the streams of a chunk have {sum(sizes)} bytes, not {len(frame) - _HEAD.size}")
    ends = np.cumsum([_HEAD.size, *sizes]).tolist()
    return [frame[start:end] for start, end in pairwise(ends)]


def _per_change(shifts: list[int] | NDArray[np.uint8], counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    return np.repeat(np.asarray(shifts, dtype=np.uint8), counts)


def _take_numbers(
    symbols: NDArray[np.uint8], shifts: NDArray[np.uint8], stream: memoryview, what: str, kernels: Kernels
) -> Numbers:
    try:
        return kernels.take_numbers(symbols, shifts, np.frombuffer(stream, dtype=np.uint8))
    except ValueError as error:
        raise DeltaCorrupt(f"in the {what}s of a chunk, {error}") from error


# -- steps: zigzag less one, two to a byte; 15 sends the reader on to the large ones ------------------------------------


def _to_nibbles(steps: Steps) -> tuple[NDArray[np.uint8], Numbers]:
    values: Numbers = to_zigzag(steps).astype(np.uint32) - np.uint32(1)  # a step is never zero
    small = np.zeros(len(values) + len(values) % 2, dtype=np.uint8)
    small[: len(values)] = np.minimum(values, _ESCAPE)
    nibbles: NDArray[np.uint8] = small[::2] | (small[1::2] << np.uint8(4))
    large: Numbers = values[values >= _ESCAPE] - np.uint32(_ESCAPE)
    return nibbles, large


def _from_nibbles(nibbles: NDArray[np.uint8], changes: int) -> NDArray[np.uint8]:
    values = np.empty(2 * len(nibbles), dtype=np.uint8)
    values[::2], values[1::2] = nibbles & 15, nibbles >> 4
    if changes % 2 and values[-1]:
        raise DeltaCorrupt("the last half byte of the steps is not empty")
    return values[:changes]


# -- the table of groups: a varint count each, and the shift where there is anything to shift ---------------------------


def _group_entry(count: int, shift: int) -> bytes:
    entry = bytearray()
    rest = count
    while rest >= 0x80:
        entry.append(rest & 0x7F | 0x80)
        rest >>= 7
    entry.append(rest)
    return bytes([*entry, shift]) if count else bytes(entry)


def _take_group_entries(stream: memoryview, groups: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    nbytes = stated_nbytes(stream, "the group table")
    if nbytes > 6 * groups:
        raise DeltaCorrupt(f"a group table of {nbytes} bytes is too long for {groups} groups")
    data = iter(decompress(stream, nbytes, "the group table"))
    counts, shifts = np.zeros(groups, dtype=np.int64), np.zeros(groups, dtype=np.uint8)
    try:
        for group in range(groups):
            counts[group] = _take_varint(data)
            if counts[group]:
                shifts[group] = next(data)
    except StopIteration:
        raise DeltaCorrupt("the group table is cut short") from None
    if next(data, None) is not None or (groups and int(shifts.max()) > _MAX_SHIFT):
        raise DeltaCorrupt("the group table has bytes left over, or a shift that is too large")
    return counts, shifts


def _take_varint(data: Iterator[int]) -> int:
    value = 0
    for place in range(0, 35, 7):
        byte = next(data)
        value |= (byte & 0x7F) << place
        if byte < 0x80:
            return value
    raise DeltaCorrupt("a count in the group table has more than 32 bits")
