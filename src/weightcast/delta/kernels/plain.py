"""The kernels in NumPy: slower by some factor, and without anything to compile."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.delta.kernels import Bits, ClassWalk, Indices, Numbers
from weightcast.delta.lanes import LaneKind, Lanes, Steps, mapped, unmapped
from weightcast.delta.numbers import FLOORS, WIDTHS


def find(old: Lanes, new: Lanes, kind: LaneKind) -> tuple[NDArray[np.uint32], Steps]:
    """See `Kernels.find`."""
    indices = np.flatnonzero(old != new)
    steps = mapped(new[indices], kind) - mapped(old[indices], kind)
    return indices.astype(np.uint32), steps


def find_with_gaps(
    old: Lanes, new: Lanes, kind: LaneKind, since: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], Steps, Numbers, NDArray[np.uint8]]:
    """See `Kernels.find_with_gaps`."""
    indices, steps = find(old, new, kind)
    return indices, steps, *class_gaps(old, indices, kind, since)


def class_gaps(old: Lanes, indices: Indices, kind: LaneKind, since: NDArray[np.uint32]) -> tuple[Numbers, NDArray[np.uint8]]:
    """See `Kernels.class_gaps`. Ranks all lanes of the block inside their class with one stable sort."""
    classes = _classes(old, kind)
    rank, population = _ranks(classes, kind.classes)
    own = classes[indices]
    ranks = rank[indices].astype(np.int64)
    order = np.argsort(own, kind="stable")
    sorted_classes, sorted_ranks = own[order], ranks[order]
    gaps = np.diff(sorted_ranks, prepend=np.int64(-1)) - 1
    first = np.flatnonzero(np.diff(sorted_classes.astype(np.int16), prepend=np.int16(-1)))
    gaps[first] = sorted_ranks[first] + since[sorted_classes[first]]
    last = np.append(first[1:], len(order)) - 1 if len(first) else first
    since += population
    since[sorted_classes[last]] = (population[sorted_classes[last]] - sorted_ranks[last] - 1).astype(np.uint32)
    unsorted = np.empty(len(order), dtype=np.uint32)
    unsorted[order] = gaps
    return unsorted, own


def find_by_class(
    old: Lanes, kind: LaneKind, gaps: NDArray[np.uint32], walk: ClassWalk, changes: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """See `Kernels.find_by_class`."""
    classes = _classes(old, kind)
    by_class = np.argsort(classes, kind="stable")
    population = np.bincount(classes, minlength=kind.classes)
    starts = np.concatenate([[0], np.cumsum(population)])
    found, order = [], []
    for name in range(kind.classes):
        left, cursor = int(walk.left[name]), int(walk.cursor[name])
        size = int(population[name])
        if left >= size:
            walk.left[name] -= np.uint32(size)
            continue
        # Every gap is followed by one change, so at most `size` more of them can lie in this block.
        ranks = left + np.concatenate([[0], np.cumsum(gaps[cursor + 1 : cursor + 1 + size].astype(np.int64) + 1)])
        inside = ranks[ranks < size]
        found.append(by_class[starts[name] + inside])
        order.append(np.arange(cursor, cursor + len(inside)) - name)
        walk.cursor[name] = cursor + len(inside)
        walk.left[name] = np.uint32(ranks[len(inside)] - size)
    indices = np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
    if len(indices) != changes:
        raise ValueError(f"a block has {len(indices)} changes, not {changes}")
    sequence = np.argsort(indices)
    positions = np.concatenate(order) if order else np.zeros(0, dtype=np.int64)
    return indices[sequence].astype(np.uint32), positions[sequence]


def put_numbers(values: Numbers, shifts: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], Bits]:
    """See `Kernels.put_numbers`."""
    large = values >> shifts
    symbols = (np.searchsorted(FLOORS, large, side="right") - 1).astype(np.uint8)
    widths = WIDTHS[symbols].astype(np.int64) + shifts
    low = values.astype(np.uint64) & ((np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1))
    return symbols, _pack(low, widths)


def take_numbers(symbols: NDArray[np.uint8], shifts: NDArray[np.uint8], bits: Bits) -> Numbers:
    """See `Kernels.take_numbers`."""
    widths = WIDTHS[symbols].astype(np.int64) + shifts
    low = _unpack(bits, widths)
    values: Numbers = ((FLOORS[symbols].astype(np.uint64) << shifts.astype(np.uint64)) | low).astype(np.uint32)
    return values


def merge(a: tuple[Indices, Steps], b: tuple[Indices, Steps]) -> tuple[Indices, Steps]:
    """See `Kernels.merge`."""
    both = np.concatenate([a[0], b[0]])
    order = np.argsort(both, kind="stable")
    indices, steps = both[order], np.concatenate([a[1], b[1]])[order]
    twice = np.flatnonzero(indices[1:] == indices[:-1])
    steps[twice] += steps[twice + 1]
    keep = steps != 0
    keep[twice + 1] = False
    return indices[keep], steps[keep]


def moved(lanes: Lanes, indices: Indices, steps: Steps, kind: LaneKind) -> Lanes:
    """See `Kernels.moved`."""
    return unmapped(mapped(lanes[indices], kind) + steps, kind)


def scatter(lanes: Lanes, indices: Indices, values: Lanes) -> None:
    """See `Kernels.scatter`."""
    lanes[indices] = values


def _classes(lanes: Lanes, kind: LaneKind) -> NDArray[np.uint8]:
    classes: Lanes = (lanes >> kind.unsigned.type(kind.shift)) & kind.unsigned.type(kind.mask)
    return classes.astype(np.uint8)


def _ranks(classes: NDArray[np.uint8], count: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The rank of every lane among the lanes of its class, and how many lanes each class has."""
    population = np.bincount(classes, minlength=count)
    starts = np.concatenate([[0], np.cumsum(population)[:-1]])
    by_class = np.argsort(classes, kind="stable")
    rank = np.empty(len(classes), dtype=np.uint32)
    rank[by_class] = np.arange(len(classes), dtype=np.int64) - starts[classes[by_class]]
    return rank, population.astype(np.uint32)


def _pack(values: NDArray[np.uint64], widths: NDArray[np.int64]) -> Bits:
    """Values of so many bits each, one after the other, the lowest bit of the first byte first."""
    ends = np.cumsum(widths)
    total = int(ends[-1]) if len(ends) else 0
    words = np.zeros(total // 64 + 2, dtype="<u8")
    if total:
        at = ends - widths
        word, bit = at >> 6, (at & 63).astype(np.uint64)
        _add_up(words, word, values << bit)
        spill = np.flatnonzero((at & 63) + widths > 64)
        _add_up(words, word[spill] + 1, values[spill] >> (np.uint64(64) - bit[spill]))
    return words.view(np.uint8)[: (total + 7) // 8].copy()


def _add_up(words: NDArray[Any], at: NDArray[np.int64], values: NDArray[np.uint64]) -> None:
    """Add values to words at sorted positions. They never overlap, so adding is setting bits."""
    first = np.flatnonzero(np.diff(at, prepend=-1))
    if len(first):
        words[at[first]] += np.add.reduceat(values, first)


def _unpack(bits: Bits, widths: NDArray[np.int64]) -> NDArray[np.uint64]:
    at = np.cumsum(widths) - widths
    padded = np.concatenate([bits, np.zeros(8, dtype=np.uint8)])
    windows = np.ndarray(len(padded) - 7, dtype="<u8", buffer=padded, strides=(1,))  # a word at every byte
    mask = (np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1)
    word: NDArray[np.uint64] = windows[at >> 3] >> (at & 7).astype(np.uint64)
    return word & mask
