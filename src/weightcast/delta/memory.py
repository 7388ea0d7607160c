"""Live memory that a delta is applied to: lanes read and written at indices, on the host or on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import numpy as np

from weightcast.errors import UnsupportedTensor
from weightcast.tensors.bridges import framework_of, host_array, spec_of
from weightcast.tensors.flat import Array, flat_bytes
from weightcast.tensors.kernels import Indices, kernels
from weightcast.tensors.lanes import LaneKind, Lanes, Steps, kind_of, lane_count, mapped, unmapped
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import Sum, array_sum


class LaneMemory(Protocol):
    """The memory of one tensor. Indices count lanes in C order, whatever the strides; None stands for all lanes."""

    spec: TensorSpec

    def read(self, indices: Indices | None) -> Lanes:
        """A copy of the lanes at these indices."""

    def moved(self, indices: Indices | None, steps: Steps) -> tuple[Lanes, Lanes]:
        """The lanes at these indices as they are, and as they would be after steps. Reads only."""

    def write(self, indices: Indices | None, values: Lanes) -> None:
        """Overwrite the lanes at these indices."""

    def holds(self, indices: Indices | None, values: Lanes) -> bool:
        """Whether the lanes at these indices are these."""

    def total(self, spec: TensorSpec, check: Callable[[], None]) -> Sum:
        """The sum of the tensor under the name of `spec`. `check` is called again and again, and may raise."""


def moved_by(before: Lanes, steps: Steps, kind: LaneKind) -> tuple[Lanes, Lanes]:
    """Lanes, and the same after steps."""
    return before, unmapped(mapped(before, kind) + steps, kind)


class HostMemory:
    """An array that is contiguous, or whose elements have at most 32 bits."""

    def __init__(self, spec: TensorSpec, array: Array) -> None:
        self.spec, self._array = spec, array
        kind = kind_of(spec.dtype)
        if not array.flags.writeable:
            raise UnsupportedTensor(f"tensor {spec.name!r} is read-only: a delta changes it in place.")
        if not array.flags.c_contiguous and kind.nbytes != spec.dtype.itemsize:
            raise UnsupportedTensor(f"tensor {spec.name!r} has 64-bit elements and is not contiguous.")
        self._flat: Lanes | None = flat_bytes(array).view(kind.unsigned) if array.flags.c_contiguous else None
        self._strided = array.view(kind.unsigned) if self._flat is None else None

    def read(self, indices: Indices | None) -> Lanes:
        """A copy of the lanes at these indices."""
        if self._flat is not None:
            return self._flat.copy() if indices is None else self._flat.take(indices)
        strided = cast("Array", self._strided)
        return strided.flatten() if indices is None else strided[np.unravel_index(indices, strided.shape)]

    def moved(self, indices: Indices | None, steps: Steps) -> tuple[Lanes, Lanes]:
        """The lanes at these indices as they are, and as they would be after steps. Reads only."""
        kind = kind_of(self.spec.dtype)
        if self._flat is not None and indices is not None:
            return kernels().moved(self._flat, indices, steps, kind)
        return moved_by(self.read(indices), steps, kind)

    def write(self, indices: Indices | None, values: Lanes) -> None:
        """Overwrite the lanes at these indices."""
        if self._flat is not None:
            if indices is None:
                self._flat[:] = values
            else:
                kernels().scatter(self._flat, indices, values)
            return
        strided = cast("Array", self._strided)
        if indices is None:
            strided[...] = values.reshape(strided.shape)
        else:
            strided[np.unravel_index(indices, strided.shape)] = values

    def holds(self, indices: Indices | None, values: Lanes) -> bool:
        """Whether the lanes at these indices are these."""
        if self._flat is not None and indices is not None:
            return kernels().count_unlike(self._flat, indices, values) == 0
        return np.array_equal(self.read(indices), values)

    def total(self, spec: TensorSpec, check: Callable[[], None]) -> Sum:
        """The sum of the tensor under the name of `spec`."""
        return array_sum(spec, self._array, check)


def memory_of(name: str, tensor: object) -> LaneMemory:
    """The memory of a tensor of any framework. Device tensors are read and written where they are."""
    spec = spec_of(name, tensor)
    if framework_of(tensor) == "torch":
        from weightcast.delta.torch_memory import TorchMemory, is_lazy, on_device  # noqa: PLC0415 - torch is an extra

        if is_lazy(tensor):
            raise UnsupportedTensor(f"tensor {name!r} is a lazy conjugate or negative: its memory holds other values.")
        if on_device(tensor):
            return TorchMemory(spec, tensor)
    if isinstance(tensor, np.generic):
        raise UnsupportedTensor(f"tensor {name!r} is a NumPy scalar, which cannot be changed: use an array of shape ().")
    array = host_array(name, tensor)
    if framework_of(tensor) == "paddle" and not _shares_memory(tensor):
        raise UnsupportedTensor(f"Paddle tensor {name!r} lies on a device: deltas are applied to host memory there.")
    return HostMemory(spec, array)


def _shares_memory(tensor: object) -> bool:
    place = getattr(tensor, "place", None)
    return place is not None and bool(place.is_cpu_place())


def check_indices(spec: TensorSpec, indices: Indices) -> None:
    """Refuse indices that lie outside of a tensor. They are sorted, so the last tells."""
    if len(indices) and int(indices[-1]) >= lane_count(spec):
        raise UnsupportedTensor(f"lane {int(indices[-1])} lies outside of {spec.name!r}, which has {lane_count(spec)}.")
