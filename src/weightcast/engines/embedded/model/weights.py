"""Where each parameter of a rank comes from, as data: boxes of checkpoint tensors and the places they have in it.

Whatever writes weights, the first load or a live update, works through these pieces and needs to know no layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import nn

from weightcast.errors import InvalidInput
from weightcast.tensors.boxes import Box

Shape = tuple[int, ...]


@dataclass(frozen=True)
class WeightPiece:
    """A box of a checkpoint tensor of this `shape`, and the box of a parameter that holds it.

    `target` may have one dimension more in front, of length 1: experts that are stacked. A `transposed` piece has its two
    dimensions exchanged in the parameter.
    """

    source: str
    shape: Shape
    box: Box
    target: Box
    transposed: bool = False

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """The live memory of the piece, in the shape and orientation of its box: writing to it writes the parameter."""
        part = parameter.detach()
        for dim, (start, length) in enumerate(zip(self.target.start, self.target.shape, strict=True)):
            part = part.narrow(dim, start, length)
        if len(self.target.shape) > len(self.box.shape):
            part = part.squeeze(0)
        return part.transpose(0, 1) if self.transposed else part

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece's box of the checkpoint tensor."""
        for dim, (start, length) in enumerate(zip(self.box.start, self.box.shape, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


@dataclass(frozen=True)
class WeightLayout:
    """The shape of a parameter and its pieces, which cover every element once, but for `padding`: that stays 0.

    `elsewhere` are tensors, by name and shape, that belong to the parameter and of which other ranks hold everything.
    """

    shape: Shape
    pieces: tuple[WeightPiece, ...]
    padding: Box | None = None
    elsewhere: tuple[tuple[str, Shape], ...] = ()

    def __post_init__(self) -> None:
        boxes = [piece.target for piece in self.pieces] + ([self.padding] if self.padding else [])
        if not all(box.fits(self.shape) for box in boxes) or not _cover_once(self.shape, boxes):
            raise InvalidInput(
                f"the pieces of a parameter of shape {list(self.shape)} do not cover each element once: {boxes}."
            )
        for piece in self.pieces:
            if not piece.box.fits(piece.shape) or prod(piece.box.shape) != prod(piece.target.shape):
                raise InvalidInput(f"a piece that is not what its parameter holds: {piece}.")

    @property
    def sources(self) -> dict[str, Shape]:
        """All tensors of a checkpoint that belong to the parameter, on any rank, and their shapes."""
        return {piece.source: piece.shape for piece in self.pieces} | dict(self.elsewhere)

    @classmethod
    def whole(cls, source: str, shape: Shape) -> WeightLayout:
        """A parameter that is a tensor of the checkpoint."""
        return cls(shape, (WeightPiece(source, shape, Box.whole(shape), Box.whole(shape)),))

    @classmethod
    def rows(cls, sources: Sequence[tuple[str, Shape, Box]], *, transposed: bool = False) -> WeightLayout:
        """Boxes of several matrices, one below the other; `transposed`, one beside the other."""
        pieces, count = [], 0
        for source, shape, box in sources:
            start, size = ((0, count), box.shape[::-1]) if transposed else ((count, 0), box.shape)
            pieces.append(WeightPiece(source, shape, box, Box(start, size), transposed))
            count += box.shape[0]
        width = sources[0][2].shape[1]
        return cls((width, count) if transposed else (count, width), tuple(pieces))


def _cover_once(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Whether boxes fill a shape without overlap: counted on the grid that their own edges make."""
    edges = [
        sorted({0, size, *(edge for box in boxes for edge in (box.start[dim], box.start[dim] + box.shape[dim]))})
        for dim, size in enumerate(shape)
    ]
    counts = np.zeros([len(places) - 1 for places in edges], dtype=np.uint8)
    for box in boxes:
        cells = tuple(
            slice(places.index(start), places.index(start + length))
            for places, start, length in zip(edges, box.start, box.shape, strict=True)
        )
        counts[cells] += 1
    return bool((counts == 1).all())


class Layer(nn.Module):
    """A module that declares the layout of each of its parameters. It is built without memory, on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts: dict[str, WeightLayout] = {}

    def declare(self, name: str, layout: WeightLayout, dtype: torch.dtype) -> None:
        """Add a parameter."""
        empty = torch.empty(layout.shape, dtype=dtype, device="meta")
        self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.layouts[name] = layout

    def materialize(self, device: torch.device, *, weights: bool = True) -> None:
        """Give the parameters memory. It is zeroed: padding has a value, and the memory is really there.

        Without `weights` only what follows from the config gets memory; the parameters take over that of a version.
        """
        for name in self.layouts if weights else ():
            meta = self.get_parameter(name)
            memory = torch.zeros(meta.shape, dtype=meta.dtype, device=device)
            self.register_parameter(name, nn.Parameter(memory, requires_grad=False))


@dataclass(frozen=True)
class DeclaredWeight:
    """A parameter of a model, by its name there, and its layout."""

    name: str
    parameter: torch.Tensor
    layout: WeightLayout


def declared_weights(model: nn.Module) -> Iterator[DeclaredWeight]:
    """Every parameter that a model owns, each once, however often it is used. A tied head is the embedding."""
    for prefix, module in model.named_modules():
        if isinstance(module, Layer):
            for name, layout in module.layouts.items():
                yield DeclaredWeight(f"{prefix}.{name}" if prefix else name, module.get_parameter(name), layout)


def materialize(model: nn.Module, device: torch.device | str, *, weights: bool = True) -> None:
    """Allocate the memory of a model that was built on the meta device: once, in its final layout, on this device.

    Without `weights` its parameters stay without memory, until they take over that of a version.
    """
    wanted = torch.device(device)
    if wanted.type == "meta":
        return
    for module in model.modules():
        if isinstance(module, Layer):
            module.materialize(wanted, weights=weights)
