"""Mappings of NumPy arrays."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, cast

import numpy as np

from weightcast.delta.memory import HostMemory, LaneMemory
from weightcast.errors import UnsupportedTensor
from weightcast.tensors.bridges import numpy_bridge
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec

Holder = tuple[MutableMapping[str, Any], str]


class NumpySlot:
    """An array in a mapping, under all the keys that share its memory. Swapping replaces the mapping's values."""

    def __init__(self, spec: TensorSpec, holders: dict[str, Holder]) -> None:
        mapping, key = next(iter(holders.values()))
        array = cast("Array", mapping[key])
        if not isinstance(array, np.ndarray) or not array.flags.writeable:
            raise UnsupportedTensor(f"array {spec.name!r} is read-only: a live model's arrays must be writeable.")
        self.spec = spec
        self.names = tuple(holders)
        self._holders = list(holders.values())
        self._owns_memory = _root(array).nbytes == array.nbytes
        self._axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])

    @property
    def resident(self) -> bool:
        """Whether the mapping has the array."""
        mapping, key = self._holders[0]
        return key in mapping

    @property
    def owns_memory(self) -> bool:
        """False for a view of a larger array."""
        return self._owns_memory

    @property
    def on_host(self) -> bool:
        """Arrays lie in host memory."""
        return True

    def live(self) -> Array:
        """The array in the mapping."""
        mapping, key = self._holders[0]
        return cast("Array", mapping[key])

    def seen(self, memory: object) -> Array:
        """The array itself."""
        return cast("Array", memory)

    def lanes(self, memory: object | None = None) -> LaneMemory:
        """The lanes of the array."""
        return HostMemory(self.spec, self.live() if memory is None else cast("Array", memory))

    def write(self, data: Array) -> None:
        """Copy over the array's elements; both sides as integers, so no conversion can touch a NaN."""
        width = f"u{data.dtype.itemsize}"
        np.copyto(self.live().view(width), data.view(width))

    def make(self, data: Array) -> object:
        """An array with this slot's order of axes."""
        if self._axes == list(range(data.ndim)):
            return data
        made = np.empty([data.shape[axis] for axis in self._axes], dtype=data.dtype).transpose(np.argsort(self._axes))
        made[...] = data
        return made

    def memory(self) -> object | None:
        """The array in the mapping."""
        return self.live() if self.resident else None

    def install(self, memory: object | None) -> None:
        """Put the array into the mapping under all its keys, or take it out."""
        for mapping, key in self._holders:
            if memory is None:
                mapping.pop(key, None)
            else:
                mapping[key] = memory

    def watch(self) -> Callable[[], bool]:
        """Watches the array that owns the memory."""
        reference = weakref.ref(_root(self.live()))
        return lambda: reference() is None


def _root(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def capture_arrays(named: Iterator[tuple[str, Holder]]) -> list[NumpySlot]:
    """One slot for each piece of memory, whatever number of keys it has."""
    tied: dict[tuple[object, ...], dict[str, Holder]] = {}
    for name, (mapping, key) in named:
        tied.setdefault(numpy_bridge.memory_key(mapping[key]), {})[name] = (mapping, key)
    slots = []
    for holders in tied.values():
        name, (mapping, key) = next(iter(holders.items()))
        slots.append(NumpySlot(numpy_bridge.spec(name, mapping[key]), holders))
    return slots
