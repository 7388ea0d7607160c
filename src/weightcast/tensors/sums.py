"""Summable digests: the digest of a tensor's state as a sum over its elements.

Sums of shards add up to the sum of the tensor, and a change adds its difference. So a rank sums only the elements that it
holds. docs/format.md has the rule and golden vectors. Sums find damage and mistakes; they do not protect from forgery.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightcast.errors import InvalidInput
from weightcast.tensors.boxes import Box
from weightcast.tensors.digest import Algorithm, Hasher, algorithm_of, raw_digest
from weightcast.tensors.flat import Array, Buffer, byte_blocks
from weightcast.tensors.kernels import ALL_ROWS, Indices, Rows, Summing, kernels_for
from weightcast.tensors.kernels.plain import sum_products
from weightcast.tensors.kernels.sum_tables import mix64
from weightcast.tensors.lanes import Lanes
from weightcast.tensors.spec import TensorSpec

LABEL, ROOT_LABEL = "sum", "sums"
_MASK = (1 << 64) - 1
_SUM = re.compile(rf"{LABEL}:[0-9a-f]{{32}}")
_AT_ONCE = 16 << 20  # bytes between two calls of `check`

Check = Callable[[], None]


def _unchecked() -> None:
    """Does nothing: for sums without a deadline."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A pair of 64-bit sums. Adds and subtracts modulo 2^64."""

    one: int = 0
    other: int = 0

    def __add__(self, more: Sum) -> Sum:
        return Sum((self.one + more.one) & _MASK, (self.other + more.other) & _MASK)

    def __sub__(self, less: Sum) -> Sum:
        return Sum((self.one - less.one) & _MASK, (self.other - less.other) & _MASK)

    def times(self, copies: int) -> Sum:
        """The sum of so many copies."""
        return Sum(self.one * copies & _MASK, self.other * copies & _MASK)

    def __str__(self) -> str:
        return f"{LABEL}:{self.one:016x}{self.other:016x}"

    @classmethod
    def parse(cls, text: str) -> Sum:
        """The sum that was written as this. Raises `InvalidInput` for other text."""
        if not is_sum(text):
            raise InvalidInput(f"{text[:80]!r} is not a sum: expected {LABEL}: and 32 hexadecimal digits.")
        digits = text.partition(":")[2]
        return cls(int(digits[:16], 16), int(digits[16:], 16))


def is_sum(text: str) -> bool:
    """Whether this is a sum as it is written: ``sum:`` and 32 lower-case hexadecimal digits."""
    return _SUM.fullmatch(text) is not None


def add_up(sums: Iterable[Sum]) -> Sum:
    """All of them together."""
    total = Sum()
    for one in sums:
        total += one
    return total


@lru_cache(maxsize=1 << 16)
def _seeds(spec: TensorSpec) -> NDArray[np.uint64]:
    """Four seeds from name, dtype and shape, two for each sum."""
    raw = raw_digest(_described(spec))
    first, second = int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")
    seeds = np.array([first, mix64(first), second, mix64(second)], dtype=np.uint64)
    seeds.flags.writeable = False
    return seeds


def _word_nbytes(spec: TensorSpec) -> int:
    return min(spec.dtype.itemsize, 2)


def _as_words(array: Array, spec: TensorSpec) -> NDArray[Any]:
    """An array as words. Elements of more than 16 bits become several words of the last dimension."""
    words: NDArray[Any] = array.view(f"u{_word_nbytes(spec)}")
    return words


def range_sum(spec: TensorSpec, offset: int, data: Buffer | NDArray[np.uint8], *, in_passing: bool = False) -> Sum:
    """The part of a tensor's sum that bytes from `offset` on add. Raises `InvalidInput` if they split a word.

    `in_passing`: it is not worth loading the compiled kernels for this.
    """
    flat, width = np.frombuffer(data, dtype=np.uint8), _word_nbytes(spec)
    if offset % width or len(flat) % width:
        raise InvalidInput(f"bytes {offset} to {offset + len(flat)} of {spec.name!r} split a word of 16 bits.")
    words = flat.view(f"u{width}")
    kernels = kernels_for(0 if in_passing else flat.nbytes)
    return Sum(*kernels.sum_rows(words[np.newaxis], offset // width, 0, _seeds(spec)))


class RunningSum:
    """The sum of a tensor whose bytes come in order, from byte `start` on, in stretches of any length."""

    def __init__(self, spec: TensorSpec, start: int = 0) -> None:
        self._spec, self._total, self._seen, self._rest = spec, Sum(), start, b""

    def update(self, data: Buffer) -> None:
        """Take in the next bytes."""
        view, width = memoryview(data).cast("B"), _word_nbytes(self._spec)
        if self._rest or len(view) % width:  # a stretch that splits a word
            joined = self._rest + bytes(view)
            whole = len(joined) - len(joined) % width
            self._rest, view = joined[whole:], memoryview(joined)[:whole]
        self._total += range_sum(self._spec, self._seen, view)
        self._seen += len(view)

    def digest(self) -> str:
        """The sum of what was taken in so far."""
        return str(self._total)


def tensor_hasher(spec: TensorSpec, expected: str) -> Hasher | RunningSum:
    """Takes in a tensor's bytes in order, and gives a digest of the same kind as `expected`: a sum, or over bytes."""
    return RunningSum(spec) if is_sum(expected) else Hasher(algorithm_of(expected))


def array_proof(spec: TensorSpec, array: Array, expected: str, check: Check = _unchecked) -> str:
    """The digest of a whole tensor, of the same kind as `expected`."""
    hasher = tensor_hasher(spec, expected)
    for block in byte_blocks(array, nbytes=_AT_ONCE):
        hasher.update(block.data)
        check()
    return hasher.digest()


class TensorHasher:
    """The digest of a tensor's bytes and its sum, from the same blocks, while they are in the cache."""

    def __init__(self, spec: TensorSpec, algorithm: Algorithm | None, start: int = 0) -> None:
        """Without an algorithm there is only the sum. The bytes begin at byte `start` of the tensor."""
        self._hasher, self._sum = Hasher(algorithm) if algorithm else None, RunningSum(spec, start)

    def update(self, data: Buffer) -> None:
        """Take in the next bytes."""
        if self._hasher is not None:
            self._hasher.update(data)
        self._sum.update(data)

    def finish(self) -> Digests:
        """Both, of what was taken in so far."""
        return Digests(self._hasher.digest() if self._hasher is not None else "", self._sum.digest())


class Digests(NamedTuple):
    """What proves a tensor: `digest` its bytes as they lie, `sum` its state."""

    digest: str
    sum: str


NO_DIGESTS = Digests("", "")


def array_sum(spec: TensorSpec, array: Array, check: Check = _unchecked) -> Sum:
    """The sum of a whole tensor, whatever the strides of the array. `check` is called every few milliseconds."""
    total, offset = Sum(), 0
    for block in byte_blocks(array, nbytes=_AT_ONCE):
        total += range_sum(spec, offset, block)
        offset += len(block)
        check()
    return total


def box_sum(spec: TensorSpec, box: Box, array: Array, check: Check = _unchecked) -> Sum:
    """The part of a tensor's sum that a box adds. `array` holds the elements of the box, with any strides."""
    if box.shape == spec.shape:
        return array_sum(spec, array, check)
    if 0 in box.shape:
        return Sum()
    words_per = spec.dtype.itemsize // _word_nbytes(spec)
    total = Sum()
    for start, rows in _row_groups(box, array.reshape(box.shape)):
        inner = np.ascontiguousarray(rows) if rows.strides[-1] != rows.itemsize else rows
        index = _flat_index(spec.shape, start) * words_per
        step = spec.shape[-1] * words_per if rows.ndim > 1 else 0
        words = _as_words(inner, spec)
        seen = words if words.ndim > 1 else words[np.newaxis]
        total += Sum(*kernels_for(seen.nbytes).sum_rows(seen, index, step, _seeds(spec)))
        check()
    return total


def _row_groups(box: Box, array: Array) -> Iterator[tuple[tuple[int, ...], Array]]:
    """The elements of a box in matrices of bounded size, and where in the tensor each begins."""
    if array.ndim < 2:
        yield box.start, array
        return
    rows = max(1, _AT_ONCE // max(1, array.shape[-1] * array.itemsize))
    for outer in np.ndindex(*array.shape[:-2]):
        matrix = array[outer]
        for row in range(0, len(matrix), rows):
            start = tuple(a + b for a, b in zip(box.start, (*outer, row, 0), strict=True))
            yield start, matrix[row : row + rows]


def box_offset(spec: TensorSpec, box: Box) -> int | None:
    """The byte of a tensor at which a box begins, if all of the box lies in one piece there."""
    lead = next((dim for dim, size in enumerate(box.shape) if size != 1), len(box.shape))
    if box.shape[lead + 1 :] != spec.shape[lead + 1 :]:
        return None
    return _flat_index(spec.shape, box.start) * spec.dtype.itemsize


def _flat_index(shape: tuple[int, ...], at: tuple[int, ...]) -> int:
    return sum(place * math.prod(shape[dim + 1 :]) for dim, place in enumerate(at))


def change_sum(spec: TensorSpec, indices: Indices, before: Lanes, after: Lanes, rows: Rows = ALL_ROWS) -> Sum:
    """By how much the sum of a tensor grows where lanes change. `indices` count lanes; 64-bit elements are two of them.

    `rows` says where lanes of another array lie in the tensor.
    """
    return Sum(*kernels_for(4 * before.nbytes).sum_changes(indices, before, after, _seeds(spec), rows))


def products_sum(spec: TensorSpec, first: int, products: NDArray[np.int64]) -> Sum:
    """The part of a tensor's sum that whole blocks of words add, from products that a device worked out (`sum_products`)."""
    return Sum(*sum_products(products, first, _seeds(spec)))


def summing(spec: TensorSpec, first: int, *, whole: bool) -> Summing:
    """How a kernel sums the changes of lanes of a tensor that follow one another from `first` on; with `whole`, also all."""
    return Summing(first, whole, True, _seeds(spec))


def root_of_sums(tensors: Iterable[tuple[TensorSpec, str]]) -> str:
    """One digest over a whole state: the name, dtype, shape and sum of each tensor, in the order of their names.

    Each field is preceded by its length, so no two states can spell the same bytes.
    """
    listed = sorted(tensors, key=lambda item: item[0].name)
    data = b"".join(part for spec, total in listed for part in (_described(spec), _field(total)))
    return f"{ROOT_LABEL}:{raw_digest(data).hex()}"


@lru_cache(maxsize=1 << 16)
def _described(spec: TensorSpec) -> bytes:
    return b"".join(map(_field, (spec.name, spec.dtype.value, ",".join(map(str, spec.shape)))))


def _field(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(8, "little") + data
