"""Which tensors of a version go into which layers of a model, learned by running the model's own loader on meta tensors."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from weightcast import logs
from weightcast.engines.vllm.skeleton import CopyCounter, Loader, Place, Skeleton
from weightcast.errors import Mismatch
from weightcast.tensors.bridges.torch_bridge import torch_dtype
from weightcast.tensors.spec import TensorSpec
from weightcast.worker.fit import misfit

log = logs.get(__name__)

_DETAIL = 200  # loaders like to list all that they know
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class View(NamedTuple):
    """Some elements of a contiguous tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of another tensor of the same shape."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class Copy(NamedTuple):
    """A copy that the loader makes: elements of a tensor of the version, and where in a parameter they go."""

    name: str
    source: View
    target: View


@dataclass(frozen=True)
class Layout:
    """What a model takes from a version of certain names, shapes and dtypes.

    `feeds` tells the tensors of each layer. A layer in `ties` has a parameter in common with another layer, and is made from
    what that one is given. `copies` has the parameters that the loader fills by copies alone, without a conversion, in the
    order in which it makes them. `opaque` means that the loader does not tell which tensor it writes: then all is one group.
    """

    feeds: dict[str, frozenset[str]]
    numel: dict[Place, int]
    ties: tuple[tuple[Place, Place], ...]
    copies: dict[Place, tuple[Copy, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    opaque: bool = False

    def layers_of(self, names: Iterable[str]) -> set[str]:
        """The layers that have to be made anew if these tensors change."""
        changed = set(names) - self.ignored
        if self.opaque:
            return set(self.feeds) if changed else set()
        return {layer for layer, fed in self.feeds.items() if fed & changed}

    def names_of(self, layers: Iterable[str]) -> set[str]:
        """All tensors that these layers are made from: fused groups are complete."""
        if self.opaque:
            return {name for fed in self.feeds.values() for name in fed}
        return {name for layer in layers for name in self.feeds[layer]}


def learn_layout(model: nn.Module, version: str, specs: Sequence[TensorSpec]) -> Layout:
    """Run the loader without any bytes. Raises `VersionDoesNotFit` with every mismatch; the model is not touched."""
    run = _DryRun(model)
    tensors = {spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta") for spec in specs}
    mismatches: list[Mismatch] = []
    try:
        run.load(tensors.items())
    except Exception as error:  # noqa: BLE001 - whatever a model's loader says; it is said again for each tensor
        log.debug("dry run failed", version=version, error=error)
        run = _DryRun(model)
        for item in tensors.items():
            try:
                run.load([item])
            except Exception as refusal:  # noqa: BLE001 - listed
                mismatches.append(_named(item, refusal))
    mismatches += run.wrong_dtypes
    if not mismatches:
        mismatches += run.lacking()
    if mismatches:
        raise misfit(version, tensors, mismatches, None)
    return run.layout(model, tensors)


class _Refused(Exception):
    """A weight loader refused a tensor; says what it was to be loaded into."""


@dataclass
class _DryRun:
    """What a loader wrote where."""

    model: nn.Module
    taken: dict[str, set[Place]] = field(default_factory=dict)
    numel: dict[Place, int] = field(default_factory=dict)
    wrong_dtypes: list[Mismatch] = field(default_factory=list)
    copied: int = 0
    copies: dict[Place, list[Copy | None]] = field(default_factory=dict)  # None: what is done there is no plain copy
    storages: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.skeleton = Skeleton(self.model)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with CopyCounter() as counter:
            self.skeleton.load(self._noted(tensors), self._on_load)
        self.copied += counter.numel

    def _noted(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self.storages[tensor.untyped_storage()._cdata] = name
            yield name, tensor

    def _on_load(self, name: str, place: Place, loader: Loader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        param = self.skeleton.tensor(place)
        with CopyCounter(keep=True) as counter:
            try:
                value = loader(param, *args, **kwargs)
            except Exception as error:
                raise _Refused(f"{place} has {tuple(param.shape)} {param.dtype}. {error}".strip()) from error
        made = [None] if counter.more else [self._copy(param, *pair) for pair in counter.copies]
        self.copies.setdefault(place, []).extend(made)
        self.taken.setdefault(name, set()).add(place)
        self.numel[place] = min(self.numel.get(place, 0) + counter.numel, param.numel())
        given = next((item for item in args if isinstance(item, torch.Tensor)), None)
        if given is not None and given.dtype != param.dtype and not {given.dtype, param.dtype} <= set(_FLOATS):
            self.wrong_dtypes.append(Mismatch("dtype", name, f"the model has {param.dtype}, the version {given.dtype}"))
        return value

    def _copy(self, param: torch.Tensor, target: torch.Tensor, source: torch.Tensor) -> Copy | None:
        """A copy as views; None if it converts, or is not from a tensor of the version into the parameter."""
        name = self.storages.get(source.untyped_storage()._cdata)
        inside = target.untyped_storage()._cdata == param.untyped_storage()._cdata and param.is_contiguous()
        if (
            name is None
            or not inside
            or param.storage_offset()
            or (source.dtype, source.shape) != (target.dtype, target.shape)
        ):
            return None
        return Copy(name, _view(source), _view(target))

    def lacking(self) -> Iterable[Mismatch]:
        """Parameters that the version does not fill."""
        filled = {place for place in self.numel if self.numel[place] >= self._wanted(place)}
        filled |= {follower for _, follower in self.skeleton.ties}  # if it lacks anything, so does the one that is loaded
        for layer, twin in self.skeleton.twins.items():
            if is_deferred_attention_layer(twin):  # scales that few checkpoints have
                continue
            for place in self.skeleton.places(layer):
                found, wanted = self.numel.get(place, 0), self._wanted(place)
                if place in filled or not wanted:
                    continue
                if not found:
                    yield Mismatch("missing", str(place), "no tensor of the version goes into this parameter")
                else:
                    having = sorted(name for name, places in self.taken.items() if place in places)
                    yield Mismatch(
                        "incomplete group",
                        ", ".join(having),
                        f"fill {found} of {wanted} elements of {place}: the rest is missing",
                    )

    def _wanted(self, place: Place) -> int:
        """The elements of a parameter that checkpoints have: without the rows that pad a vocabulary."""
        twin, param = self.skeleton.twins[place.layer], self.skeleton.tensor(place)
        if isinstance(twin, VocabParallelEmbedding) and param.shape[:1] == (twin.num_embeddings_per_partition,):
            rows = twin.shard_indices.num_org_elements + twin.shard_indices.num_added_elements
            return int(rows * param[0].numel()) if param.ndim > 1 else int(rows)
        return int(getattr(param, "weight_loader_numel", param.numel()))

    def layout(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> Layout:
        feeds: dict[str, set[str]] = {}
        for name, places in self.taken.items():
            for place in places:
                feeds.setdefault(place.layer, set()).add(name)
        for leader, follower in self.skeleton.ties:
            feeds.setdefault(follower.layer, set()).update(feeds.get(leader.layer, ()))
        idle = {name: tensor for name, tensor in tensors.items() if name not in self.taken}
        opaque = any(_writes(model, item) for item in idle.items())
        if idle and not opaque:
            log.info(
                "tensors ignored",
                count=len(idle),
                names=sorted(idle)[:16],
                why="the model's loader takes nothing from these",
            )
        copies = {
            place: tuple(one for one in made if one is not None) for place, made in self.copies.items() if None not in made
        }
        return Layout(
            {layer: frozenset(names) for layer, names in feeds.items()}, self.numel, tuple(self.skeleton.ties), copies,
            ignored=frozenset() if opaque else frozenset(idle), opaque=opaque,
        )  # fmt: skip


def _view(tensor: torch.Tensor) -> View:
    return View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _writes(model: nn.Module, item: tuple[str, torch.Tensor]) -> bool:
    """Whether a tensor that seemed to be ignored is written when it comes alone: then the loader holds tensors back."""
    run = _DryRun(model)
    try:
        run.load([item])
    except Exception as error:  # noqa: BLE001 - a loader may want the tensor that this one is tied to
        log.debug("tensor not loaded alone", tensor=item[0], error=error)
        return False
    return bool(run.taken) or run.copied > 0


def _named(item: tuple[str, torch.Tensor], error: Exception) -> Mismatch:
    name, tensor = item
    detail = textwrap.shorten(str(error) or type(error).__name__, _DETAIL)
    return Mismatch("refused", name, f"the model's loader does not take {tuple(tensor.shape)} {tensor.dtype}: {detail}")
