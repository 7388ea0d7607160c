"""A model of vLLM without memory, as it was before its weights were processed, so that its own loader can run beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

Loader = Callable[..., object]


class Place(NamedTuple):
    """A parameter or buffer: the path of its layer, which of the layer's two tables it is in, and its name there."""

    layer: str
    table: str
    name: str

    def __str__(self) -> str:
        return f"{self.layer}.{self.name}" if self.layer else self.name


class CopyCounter(TorchDispatchMode):
    """Counts the elements that are copied into tensors: what a weight loader does in the end, however it slices.

    With `keep`, `copies` are these copies, target and source. `more` tells whether anything else than zeros, which pad a
    vocabulary, was written.
    """

    def __init__(self, *, keep: bool = False) -> None:
        super().__init__()
        self.numel, self.more, self._keep = 0, False, keep
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func is torch.ops.aten.copy_.default:
            self.numel += args[0].numel()
            if self._keep:
                self.copies.append((args[0], args[1]))
        elif func._schema.is_mutable and not (func is torch.ops.aten.fill_.Scalar and args[1] == 0):
            self.more = True
        return func(*args, **(kwargs or {}))


OnLoad = Callable[[str, Place, Loader, tuple[Any, ...], dict[str, Any]], object]


class Skeleton:
    """Twins of all modules of a live model, with tensors on the meta device, in the form that checkpoints are loaded in.

    Twins share every plain attribute with the live modules and have tables of parameters and buffers of their own: what is
    loaded into a twin, or set on it, does not reach the live module. Parameters that several layers have in common are in
    `ties`: the place that is loaded, and another one. Twins have them in common as well.
    """

    def __init__(self, model: nn.Module) -> None:
        self.live: dict[str, nn.Module] = {}
        self.twins: dict[str, nn.Module] = {}
        self.ties: list[tuple[Place, Place]] = []
        self._made: dict[int, nn.Module] = {}
        self._metas: dict[int, tuple[Place, torch.Tensor]] = {}
        self._loaders: dict[Place, Loader] = {}
        self._on_load: OnLoad = _refuse
        self._current = ""
        self.root = self._twin(model, "")

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], on_load: OnLoad) -> None:
        """Run the model's own loader over tensors. Each call of a parameter's weight loader becomes a call of `on_load`: the
        name of the tensor that the model's loader took last, the place, the weight loader and its further arguments.
        """
        self._on_load = on_load

        def told() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                self._current = name
                yield name, tensor

        try:
            self.root.load_weights(told())  # type: ignore[operator]
        finally:
            self._on_load = _refuse

    def tensor(self, place: Place) -> torch.Tensor:
        """What a twin has in a place."""
        found: torch.Tensor = getattr(self.twins[place.layer], place.table)[place.name]
        return found

    def put(self, place: Place, tensor: torch.Tensor) -> None:
        """Give a twin a tensor, of the class and with the attributes that the one in its place has."""
        former = self.tensor(place)
        tensor.__class__ = former.__class__
        tensor.__dict__ = dict(former.__dict__)
        for other in [place, *(follower for leader, follower in self.ties if leader == place)]:
            getattr(self.twins[other.layer], other.table)[other.name] = tensor

    def places(self, layer: str) -> list[Place]:
        """The parameters of a layer."""
        return [
            Place(layer, "_parameters", name) for name, held in self.twins[layer]._parameters.items() if held is not None
        ]

    def end_loading(self, layer: str) -> None:
        """Give the parameters of a layer their own weight loaders back."""
        for place in self.places(layer):
            if place in self._loaders:
                self.tensor(place).weight_loader = self._loaders[place]  # type: ignore[attr-defined]

    def dissolve(self) -> None:
        """Take all tensors out of the twins. Loaders refer to twins, and twins to tensors: without this, memory would wait
        for the garbage collector.
        """
        for twin in self.twins.values():
            twin.__dict__["_parameters"], twin.__dict__["_buffers"] = {}, {}
        self._metas.clear()

    def _twin(self, module: nn.Module, path: str) -> nn.Module:
        if id(module) in self._made:
            return self._made[id(module)]
        twin: nn.Module = object.__new__(type(module))
        self._made[id(module)] = twin
        twin.__dict__.update(module.__dict__)
        self.live[path], self.twins[path] = module, twin
        recorded = get_layerwise_info(module).restore_metadata
        for table, known in zip(("_parameters", "_buffers"), recorded, strict=True):
            twin.__dict__[table] = self._metas_of(path, table, known, module, twin)
        twin.__dict__["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
        twin.__dict__["_modules"] = {
            name: child if child is None else self._twin(child, f"{path}.{name}" if path else name)
            for name, child in module._modules.items()
        }
        return twin

    def _metas_of(
        self, path: str, table: str, known: dict[str, torch.Tensor], live: nn.Module, twin: nn.Module
    ) -> dict[str, torch.Tensor | None]:
        """The tensors of a table as they were recorded before processing; what was not recorded is as it is now."""
        held: dict[str, torch.Tensor | None] = getattr(live, table)
        metas: dict[str, torch.Tensor | None] = {}
        for name in {**held, **known}:
            now, place = held.get(name), Place(path, table, name)
            tensor = known.get(name, now)
            if tensor is None or (table == "_buffers" and name not in known):  # buffers that are not loaded may be large
                metas[name] = tensor
            elif now is not None and id(now) in self._metas:
                leader, metas[name] = self._metas[id(now)]
                self.ties.append((leader, place))
            else:
                metas[name] = meta = self._meta(tensor, place, live, twin)
                if now is not None:
                    self._metas[id(now)] = (place, meta)
        return metas

    def _meta(self, tensor: torch.Tensor, place: Place, live: nn.Module, twin: nn.Module) -> torch.Tensor:
        meta: Any = tensor.data.to("meta")
        meta.__class__ = tensor.__class__
        meta.__dict__ = dict(tensor.__dict__)
        meta.weight_loader = _get_original_loader(meta)  # a reload by vLLM leaves its own around it, which loads nothing
        restore_layer_refs(meta, twin)
        for key, value in meta.__dict__.items():
            if isinstance(value, MethodType) and value.__self__ is live:
                meta.__dict__[key] = MethodType(value.__func__, twin)
        loader: Loader = meta.weight_loader
        self._loaders[place] = loader

        def told(param: torch.Tensor, *args: Any, **kwargs: Any) -> object:  # noqa: ARG001 - `on_load` knows a better one
            return self._on_load(self._current, place, loader, args, kwargs)

        meta.weight_loader = told
        twin_tensor: torch.Tensor = meta
        return twin_tensor


def _refuse(name: str, place: Place, *_: object) -> object:
    raise AssertionError(f"{name} was loaded into {place} outside of a load")
