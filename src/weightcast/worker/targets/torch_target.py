"""torch modules and mappings of torch tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, cast

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightcast.delta.memory import LaneMemory, memory_of
from weightcast.errors import UnsupportedTensor
from weightcast.tensors.boxes import Box
from weightcast.tensors.bridges import bridge_for, is_distributed, local_box, torch_bridge
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec

Boxes = dict[str, tuple[tuple[int, ...], Box]]  # by name: the shape of a distributed tensor, and the box of it that is here
Holder = tuple[MutableMapping[str, Any], str]  # a dict that refers to a tensor, and the key it does so under


class TorchSlot:
    """A torch tensor, under all the names that share its memory.

    Parameters keep their identity, so references that an engine holds stay good; only one on the meta device is replaced,
    by a parameter of the same class with the same attributes.

    All of it works inside and outside of `torch.inference_mode`, whichever the parameters were made in: memory that is made
    or handed out is always a normal tensor, so that a thread of the other kind can go on with it.
    """

    def __init__(self, spec: TensorSpec, holders: dict[str, Holder], *, owns_memory: bool, device: torch.device) -> None:
        tensor = _held(next(iter(holders.values())))
        if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise UnsupportedTensor(f"parameter {spec.name!r} is expanded: several elements share memory.")
        self.spec = spec
        self.names = tuple(holders)
        self._holders = list(holders.values())
        self._owns_memory = owns_memory
        self._stride = tensor.stride()
        self._dtype = tensor.dtype
        self._device = device if tensor.device.type == "meta" else tensor.device

    @property
    def resident(self) -> bool:
        """Whether the parameter has its full shape and memory behind it."""
        tensor = _held(self._holders[0])
        return tuple(tensor.shape) == self.spec.shape and torch_bridge.has_storage(tensor)

    @property
    def owns_memory(self) -> bool:
        """False for a view of larger or differently shaped memory."""
        return self._owns_memory

    @property
    def on_host(self) -> bool:
        """Whether the parameter lies in host memory."""
        return self._device.type == "cpu"

    def live(self) -> Array:
        """The elements; a copy if they lie on a device."""
        return torch_bridge.host(_held(self._holders[0]))

    def seen(self, memory: object) -> Array:
        """The elements of the tensor; a copy if they lie on a device."""
        return torch_bridge.host(memory)

    def lanes(self, memory: object | None = None) -> LaneMemory:
        """The lanes of the tensor, where it lies."""
        tensor = _normal(_held(self._holders[0])) if memory is None else cast("torch.Tensor", memory)
        return memory_of(self.spec.name, tensor.detach())

    def write(self, data: Array) -> None:
        """Copy over the live elements. Bits are copied as integers, so no conversion can touch a NaN."""
        if self.on_host:
            width = f"u{data.dtype.itemsize}"
            np.copyto(self.live().view(width), data.view(width))  # torch's own copy takes 1.75 times as long as memcpy
            return
        tensor = _normal(_held(self._holders[0])).detach()
        torch_bridge.as_bits(tensor).copy_(torch_bridge.as_bits(torch_bridge.from_host(data, self._dtype)))

    @torch.inference_mode(mode=False)
    def make(self, data: Array) -> object:
        """A tensor with this parameter's strides and device; the array's own memory where both are plain."""
        host = torch_bridge.from_host(data, self._dtype)
        if self._device.type == "cpu" and host.stride() == self._stride:
            return host
        made = torch.empty_strided(self.spec.shape, self._stride, dtype=self._dtype, device=self._device)
        torch_bridge.as_bits(made).copy_(torch_bridge.as_bits(host))
        return made

    def memory(self) -> object | None:
        """The data of the parameter."""
        return _normal(_held(self._holders[0])) if self.resident else None

    @torch.inference_mode(mode=False)
    def install(self, memory: object | None) -> None:
        """Point every tensor of the slot at `memory`; the parameter objects stay."""
        new = cast("torch.Tensor | None", memory)
        for tensor in {id(held): held for held in map(_held, self._holders)}.values():
            if tensor.device.type != "meta":
                _point(tensor, torch.empty(0, dtype=self._dtype, device=self._device) if new is None else new)
            elif new is not None:
                self._replace(tensor, new)

    def _replace(self, old: torch.Tensor, memory: torch.Tensor) -> None:
        """A meta tensor cannot be given memory, so its holders get a twin: same class, same attributes."""
        new: torch.Tensor = memory
        if isinstance(old, torch.nn.Parameter):
            new = torch.nn.Parameter(memory, requires_grad=old.requires_grad)
        if type(old) not in (torch.Tensor, torch.nn.Parameter):
            new.__class__ = type(old)
        new.__dict__.update(old.__dict__)
        for mapping, key in self._holders:
            if mapping[key] is old:
                mapping[key] = new

    def watch(self) -> Callable[[], bool]:
        """Watches the storage, which outlives the tensor if anything else refers to it."""
        reference = StorageWeakRef(_held(self._holders[0]).untyped_storage())
        return lambda: bool(reference.expired())


class _LocalPart(dict[str, Any]):
    """What is here of a distributed tensor that another mapping holds.

    It is looked up at each use: FSDP moves it to other memory when the module is first used, and puts the gathered parameter
    into its place while that is computed with.
    """

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self._holder, self._last = holder, _held(holder)

    def __getitem__(self, _key: str) -> torch.Tensor:
        now = _held(self._holder)
        if is_distributed(now):
            self._last = now
        return cast("torch.Tensor", cast("Any", self._last).detach().to_local())


def _held(holder: Holder) -> torch.Tensor:
    mapping, key = holder
    return cast("torch.Tensor", mapping[key])


@torch.inference_mode(mode=False)
def _normal(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as a normal tensor. Of one that was made in inference mode every view is one of that kind too,
    which cannot be changed outside of it.
    """
    if not tensor.is_inference():
        return tensor.data
    seen = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return seen.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _point(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Give a tensor other memory. One that was made in inference mode refuses `.data`, and takes it only there."""
    if not tensor.is_inference():
        tensor.data = memory
        return
    with torch.inference_mode():
        tensor.set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride())


def reshard(module: torch.nn.Module) -> None:
    """Let FSDP2 drop parameters that it has gathered, so that it gathers them again from what is written now."""
    for child in module.modules():
        if any(cls.__name__ == "FSDPModule" for cls in type(child).__mro__):
            cast("Any", child).reshard()


def named_holders(module: torch.nn.Module) -> Iterator[tuple[str, Holder]]:
    """The parameters and persistent buffers of a module. Reads shapes only; allocates no tensor."""
    reshard(module)
    for prefix, child in module.named_modules(remove_duplicate=False):
        for kind in (child._parameters, child._buffers):
            for key, tensor in kind.items():
                if tensor is not None and not (kind is child._buffers and key in child._non_persistent_buffers_set):
                    yield f"{prefix}.{key}" if prefix else key, (cast("MutableMapping[str, Any]", kind), key)


def capture_tensors(named: Iterator[tuple[str, Holder]], device: torch.device) -> tuple[list[TorchSlot], Boxes]:
    """One slot for each piece of memory, whatever number of names it has; and which boxes those of distributed tensors are.

    The memory of a distributed tensor is written and never replaced: what distributes it holds on to it.
    """
    tied: dict[tuple[object, ...], dict[str, Holder]] = {}
    boxes: Boxes = {}
    for name, holder in named:
        tensor = _held(holder)
        key, distributed = bridge_for(tensor).memory_key(tensor), local_box(name, tensor)
        if distributed is not None:
            if not bridge_for(tensor).has_storage(tensor):
                raise UnsupportedTensor(
                    f"parameter {name!r} is distributed and has no memory: give it some first (module.to_empty(device=...))."
                )
            boxes[name] = distributed[:2]
        tied.setdefault(key, {})[name] = holder if distributed is None else (_LocalPart(holder), name)
    storages = Counter(_storage_key(_held(next(iter(holders.values())))) for holders in tied.values())
    slots = []
    for holders in tied.values():
        name, holder = next(iter(holders.items()))
        tensor = _held(holder)
        spec = torch_bridge.spec(name, tensor)
        whole = tensor.device.type == "meta" or tensor.untyped_storage().nbytes() in (0, spec.nbytes)
        owns = whole and (storages[_storage_key(tensor)] == 1 or spec.nbytes == 0) and name not in boxes
        slots.append(TorchSlot(spec, holders, owns_memory=owns, device=device))
    return slots, boxes


def _storage_key(tensor: torch.Tensor) -> object:
    return id(tensor) if tensor.device.type == "meta" else tensor.untyped_storage().data_ptr()
