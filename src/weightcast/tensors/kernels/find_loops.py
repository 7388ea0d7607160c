"""The compiled loop that finds changes. It sums in passing, block by block, what it has just read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import types

from weightcast.tensors.kernels.jit import (
    I64,
    LANE_TYPES,
    U8,
    U32,
    U64,
    compiled,
    differing,
    prefetch,
    read_of,
    trailing_zeros,
    write_of,
)
from weightcast.tensors.kernels.sum_loops import (
    BLOCK,
    LANES_LOG,
    PAIR,
    TABLE_TYPE,
    block_products,
    change_products,
    rows_of,
    weighed,
)

_FOUND: Any = types.Tuple((I64, PAIR, PAIR))
_AHEAD = 2048  # bytes: while a block is summed, nothing is read ahead by itself


def _finder(lane: Any) -> Callable[..., Any]:
    words, line = max(1, lane.bitwidth // 16), 512 // lane.bitwidth  # words of a lane, and lanes of a line of the cache
    low, ahead = (1 << min(lane.bitwidth, 16)) - 1, 8 * _AHEAD // lane.bitwidth
    word_type = U8 if lane.bitwidth == 8 else types.uint16

    @compiled(
        _FOUND(
            *2 * (read_of(lane),),
            rows_of(word_type),
            *2 * (I64,),
            *2 * (types.boolean,),
            read_of(U64),
            *2 * (TABLE_TYPE,),
            write_of(U32),
            write_of(lane),
        )
    )
    def find(
        old: Any,
        new: Any,
        new_words: Any,
        flip: Any,
        first: Any,
        whole: Any,
        grown: Any,
        seeds: Any,
        tables: Any,
        by_lane: Any,
        indices: Any,
        steps: Any,
    ) -> Any:
        """Counts all changes and writes as many as there is room for. Returns their number, and the sums.

        `first` is the index of the first lane in the tensor. `whole`: sum all new lanes. `grown`: sum the changes.
        """
        found, room, at = np.uint64(0), np.uint64(indices.size), np.int64(0)
        one, other, more, further = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
        while at < new.size:
            index = (first + at) * words
            block, skip = index >> LANES_LOG, index & (BLOCK - 1)
            start, stop = at, min(new.size, at + (BLOCK - skip) // words)
            a, b, c, d = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
            while start < stop:
                left = np.uint64(0)
                if start + 64 <= stop:
                    left = differing(old, new, start)
                    for near in range(0, 64, line):
                        prefetch(old, np.uint64(start + ahead + near))
                        prefetch(new, np.uint64(start + ahead + near))
                else:  # lanes that do not fill a group
                    for rest in range(stop - start):
                        left |= np.uint64(old[start + rest] != new[start + rest]) << np.uint64(rest)
                while left:
                    place = np.uint64(start) + trailing_zeros(left)
                    left &= left - np.uint64(1)
                    x, y = np.int64(old[place]), np.int64(new[place])
                    if grown:
                        lane_at = np.uint64(skip) + (place - np.uint64(at)) * np.uint64(words)
                        for word in range(words):
                            before, after = np.int16((x >> 16 * word) & low), np.int16((y >> 16 * word) & low)
                            p, q, r, s = change_products(before, after, by_lane, lane_at + np.uint64(word))
                            a, b, c, d = a + p, b + q, c + r, d + s
                    if found < room:
                        x, y = x ^ ((x >> 63) & flip), y ^ ((y >> 63) & flip)  # mapped, see `lanes`
                        indices[found], steps[found] = place, y - x
                    found += np.uint64(1)
                start += 64
            if grown:
                p, q = weighed(seeds, block, a, b, c, d)
                more, further = more + p, further + q
            if whole:
                a, b, c, d = block_products(new_words, 0, at * words, tables, skip, (stop - at) * words)
                p, q = weighed(seeds, block, a, b, c, d)
                one, other = one + p, other + q
            at = stop
        return np.int64(found), (one, other), (more, further)

    return find


LOOPS = {nbytes: _finder(lane) for nbytes, lane in zip((1, 2, 4), LANE_TYPES, strict=True)}
