"""Views of NumPy, torch and Paddle tensors without a copy. A framework is imported only when its tensor is met."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Literal, Protocol, cast

import numpy as np

from weightcast.errors import UnsupportedTensor
from weightcast.tensors.boxes import Box
from weightcast.tensors.bridges import numpy_bridge
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec

Framework = Literal["numpy", "torch", "paddle"]


class Bridge(Protocol):
    """What a framework must tell about one of its tensors. Modules in this package implement it as functions."""

    def spec(self, name: str, tensor: object) -> TensorSpec:
        """Name, dtype and shape; works without storage (torch's `meta` device)."""

    def has_storage(self, tensor: object) -> bool:
        """False for a tensor that has a shape and no memory."""

    def host(self, tensor: object) -> Array:
        """The elements as a NumPy array that shares the tensor's memory and strides; a copy only if it is on a device."""

    def memory_key(self, tensor: object) -> tuple[object, ...]:
        """Equal for two tensors exactly when they are the same memory seen the same way."""


class LazyTensor(ABC):
    """A tensor of a version whose elements are made when they are asked for, one tensor at a time."""

    spec: TensorSpec

    @abstractmethod
    def host(self) -> Array:
        """The elements, in memory of their own."""

    @abstractmethod
    def memory_key(self) -> tuple[object, ...]:
        """Equal for two of them exactly when they are made in the same way from the same memory."""


class Converted(LazyTensor):
    """A floating-point tensor in another dtype: each element is rounded to the nearest, ties to even."""

    def __init__(self, name: str, tensor: object, dtype: DType) -> None:
        self.spec = replace(spec_of(name, tensor), dtype=dtype)
        self._tensor = tensor

    def host(self) -> Array:
        """The converted elements."""
        with np.errstate(all="ignore"):  # a value beyond the range of its new dtype becomes infinite
            return host_array(self.spec.name, self._tensor).astype(self.spec.dtype.numpy)

    def memory_key(self) -> tuple[object, ...]:
        """That of the tensor, and the dtype."""
        return (*bridge_for(self._tensor).memory_key(self._tensor), self.spec.dtype)


class _LazyBridge:
    def spec(self, name: str, tensor: object) -> TensorSpec:
        return replace(cast("LazyTensor", tensor).spec, name=name)

    def has_storage(self, tensor: object) -> bool:  # noqa: ARG002 - the bridge protocol
        return True

    def host(self, tensor: object) -> Array:
        return cast("LazyTensor", tensor).host()

    def memory_key(self, tensor: object) -> tuple[object, ...]:
        return cast("LazyTensor", tensor).memory_key()


_LAZY = _LazyBridge()


def framework_of(thing: object) -> Framework | None:
    """Whose tensor, module or other object this is, told by its classes: importing nothing."""
    if isinstance(thing, np.ndarray | np.generic):
        return "numpy"
    roots = {cls.__module__.partition(".")[0] for cls in type(thing).__mro__}
    return "torch" if "torch" in roots else "paddle" if "paddle" in roots else None


def bridge_for(tensor: object) -> Bridge:
    """The bridge for whatever framework owns `tensor`."""
    framework = framework_of(tensor)
    if framework == "numpy":
        return numpy_bridge
    if isinstance(tensor, LazyTensor):
        return _LAZY
    if is_distributed(tensor):
        from weightcast.tensors.bridges import dtensor_bridge  # noqa: PLC0415 - torch is an extra

        return dtensor_bridge
    if framework == "torch":
        from weightcast.tensors.bridges import torch_bridge  # noqa: PLC0415 - torch is an extra

        if torch_bridge.is_tensor(tensor):  # and no module or optimizer
            return torch_bridge
    if framework == "paddle":
        from weightcast.tensors.bridges import paddle_bridge  # noqa: PLC0415 - paddle is an extra

        return paddle_bridge
    raise UnsupportedTensor(f"an object of type {type(tensor).__qualname__} is not a NumPy, torch or Paddle tensor.")


def spec_of(name: str, tensor: object) -> TensorSpec:
    """Describe a tensor of any framework. Errors name the tensor."""
    try:
        return bridge_for(tensor).spec(name, tensor)
    except UnsupportedTensor as error:
        raise UnsupportedTensor(f"tensor {name!r}: {error}") from error


def host_array(name: str, tensor: object) -> Array:
    """The elements of a tensor of any framework, sharing its memory where it lies on the host. Errors name the tensor."""
    bridge = bridge_for(tensor)
    if not bridge.has_storage(tensor):
        raise UnsupportedTensor(f"tensor {name!r} has no storage (it is on the meta device, or was cleared).")
    try:
        return bridge.host(tensor)
    except UnsupportedTensor as error:
        raise UnsupportedTensor(f"tensor {name!r}: {error}") from error


def is_distributed(tensor: object) -> bool:
    """Whether this is torch's tensor that is distributed over processes, told by its classes: importing nothing."""
    return any(cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed.") for cls in type(tensor).__mro__)


def local_box(name: str, tensor: object) -> tuple[tuple[int, ...], Box, object] | None:
    """Of a tensor that is distributed over processes: its shape, the box of it that is here, and the tensor with that box.

    None for any other tensor. Errors name the tensor.
    """
    if not is_distributed(tensor):
        return None
    from weightcast.tensors.bridges import dtensor_bridge  # noqa: PLC0415 - torch is an extra

    try:
        return dtensor_bridge.local_box(tensor)
    except UnsupportedTensor as error:
        raise UnsupportedTensor(f"tensor {name!r}: {error}") from error
