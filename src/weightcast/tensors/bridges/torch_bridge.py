"""torch tensors: host tensors are seen in place with their strides; device tensors are copied to the host."""

from __future__ import annotations

from typing import cast

import torch

from weightcast.errors import UnsupportedTensor
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec

_DTYPES: dict[torch.dtype, DType] = {
    torch.bool: DType.BOOL,
    torch.uint8: DType.U8,
    torch.int8: DType.I8,
    torch.float8_e4m3fn: DType.F8_E4M3,
    torch.float8_e5m2: DType.F8_E5M2,
    torch.uint16: DType.U16,
    torch.int16: DType.I16,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.uint32: DType.U32,
    torch.int32: DType.I32,
    torch.float32: DType.F32,
    torch.uint64: DType.U64,
    torch.int64: DType.I64,
    torch.float64: DType.F64,
    torch.complex64: DType.C64,
}
# Newer torch only. The last one packs two 4-bit elements into a byte.
for _name, _dtype in (("float8_e8m0fnu", DType.F8_E8M0), ("float4_e2m1fn_x2", DType.U8)):
    if hasattr(torch, _name):
        _DTYPES[getattr(torch, _name)] = _dtype

# Integers of the same width: NumPy can share memory with these, whatever the element means.
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_tensor(thing: object) -> bool:
    """Whether an object of torch is a tensor."""
    return isinstance(thing, torch.Tensor)


def dtype_of(tensor: torch.Tensor) -> DType:
    """The spelling of a torch dtype."""
    found = _DTYPES.get(tensor.dtype)
    if found is None:
        raise UnsupportedTensor(f"torch dtype {tensor.dtype} cannot be carried.")
    return found


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of a spelling."""
    found = next((known for known, spelt in _DTYPES.items() if spelt is dtype), None)
    if found is None:
        raise UnsupportedTensor(f"this torch has no dtype {dtype}.")
    return found


def spec(name: str, tensor: object) -> TensorSpec:
    """Name, dtype and shape; allocates nothing."""
    tensor = cast("torch.Tensor", tensor)
    if tensor.layout is not torch.strided:
        raise UnsupportedTensor(f"torch layout {tensor.layout} cannot be carried: only strided tensors.")
    return TensorSpec(name=name, dtype=dtype_of(tensor), shape=tuple(tensor.shape))


def has_storage(tensor: object) -> bool:
    """False on the meta device and where the storage was resized to nothing."""
    tensor = cast("torch.Tensor", tensor)
    return tensor.device.type != "meta" and (tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0)


def host(tensor: object) -> Array:
    """The elements with their strides, in the tensor's own memory if that is host memory."""
    tensor = cast("torch.Tensor", tensor).detach()
    dtype = dtype_of(tensor)
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if tensor.is_conj() or tensor.is_neg():  # lazy views: the bytes in memory are not the values
        tensor = tensor.resolve_conj().resolve_neg()
    array: Array = as_bits(tensor).numpy()
    return array.view(dtype.numpy)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory seen as integers of the same width, with the same strides."""
    return tensor.view(_CARRIER[tensor.element_size()])


def from_host(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """A host tensor over the memory of a contiguous array; the array stays alive with it."""
    return torch.from_numpy(array.view(f"i{array.dtype.itemsize}")).view(dtype)


def memory_key(tensor: object) -> tuple[object, ...]:
    """Storage, offset, dtype, shape and strides. Tensors without memory are the same only as the same object."""
    tensor = cast("torch.Tensor", tensor)
    if tensor.numel() == 0 or not has_storage(tensor):
        return (id(tensor),)
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())
