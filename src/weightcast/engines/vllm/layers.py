"""Layers made beside the live ones, loaded and packed, and the switch to them, which can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from weightcast.clock import Deadline
from weightcast.engines.vllm.layout import Layout
from weightcast.engines.vllm.skeleton import CopyCounter, Loader, Place, Skeleton
from weightcast.errors import SourceFailed
from weightcast.tensors.bridges import torch_bridge
from weightcast.worker.buffers import Buffers

# What these keep of a layer's weights they keep on the layer: packing a twin does not touch what the live layer uses.
_KEPT_ON_THE_LAYER = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_TABLES = ("_parameters", "_buffers", "_modules")


def can_be_made_beside(model: nn.Module) -> bool:
    """Whether all layers of a model can be made beside the live ones: on the host, and with nothing derived elsewhere."""
    if any(tensor.device.type != "cpu" for tensor in model.parameters()):
        return False  # graphs know the addresses, and a second set may not fit on a device
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    plain = all(method is None or type(method) in _KEPT_ON_THE_LAYER for method in methods)
    return plain and not any(isinstance(layer, MLAAttention) for layer in model.modules())


@dataclass(frozen=True)
class MadeLayer:
    """A layer that waits to be switched to: its tensors, and what processing them has set on it."""

    path: str
    live: nn.Module
    tensors: Mapping[str, torch.Tensor | None]
    attributes: Mapping[str, object]

    def switch(self, undo: list[Callable[[], None]]) -> None:
        """Give the live layer what was made. Each step puts its way back into `undo` first."""
        for name, tensor in self.tensors.items():
            self._put(self.live._parameters, name, tensor, undo)
        for name, value in self.attributes.items():
            undo.append(_restoring(self.live.__dict__, name))
            self.live.__dict__[name] = value

    @staticmethod
    def _put(held: dict[str, Any], name: str, tensor: torch.Tensor | None, undo: list[Callable[[], None]]) -> None:
        live = held.get(name)
        if live is None or tensor is None or live.shape != tensor.shape or live.dtype != tensor.dtype:
            undo.append(_restoring(held, name))
            held[name] = tensor
        else:  # the parameter stays the same object: compiled code and tied layers refer to it
            undo.append(_pointing(live, live.data))
            live.data = tensor.data


def _restoring(table: dict[str, Any], name: str) -> Callable[[], None]:
    if name not in table:
        return lambda: table.pop(name, None)
    former = table[name]
    return lambda: table.update({name: former})


def _pointing(tensor: torch.Tensor, data: torch.Tensor) -> Callable[[], None]:
    def point() -> None:
        tensor.data = data

    return point


def make_layers(
    model: nn.Module,
    layout: Layout,
    layers: set[str],
    tensors: Iterable[tuple[str, torch.Tensor]],
    buffers: Buffers,
    deadline: Deadline,
) -> list[MadeLayer]:
    """Load and process these layers beside the live ones. `tensors` are all that they are made from.

    A layer is packed as soon as it is complete, so that there is one unpacked copy of a layer at a time, and not of a model.
    What is loaded lies in `buffers`: it comes back to them once it is packed, or switched out of the model.
    """
    with torch.no_grad():
        making = _Making(model, layout, layers, buffers, deadline)
        making.skeleton.load(tensors, making.on_load)
        return making.finished()


class _Making:
    def __init__(self, model: nn.Module, layout: Layout, layers: set[str], buffers: Buffers, deadline: Deadline) -> None:
        self.skeleton = Skeleton(model)
        self._layout, self._layers, self._buffers, self._deadline = layout, layers, buffers, deadline
        self._left = {place: numel for place, numel in layout.numel.items() if place.layer in layers}
        self._before = {layer: dict(self.skeleton.twins[layer].__dict__) for layer in layers}
        self._done: set[str] = set()

    def on_load(self, _: str, place: Place, loader: Loader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Let the weight loader write into memory of the twin."""
        self._deadline.check(f"loading {place} beside the live model")
        if place.layer not in self._layers or place.layer in self._done:
            return None  # a tensor that goes into two layers, one of which did not change, or that comes twice
        param = self.skeleton.tensor(place)
        if param.is_meta:
            padded = self._layout.numel[place] < param.numel()
            memory = self._buffers.take(torch_bridge.spec(str(place), param), zeroed=padded)
            self.skeleton.put(place, torch_bridge.from_host(memory, param.dtype))
            param = self.skeleton.tensor(place)
        with CopyCounter() as counter:
            value = loader(param, *args, **kwargs)
        self._left[place] -= counter.numel
        if all(left <= 0 for other, left in self._left.items() if other.layer == place.layer):
            self._complete(place.layer)
        return value

    def _complete(self, layer: str) -> None:
        self._process(layer)
        for leader, follower in self._layout.ties:
            if leader.layer == layer:
                self._process(follower.layer)

    def _process(self, layer: str) -> None:
        self.skeleton.end_loading(layer)
        twin = self.skeleton.twins[layer]
        method = getattr(twin, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(twin)
            reconcile: Any = getattr(twin, "update_param_tp_status", None)
            if reconcile is not None:
                reconcile()
        self._done.add(layer)

    def finished(self) -> list[MadeLayer]:
        """All of them, or an error that names those that are not complete."""
        lacking = [f"{place} ({left} elements)" for place, left in self._left.items() if place.layer not in self._done]
        if lacking:
            raise SourceFailed(
                f"the model's loader did not complete these layers: {', '.join(lacking)}. Nothing was changed."
            )
        made = [self._made(layer) for layer in sorted(self._layers)]
        self.skeleton.dissolve()
        return made

    def _made(self, layer: str) -> MadeLayer:
        twin, before = self.skeleton.twins[layer], self._before[layer]
        tensors = {name: tensor for name, tensor in twin._parameters.items() if tensor is None or not tensor.is_meta}
        attributes = {
            name: value
            for name, value in twin.__dict__.items()
            if name not in _TABLES and (name not in before or before[name] is not value)
        }
        return MadeLayer(layer, self.skeleton.live[layer], tensors, attributes)
