"""The kernels compiled by Numba, kept in a cache on disk. They release the interpreter, so threads run side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from weightcast.delta.kernels import Bits, ClassWalk, Indices, Numbers
from weightcast.delta.lanes import SIGNED, LaneKind, Lanes, Steps
from weightcast.delta.numbers import EXACT, FLOORS, WIDTHS

_AHEAD = 64  # how many changes ahead memory is asked for: scattered stores wait for memory, not for the processor
_STRIDE = 32  # bytes that are compared at once

Function = TypeVar("Function", bound=Callable[..., Any])


def _read(item: Any) -> Any:
    """Memory that is only read; the weakest type, so that any array passes without compiling once more."""
    return types.Array(item, 1, "C", readonly=True, aligned=False)


def _write(item: Any) -> Any:
    return types.Array(item, 1, "C", aligned=False)


_LANE_TYPES = (types.int8, types.int16, types.int32)
_INDEX_TYPES = (types.uint32, types.uint64)
_U8, _U32, _I64 = types.uint8, types.uint32, types.int64


def _compiled(*signatures: Any) -> Callable[[Function], Function]:
    """Compile now, for exactly these types, or load from the cache: nothing is compiled in the middle of an update."""
    return cast("Callable[[Function], Function]", numba.njit(list(signatures), nogil=True, cache=True, error_model="numpy"))


@intrinsic
def _prefetch(typing_context, array, index):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Ask for the cache line of ``array[index]`` without waiting for it."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        byte = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        place = builder.bitcast(builder.gep(data, [args[1]]), byte)
        # Read rather than write intent, into all caches, data: measured fastest for scattered stores.
        builder.call(function, [place, *(ir.Constant(number, value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, index), generate


@_compiled(*(_I64(_read(t), _read(t), _I64, _write(_U32), _write(t)) for t in _LANE_TYPES))
def _find(old: Any, new: Any, flip: Any, indices: Any, steps: Any) -> int:
    """Counts all changes and writes as many as there is room for."""
    found = 0
    stride = _STRIDE // old.itemsize
    for start in range(0, old.size, stride):
        stop = min(start + stride, old.size)
        if stop - start == stride:
            differ = 0
            for at in range(start, start + stride):
                differ |= old[at] ^ new[at]
            if differ == 0:
                continue
        for at in range(start, stop):
            if old[at] != new[at]:
                if found < indices.size:
                    x, y = np.int64(old[at]), np.int64(new[at])
                    if x < 0:
                        x ^= flip
                    if y < 0:
                        y ^= flip
                    indices[found] = at
                    steps[found] = y - x
                found += 1
    return found


@_compiled(
    *(types.void(_read(t), _read(_U32), _I64, _I64, _write(_U32), _write(_U32), _write(_U8)) for t in _LANE_TYPES),
)
def _class_gaps(old: Any, indices: Any, shift: Any, mask: Any, since: Any, gaps: Any, classes: Any) -> None:
    start = np.int64(0)
    for change in range(indices.size + 1):
        stop = np.int64(indices[change]) if change < indices.size else old.size
        for at in range(start, stop):
            since[(old[at] >> shift) & mask] += 1
        if change < indices.size:
            own = (old[stop] >> shift) & mask
            gaps[change], classes[change] = since[own], own
            since[own] = 0
        start = stop + 1


@_compiled(
    *(_I64(_read(t), _I64, _I64, _read(_U32), _write(_I64), _write(_U32), _write(_U32), _write(_I64)) for t in _LANE_TYPES),
)
def _find_by_class(old: Any, shift: Any, mask: Any, gaps: Any, cursor: Any, left: Any, indices: Any, positions: Any) -> int:
    """Counts all changes and writes as many as there is room for."""
    found = 0
    for at in range(old.size):
        own = (old[at] >> shift) & mask
        remaining = left[own]
        if remaining == 0:
            if found < indices.size:
                indices[found], positions[found] = at, cursor[own] - own
            found += 1
            cursor[own] += 1
            left[own] = gaps[cursor[own]]
        else:
            left[own] = remaining - np.uint32(1)
    return found


@_compiled(_I64(_read(_U32), _read(_U8), _read(_U8), _write(_U8), _write(_U8)))
def _put_numbers(values: Any, shifts: Any, widths: Any, symbols: Any, bits: Any) -> int:
    word, filled, written = np.uint64(0), np.uint64(0), 0
    for at in range(values.size):
        large = values[at] >> shifts[at]
        symbol = np.int64(large)
        if large >= EXACT:
            octave = 0
            while (large >> np.uint32(octave)) >= 2 * EXACT:
                octave += 1
            symbol = EXACT + 8 * octave + np.int64((large >> np.uint32(octave + 1)) & np.uint32(7))
        symbols[at] = symbol
        width = np.uint64(widths[symbol]) + np.uint64(shifts[at])
        word |= (np.uint64(values[at]) & ((np.uint64(1) << width) - np.uint64(1))) << filled
        filled += width
        while filled >= np.uint64(8):
            bits[written] = word & np.uint64(0xFF)
            written += 1
            word >>= np.uint64(8)
            filled -= np.uint64(8)
    if filled > np.uint64(0):
        bits[written] = word & np.uint64(0xFF)
        written += 1
    return written


@_compiled(types.void(_read(_U8), _read(_U8), _read(_U32), _read(_U8), _read(_U8), _write(_U32)))
def _take_numbers(symbols: Any, shifts: Any, floors: Any, widths: Any, bits: Any, values: Any) -> None:
    word, filled, read = np.uint64(0), np.uint64(0), 0
    for at in range(symbols.size):
        symbol = symbols[at]
        shift = np.uint64(shifts[at])
        width = np.uint64(widths[symbol]) + shift
        while filled < width:
            word |= np.uint64(bits[read]) << filled
            read += 1
            filled += np.uint64(8)
        low = word & ((np.uint64(1) << width) - np.uint64(1))
        values[at] = (np.uint64(floors[symbol]) << shift) | low
        word >>= width
        filled -= width


@_compiled(*(_I64(_read(i), _read(t), _read(i), _read(t), _write(i), _write(t)) for t in _LANE_TYPES for i in _INDEX_TYPES))
def _merge(a_indices: Any, a_steps: Any, b_indices: Any, b_steps: Any, indices: Any, steps: Any) -> int:
    a = b = merged = 0
    while a < a_indices.size or b < b_indices.size:
        if b == b_indices.size or (a < a_indices.size and a_indices[a] < b_indices[b]):
            indices[merged], steps[merged] = a_indices[a], a_steps[a]
            a += 1
        elif a == a_indices.size or b_indices[b] < a_indices[a]:
            indices[merged], steps[merged] = b_indices[b], b_steps[b]
            b += 1
        else:
            indices[merged], steps[merged] = a_indices[a], a_steps[a] + b_steps[b]
            a += 1
            b += 1
        if steps[merged] != 0:
            merged += 1
    return merged


@_compiled(*(types.void(_read(t), _read(i), _read(t), _I64, _write(t)) for t in _LANE_TYPES for i in _INDEX_TYPES))
def _moved(lanes: Any, indices: Any, steps: Any, flip: Any, values: Any) -> None:
    ahead = max(0, indices.size - _AHEAD)
    for at in range(indices.size):
        if at < ahead:
            _prefetch(lanes, np.intp(indices[at + _AHEAD]))
        value = np.int64(lanes[np.intp(indices[at])])
        if value < 0:
            value ^= flip
        values[at] = value + steps[at]  # wraps round
        if values[at] < 0:
            values[at] ^= flip


@_compiled(*(types.void(_write(t), _read(i), _read(t)) for t in _LANE_TYPES for i in _INDEX_TYPES))
def _scatter(lanes: Any, indices: Any, values: Any) -> None:
    ahead = max(0, indices.size - _AHEAD)
    for at in range(ahead):
        _prefetch(lanes, np.intp(indices[at + _AHEAD]))
        lanes[np.intp(indices[at])] = values[at]
    for at in range(ahead, indices.size):
        lanes[np.intp(indices[at])] = values[at]


def _flip(kind: LaneKind) -> int:
    """What maps a negative lane: all bits but the sign, or none for a kind that is ordered as it is."""
    return (1 << (8 * kind.nbytes - 1)) - 1 if kind.signed_magnitude else 0


def find(old: Lanes, new: Lanes, kind: LaneKind) -> tuple[NDArray[np.uint32], Steps]:
    """See `Kernels.find`."""
    room = old.size // 4 + 64  # only what is written costs memory
    while True:
        indices, steps = np.empty(room, dtype=np.uint32), np.empty(room, dtype=kind.signed)
        found = _find(old.view(kind.signed), new.view(kind.signed), _flip(kind), indices, steps)
        if found <= room:
            return indices[:found].copy(), steps[:found].copy()
        room = found


def class_gaps(old: Lanes, indices: Indices, kind: LaneKind, since: NDArray[np.uint32]) -> tuple[Numbers, NDArray[np.uint8]]:
    """See `Kernels.class_gaps`."""
    gaps, classes = np.empty(indices.size, dtype=np.uint32), np.empty(indices.size, dtype=np.uint8)
    _class_gaps(old.view(kind.signed), indices, kind.shift, kind.mask, since, gaps, classes)
    return gaps, classes


def find_by_class(
    old: Lanes, kind: LaneKind, gaps: NDArray[np.uint32], walk: ClassWalk, changes: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """See `Kernels.find_by_class`."""
    indices, positions = np.empty(changes, dtype=np.uint32), np.empty(changes, dtype=np.int64)
    lanes = old.view(kind.signed)
    found = _find_by_class(lanes, kind.shift, kind.mask, gaps, walk.cursor, walk.left, indices, positions)
    if found != changes:
        raise ValueError(f"a block has {found} changes, not {changes}")
    return indices, positions


def put_numbers(values: Numbers, shifts: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], Bits]:
    """See `Kernels.put_numbers`."""
    symbols, bits = np.empty(values.size, dtype=np.uint8), np.empty(4 * values.size + 8, dtype=np.uint8)
    written = _put_numbers(values, shifts, WIDTHS, symbols, bits)
    return symbols, bits[:written].copy()


def take_numbers(symbols: NDArray[np.uint8], shifts: NDArray[np.uint8], bits: Bits) -> Numbers:
    """See `Kernels.take_numbers`."""
    values = np.empty(symbols.size, dtype=np.uint32)
    _take_numbers(symbols, shifts, FLOORS, WIDTHS, bits, values)
    return values


def merge(a: tuple[Indices, Steps], b: tuple[Indices, Steps]) -> tuple[Indices, Steps]:
    """See `Kernels.merge`."""
    room = a[0].size + b[0].size + 1  # a step that cancels is written once more before it is passed over
    indices, steps = np.empty(room, dtype=a[0].dtype), np.empty(room, dtype=a[1].dtype)
    merged = _merge(*a, *b, indices, steps)
    return indices[:merged].copy(), steps[:merged].copy()


def moved(lanes: Lanes, indices: Indices, steps: Steps, kind: LaneKind) -> Lanes:
    """See `Kernels.moved`."""
    values = np.empty(indices.size, dtype=kind.signed)
    _moved(lanes.view(kind.signed), indices, steps, _flip(kind), values)
    return values.view(kind.unsigned)


def scatter(lanes: Lanes, indices: Indices, values: Lanes) -> None:
    """See `Kernels.scatter`."""
    signed = SIGNED[lanes.itemsize]
    _scatter(lanes.view(signed), indices, values.view(signed))
