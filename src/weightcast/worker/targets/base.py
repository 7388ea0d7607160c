"""A slot: one piece of live memory that a tensor of a version goes into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from weightcast.delta.memory import LaneMemory
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import array_proof, is_sum


class Slot(Protocol):
    """One parameter or buffer of a live model. Tied names are one slot.

    Adopt or copy is decided by `resident` alone: memory that exists is written into, so its address stays; where there is
    none, a slot takes over the memory it is given (docs/adopt-or-copy.md).
    """

    spec: TensorSpec
    names: tuple[str, ...]

    @property
    def resident(self) -> bool:
        """Whether there is memory behind the parameter: false on torch's meta device and after a clear."""

    @property
    def owns_memory(self) -> bool:
        """False if the memory is part of a larger one or also seen in another shape: such a slot cannot be swapped."""

    @property
    def on_host(self) -> bool:
        """Whether `live` is the memory itself rather than a copy from a device."""

    def live(self) -> Array:
        """The live elements with their strides, without a copy on the host. Only while resident."""

    def seen(self, memory: object) -> Array:
        """The elements of a memory from `make` or `memory`, as `live` shows those of the present one."""

    def lanes(self, memory: object | None = None) -> LaneMemory:
        """Access to single lanes: of the live memory, or of one from `make` or `memory`."""

    def write(self, data: Array) -> None:
        """Copy `data` over the live elements, bit for bit, whatever their strides."""

    def make(self, data: Array) -> object:
        """Memory in this slot's own layout and device that holds `data`; `data` itself where that already fits."""

    def memory(self) -> object | None:
        """What `install` would need to bring back the present state; None if there is no memory."""

    def install(self, memory: object | None) -> None:
        """Make this the slot's memory: one from `make` or `memory`, or None to drop what it has."""

    def watch(self) -> Callable[[], bool]:
        """A function that tells later whether the memory the slot has now was freed."""


def live_proof(slot: Slot, spec: TensorSpec, expected: str, check: Callable[[], None]) -> str:
    """The digest of the live elements as the tensor `spec`, of the same kind as `expected`. Sums are taken on the device."""
    if is_sum(expected) and not slot.on_host:
        return str(slot.lanes().total(spec, check))
    return array_proof(spec, slot.live(), expected, check)
