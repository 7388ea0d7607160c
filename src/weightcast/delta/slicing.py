"""Where tensors are cut, so that a rank which holds slices fetches and decodes its part of a delta and nothing else.

    slicing = Slicing.decoder()                            # Llama, Qwen, Mistral … under their usual names
    experts = Cut(("*.experts.*",), dim=None, number=r"experts\\.(\\d+)", like="experts")
    slicing = Slicing((experts, *Slicing.decoder().cuts))  # where each rank has whole experts

Where nothing is said, tensors stay whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import NamedTuple

from weightcast.delta.container import MAX_SLICES, SLICED_NBYTES
from weightcast.delta.states import CHUNK_LANES, block_ranges
from weightcast.errors import InvalidInput
from weightcast.tensors.box_plan import chunks
from weightcast.tensors.boxes import Box
from weightcast.tensors.lanes import lane_count, lanes_per_element
from weightcast.tensors.spec import TensorSpec

PARTS = 16


@dataclass(frozen=True)
class Cut:
    """How some tensors, found by patterns of their names, are divided among ranks.

    They are cut along `dim` into `parts` of equal length, or at `edges`; the sections of a fused tensor, whose lengths are
    `sections`, each for themselves. With `dim` None they stay whole, and a rank has some of them: the first group of the
    regular expression `number` finds the part that each is, for instance an expert. Cuts that are `like` each other give
    the same parts to the same rank: only such tensors share chunks.
    """

    names: tuple[str, ...]
    dim: int | None
    parts: int = PARTS
    like: str = "tensor parallel"
    sections: tuple[int, ...] = ()
    edges: tuple[int, ...] = ()
    number: str = r"(\d+)"

    def __post_init__(self) -> None:
        slices = len(self.edges) + 1 if self.edges else self.parts * max(1, len(self.sections))
        if (self.dim or 0) < 0 or not 1 <= slices <= MAX_SLICES:
            raise InvalidInput(f"tensors cannot be cut along dimension {self.dim} into {slices} slices: up to {MAX_SLICES}.")
        try:
            groups = re.compile(self.number).groups
        except re.error as error:
            raise InvalidInput(f"number={self.number!r} of a cut is not a regular expression: {error}.") from error
        if not groups:
            raise InvalidInput(
                f"number={self.number!r} of a cut needs a group in brackets, which finds the number of a part."
            )
        if any(after <= before for before, after in pairwise(self.edges)) or any(size < 1 for size in self.sections):
            raise InvalidInput(
                f"the edges {list(self.edges)} must grow, and the sections {list(self.sections)} be positive."
            )

    def ranges(self, size: int) -> list[list[tuple[int, int]]]:
        """The ranges of a dimension of this size that each part has."""
        if self.edges:
            inner = [edge for edge in self.edges if 0 < edge < size]
            return [[pair] for pair in pairwise([0, *inner, size])]
        sections = self.sections if sum(self.sections) == size else (size,)
        parts = min(self.parts, *sections)
        found: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
        start = 0
        for length in sections:
            for part in range(parts):
                found[part].append((start + part * length // parts, start + (part + 1) * length // parts))
            start += length
        return found


class Place(NamedTuple):
    """A block to be: the lanes `start` to `stop` of a tensor, or what a box has of these rows. `part` says whose it is."""

    part: tuple[str, int, int]
    start: int
    stop: int
    box: Box | None = None


@dataclass(frozen=True)
class Slicing:
    """Cuts of all tensors: the first that a name fits. Small tensors and those that no cut fits stay whole."""

    cuts: tuple[Cut, ...] = ()

    @classmethod
    def decoder(cls, parts: int = PARTS) -> Slicing:
        """Decoders under the names that most checkpoints have, as tensor-parallel engines divide them."""
        rows = ("*.q_proj.*", "*.gate_proj.*", "*.up_proj.*", "*.w1.*", "*.w3.*")
        return cls(
            (
                Cut(rows, 0, parts),
                Cut(("*.o_proj.weight", "*.down_proj.weight", "*.w2.weight"), 1, parts),
                Cut(("*.k_proj.*", "*.v_proj.*"), 0, parts, like="key and value heads"),
                Cut(("*embed_tokens.weight", "*lm_head.weight"), 0, parts, like="vocabulary"),
            )
        )

    def places(self, spec: TensorSpec) -> Iterator[Place]:
        """The blocks of a tensor by their rows, each with no more lanes than a chunk may have."""
        cut = self._cut(spec)
        if cut is None or cut.dim is None:
            own = _whole_part(cut, spec)
            yield from (Place(own, start, stop) for start, stop in block_ranges(lane_count(spec)))
            return
        per_element, inner = lanes_per_element(spec.dtype), (0,) * (len(spec.shape) - 1)
        row = math.prod(spec.shape[1:]) * per_element
        if cut.dim == 0:  # what lies together is read as it is
            runs = [
                (part, _flat(spec, box.start), math.prod(box.shape)) for part, box in self.boxes(spec, Box.whole(spec.shape))
            ]
            yield from (Place(part, at, at + size * per_element) for part, at, size in sorted(runs, key=lambda run: run[1]))
            return
        step = max(1, CHUNK_LANES // row)
        for at in range(0, spec.shape[0], step):
            rows = Box((at, *inner), (min(step, spec.shape[0] - at), *spec.shape[1:]))
            for part, box in self.boxes(spec, rows):
                yield Place(part, box.start[0] * row, (box.start[0] + box.shape[0]) * row, box)

    def boxes(self, spec: TensorSpec, held: Box) -> Iterator[tuple[tuple[str, int, int], Box]]:
        """The blocks of a box of a tensor, and whose each is: none has more lanes than a chunk may have."""
        if not math.prod(held.shape):
            return
        cut = self._cut(spec)
        per_element = lanes_per_element(spec.dtype)
        if cut is None or cut.dim is None:
            own = _whole_part(cut, spec)
            yield from ((own, box) for box in chunks(held, per_element, CHUNK_LANES))
            return
        start, size = held.start[cut.dim], held.shape[cut.dim]
        ranges = cut.ranges(spec.shape[cut.dim])
        for part, ends in enumerate(ranges):
            for first, last in ends:
                first, last = max(first, start), min(last, start + size)  # noqa: PLW2901 - what the box has of it
                if first < last:
                    inner = Box(_with(held.start, cut.dim, first), _with(held.shape, cut.dim, last - first))
                    yield from (((cut.like, len(ranges), part), box) for box in chunks(inner, per_element, CHUNK_LANES))

    def _cut(self, spec: TensorSpec) -> Cut | None:
        """How a tensor is cut; None if it stays whole and any rank may hold it."""
        cut = next((cut for cut in self.cuts if any(fnmatchcase(spec.name, name) for name in cut.names)), None)
        if cut is None or (cut.dim or 0) >= len(spec.shape) or spec.nbytes < SLICED_NBYTES:
            return None
        return cut


def _whole_part(cut: Cut | None, spec: TensorSpec) -> tuple[str, int, int]:
    """Whose a tensor is that is not cut."""
    found = re.search(cut.number, spec.name) if cut is not None else None
    known = found is not None and (found[1] or "").isdecimal()
    return (cut.like, 0, int(found[1])) if cut is not None and found is not None and known else ("", 0, 0)


def _flat(spec: TensorSpec, start: tuple[int, ...]) -> int:
    """The lane that an element begins at."""
    strides = (math.prod(spec.shape[dim + 1 :]) for dim in range(len(spec.shape)))
    return sum(at * stride for at, stride in zip(start, strides, strict=True)) * lanes_per_element(spec.dtype)


def _with(numbers: tuple[int, ...], at: int, number: int) -> tuple[int, ...]:
    return (*numbers[:at], number, *numbers[at + 1 :])


WHOLE = Slicing()
