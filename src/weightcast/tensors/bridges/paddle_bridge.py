"""Paddle tensors. On the host they are seen in place through DLPack; device tensors are copied to the host."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from weightcast.errors import UnsupportedTensor
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec

# Keyed by the name after "paddle.", so that nothing is imported and static and dynamic dtypes read alike.
_DTYPES: dict[str, DType] = {
    "bool": DType.BOOL,
    "uint8": DType.U8,
    "int8": DType.I8,
    "float8_e4m3fn": DType.F8_E4M3,
    "float8_e5m2": DType.F8_E5M2,
    "int16": DType.I16,
    "float16": DType.F16,
    "bfloat16": DType.BF16,
    "int32": DType.I32,
    "float32": DType.F32,
    "int64": DType.I64,
    "float64": DType.F64,
    "complex64": DType.C64,
}


def _dtype(tensor: Any) -> DType:
    found = _DTYPES.get(str(tensor.dtype).rpartition(".")[2])
    if found is None:
        raise UnsupportedTensor(f"Paddle dtype {tensor.dtype} cannot be carried.")
    return found


def spec(name: str, tensor: object) -> TensorSpec:
    """Name, dtype and shape."""
    return TensorSpec(name=name, dtype=_dtype(tensor), shape=tuple(cast("Any", tensor).shape))


def has_storage(tensor: object) -> bool:
    """False for a lazily declared parameter and after its buffer was cleared."""
    return bool(cast("Any", tensor)._is_initialized())


def host(tensor: object) -> Array:
    """The elements; Paddle shows BF16 to NumPy as uint16, which is viewed back."""
    dtype = _dtype(tensor)
    paddle_tensor = cast("Any", tensor).detach()
    if not paddle_tensor.place.is_cpu_place():
        paddle_tensor = paddle_tensor.cpu()
    width = dtype.numpy.itemsize
    if dtype not in (DType.BOOL, DType.C64):
        paddle_tensor = paddle_tensor.view(f"int{8 * width}" if width > 1 else "uint8")
    return np.from_dlpack(paddle_tensor).view(dtype.numpy)


def memory_key(tensor: object) -> tuple[object, ...]:
    """Address, dtype, shape and strides."""
    if not has_storage(tensor):
        return (id(tensor),)
    paddle_tensor = cast("Any", tensor)
    return (
        paddle_tensor.data_ptr(),
        str(paddle_tensor.dtype),
        tuple(paddle_tensor.shape),
        tuple(paddle_tensor.strides),
    )
