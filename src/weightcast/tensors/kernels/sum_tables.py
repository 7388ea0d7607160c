"""The constants of summable digests, and how the multipliers of a tensor follow from its seed. docs/format.md has the rule.

The constants are part of the format: another value anywhere makes other sums.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LANES = 2048  # words of a block: the tables of a block stay in the fastest cache
GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_LOWEST = 0x8000  # as a signed word: -32768


def mix64(number: int) -> int:
    """The finalizer of splitmix64: each bit of the result depends on each bit of the number."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def _make_tables() -> NDArray[np.int16]:
    """Four words for each lane: two to combine by xor, two to add.

    No word of data makes both factors of a product -32768, so two products always fit into 32 bits.
    """
    tables = np.empty((4, LANES), dtype=np.uint16)
    number = 0
    for lane in range(LANES):
        while True:
            number += 1
            drawn = mix64(number * GOLDEN & _MASK)
            words = [drawn >> shift & 0xFFFF for shift in (0, 16, 32, 48)]
            if {word ^ _LOWEST for word in words[:2]}.isdisjoint((_LOWEST - word) & 0xFFFF for word in words[2:]):
                break
        tables[:, lane] = words
    return tables.view(np.int16)


TABLES: NDArray[np.int16] = _make_tables()
TABLES.flags.writeable = False
