"""NumPy arrays. BF16 and 8-bit floats are ml_dtypes types."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import numpy as np

from weightcast.tensors.dtypes import from_numpy
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec


def spec(name: str, tensor: object) -> TensorSpec:
    """Name, dtype and shape."""
    array = cast("Array", tensor)
    return _spec(name, array.dtype, array.shape)


@lru_cache(maxsize=1 << 16)
def _spec(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> TensorSpec:
    """To make one takes several times as long as to find it: each tensor is described several times in a publish."""
    return TensorSpec(name=name, dtype=from_numpy(dtype), shape=shape)


def has_storage(tensor: object) -> bool:  # noqa: ARG001 - the bridge protocol
    """An array always has memory."""
    return True


def host(tensor: object) -> Array:
    """The array itself."""
    return np.asarray(tensor)


def memory_key(tensor: object) -> tuple[object, ...]:
    """Address, dtype, shape and strides. A NumPy scalar owns its value, so it is the same as nothing else."""
    if isinstance(tensor, np.generic):
        return (id(tensor),)
    array = cast("Array", tensor)
    return (array.__array_interface__["data"][0], array.dtype.str, array.shape, array.strides)
