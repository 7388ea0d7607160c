"""Views of NumPy, torch and Paddle tensors without a copy. A framework is imported only when its tensor is met."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from weightcast.errors import UnsupportedTensor
from weightcast.tensors.boxes import Box
from weightcast.tensors.bridges import numpy_bridge
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
    if framework == "torch":
        from weightcast.tensors.bridges import torch_bridge  # noqa: PLC0415 - torch is an extra

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
    """The elements of a tensor of any framework, sharing its memory where it lies on the host."""
    bridge = bridge_for(tensor)
    if not bridge.has_storage(tensor):
        raise UnsupportedTensor(f"tensor {name!r} has no storage (it is on the meta device, or was cleared).")
    return bridge.host(tensor)


def local_box(name: str, tensor: object) -> tuple[tuple[int, ...], Box, object] | None:
    """Of a tensor that is distributed over processes: its shape, the box of it that is here, and the tensor with that box.

    None for any other tensor. Errors name the tensor.
    """
    classes = {f"{cls.__module__}.{cls.__name__}" for cls in type(tensor).__mro__ if cls.__name__ == "DTensor"}
    if not any(called.startswith("torch.distributed.") for called in classes):
        return None
    from weightcast.tensors.bridges import dtensor_bridge  # noqa: PLC0415 - torch is an extra

    try:
        return dtensor_bridge.local_box(tensor)
    except UnsupportedTensor as error:
        raise UnsupportedTensor(f"tensor {name!r}: {error}") from error
