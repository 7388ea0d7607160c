"""Tensors as a pickle describes them, and what a pickle of Paddle may ask for: NumPy arrays and the containers around.

None of the real functions is ever called. These stand-ins check what they are given and note where the bytes lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightcast.errors import PartCorrupt, PickleRefused
from weightcast.store.pickles.machine import Blob, Buildable, Global, OrderedDict, Text, Window
from weightcast.tensors.dtypes import DType

# Paddle has no uint16: it writes BF16 as that. 8-bit floats it writes as int8, which cannot be told from int8.
_NUMPY_DTYPES = {
    "b1": DType.BOOL,
    "u1": DType.U8,
    "i1": DType.I8,
    "u2": DType.BF16,
    "i2": DType.I16,
    "f2": DType.F16,
    "u4": DType.U32,
    "i4": DType.I32,
    "f4": DType.F32,
    "u8": DType.U64,
    "i8": DType.I64,
    "f8": DType.F64,
    "c8": DType.C64,
}
_MAX_DIMS = 32
_MAX_ELEMENTS = 1 << 48


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose bytes lie in the file. `start` counts bytes into the blob, `strides` counts elements."""

    dtype: DType
    shape: tuple[int, ...]
    blob: Blob
    start: int
    strides: tuple[int, ...]

    @property
    def span_nbytes(self) -> int:
        """Bytes from the first to the last element."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def in_order(self) -> bool:
        """Whether the bytes lie in the file as they are to be given out."""
        return not self.blob.utf8 and (0 in self.shape or _same_order(self.shape, self.strides, c_strides(self.shape)))


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor in C order."""
    return tuple(math.prod(shape[index + 1 :]) for index in range(len(shape)))


def _same_order(shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return all(size == 1 or stride == want for size, stride, want in zip(shape, strides, wanted, strict=True))


def is_count(value: object) -> bool:
    """Whether a value is an integer that can be a size or a place."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_ELEMENTS


def counts(path: Path, value: object, what: str) -> tuple[int, ...]:
    """A tuple of sizes, strides or the like, or `PartCorrupt`."""
    if not isinstance(value, tuple) or len(value) > _MAX_DIMS or not all(is_count(size) for size in value):
        raise PartCorrupt(path, f"a tensor in its pickle has {what} that is not made of at most {_MAX_DIMS} counts")
    if math.prod(max(1, size) for size in value) > _MAX_ELEMENTS and what == "a shape":
        raise PartCorrupt(path, "a tensor in its pickle has an impossibly large shape")
    return value


class _Dtype(Buildable):
    """numpy.dtype: made from a code, completed with a byte order."""

    def __init__(self, path: Path, code: str) -> None:
        self._path, self.code, self.order = path, code, ""

    def build(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 8 or state[2:5] != (None, None, None) or state[1] not in ("<", "|"):
            raise PickleRefused(self._path, "a numpy.dtype that is not a plain little-endian number")
        self.order = state[1]

    def resolve(self) -> DType:
        """The element type, once it is complete."""
        if self.order != ("|" if self.code.endswith("1") else "<"):
            raise PartCorrupt(self._path, f"its pickle has a numpy.dtype {self.code!r} without a byte order")
        return _NUMPY_DTYPES[self.code]


class _Array(Buildable):
    """numpy.ndarray: made empty, completed with shape, dtype and bytes."""

    def __init__(self, path: Path, size_of: Callable[[Blob], int]) -> None:
        self._path, self._size_of = path, size_of
        self.tensor: StoredTensor | None = None

    def build(self, state: object) -> None:
        if self.tensor is not None or not isinstance(state, tuple) or len(state) != 5 or state[0] != 1:
            raise PartCorrupt(self._path, "a numpy.ndarray in its pickle has a state of another form")
        _, shape, dtype, fortran, blob = state
        self.fill(shape, dtype, blob, "F" if fortran is True else "C")

    def fill(self, shape: object, dtype: object, blob: object, order: str, axes: object = None) -> None:
        """Complete the array. With `axes` the bytes are in C order of `shape`, and the axes change places after that."""
        sizes = counts(self._path, shape, "a shape")
        if not isinstance(dtype, _Dtype) or not isinstance(blob, Blob):
            raise PartCorrupt(self._path, "a numpy.ndarray in its pickle has no plain dtype or no bytes")
        element = dtype.resolve()
        expected, found = math.prod(sizes) * element.itemsize, self._size_of(blob)
        if expected != found:
            raise PartCorrupt(
                self._path, f"an array of {element}{list(sizes)} in its pickle has {found} bytes, not {expected}"
            )
        strides = c_strides(sizes[::-1])[::-1] if order == "F" else c_strides(sizes)
        if axes is not None:
            places = counts(self._path, axes, "an order of axes")
            if sorted(places) != list(range(len(sizes))):
                raise PartCorrupt(self._path, "an array in its pickle has an order of axes that is not one")
            sizes, strides = tuple(sizes[axis] for axis in places), tuple(strides[axis] for axis in places)
        self.tensor = StoredTensor(dtype=element, shape=sizes, blob=blob, start=0, strides=strides)


def tensor_of(value: object) -> StoredTensor | None:
    """The tensor that a value of the state dict is, or None. Paddle may wrap an array as (its own name, array)."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]
    if isinstance(value, _Array):
        return value.tensor
    return value if isinstance(value, StoredTensor) else None


class NumpyGlobals:
    """What a Paddle pickle may ask for."""

    def __init__(self, window: Window) -> None:
        self._window, self._path = window, window.path

    def table(self) -> dict[str, Global]:
        """Every name and what stands for it."""
        reconstruct, frombuffer = self._reconstruct, self._frombuffer
        return table_of(
            Global("collections.OrderedDict", self._ordered_dict),
            Global("numpy._core.multiarray._reconstruct", reconstruct),
            Global("numpy.core.multiarray._reconstruct", reconstruct),
            Global("numpy._core.numeric._frombuffer", frombuffer),
            Global("numpy.core.numeric._frombuffer", frombuffer),
            Global("numpy.ndarray"),
            Global("numpy.dtype", self._dtype),
            Global("_codecs.encode", self._encode),
            Global("__builtin__.bytes", self._empty_bytes),
            Global("builtins.bytes", self._empty_bytes),
            Global("__builtin__.tuple", self._tuple),
            Global("builtins.tuple", self._tuple),
        )

    def _wrong(self, name: str) -> PartCorrupt:
        return PartCorrupt(self._path, f"its pickle calls {name} in another way than a writer of tensors does")

    def _ordered_dict(self, args: tuple[object, ...]) -> object:
        if args:
            raise self._wrong("collections.OrderedDict")
        return OrderedDict()

    def _reconstruct(self, args: tuple[object, ...]) -> object:
        if len(args) != 3 or not isinstance(args[0], Global) or args[0].name != "numpy.ndarray" or args[1] != (0,):
            raise self._wrong("numpy's _reconstruct")
        return _Array(self._path, self._decoded_nbytes)

    def _frombuffer(self, args: tuple[object, ...]) -> object:
        if (len(args), args[3:4]) not in ((4, ("C",)), (4, ("F",)), (5, ("K",))):
            raise self._wrong("numpy's _frombuffer")
        array = _Array(self._path, self._decoded_nbytes)
        array.fill(args[2], args[1], args[0], str(args[3]), *args[4:])
        return array

    def _dtype(self, args: tuple[object, ...]) -> object:
        if not args or not isinstance(args[0], str):
            raise self._wrong("numpy.dtype")
        if args[0] not in _NUMPY_DTYPES:
            raise PickleRefused(self._path, f"numpy.dtype({str(args[0])!r})")
        return _Dtype(self._path, str(args[0]))

    def _encode(self, args: tuple[object, ...]) -> object:
        text = args[0].blob if args and isinstance(args[0], Text) else args[0] if args else None
        if len(args) != 2 or args[1] != "latin1" or not isinstance(text, Blob) or not text.utf8:
            raise self._wrong("_codecs.encode")
        return text

    def _empty_bytes(self, args: tuple[object, ...]) -> object:
        if args:
            raise self._wrong("bytes")
        return Blob(0, 0)

    def _tuple(self, args: tuple[object, ...]) -> object:
        if len(args) != 1 or not isinstance(args[0], tuple):
            raise self._wrong("tuple")
        return args[0]

    def _decoded_nbytes(self, blob: Blob) -> int:
        """Bytes that the blob stands for. In UTF-8 every latin-1 character has exactly one byte that is no continuation."""
        if not blob.utf8:
            return blob.stored_nbytes
        count = 0
        for start in range(0, blob.stored_nbytes, 1 << 20):
            stretch = self._window.read_at(blob.offset + start, min(1 << 20, blob.stored_nbytes - start))
            count += int(np.count_nonzero(np.frombuffer(stretch, dtype=np.int8) >= -64))
        return count


def table_of(*entries: Global) -> dict[str, Global]:
    """What a machine may hand out, by name."""
    return {entry.name: entry for entry in entries}


def named_tensors(path: Path, state: object, drop: Iterable[str]) -> dict[str, StoredTensor]:
    """The tensors of a state dict. Everything in it that is not a tensor is refused, all at once and by name."""
    if not isinstance(state, dict):
        raise PartCorrupt(path, f"its pickle holds a {_kind(state)}, not a dict of tensors")
    kept = {name: value for name, value in state.items() if name not in drop}
    tensors = {name: tensor for name, value in kept.items() if isinstance(name, str) and (tensor := tensor_of(value))}
    others = [f"{name!r} is a {_kind(value)}" for name, value in kept.items() if name not in tensors]
    if others:
        raise PartCorrupt(path, f"its pickle holds more than tensors: {', '.join(others[:20])}{', …' * (len(others) > 20)}")
    return {str(name): tensor for name, tensor in tensors.items()}


def _kind(value: object) -> str:
    names = {Text: "text", Blob: "bytes", OrderedDict: "dict", _Array: "array without contents", type(None): "None"}
    return names.get(type(value), type(value).__name__.lstrip("_"))
