"""The code for gaps and large steps: a byte that says how large a number is, and as many low bits as that leaves open.

A number below 16 is its own symbol. Above, a symbol names one of eight equal parts of an octave, and the low bits follow in
a packed stream. Symbols are few and skewed, so zstd's entropy coder does the rest; low bits are as good as random.
docs/delta-format.md has the rule in full.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EXACT = 16  # symbols below this stand for themselves
ESCAPE = 15  # half a byte that sends the reader to the stream of large steps
MAX_WIDTH = 28  # low bits of a 32-bit number: its symbol has the upper four
SYMBOLS = EXACT + 8 * MAX_WIDTH

_OCTAVE = np.arange(SYMBOLS - EXACT) // 8
WIDTHS: NDArray[np.uint8] = np.concatenate([np.zeros(EXACT), _OCTAVE + 1]).astype(np.uint8)
"""How many low bits follow a symbol."""
FLOORS: NDArray[np.uint32] = np.concatenate(
    [np.arange(EXACT), (8 + np.arange(SYMBOLS - EXACT) % 8) << (_OCTAVE + 1)]
).astype(np.uint32)
"""The smallest number with a symbol."""


def shift_for(total: int, count: int) -> int:
    """How many low bits to set aside in a group of `count` numbers, so that what remains is about 8 to 16 on average."""
    return max(0, (total // count + 1).bit_length() - 4)


def check_bits(bits: NDArray[np.uint8], asked: int) -> None:
    """Raise `ValueError` unless there are so many packed bits, and nothing behind them."""
    if len(bits) != (asked + 7) // 8 or (asked % 8 and bits[-1] >> (asked % 8)):
        raise ValueError(f"the low bits have {len(bits)} bytes where {asked} bits are asked for")


def check_steps(nibbles: NDArray[np.uint8], changes: int, large: int, given: int) -> None:
    """Raise `ValueError` if steps are too large, if there are not as many large ones as given, or if bits are left over."""
    if large < 0:
        raise ValueError("a step does not fit into a lane")
    if large != given:
        raise ValueError(f"there are {given} large steps where {large} are asked for")
    if changes % 2 and nibbles[-1] >> 4:
        raise ValueError("the last half byte of the steps is not empty")
