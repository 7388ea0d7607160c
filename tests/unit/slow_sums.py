"""A second implementation of the sums of tensors and of the root over them: whole numbers, one word at a time.

It shares no code with weightcast, so that a mistake in one of them is not a mistake in both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import cache

import xxhash

BLOCK = 2048  # words that have the same multipliers
GOLDEN = 0x9E3779B97F4A7C15
NARROW = {"BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"}  # a word is a byte; of all others it is 16 bits

Pair = tuple[int, int]


def mix(number: int) -> int:
    """The last steps of splitmix64."""
    number %= 1 << 64
    number ^= number >> 30
    number = number * 0xBF58476D1CE4E5B9 % (1 << 64)
    number ^= number >> 27
    number = number * 0x94D049BB133111EB % (1 << 64)
    return number ^ (number >> 31)


def signed(word: int) -> int:
    """The lowest 16 bits as a number with a sign."""
    word %= 1 << 16
    return word - (1 << 16) if word >= 1 << 15 else word


@cache
def table() -> list[tuple[int, int, int, int]]:
    """For each place in a block two words to combine by xor and two to add.

    They are drawn one after the other. Those with a data word that makes both factors of a product -32768 are passed over.
    """
    lanes: list[tuple[int, int, int, int]] = []
    drawn = 0
    while len(lanes) < BLOCK:
        drawn += 1
        number = mix(drawn * GOLDEN)
        a, b, c, d = (number >> place & 0xFFFF for place in (0, 16, 32, 48))
        lowest = [(word ^ 0x8000, added) for word in (a, b) for added in (c, d)]
        if all(signed(word + added) != -32768 for word, added in lowest):
            lanes.append((a, b, c, d))
    return lanes


def spelled(*texts: str) -> bytes:
    """Texts, each after its length."""
    return b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in texts)


def described(shape: Sequence[int]) -> str:
    return ",".join(str(size) for size in shape)


def seeds_of(name: str, dtype: str, shape: Sequence[int]) -> tuple[int, int, int, int]:
    drawn = xxhash.xxh3_128(spelled(name, dtype, described(shape))).digest()
    first, second = struct.unpack("<QQ", drawn)
    return first, mix(first), second, mix(second)


def multiplier(seed: int, block: int) -> int:
    return mix(seed + (block + 1) * GOLDEN) | 1


def block_sum(seeds: tuple[int, int, int, int], index: int, words: Sequence[int]) -> Pair:
    """What words of one block, from `index` of the tensor on, add to both sums."""
    ac = ad = bc = bd = 0
    for word, (a, b, c, d) in zip(words, table()[index % BLOCK :], strict=False):
        x, y = ((word ^ a) + 32768) % 65536 - 32768, ((word ^ b) + 32768) % 65536 - 32768
        p, q = (word + c + 32768) % 65536 - 32768, (word + d + 32768) % 65536 - 32768
        ac, ad, bc, bd = ac + x * p, ad + x * q, bc + y * p, bd + y * q
    first, second, third, fourth = (multiplier(seed, index // BLOCK) for seed in seeds)
    return first * ac + second * bd, third * ad + fourth * bc


def words_of(dtype: str, data: bytes) -> Sequence[int]:
    return data if dtype in NARROW else struct.unpack(f"<{len(data) // 2}H", data)


def written(total: Iterable[int]) -> str:
    return "sum:" + "".join(f"{number % (1 << 64):016x}" for number in total)


def range_sum(name: str, dtype: str, shape: Sequence[int], first: int, data: bytes) -> str:
    """What bytes add to the sum of a tensor. The word that they begin with is number `first` of it."""
    seeds, words, one, other = seeds_of(name, dtype, shape), words_of(dtype, data), 0, 0
    at = 0
    while at < len(words):
        count = BLOCK - (first + at) % BLOCK
        more = block_sum(seeds, first + at, words[at : at + count])
        one, other, at = one + more[0], other + more[1], at + count
    return written((one, other))


def tensor_sum(name: str, dtype: str, shape: Sequence[int], data: bytes) -> str:
    """The sum of a tensor whose bytes are these."""
    return range_sum(name, dtype, shape, 0, data)


def root(tensors: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """The root over names, dtypes, shapes and sums."""
    whole = b"".join(spelled(name, dtype, described(shape), total) for name, dtype, shape, total in sorted(tensors))
    return f"sums:{xxhash.xxh3_128(whole).hexdigest()}"
