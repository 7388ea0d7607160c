"""The compiled loops of summable digests. The rule is in docs/format.md; `plain` computes the same in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from weightcast.tensors.kernels import ALL_ROWS, Rows
from weightcast.tensors.kernels.jit import I64, INDEX_TYPES, U8, U32, U64, compiled, read_of
from weightcast.tensors.kernels.sum_tables import GOLDEN, LANES, TABLES

_WIDTH = 16  # words at a time
BLOCK, _GOLDEN = np.int64(LANES), np.uint64(GOLDEN)
_I16, _U16 = types.int16, types.uint16
PAIR = types.UniTuple(U64, 2)  # type: ignore[no-untyped-call]
FOUR = types.UniTuple(I64, 4)  # type: ignore[no-untyped-call]
_FIVE = types.UniTuple(I64, 5)  # type: ignore[no-untyped-call]
LANES_LOG = LANES.bit_length() - 1
BY_LANE = np.ascontiguousarray(TABLES.T)  # what one lane needs lies together
BY_LANE.flags.writeable = False
TABLE_TYPE = types.Array(_I16, 2, "C", readonly=True)


def rows_of(item: Any) -> Any:
    return types.Array(item, 2, "A", readonly=True, aligned=False)


@intrinsic
def _vectors(typing_context, data, at, tables, lane, count):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Four sums of products over `count` words, a multiple of 16: xor table 0 or 1 with add table 0 or 1.

    The words begin `at` bytes from the start of `data`, the tables at `lane`. Written as vectors of 16 words, because a
    plain loop is not compiled into multiplications of pairs of words, which are three times as fast.
    """

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        word, number, long = ir.IntType(16), ir.IntType(32), ir.IntType(64)
        item = word if signature.args[0].dtype.bitwidth == 16 else ir.IntType(8)
        words, products = ir.VectorType(word, _WIDTH), ir.VectorType(number, _WIDTH)
        pairs = ir.VectorType(number, _WIDTH // 2)
        even = ir.Constant(pairs, list(range(0, _WIDTH, 2)))
        odd = ir.Constant(pairs, list(range(1, _WIDTH, 2)))
        low, sixteen = ir.Constant(pairs, [0xFFFF] * (_WIDTH // 2)), ir.Constant(pairs, [16] * (_WIDTH // 2))
        byte = ir.IntType(8).as_pointer()
        data_start = context.make_array(signature.args[0])(context, builder, args[0]).data
        start = builder.gep(builder.bitcast(data_start, byte), [args[1]])
        table = builder.gep(context.make_array(signature.args[2])(context, builder, args[2]).data, [args[3]])

        def load(place: Any, kind: Any) -> Any:
            vector = ir.VectorType(kind, _WIDTH)
            return builder.load(builder.bitcast(place, vector.as_pointer()), align=1)

        nothing: Any = ir.Constant(pairs, None)
        make: Any = cgutils.alloca_once_value
        lows, highs = [[make(builder, nothing) for _ in range(4)] for _ in range(2)]
        with cgutils.for_range(builder, builder.udiv(args[4], ir.Constant(long, _WIDTH))) as loop:
            first = builder.mul(loop.index, ir.Constant(long, _WIDTH))
            found = load(builder.gep(start, [builder.mul(first, ir.Constant(long, item.width // 8))]), item)
            value = found if item is word else builder.zext(found, words)
            there = [load(builder.gep(table, [builder.add(first, ir.Constant(long, k * LANES))]), word) for k in range(4)]
            left = [builder.sext(builder.xor(value, one), products) for one in there[:2]]
            right = [builder.sext(builder.add(value, one), products) for one in there[2:]]
            for index in range(4):
                product = builder.mul(left[index // 2], right[index % 2])
                unused = ir.Constant(products, ir.Undefined)
                pair = builder.add(
                    builder.shuffle_vector(product, unused, even), builder.shuffle_vector(product, unused, odd)
                )
                builder.store(builder.add(builder.load(lows[index]), builder.and_(pair, low)), lows[index])
                builder.store(builder.add(builder.load(highs[index]), builder.ashr(pair, sixteen)), highs[index])
        totals = []
        for index in range(4):
            total = ir.Constant(long, 0)
            lower, upper = builder.load(lows[index]), builder.load(highs[index])
            for pair_at in range(_WIDTH // 2):
                place = ir.Constant(number, pair_at)
                total = builder.add(total, builder.sext(builder.extract_element(lower, place), long))
                high = builder.sext(builder.extract_element(upper, place), long)
                total = builder.add(total, builder.shl(high, ir.Constant(long, 16)))
            totals.append(total)
        return context.make_tuple(builder, signature.return_type, totals)

    return FOUR(data, types.int64, tables, types.int64, types.int64), generate


_sum_vectors: Any = _vectors


@compiled(U64(U64, I64))
def _multiplier(seed: Any, block: Any) -> Any:
    number = seed + np.uint64(block + 1) * _GOLDEN
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (number ^ (number >> np.uint64(31))) | np.uint64(1)


@compiled(FOUR(I64, TABLE_TYPE, I64))
def _products(word: Any, tables: Any, lane: Any) -> Any:
    a, b = np.int64(np.int16(word ^ tables[0, lane])), np.int64(np.int16(word ^ tables[1, lane]))
    c, d = np.int64(np.int16(word + tables[2, lane])), np.int64(np.int16(word + tables[3, lane]))
    return a * c, a * d, b * c, b * d


@compiled(*(FOUR(rows_of(item), I64, I64, TABLE_TYPE, I64, I64) for item in (U8, _U16)))
def block_products(rows: Any, row: Any, at: Any, tables: Any, lane: Any, count: Any) -> Any:
    """The sums of products over `count` words of a row from `at` on, which lie in one block from `lane` on."""
    fast = count // _WIDTH * _WIDTH
    p, q, r, s = _sum_vectors(rows, row * rows.strides[0] + at * rows.itemsize, tables, lane, fast)
    for offset in range(fast, count):
        w, x, y, z = _products(np.int64(rows[row, at + offset]), tables, lane + offset)
        p, q, r, s = p + w, q + x, r + y, s + z
    return p, q, r, s


@compiled(FOUR(_I16, _I16, TABLE_TYPE, U64))
def change_products(old: Any, new: Any, by_lane: Any, lane: Any) -> Any:
    """By how much the products of a word grow that changes."""
    t, u, v, x = by_lane[lane, 0], by_lane[lane, 1], by_lane[lane, 2], by_lane[lane, 3]
    a, b = np.int64(np.int16(new ^ t)), np.int64(np.int16(new ^ u))
    c, d = np.int64(np.int16(new + v)), np.int64(np.int16(new + x))
    i, j = np.int64(np.int16(old ^ t)), np.int64(np.int16(old ^ u))
    k, m = np.int64(np.int16(old + v)), np.int64(np.int16(old + x))
    return a * c - i * k, a * d - i * m, b * c - j * k, b * d - j * m


@compiled(PAIR(read_of(U64), I64, I64, I64, I64, I64))
def weighed(seeds: Any, block: Any, p: Any, q: Any, r: Any, s: Any) -> Any:
    """What the products of a block add to the two sums."""
    one = _multiplier(seeds[0], block) * np.uint64(p) + _multiplier(seeds[1], block) * np.uint64(s)
    other = _multiplier(seeds[2], block) * np.uint64(q) + _multiplier(seeds[3], block) * np.uint64(r)
    return one, other


@compiled(*(PAIR(rows_of(item), I64, I64, read_of(U64), TABLE_TYPE) for item in (U8, _U16)))
def _sum_rows(rows: Any, first: Any, step: Any, seeds: Any, tables: Any) -> Any:
    """The sums of rows of words, whose first has index `first` and each next one an index larger by `step`."""
    one, other = np.uint64(0), np.uint64(0)
    for row in range(rows.shape[0]):
        start, at, length = first + row * step, 0, rows.shape[1]
        while at < length:
            block, lane = (start + at) // BLOCK, (start + at) % BLOCK
            count = min(length - at, BLOCK - lane)
            p, q, r, s = block_products(rows, row, at, tables, lane, count)
            more, further = weighed(seeds, block, p, q, r, s)
            one, other, at = one + more, other + further, at + count
    return one, other


@intrinsic
def _changed(typing_context, indices, before, after, tables, at, low, limit, away):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """The products that new values have, less those of the old ones, over the changes from `at` on up to the first whose
    index is not between `low` and `limit`. Gives where that is, and the four sums.

    `away` leads from an index to the place in the tensor. All four products of a word are taken at once, as a vector.
    """

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        word, number, long = ir.IntType(16), ir.IntType(32), ir.IntType(64)
        two, four = ir.VectorType(word, 2), ir.VectorType(word, 4)
        arrays = [context.make_array(signature.args[place])(context, builder, args[place]) for place in range(4)]
        narrow = signature.args[0].dtype.bitwidth < 64
        bits = signature.args[1].dtype.bitwidth
        words = max(1, bits // 16)
        count = builder.extract_value(arrays[0].shape, 0)
        table = builder.bitcast(arrays[3].data, four.as_pointer())
        unused = ir.Constant(four, ir.Undefined)
        xored, added = ir.Constant(four, [-1, -1, 0, 0]), ir.Constant(four, [0, 0, -1, -1])

        def constant(value: int) -> Any:
            return ir.Constant(long, value)

        def picked(vector: Any, *lanes: int) -> Any:
            places = ir.Constant(ir.VectorType(number, len(lanes)), list(lanes))
            return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), places)

        def words_of(array: Any, place: Any) -> list[Any]:
            value = builder.load(builder.gep(array.data, [place]))
            if bits == 32:
                return [builder.extract_element(builder.bitcast(value, two), ir.Constant(number, one)) for one in range(2)]
            return [value if bits == 16 else builder.zext(value, word)]

        def terms(value: Any, seeds: Any) -> Any:
            spread = builder.insert_element(unused, value, ir.Constant(number, 0))
            spread = picked(spread, 0, 0, 0, 0)
            return builder.add(builder.xor(spread, builder.and_(seeds, xored)), builder.and_(seeds, added))

        make: Any = cgutils.alloca_once_value
        place, total = make(builder, args[4]), make(builder, ir.Constant(ir.VectorType(long, 4), None))
        more, body, end = (builder.append_basic_block(name) for name in ("more", "body", "end"))
        builder.branch(more)
        builder.position_at_end(more)
        here = builder.load(place)
        inside = builder.append_basic_block("inside")
        builder.cbranch(builder.icmp_signed("<", here, count), inside, end)
        builder.position_at_end(inside)
        index = builder.load(builder.gep(arrays[0].data, [here]))
        index = builder.zext(index, long) if narrow else index
        builder.cbranch(builder.icmp_unsigned("<", builder.sub(index, args[5]), builder.sub(args[6], args[5])), body, end)
        builder.position_at_end(body)
        first = builder.mul(builder.add(index, args[7]), constant(words))
        old, new = words_of(arrays[1], here), words_of(arrays[2], here)
        for offset in range(words):
            lane = builder.and_(builder.add(first, constant(offset)), constant(LANES - 1))
            seeds = builder.load(builder.gep(table, [lane]), align=2)
            both = builder.shuffle_vector(
                terms(new[offset], seeds), terms(old[offset], seeds), ir.Constant(ir.VectorType(number, 8), list(range(8)))
            )
            wide = ir.VectorType(number, 8)
            left = builder.sext(picked(both, 0, 0, 1, 1, 4, 4, 5, 5), wide)
            right = builder.sext(picked(both, 2, 3, 2, 3, 6, 7, 6, 7), wide)
            product = builder.mul(left, right)
            grown = builder.sub(picked(product, 0, 1, 2, 3), picked(product, 4, 5, 6, 7))  # less than 2 ** 31
            builder.store(builder.add(builder.load(total), builder.sext(grown, ir.VectorType(long, 4))), total)
        builder.store(builder.add(here, constant(1)), place)
        builder.branch(more)
        builder.position_at_end(end)
        sums = builder.load(total)
        found = [builder.extract_element(sums, ir.Constant(number, one)) for one in range(4)]
        return context.make_tuple(builder, signature.return_type, [builder.load(place), *found])

    return _FIVE(indices, before, after, tables, *[types.int64] * 4), generate


_sum_changed: Any = _changed


@compiled(
    *(
        PAIR(read_of(index), read_of(item), read_of(item), read_of(U64), TABLE_TYPE, I64, I64, I64, I64, I64)
        for index in INDEX_TYPES
        for item in (U8, _U16, U32)
    )
)
def _sum_changes(
    indices: Any,
    before: Any,
    after: Any,
    seeds: Any,
    tables: Any,
    length: Any,
    skip: Any,
    width: Any,
    stride: Any,
    corner: Any,
) -> Any:
    """By how much the sums grow where lanes of 8, 16 or 32 bits change."""
    one, other = np.uint64(0), np.uint64(0)
    lanes = BLOCK // max(1, before.itemsize // 2)
    start, stop, low, end, away = np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    at, count = np.int64(0), np.int64(indices.size)
    while at < count:
        place = np.int64(indices[at])
        if place < start or place >= stop:  # in another row than the change before
            row = place // length
            start, stop = row * length, row * length + length
            low, end = start + skip, start + skip + width
            away = row * stride + corner - low
        if place < low or place >= end:
            at += 1
            continue
        block = (place + away) // lanes
        first, last = max(low, block * lanes - away), min(end, (block + 1) * lanes - away)
        at, p, q, r, s = _sum_changed(indices, before, after, tables, at, first, last, away)
        more, further = weighed(seeds, block, p, q, r, s)
        one, other = one + more, other + further
    return one, other


def sum_rows(rows: NDArray[Any], first: int, step: int, seeds: NDArray[np.uint64]) -> tuple[int, int]:
    """See `Kernels.sum_rows`."""
    one, other = _sum_rows(rows, first, step, seeds, TABLES)
    return int(one), int(other)


def sum_changes(
    indices: NDArray[Any], before: NDArray[Any], after: NDArray[Any], seeds: NDArray[np.uint64], rows: Rows = ALL_ROWS
) -> tuple[int, int]:
    """See `Kernels.sum_changes`."""
    one, other = _sum_changes(indices, before, after, seeds, BY_LANE, *rows)
    return int(one), int(other)
