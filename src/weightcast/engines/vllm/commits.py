"""The two ways in which a staged version becomes what a model of vLLM computes with. Both can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

from weightcast.engines.vllm.layers import MadeLayer
from weightcast.engines.vllm.layout import Layout
from weightcast.errors import CommitFailed

Breath = Callable[[], object]


def no_breath() -> None:
    """Go on at once."""


class Commit(Protocol):
    """A change of the live model that waits to be made. No step of the engine runs while it is applied or undone."""

    def apply(self) -> None:
        """Make it. If this raises, `undo` is to be called."""

    def undo(self) -> None:
        """Take back what was applied so far."""

    def forget(self, breathe: Breath = no_breath) -> None:
        """Let go of all memory, and call `breathe` between its pieces: freeing takes time from whoever computes."""


class Switch:
    """Layers were made beside the live ones: what is left is to switch to them."""

    def __init__(self, layers: Sequence[MadeLayer]) -> None:
        self._layers = list(layers)
        self._undo: list[Callable[[], None]] = []

    def apply(self) -> None:
        """Switch every layer."""
        for layer in self._layers:
            layer.switch(self._undo)

    def undo(self) -> None:
        """Switch back, last first."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def forget(self, breathe: Breath = no_breath) -> None:
        """Free the layers that are not in use."""
        self._layers.clear()
        while self._undo:
            self._undo.pop()
            breathe()


class Reload:
    """vLLM's own layerwise reload, for models on a device, whose addresses must stay, and for quantised ones.

    `tensors` are complete groups; `former` gives the same tensors of the version that is served, as far as they are known.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: Any,
        layout: Layout,
        tensors: Mapping[str, torch.Tensor],
        former: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    ) -> None:
        self._model, self._config, self._layout = model, model_config, layout
        self._tensors, self._former = tensors, former

    def apply(self) -> None:
        """Load layer by layer."""
        self._load(iter(self._tensors.items()))

    def undo(self) -> None:
        """Give every layer its own tensors back, and load what was served before."""
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
        lacking = set(self._tensors)

        def found() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self._former():
                lacking.discard(name)
                yield name, tensor

        self._load(found())
        if lacking:
            raise CommitFailed(f"the weights from before the update are not known: {', '.join(sorted(lacking))}")

    def forget(self, breathe: Breath = no_breath) -> None:  # noqa: ARG002 - they lie in the host copy, which is not freed
        """Let go of the tensors."""
        self._tensors, self._former = {}, lambda: iter(())

    @torch.no_grad()
    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        initialize_layerwise_reload(self._model)
        self._model.load_weights(tensors)  # type: ignore[operator]
        finalize_layerwise_reload(self._model, self._config)
        self._retie(self._tensors.keys())

    def _retie(self, names: Any) -> None:
        """A packed layer has a copy of its own: reloading the layer that it is tied to leaves it as it was."""
        layers = self._layout.layers_of(names)
        modules = dict(self._model.named_modules())
        for leader, follower in self._layout.ties:
            layer = modules[follower.layer]
            method = getattr(layer, "quant_method", None)
            if leader.layer in layers and isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(layer)
