"""The frame of a sparse chunk: gaps and steps as streams that zstd codes well. docs/delta-format.md has every byte."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightcast.delta.zstd import compress, decompress, stated_nbytes
from weightcast.errors import DeltaCorrupt
from weightcast.tensors.kernels import NO_ROOM, Counts, Kernels, Numbers
from weightcast.tensors.kernels.numbers import shift_for
from weightcast.tensors.lanes import LaneKind, Steps

_HEAD = struct.Struct("<7I")
_MAX_SHIFT = 24


class Groups(NamedTuple):
    """Changes in the order of their groups: how many each group has, and its gaps and steps one after the other.

    With `lanes`, the lanes that change are in the place of the gaps between them.
    """

    counts: Counts
    gaps: Numbers
    steps: Steps
    lanes: bool = False


def pack_groups(groups: Groups, kernels: Kernels) -> bytes:
    """One frame."""
    counts, ends = groups.counts, np.cumsum(groups.counts)
    if groups.lanes:  # no group is empty
        sums = groups.gaps[ends - 1].astype(np.int64) + 1 - counts
    else:
        totals = np.concatenate([[0], np.cumsum(groups.gaps, dtype=np.int64)])
        sums = totals[ends] - totals[ends - counts]
    pairs = zip(sums.tolist(), counts.tolist(), strict=True)
    shifts = [shift_for(total, count) if count else 0 for total, count in pairs]
    each = np.array(shifts, dtype=np.uint8)
    gap_symbols, gap_bits = kernels.put_numbers(groups.gaps, counts, each, lanes=groups.lanes)
    nibbles, large = kernels.put_steps(groups.steps)
    large_symbols, large_bits = kernels.put_numbers(large, *_one_group(len(large)))
    streams = [
        compress(b"".join(_group_entry(count, shift) for count, shift in zip(counts.tolist(), shifts, strict=True))),
        compress(gap_symbols.data),
        gap_bits.tobytes(),
        compress(nibbles.data),
        compress(large_symbols.data),
        large_bits.tobytes(),
    ]
    return b"".join([_HEAD.pack(len(groups.gaps), *map(len, streams)), *streams])


def unpack_groups(
    frame: memoryview, *, groups: int, changes: int, kind: LaneKind, kernels: Kernels, room: Counts = NO_ROOM
) -> Groups:
    """The opposite of `pack_groups`, for a frame that must hold so many groups and changes. Believes nothing in it.

    With `room`, the lanes of each block, `gaps` are the lanes that change.
    """
    streams = _cut(frame, changes)
    counts, shifts = _take_group_entries(streams[0], groups, changes)
    gap_symbols = np.frombuffer(decompress(streams[1], changes, "gap symbols"), dtype=np.uint8)
    nibbles = np.frombuffer(decompress(streams[3], (changes + 1) // 2, "steps"), dtype=np.uint8)
    escaped = min(stated_nbytes(streams[4], "large steps"), changes)
    large_symbols = np.frombuffer(decompress(streams[4], escaped, "large steps"), dtype=np.uint8)
    gap_bits, large_bits = (np.frombuffer(stream, dtype=np.uint8) for stream in (streams[2], streams[5]))
    try:
        gaps = kernels.take_numbers(gap_symbols, counts, shifts, gap_bits, room)
        large = kernels.take_numbers(large_symbols, *_one_group(escaped), large_bits)
        return Groups(counts, gaps, kernels.take_steps(nibbles, large, changes, kind), lanes=len(room) > 0)
    except ValueError as error:
        raise DeltaCorrupt(f"in a chunk, {error}") from error


def _one_group(count: int) -> tuple[Counts, NDArray[np.uint8]]:
    """So many numbers without a shift."""
    return np.array([count], dtype=np.int64), np.zeros(1, dtype=np.uint8)


def _cut(frame: memoryview, changes: int) -> list[memoryview]:
    if len(frame) < _HEAD.size:
        raise DeltaCorrupt(f"a chunk of {len(frame)} bytes is too short for its head")
    stated, *sizes = _HEAD.unpack_from(frame)
    if stated != changes:
        raise DeltaCorrupt(f"a chunk says that it has {stated} changes, the table says {changes}")
    if _HEAD.size + sum(sizes) != len(frame):
        raise DeltaCorrupt(f"the streams of a chunk have {sum(sizes)} bytes, not {len(frame) - _HEAD.size}")
    ends = accumulate([_HEAD.size, *sizes])
    return [frame[start:end] for start, end in pairwise(ends)]


# -- the table of groups: a varint count each, and the shift where there is anything to shift ---------------------------


def _group_entry(count: int, shift: int) -> bytes:
    entry = bytearray()
    rest = count
    while rest >= 0x80:
        entry.append(rest & 0x7F | 0x80)
        rest >>= 7
    entry.append(rest)
    return bytes([*entry, shift]) if count else bytes(entry)


def _take_group_entries(stream: memoryview, groups: int, changes: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    nbytes = stated_nbytes(stream, "the group table")
    if nbytes > 6 * groups:
        raise DeltaCorrupt(f"a group table of {nbytes} bytes is too long for {groups} groups")
    data = iter(decompress(stream, nbytes, "the group table"))
    counts, shifts = [], []
    try:
        for _ in range(groups):
            counts.append(_take_varint(data))
            shifts.append(next(data) if counts[-1] else 0)
    except StopIteration:
        raise DeltaCorrupt("the group table is cut short") from None
    if next(data, None) is not None or max(shifts, default=0) > _MAX_SHIFT:
        raise DeltaCorrupt("the group table has bytes left over, or a shift that is too large")
    if sum(counts) != changes:
        raise DeltaCorrupt(f"the groups of a chunk have {sum(counts)} changes, the table says {changes}")
    return np.array(counts, dtype=np.int64), np.array(shifts, dtype=np.uint8)


def _take_varint(data: Iterator[int]) -> int:
    value = 0
    for place in range(0, 35, 7):
        byte = next(data)
        value |= (byte & 0x7F) << place
        if byte < 0x80:
            return value
    raise DeltaCorrupt("a count in the group table has more than 32 bits")
