"""Lanes: the units a delta counts in. A lane is an element of 8, 16 or 32 bits; wider elements are two lanes of 32 bits.

A float's lanes are mapped to integers that grow with the value (−0 and +0 are neighbours, NaNs lie beyond the infinities).
The map is its own inverse and defined for every pattern, so differences modulo 2^bits lose nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.errors import InvalidInput
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array, Bytes, flat_bytes
from weightcast.tensors.spec import TensorSpec

Lanes = NDArray[Any]  # flat and contiguous, uint8, uint16 or uint32
Steps = NDArray[Any]  # differences of mapped lanes modulo 2^bits, as int8, int16 or int32

UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
SIGNED: dict[int, np.dtype[Any]] = {1: np.dtype(np.int8), 2: np.dtype(np.int16), 4: np.dtype(np.int32)}


@dataclass(frozen=True)
class LaneKind:
    """How the lanes of some dtypes are read.

    `signed_magnitude`: a sign bit and a magnitude, as floats have. The class of a lane is ``(bits >> shift) & mask``: its
    exponent, or 0 for everything without one.
    """

    nbytes: int
    signed_magnitude: bool = False
    shift: int = 0
    mask: int = 0

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return self.mask + 1

    @property
    def unsigned(self) -> np.dtype[Any]:
        """The dtype of lanes."""
        return UNSIGNED[self.nbytes]

    @property
    def signed(self) -> np.dtype[Any]:
        """The dtype of steps."""
        return SIGNED[self.nbytes]


_PLAIN = {width: LaneKind(width) for width in (1, 2, 4)}
_FLOAT32 = LaneKind(4, signed_magnitude=True, shift=23, mask=0xFF)
_KINDS: dict[DType, LaneKind] = {
    DType.F8_E4M3: LaneKind(1, signed_magnitude=True, shift=3, mask=0xF),
    DType.F8_E5M2: LaneKind(1, signed_magnitude=True, shift=2, mask=0x1F),
    DType.F16: LaneKind(2, signed_magnitude=True, shift=10, mask=0x1F),
    DType.BF16: LaneKind(2, signed_magnitude=True, shift=7, mask=0xFF),
    DType.F32: _FLOAT32,
    DType.C64: _FLOAT32,
}


def kind_of(dtype: DType) -> LaneKind:
    """How lanes of this dtype are read."""
    return _KINDS.get(dtype) or _PLAIN[min(dtype.itemsize, 4)]


def lanes_per_element(dtype: DType) -> int:
    """1, or 2 for 64-bit elements."""
    return dtype.itemsize // kind_of(dtype).nbytes


def lane_count(spec: TensorSpec) -> int:
    """Lanes of a whole tensor."""
    return spec.numel * lanes_per_element(spec.dtype)


def index_dtype(lanes: int) -> np.dtype[Any]:
    """The dtype of lane indices: 32 bits where they suffice."""
    return np.dtype(np.uint32) if lanes <= 1 << 32 else np.dtype(np.uint64)


def lane_range(array: Array, dtype: DType, start: int, stop: int) -> Lanes:
    """Lanes `start` to `stop` of an array in C order: a view where its memory is contiguous, else a copy of that range."""
    kind = kind_of(dtype)
    if not array.flags.c_contiguous:
        inner = math.prod(array.shape[1:]) * lanes_per_element(dtype)
        first, last = start // inner, -(-stop // inner)
        array = np.ascontiguousarray(array[first:last])
        start, stop = start - first * inner, stop - first * inner
    return flat_bytes(array)[start * kind.nbytes : stop * kind.nbytes].view(kind.unsigned)


def mapped(lanes: Lanes, kind: LaneKind) -> Steps:
    """Lanes as integers that grow with the value. `unmapped` inverts it."""
    signed: Steps = lanes.view(kind.signed)
    if not kind.signed_magnitude:
        return signed
    bits = 8 * kind.nbytes
    grown: Steps = signed ^ ((signed >> (bits - 1)) & kind.signed.type((1 << (bits - 1)) - 1))
    return grown


def unmapped(values: Steps, kind: LaneKind) -> Lanes:
    """The lanes that these mapped integers stand for."""
    return mapped(values.view(kind.unsigned), kind).view(kind.unsigned)


def to_zigzag(steps: Steps) -> Lanes:
    """Steps as unsigned numbers of the same width, small where the step is small: 0, −1, 1, −2, 2 …"""
    zigzag: Lanes = ((steps << 1) ^ (steps >> (8 * steps.itemsize - 1))).view(UNSIGNED[steps.itemsize])
    return zigzag


def from_zigzag(values: Lanes) -> Steps:
    """The opposite of `to_zigzag`."""
    one, signed = values.dtype.type(1), SIGNED[values.itemsize]
    steps: Steps = (values >> one).view(signed) ^ -(values & one).view(signed)
    return steps


_SPECIAL: dict[DType, int] = {  # bits that are all set in infinities and NaNs, and in nothing else
    DType.F64: 0x7FF0_0000_0000_0000, DType.F32: 0x7F80_0000, DType.C64: 0x7F80_0000, DType.BF16: 0x7F80, DType.F16: 0x7C00,
    DType.F8_E5M2: 0x7C, DType.F8_E4M3: 0x7F, DType.F8_E8M0: 0xFF,
}  # fmt: skip
_LOOKED_AT = 1 << 20  # bytes at once: they stay in the cache


def check_finite(spec: TensorSpec, data: Bytes) -> None:
    """Raise `InvalidInput` if bytes of a tensor have a NaN or an infinity. Integers have none."""
    special = _SPECIAL.get(spec.dtype)
    if special is None:
        return
    unsigned = np.dtype(f"<u{4 if spec.dtype is DType.C64 else spec.dtype.itemsize}")
    values, mask = data.view(unsigned), unsigned.type(special)
    step = _LOOKED_AT // unsigned.itemsize
    for start in range(0, values.size, step):
        if ((values[start : start + step] & mask) == mask).any():
            raise InvalidInput(f"tensor {spec.name!r} has a NaN or an infinity, and only finite ones are to be published.")
