"""Does a version fit a model? Its own loader is run on tensors without memory, beside the model, and tells."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightcast import logs
from weightcast.errors import Mismatch
from weightcast.tensors.bridges.torch_bridge import torch_dtype
from weightcast.tensors.spec import TensorSpec

log = logs.get(__name__)

# They leave a parameter as the loader wrote it. Others pack, quantize or shuffle: then what is loaded has another layout
# than what is served, and a part of it cannot be loaded alone.
_PLAIN = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}

_WRITES = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


def is_plain(model: nn.Module) -> bool:
    """Whether all parameters are served as they were loaded."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return all(method is None or type(method).__name__ in _PLAIN for method in methods)


def find_mismatches(model: nn.Module, tensors: Mapping[str, TensorSpec], *, allow_unwritten: bool) -> list[Mismatch]:
    """Everything that a plain model's loader refuses of a version, or does not find in it. The model is not touched.

    Nothing is found, and that is logged, where the loader cannot do without memory.
    """
    metas = {name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta") for name, spec in tensors.items()}
    try:
        twin = _Twin(model)
        whole = twin.refusal(metas)
    except _CannotTellError as error:
        log.warning(
            "loader not tried", model=type(model).__name__, why="it cannot be tried beforehand", error=error.__cause__
        )
        return []
    if not whole:
        return [] if allow_unwritten else list(twin.unwritten())
    found = []
    for name, tensor in metas.items():
        try:
            why = twin.refusal({name: tensor})
        except _CannotTellError:
            continue
        if why:
            found.append(Mismatch("refused", name, f"the model's loader does not take {tensors[name].describe()}: {why}"))
    return found or [Mismatch("refused", type(model).__name__, f"the model's loader does not take the version: {whole}")]


class _CannotTellError(Exception):
    """The loader did something that needs memory."""


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts elements that are written, however a loader slices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func in _WRITES:
            self.numel += args[0].numel()
        return func(*args, **(kwargs or {}))


class _Twin:
    """The modules of a model once more, with parameters on the meta device. What is set on a twin stays there."""

    def __init__(self, model: nn.Module) -> None:
        from sglang.srt.model_loader.weight_utils import default_weight_loader  # noqa: PLC0415 - only inside of a server

        self._default = default_weight_loader
        self._live = {id(param) for param in model.parameters()}
        self._made: dict[int, Any] = {}
        self._written: dict[int, int] = {}
        self._lock = threading.Lock()  # some loaders use threads
        try:
            self._root = self._twin(model)
        except Exception as error:
            raise _CannotTellError from error

    def refusal(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """What the loader says against these; empty if it takes them."""
        try:
            with torch.no_grad():
                self._root.load_weights(iter(tensors.items()))
        except Exception as error:
            if isinstance(error, NotImplementedError) or "meta" in str(error).lower():
                raise _CannotTellError from error
            return " ".join(f"{type(error).__name__}: {error}".split())
        return ""

    def unwritten(self) -> Iterator[Mismatch]:
        """Parameters that were not written, or not as a whole. None if the loader does not tell what it writes."""
        if not self._written:
            return
        for name, param in self._root.named_parameters():
            written = self._written.get(id(param), 0)
            if not written and param.numel():
                yield Mismatch("missing", name, "no tensor of the version goes into this parameter")
            elif written < param.numel():
                yield Mismatch("incomplete group", name, f"the version has {written} of its {param.numel()} elements")

    def _twin(self, module: nn.Module) -> Any:
        if id(module) in self._made:
            return self._made[id(module)]
        twin: Any = object.__new__(type(module))
        self._made[id(module)] = twin
        twin.__dict__.update({name: value for name, value in vars(module).items() if not self._holds_live(value)})
        twin.__dict__["_parameters"] = {
            name: param if param is None else self._meta(param, module, twin) for name, param in module._parameters.items()
        }
        twin.__dict__["_buffers"] = {
            name: buffer if buffer is None else buffer.to("meta") for name, buffer in module._buffers.items()
        }
        twin.__dict__["_modules"] = {
            name: child if child is None else self._twin(child) for name, child in module._modules.items()
        }
        return twin

    def _holds_live(self, value: object) -> bool:
        """A table of parameters that a loader made for itself: a twin must make its own."""
        return isinstance(value, dict) and any(id(one) in self._live for one in value.values())

    def _meta(self, param: torch.Tensor, module: nn.Module, twin: Any) -> torch.Tensor:
        if id(param) in self._made:  # tied
            return cast("torch.Tensor", self._made[id(param)])
        meta = param.data.to("meta")
        meta.__class__ = param.__class__
        meta.__dict__ = {
            name: MethodType(value.__func__, twin) if isinstance(value, MethodType) and value.__self__ is module else value
            for name, value in vars(param).items()
        }
        loader = getattr(meta, "weight_loader", self._default)
        # Parameters of some classes have a property of that name over a field of this one.
        field = "_weight_loader" if isinstance(getattr(type(meta), "weight_loader", None), property) else "weight_loader"
        setattr(meta, field, self._counting(loader))
        self._made[id(param)] = meta
        return meta

    def _counting(self, loader: Callable[..., object]) -> Callable[..., object]:
        def load(param: torch.Tensor, *args: Any, **kwargs: Any) -> object:
            with _Writes() as writes:
                value = loader(param, *args, **kwargs)
            with self._lock:
                self._written[id(param)] = self._written.get(id(param), 0) + writes.numel
            return value

        return load
