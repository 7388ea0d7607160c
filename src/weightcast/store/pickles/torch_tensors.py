"""What the pickle inside of a torch file may ask for: tensors that are views of storages, and the containers around.

None of the real functions is ever called. These stand-ins check what they are given and note where the bytes lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weightcast.errors import PartCorrupt, PickleRefused
from weightcast.store.pickles.machine import Blob, Global, OrderedDict
from weightcast.store.pickles.numpy_arrays import StoredTensor, counts, is_count, table_of
from weightcast.tensors.dtypes import DType

_TORCH_STORAGES = {
    "BoolStorage": DType.BOOL,
    "ByteStorage": DType.U8,
    "CharStorage": DType.I8,
    "ShortStorage": DType.I16,
    "HalfStorage": DType.F16,
    "BFloat16Storage": DType.BF16,
    "IntStorage": DType.I32,
    "FloatStorage": DType.F32,
    "LongStorage": DType.I64,
    "DoubleStorage": DType.F64,
    "ComplexFloatStorage": DType.C64,
}
_TORCH_DTYPES = {
    "float8_e4m3fn": DType.F8_E4M3,
    "float8_e5m2": DType.F8_E5M2,
    "float8_e8m0fnu": DType.F8_E8M0,
    "uint16": DType.U16,
    "uint32": DType.U32,
    "uint64": DType.U64,
}


@dataclass(frozen=True)
class _Storage:
    blob: Blob
    dtype: DType | None  # None for an untyped storage


class TorchGlobals:
    """What the pickle of a torch file may ask for. `find_blob` gives the place of a storage by its key, None if missing."""

    def __init__(self, path: Path, find_blob: Callable[[str], Blob | None]) -> None:
        self._path, self._find_blob = path, find_blob

    def table(self) -> dict[str, Global]:
        """Every name and what stands for it."""
        return table_of(
            Global("collections.OrderedDict", self._ordered_dict),
            Global("torch._utils._rebuild_tensor_v2", self._tensor_v2),
            Global("torch._utils._rebuild_tensor_v3", self._tensor_v3),
            Global("torch._utils._rebuild_parameter", self._parameter),
            Global("torch.storage.UntypedStorage"),
            *(Global(f"torch.{name}") for name in (*_TORCH_STORAGES, *_TORCH_DTYPES)),
        )

    def load_persistent(self, key: object) -> object:
        """The storage that a persistent id names: ("storage", type, key, location, count)."""
        if not isinstance(key, tuple) or len(key) != 5 or key[0] != "storage" or not isinstance(key[1], Global):
            raise self._wrong("a persistent id")
        kind = key[1].name.removeprefix("torch.")
        dtype = _TORCH_STORAGES.get(kind)
        if (dtype is None and kind != "storage.UntypedStorage") or not isinstance(key[2], str) or not is_count(key[4]):
            raise self._wrong("a persistent id")
        blob = self._find_blob(key[2])
        expected = key[4] * (dtype.itemsize if dtype else 1)
        if blob is None or blob.stored_nbytes != expected:
            found = "is missing" if blob is None else f"has {blob.stored_nbytes} bytes, not {expected}"
            raise PartCorrupt(self._path, f"its storage {str(key[2])!r} {found}")
        return _Storage(blob, dtype)

    def _wrong(self, name: str) -> PartCorrupt:
        return PartCorrupt(self._path, f"its pickle uses {name} in another way than torch.save does")

    def _ordered_dict(self, args: tuple[object, ...]) -> object:
        if args:
            raise self._wrong("collections.OrderedDict")
        return OrderedDict()

    def _parameter(self, args: tuple[object, ...]) -> object:
        if len(args) != 3 or not isinstance(args[0], StoredTensor):
            raise self._wrong("_rebuild_parameter")
        return args[0]

    def _tensor_v2(self, args: tuple[object, ...]) -> object:
        if len(args) not in (6, 7) or not isinstance(args[0], _Storage) or args[0].dtype is None:
            raise self._wrong("_rebuild_tensor_v2")
        return self._tensor(args[0], args[0].dtype, args[1:4], args[6:])

    def _tensor_v3(self, args: tuple[object, ...]) -> object:
        if len(args) not in (7, 8) or not isinstance(args[0], _Storage) or not isinstance(args[6], Global):
            raise self._wrong("_rebuild_tensor_v3")
        dtype = _TORCH_DTYPES.get(args[6].name.removeprefix("torch."))
        if dtype is None:
            raise self._wrong("_rebuild_tensor_v3")
        return self._tensor(args[0], dtype, args[1:4], args[7:])

    def _tensor(
        self, storage: _Storage, dtype: DType, layout: tuple[object, ...], metadata: tuple[object, ...]
    ) -> StoredTensor:
        first, shape, strides = (
            layout[0],
            counts(self._path, layout[1], "a shape"),
            counts(self._path, layout[2], "strides"),
        )
        if not isinstance(first, int) or not is_count(first) or len(shape) != len(strides):
            raise self._wrong("the layout of a tensor")
        if any(metadata):
            raise PickleRefused(self._path, "a torch tensor with lazy conjugation or negation")
        tensor = StoredTensor(dtype=dtype, shape=shape, blob=storage.blob, start=first * dtype.itemsize, strides=strides)
        if tensor.span_nbytes and tensor.start + tensor.span_nbytes > storage.blob.stored_nbytes:
            raise PartCorrupt(self._path, f"a tensor of {dtype}{list(shape)} reaches beyond the end of its storage")
        if math.prod(shape) * dtype.itemsize > storage.blob.stored_nbytes:
            raise PartCorrupt(
                self._path, f"a tensor of {dtype}{list(shape)} is expanded from a smaller storage: save it contiguous"
            )
        return tensor
