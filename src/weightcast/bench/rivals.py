"""What others ship instead of our deltas, and how small a delta could be: both for comparison only.

A state maps names to arrays of 16-bit elements. The order of the old state's names is the order in every blob, and
nothing is framed per tensor: each stream runs over all of them and is compressed in one call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from weightcast.errors import InvalidInput
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array
from weightcast.tensors.ulp import ordered

State = Mapping[str, Array]
Patterns = NDArray[np.uint16]
Indices = NDArray[np.int64]

LEVEL = 1  # of zstd: higher ones gain 1–3 % and cost several times the time
WIDE = 0xFFFF  # a gap of this size or more stands in a stream of its own
_LENGTHS = "<3Q"  # of the streams
EXPONENTS = 1 << 8
BLOCK = 1 << 22  # elements counted at once: bounds the memory


@dataclass(frozen=True)
class Rival:
    """One way to ship a change. `decode(old, encode(old, new))` is `new`, bit for bit."""

    name: str
    encode: Callable[[State, State], bytes]
    decode: Callable[[State, bytes], dict[str, Array]]


@dataclass(frozen=True)
class Bound:
    """Bytes that an ideal entropy coder needs for a change: for where the changes are and for how far each goes."""

    changes: int
    positions: float
    differences: float

    @property
    def total(self) -> float:
        """Bytes for both."""
        return self.positions + self.differences


@dataclass(frozen=True)
class ExponentBound(Bound):
    """`differences_given_exponent` is `differences` for a coder with one table for each exponent of the old values."""

    differences_given_exponent: float

    @property
    def total_given_exponent(self) -> float:
        """Bytes for both, the differences given the exponent too."""
        return self.positions + self.differences_given_exponent


def order0_entropy_bytes(old: State, new: State) -> Bound:
    """Empirical order-0 entropy of the gaps between changes inside each tensor, and of the ULP differences."""
    gaps, ulps = [], []
    for before, after in _flat_pairs(old, new):
        changed = np.flatnonzero(before != after)
        gaps.append(_gaps(changed))
        ulps.append(_ulps(before[changed], after[changed]))
    differences = _joined(ulps)
    return Bound(len(differences), _entropy_bits(_joined(gaps)) / 8, _entropy_bits(differences) / 8)


def given_exponent_bytes(old: State, new: State) -> ExponentBound:
    """The bound for a receiver that holds the old BF16 values and knows how often each exponent of these changes."""
    elements = np.zeros(EXPONENTS, dtype=np.int64)
    exponents, ulps = [], []
    for before, after in _flat_pairs(old, new):
        for start in range(0, len(before), BLOCK):
            elements += np.bincount(_exponent(before[start : start + BLOCK]), minlength=EXPONENTS)
        changed = np.flatnonzero(before != after)
        exponents.append(_exponent(before[changed]).astype(np.int64))
        ulps.append(_ulps(before[changed], after[changed]))
    classes, differences = _joined(exponents), _joined(ulps)
    changes = np.bincount(classes, minlength=EXPONENTS)
    positions = _n_log_n(elements) - _n_log_n(changes) - _n_log_n(elements - changes)
    together = _entropy_bits(classes << 32 | (differences + (1 << 16)))  # differences have 17 bits and a sign
    return ExponentBound(
        changes=len(differences),
        positions=positions / 8,
        differences=_entropy_bits(differences) / 8,
        differences_given_exponent=(together - _entropy_bits(classes)) / 8,
    )


def _exponent(patterns: Patterns) -> Patterns:
    return (patterns >> np.uint16(7)) & np.uint16(0xFF)


def _ulps(before: Patterns, after: Patterns) -> Indices:
    return ordered(after, DType.BF16) - ordered(before, DType.BF16)


def _gaps(indices: Indices) -> Indices:
    """How many elements stand unchanged before each change."""
    return np.diff(indices, prepend=-1) - 1


def _joined(parts: list[Indices]) -> Indices:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _entropy_bits(symbols: Indices) -> float:
    """What all symbols together cost a coder that knows how often each occurs."""
    counts = np.unique(symbols, return_counts=True)[1]
    return float(_n_log_n(np.array([len(symbols)])) - _n_log_n(counts))


def _n_log_n(counts: NDArray[np.integer[Any]]) -> float:
    counts = counts[counts > 0]
    return float(np.sum(counts * np.log2(counts)))


def _encode_int32_value(old: State, new: State) -> bytes:
    counts, indices, values = [], [], []
    for before, after in _flat_pairs(old, new):
        if len(before) > np.iinfo(np.int32).max:
            raise InvalidInput(f"int32_value cannot index a tensor of {len(before)} elements.")
        changed = np.flatnonzero(before != after)
        counts.append(len(changed))
        indices.append(changed.astype(np.int32))
        values.append(after[changed])
    parts: list[Array] = [np.array(counts, dtype=np.int32), *indices, *values]
    return b"".join(part.tobytes() for part in parts)


def _decode_int32_value(old: State, blob: bytes) -> dict[str, Array]:
    counts = np.frombuffer(blob, dtype=np.int32, count=len(old))
    total = int(counts.sum())
    indices = np.frombuffer(blob, dtype=np.int32, count=total, offset=counts.nbytes)
    values = np.frombuffer(blob, dtype=np.uint16, count=total, offset=counts.nbytes + indices.nbytes)
    sizes = [array.size for array in old.values()]
    elements = _concatenated(old)
    elements[indices + np.repeat(np.cumsum([0, *sizes])[:-1], counts)] = values
    return _split(elements, old)


def _encode_xor_zstd(old: State, new: State) -> bytes:
    pairs = _flat_pairs(old, new)
    flipped = np.empty(sum(len(before) for before, _ in pairs), dtype=np.uint16)
    start = 0
    for before, after in pairs:
        np.bitwise_xor(before, after, out=flipped[start : start + len(before)])
        start += len(before)
    return _compressed(flipped)


def _decode_xor_zstd(old: State, blob: bytes) -> dict[str, Array]:
    elements = _concatenated(old)
    elements ^= np.frombuffer(_decompressed(blob), dtype=np.uint16)
    return _split(elements, old)


def _encode_gaps_absolute_zstd(old: State, new: State) -> bytes:
    positions, values = [], []
    start = 0
    for before, after in _flat_pairs(old, new):
        changed = np.flatnonzero(before != after)
        positions.append(changed + start)
        values.append(after[changed])
        start += len(before)
    gaps = _gaps(_joined(positions))
    narrow, wide = np.minimum(gaps, WIDE).astype(np.uint16), gaps[gaps >= WIDE]
    streams = [_compressed(stream) for stream in (narrow, wide, np.concatenate([narrow[:0], *values]))]
    return b"".join((struct.pack(_LENGTHS, *map(len, streams)), *streams))


def _decode_gaps_absolute_zstd(old: State, blob: bytes) -> dict[str, Array]:
    ends = np.cumsum([struct.calcsize(_LENGTHS), *struct.unpack_from(_LENGTHS, blob)]).tolist()
    narrow, wide, values = (_decompressed(blob[start:end]) for start, end in pairwise(ends))
    gaps = np.frombuffer(narrow, dtype=np.uint16).astype(np.int64)
    gaps[gaps == WIDE] = np.frombuffer(wide, dtype=np.int64)
    elements = _concatenated(old)
    elements[np.cumsum(gaps + 1) - 1] = np.frombuffer(values, dtype=np.uint16)
    return _split(elements, old)


INT32_VALUE = Rival("int32_value", _encode_int32_value, _decode_int32_value)
XOR_ZSTD = Rival("xor_zstd", _encode_xor_zstd, _decode_xor_zstd)
GAPS_ABSOLUTE_ZSTD = Rival("gaps_absolute_zstd", _encode_gaps_absolute_zstd, _decode_gaps_absolute_zstd)
RIVALS = (INT32_VALUE, XOR_ZSTD, GAPS_ABSOLUTE_ZSTD)


def _flat_pairs(old: State, new: State) -> list[tuple[Patterns, Patterns]]:
    """The bit patterns of each tensor in both states, in the order of the old one."""
    if old.keys() != new.keys():
        raise InvalidInput(f"the states differ in these names: {', '.join(sorted(old.keys() ^ new.keys()))}.")
    for name, array in old.items():
        if (array.dtype, array.shape) != (new[name].dtype, new[name].shape) or array.dtype.itemsize != 2:
            raise InvalidInput(f"tensor {name} must have the same shape and the same 16-bit dtype in both states.")
    return [(_patterns(array), _patterns(new[name])) for name, array in old.items()]


def _patterns(array: Array) -> Patterns:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint16)


def _concatenated(state: State) -> Patterns:
    """A copy of all elements."""
    return np.concatenate([np.empty(0, dtype=np.uint16), *map(_patterns, state.values())])


def _split(elements: Patterns, like: State) -> dict[str, Array]:
    """All elements as the tensors that they are, without a copy."""
    parts = np.split(elements, np.cumsum([array.size for array in like.values()])[:-1])
    return {
        name: part.view(array.dtype).reshape(array.shape) for (name, array), part in zip(like.items(), parts, strict=False)
    }


def _compressed(stream: Array) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(stream.data)


def _decompressed(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)
