"""The kernels in NumPy: slower by some factor, and without anything to compile."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.tensors.kernels import (
    ALL_ROWS,
    NO_ROOM,
    NO_SUMS,
    Bits,
    ClassWalk,
    Counts,
    Found,
    Indices,
    Numbers,
    Rows,
    Summing,
)
from weightcast.tensors.kernels.numbers import ESCAPE, FLOORS, MAX_WIDTH, SYMBOLS, WIDTHS, check_bits, check_steps
from weightcast.tensors.kernels.sum_tables import GOLDEN, LANES, TABLES
from weightcast.tensors.lanes import LaneKind, Lanes, Steps, from_zigzag, mapped, to_zigzag, unmapped


def find(old: Lanes, new: Lanes, kind: LaneKind, summing: Summing = NO_SUMS) -> Found:
    """See `Kernels.find`."""
    indices = np.flatnonzero(old != new)
    before, after = old[indices], new[indices]
    steps = mapped(after, kind) - mapped(before, kind)
    whole = grown = (0, 0)
    if summing.whole:
        words = new.view(f"u{min(kind.nbytes, 2)}")[np.newaxis]
        whole = sum_rows(words, summing.first * max(1, kind.nbytes // 2), 0, summing.seeds)
    if summing.grown:
        grown = sum_changes(indices + summing.first, before, after, summing.seeds)
    return Found(indices.astype(np.uint32), steps, whole, grown)


def find_with_gaps(
    old: Lanes, new: Lanes, kind: LaneKind, since: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], Steps, Numbers, NDArray[np.uint8]]:
    """See `Kernels.find_with_gaps`."""
    indices, steps, *_ = find(old, new, kind)
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


def put_numbers(
    values: Numbers, counts: Counts, shifts: NDArray[np.uint8], *, lanes: bool = False
) -> tuple[NDArray[np.uint8], Bits]:
    """See `Kernels.put_numbers`."""
    if lanes:
        gaps = np.diff(values, prepend=np.uint32(0)) - np.uint32(1)
        first = (np.cumsum(counts) - counts)[counts > 0]
        gaps[first] = values[first]
        values = gaps
    each = np.repeat(shifts, counts)
    large = values >> each
    symbols = (np.searchsorted(FLOORS, large, side="right") - 1).astype(np.uint8)
    widths = WIDTHS[symbols].astype(np.int64) + each
    low = values.astype(np.uint64) & ((np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1))
    return symbols, _pack(low, widths)


def take_numbers(
    symbols: NDArray[np.uint8], counts: Counts, shifts: NDArray[np.uint8], bits: Bits, room: Counts = NO_ROOM
) -> Numbers:
    """See `Kernels.take_numbers`."""
    if len(symbols) and int(symbols.max()) >= SYMBOLS:
        raise ValueError(f"{int(symbols.max())} is not a symbol")
    each = np.repeat(shifts, counts)
    widths = WIDTHS[symbols].astype(np.int64) + each
    if len(symbols) and int(widths.max()) > MAX_WIDTH:
        raise ValueError("a number has more than 32 bits")
    check_bits(bits, int(widths.sum()))
    low = _unpack(bits, widths)
    values: Numbers = ((FLOORS[symbols].astype(np.uint64) << each.astype(np.uint64)) | low).astype(np.uint32)
    return _lanes_after(values, counts, room) if len(room) else values


def _lanes_after(gaps: Numbers, counts: Counts, room: Counts) -> Numbers:
    """The lanes of changes, from the gaps between them."""
    through = np.cumsum(gaps.astype(np.int64) + 1)
    ends = np.cumsum(counts)
    begins = np.concatenate([[0], through])[ends - counts]
    lanes = through - np.repeat(begins, counts) - 1
    if (lanes >= np.repeat(room, counts)).any():
        raise ValueError("a change lies outside of its block")
    found: Numbers = lanes.astype(np.uint32)
    return found


def put_steps(steps: Steps) -> tuple[NDArray[np.uint8], Numbers]:
    """See `Kernels.put_steps`."""
    values: Numbers = to_zigzag(steps).astype(np.uint32) - np.uint32(1)
    small = np.zeros(len(values) + len(values) % 2, dtype=np.uint8)
    small[: len(values)] = np.minimum(values, ESCAPE)
    return small[::2] | (small[1::2] << np.uint8(4)), values[values >= ESCAPE] - np.uint32(ESCAPE)


def take_steps(nibbles: NDArray[np.uint8], large: Numbers, changes: int, kind: LaneKind) -> Steps:
    """See `Kernels.take_steps`."""
    values = np.empty(2 * len(nibbles), dtype=np.uint64)
    values[::2], values[1::2] = nibbles & 15, nibbles >> 4
    values = values[:changes]
    escaped = np.flatnonzero(values == ESCAPE)
    check_steps(nibbles, changes, len(escaped), len(large))
    values[escaped] += large
    if changes and int(values.max()) > (1 << 8 * kind.nbytes) - 2:
        check_steps(nibbles, changes, -1, len(large))
    return from_zigzag((values + np.uint64(1)).astype(kind.unsigned))


def fold(changes: tuple[Indices, Steps], ends: Counts, *, apart: bool = False) -> tuple[Indices, Steps]:  # noqa: ARG001
    """See `Kernels.fold`."""
    order = np.argsort(changes[0], kind="stable")
    indices, steps = changes[0][order], changes[1][order]
    first = np.flatnonzero(np.concatenate([[True], indices[1:] != indices[:-1]])[: len(indices)])
    if apart and len(first) < len(indices):
        raise ValueError("changes overlap")
    added = np.add.reduceat(steps, first, dtype=steps.dtype) if len(first) else steps
    keep = added != 0
    return indices[first][keep], added[keep]


def place(changes: tuple[Indices, Steps], moves: NDArray[np.int64], out: tuple[Indices, Steps]) -> Counts:
    """See `Kernels.place`."""
    ends, at, written = [], 0, 0
    for count, start, *numbers, step in moves.tolist():
        rows, indices, steps = Rows(*numbers), changes[0][at : at + count], changes[1][at : at + count]
        row, inside = np.divmod(indices.astype(np.int64) + start, rows.length)
        inside -= rows.skip
        taken = np.flatnonzero((inside >= 0) & (inside < rows.width))
        at, first, written = at + count, written, written + len(taken)
        out[0][first:written] = row[taken] * rows.stride + rows.corner + inside[taken] * step
        out[1][first:written] = steps[taken]
        ends.append(written)
    return np.array(ends, dtype=np.int64)


def moved(lanes: Lanes, indices: Indices, steps: Steps, kind: LaneKind) -> tuple[Lanes, Lanes]:
    """See `Kernels.moved`."""
    before = lanes[indices]
    return before, unmapped(mapped(before, kind) + steps, kind)


def scatter(lanes: Lanes, indices: Indices, values: Lanes) -> None:
    """See `Kernels.scatter`."""
    lanes[indices] = values


def count_unlike(lanes: Lanes, indices: Indices, values: Lanes) -> int:
    """See `Kernels.count_unlike`."""
    return int(np.count_nonzero(lanes[indices] != values))


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


# -- summable digests ---------------------------------------------------------------------------------------------------

_LONG = 4 * LANES  # words of a run that are summed block by block; shorter runs are summed many at a time
_AT_ONCE = 1 << 17  # words: what is worked out of them stays in the cache


def sum_rows(rows: NDArray[Any], first: int, step: int, seeds: NDArray[np.uint64]) -> tuple[int, int]:
    """See `Kernels.sum_rows`."""
    total = np.zeros(2, dtype=np.uint64)
    count, length = rows.shape
    if length >= _LONG:
        for row in range(count):
            total += _sum_run(rows[row], first + row * step, seeds)
    elif length:
        at_once = max(1, _AT_ONCE // length)
        for row in range(0, count, at_once):
            words = rows[row : row + at_once]
            starts = first + step * np.arange(row, row + len(words), dtype=np.int64)
            indices = (starts[:, np.newaxis] + np.arange(length)).reshape(-1)
            total += _sum_words(words.reshape(-1), indices, seeds)
    return int(total[0]), int(total[1])


def sum_changes(
    indices: Indices, before: NDArray[Any], after: NDArray[Any], seeds: NDArray[np.uint64], rows: Rows = ALL_ROWS
) -> tuple[int, int]:
    """See `Kernels.sum_changes`."""
    words = max(1, before.itemsize // 2)
    places = indices.astype(np.int64)
    if rows is not ALL_ROWS:
        row, inside = places // rows.length, places % rows.length - rows.skip
        taken = (inside >= 0) & (inside < rows.width)
        places, before, after = (row * rows.stride + rows.corner + inside)[taken], before[taken], after[taken]
    if words > 1:
        places = (places[:, np.newaxis] * words + np.arange(words)).reshape(-1)
        before, after = np.ascontiguousarray(before).view(np.uint16), np.ascontiguousarray(after).view(np.uint16)
    total = _sum_words(after, places, seeds) - _sum_words(before, places, seeds)
    return int(total[0]), int(total[1])


def _sum_run(words: NDArray[Any], start: int, seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The sums of words that follow one another."""
    head = min(-start % LANES, len(words))
    blocks = (len(words) - head) // LANES
    tail = head + blocks * LANES
    total = _sum_words(words[:head], start + np.arange(head), seeds)
    total += _sum_words(words[tail:], start + np.arange(tail, len(words)), seeds)
    for at in range(0, blocks, _AT_ONCE // LANES):
        some = min(_AT_ONCE // LANES, blocks - at)
        whole = words[head + at * LANES : head + (at + some) * LANES].astype(np.uint16).view(np.int16).reshape(some, LANES)
        left, right = [(whole ^ table).astype(np.int32) for table in TABLES[:2]], [whole + table for table in TABLES[2:]]
        products = [(one * other).sum(axis=1, dtype=np.int64) for one in left for other in right]
        total += _weighed((start + head) // LANES + at + np.arange(some), products, seeds)
    return total


def _sum_words(words: NDArray[Any], indices: NDArray[np.int64], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The sums of words at any indices."""
    if not len(words):
        return np.zeros(2, dtype=np.uint64)
    blocks, lanes = indices // LANES, indices % LANES
    signed = words.astype(np.uint16).view(np.int16)
    factors = [(signed ^ table[lanes]).astype(np.int64) for table in TABLES[:2]]
    factors += [(signed + table[lanes]).astype(np.int64) for table in TABLES[2:]]
    begins = np.flatnonzero(np.diff(blocks, prepend=np.int64(-1)))
    products = [np.add.reduceat(factors[j] * factors[k], begins) for j in (0, 1) for k in (2, 3)]
    return _weighed(blocks[begins], products, seeds)


def _weighed(blocks: NDArray[np.int64], products: list[NDArray[np.int64]], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The products of blocks, each times the multiplier of its block, in two sums."""
    first, second, third, fourth = (product.view(np.uint64) for product in products)
    one = _multipliers(seeds[0], blocks) * first + _multipliers(seeds[1], blocks) * fourth
    other = _multipliers(seeds[2], blocks) * second + _multipliers(seeds[3], blocks) * third
    return np.array([one.sum(dtype=np.uint64), other.sum(dtype=np.uint64)])


def sum_products(products: NDArray[np.int64], first: int, seeds: NDArray[np.uint64]) -> tuple[int, int]:
    """The two sums of whole blocks from block `first` on.

    `products` has four rows, each added up for each block: left 0 · right 0, left 0 · right 1, left 1 · right 0 and
    left 1 · right 1, as docs/format.md calls the factors.
    """
    total = _weighed(first + np.arange(products.shape[1]), list(products), seeds)
    return int(total[0]), int(total[1])


def _multipliers(seed: np.uint64, blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
    numbers = seed + (blocks + 1).view(np.uint64) * np.uint64(GOLDEN)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (numbers ^ (numbers >> np.uint64(31))) | np.uint64(1)
