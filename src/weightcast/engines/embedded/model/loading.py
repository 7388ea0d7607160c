"""Filling models from a checkpoint: everything is checked before the first byte is written."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

import torch

from weightcast.engines.embedded.model.build import Model
from weightcast.engines.embedded.model.weights import DeclaredWeight, Shape, WeightPiece, declared_weights
from weightcast.errors import Mismatch, SourceFailed, VersionDoesNotFit
from weightcast.store.checkpoint import Checkpoint
from weightcast.tensors.bridges.torch_bridge import from_host
from weightcast.tensors.dtypes import DType
from weightcast.tensors.spec import TensorSpec

log = logging.getLogger(__name__)

_DTYPES = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F64: torch.float64}
_ALWAYS_IGNORED = ("*.rotary_emb.inv_freq",)  # older checkpoints carry it; it follows from the config

Destination = tuple[DeclaredWeight, WeightPiece]


def load(models: Model | Sequence[Model], checkpoint: Checkpoint) -> None:
    """Fill the models of one rank from a checkpoint that holds the tensors of all of them.

    Tensors are streamed: beside the models there is never more than the largest one. Elements are converted to the
    parameters' dtype. `VersionDoesNotFit` lists every tensor, held by this rank or not, that is missing, unexpected or of
    another shape or kind, and nothing was written then. Any later failure (a file that ends too early) leaves the models
    partly written. May be called again: parameters keep their memory.
    """
    given = (models,) if not isinstance(models, Sequence) else tuple(models)
    ignored = (*_ALWAYS_IGNORED, *(pattern for model in given for pattern in model.ignored))
    weights = [weight for model in given for weight in declared_weights(model)]
    destinations: dict[str, list[Destination]] = defaultdict(list)
    for weight in weights:
        for piece in weight.layout.pieces:
            destinations[piece.source].append((weight, piece))
    sources = {name: shape for weight in weights for name, shape in weight.layout.sources.items()}
    mismatches = find_mismatches(checkpoint.specs, sources, ignored)
    if mismatches:
        raise VersionDoesNotFit(str(checkpoint.directory), mismatches)
    _write(checkpoint, destinations, weights)


def find_mismatches(specs: Mapping[str, TensorSpec], sources: Mapping[str, Shape], ignored: Sequence[str]) -> list[Mismatch]:
    """Everything in which the tensors of a checkpoint differ from those that a model is made of."""
    mismatches = []
    for name, shape in sources.items():
        spec = specs.get(name)
        if spec is None:
            mismatches.append(Mismatch("missing", name, f"the model needs it, of shape {list(shape)}"))
        elif spec.shape != shape:
            mismatches.append(
                Mismatch("shape", name, f"the checkpoint has {spec.describe()}, the model needs {list(shape)}")
            )
        elif spec.dtype not in _DTYPES:
            mismatches.append(Mismatch("dtype", name, f"the checkpoint has {spec.describe()}: it cannot be converted"))
    for name, spec in specs.items():
        if name not in sources and not any(fnmatchcase(name, pattern) for pattern in ignored):
            mismatches.append(
                Mismatch("unexpected", name, f"the checkpoint has {spec.describe()}, the model has no such name")
            )
    return mismatches


@torch.no_grad()
def _write(checkpoint: Checkpoint, destinations: dict[str, list[Destination]], weights: Sequence[DeclaredWeight]) -> None:
    written = dict.fromkeys((id(weight) for weight in weights), 0)
    for name, array in checkpoint.tensors():
        landing = destinations.get(name, ())
        if landing:
            tensor = from_host(array, _DTYPES[checkpoint.specs[name].dtype])
            for weight, piece in landing:
                written[id(weight)] += piece.view(weight.parameter).copy_(piece.cut(tensor)).numel()
    short = [weight.name for weight in weights if written[id(weight)] != _wanted(weight)]
    if short:
        raise SourceFailed(f"{checkpoint.directory} changed while it was read: {', '.join(short)} not written exactly once.")
    log.info("load from=%s parameters=%d elements=%d", checkpoint.directory, len(weights), sum(written.values()))


def _wanted(weight: DeclaredWeight) -> int:
    padding = weight.layout.padding
    return prod(weight.layout.shape) - (prod(padding.shape) if padding else 0)
