"""Layers made beside the live ones, loaded and packed, and the switch to them, which can be taken back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FunctionType
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

    def without_memory(self) -> MadeLayer:
        """The same with tensors that only have a shape and a dtype."""
        return replace(
            self, tensors={name: held if held is None else held.data.to("meta") for name, held in self.tensors.items()}
        )

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


class LayerMaker:
    """Makes layers beside the live ones, of versions with one layout. What is loaded lies in `buffers`: it comes back to
    them once it is packed, or switched out of the model.

    A layer is made by the model's own loader and by vLLM's processing. If these were seen to leave its parameters as they
    are in the version, and to keep nothing that depends on them, only the copies are made from the next time on.
    """

    def __init__(self, model: nn.Module, layout: Layout, buffers: Buffers) -> None:
        self._model, self._layout, self._buffers = model, layout, buffers
        self._leaders = {follower: leader for leader, follower in layout.ties}
        self._tied = {place.layer for tie in layout.ties for place in tie}
        self._plain: dict[str, MadeLayer | None] = {}  # without memory; None: it is not used as it is loaded

    @torch.no_grad()
    def make(self, layers: set[str], tensors: Mapping[str, torch.Tensor], deadline: Deadline) -> list[MadeLayer]:
        """Load and process these layers. `tensors` are all that they are made from, neighbours together.

        A layer is packed as soon as it is complete: there is one unpacked copy of a layer at a time, and not of a model.
        """
        plain = {layer: known for layer in sorted(layers) if (known := self._known(layer)) is not None}
        if not self._tied <= plain.keys():  # these are made together
            plain = {layer: known for layer, known in plain.items() if layer not in self._tied}
        made, rest = self._copied(plain, tensors, deadline), layers - plain.keys()
        if rest:
            making = _Making(self._model, self._layout, rest, self._buffers, deadline)
            names = self._layout.names_of(rest)
            making.skeleton.load(((name, tensor) for name, tensor in tensors.items() if name in names), making.on_load)
            loaded = making.finished()
            for one in loaded:
                deadline.check(f"comparing {one.path} with the version")
                if one.path not in self._plain:
                    self._plain[one.path] = one.without_memory() if self._stays(one, making.loaded, tensors) else None
            made += loaded
        return made

    def _known(self, layer: str) -> MadeLayer | None:
        """What a layer is, if it is used as it is loaded, and the live one is too."""
        known = self._plain.get(layer)
        if known is None:
            return None
        live = self._model.get_submodule(layer)
        held = [(tensor, live._parameters.get(name)) for name, tensor in known.tensors.items() if tensor is not None]
        same = all(now is not None and (now.shape, now.dtype) == (tensor.shape, tensor.dtype) for tensor, now in held)
        return replace(known, live=live) if same else None

    def _copied(
        self, layers: Mapping[str, MadeLayer], tensors: Mapping[str, torch.Tensor], deadline: Deadline
    ) -> list[MadeLayer]:
        """Layers that are used as they are loaded, made by the copies that the loader makes."""
        memory: dict[Place, torch.Tensor] = {}
        for place, copies in self._layout.copies.items():
            known = layers[place.layer].tensors.get(place.name) if place.layer in layers else None
            if known is not None:
                deadline.check(f"loading {place} beside the live model")
                memory[place] = _memory(self._layout, place, known, self._buffers)
                for copy in copies:
                    copy.target.of(memory[place]).copy_(copy.source.of(tensors[copy.name]))
        return [
            replace(
                layer,
                tensors={
                    name: tensor if tensor is None else memory[self._leader(path, name)]
                    for name, tensor in layer.tensors.items()
                },
            )
            for path, layer in layers.items()
        ]

    def _stays(self, made: MadeLayer, loaded: Mapping[Place, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether a layer that was loaded and processed has the values of the version, and nothing that depends on them."""
        if any(place.table != "_parameters" for place in self._layout.numel if place.layer == made.path):
            return False
        for name, tensor in made.tensors.items():
            place = self._leader(made.path, name)
            copies = self._layout.copies.get(place, ())
            if tensor is not None and not (
                tensor is loaded.get(place)
                and sum(math.prod(copy.target.size) for copy in copies) == self._layout.numel[place]
                and all(torch.equal(copy.target.of(tensor), copy.source.of(tensors[copy.name])) for copy in copies)
            ):
                return False
        return all(map(_keeps_nothing, made.attributes.values()))

    def _leader(self, layer: str, name: str) -> Place:
        place = Place(layer, "_parameters", name)
        return self._leaders.get(place, place)


def _memory(layout: Layout, place: Place, param: torch.Tensor, buffers: Buffers) -> torch.Tensor:
    """Memory for what is loaded into a parameter, with zeros where a version has nothing for it."""
    padded = layout.numel[place] < param.numel()
    return torch_bridge.from_host(buffers.take(torch_bridge.spec(str(place), param), zeroed=padded), param.dtype)


def _keeps_nothing(value: object) -> bool:
    """Whether something that processing has set on a layer cannot have come from its weights."""
    if isinstance(value, FunctionType):
        return not (value.__closure__ or value.__defaults__ or value.__kwdefaults__)
    return value is None or isinstance(value, bool)


class _Making:
    def __init__(self, model: nn.Module, layout: Layout, layers: set[str], buffers: Buffers, deadline: Deadline) -> None:
        self.skeleton = Skeleton(model)
        self._layout, self._layers, self._buffers, self._deadline = layout, layers, buffers, deadline
        self._left = {place: numel for place, numel in layout.numel.items() if place.layer in layers}
        self._before = {layer: dict(self.skeleton.twins[layer].__dict__) for layer in layers}
        self._done: set[str] = set()
        self.loaded: dict[Place, torch.Tensor] = {}

    def on_load(self, _: str, place: Place, loader: Loader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Let the weight loader write into memory of the twin."""
        self._deadline.check(f"loading {place} beside the live model")
        if place.layer not in self._layers or place.layer in self._done:
            return None  # a tensor that goes into two layers, one of which did not change, or that comes twice
        param = self.skeleton.tensor(place)
        if param.is_meta:
            self.skeleton.put(place, _memory(self._layout, place, param, self._buffers))
            param = self.loaded[place] = self.skeleton.tensor(place)
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
