"""Whether what the ranks staged is the version that is wanted: their sums, added up, are those of its manifest. Pure."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import NamedTuple

from weightcast.engines.embedded.messages import Feed, PartLayout, Vote
from weightcast.errors import DigestMismatch, InvalidInput, SourceFailed
from weightcast.tensors.box_plan import intersection, tiling_problems
from weightcast.tensors.boxes import Box
from weightcast.tensors.sums import Sum
from weightcast.wire.manifest import Manifest, TensorEntry

_Numbers = tuple[int, ...]


class _Holder(NamedTuple):
    """A rank that holds a box, and the place of the box in the rank's votes."""

    rank: int
    place: int


@dataclass(frozen=True)
class VoteLayout:
    """Which ranks hold which boxes of one model. A box that several hold is there once, with all of them."""

    boxes: Mapping[str, Mapping[Box, tuple[_Holder, ...]]]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, layouts: Sequence[PartLayout]) -> VoteLayout:
        """From what the ranks reported at their start, in their order.

        Raises `InvalidInput` listing every element that no rank holds, and boxes that overlap without being the same.
        """
        found: dict[str, dict[Box, list[_Holder]]] = defaultdict(lambda: defaultdict(list))
        for rank, layout in enumerate(layouts):
            for place, one in enumerate(layout.boxes):
                if prod(one.shape):
                    found[one.source][Box(one.start, one.shape)].append(_Holder(rank, place))
        shapes = {name: shape for layout in layouts for name, shape in layout.sources.items()}
        problems = [f"{name}: {text}" for name, shape in shapes.items() for text in _problems(shape, list(found[name]))]
        if problems:
            raise InvalidInput(f"the ranks do not hold the model between them: {'; '.join(problems[:8])}.")
        boxes = {name: {box: tuple(who) for box, who in held.items()} for name, held in found.items() if held}
        return cls(boxes, tuple(len(layout.boxes) for layout in layouts))


def _problems(shape: tuple[int, ...], boxes: Sequence[Box]) -> Iterator[str]:
    crossing = [(a, b) for a, b in combinations(boxes, 2) if intersection(a, b) is not None] if len(boxes) < 64 else []
    yield from (f"{a} and {b} overlap and are not the same" for a, b in crossing)
    if not crossing:
        yield from tiling_problems(shape, boxes)


def check_sums(
    layouts: Mapping[str, VoteLayout],
    feeds: Sequence[Feed],
    manifests: Sequence[Manifest],
    votes: Sequence[Vote],
    *,
    proved: bool,
) -> None:
    """Compare the sums that the ranks voted with: copies of a box with each other, and each tensor with its manifest.

    Raises `DigestMismatch` that names every tensor that is wrong and the ranks that hold it. Tensors without sums (format
    1) are compared between ranks only; all are, if the version is not `proved`.
    """
    wrong: list[tuple[str, str, str]] = []
    for number, (feed, manifest) in enumerate(zip(feeds, manifests, strict=True)):
        layout = layouts[feed.part]
        told = [
            _numbers(vote, number, size, rank) for rank, (vote, size) in enumerate(zip(votes, layout.sizes, strict=True))
        ]
        entries = manifest.by_name()
        for source, boxes in layout.boxes.items():
            wrong += _compare(entries[feed.version_name(source)], boxes, told, proved=proved)
    if wrong:
        raise DigestMismatch(f"version {manifests[0].version} as the ranks staged it together", wrong)


def _numbers(vote: Vote, number: int, size: int, rank: int) -> list[_Numbers]:
    """What a rank voted with for each of its boxes: its two sums, and the elements in them."""
    data = vote.sums[number] if number < len(vote.sums) else b""
    if len(data) != 24 * size:
        raise SourceFailed(f"rank {rank} voted with {len(data)} bytes of sums for {size} boxes.")
    return list(struct.iter_unpack("<QQQ", data))


def _compare(
    entry: TensorEntry, boxes: Mapping[Box, tuple[_Holder, ...]], told: Sequence[Sequence[_Numbers]], *, proved: bool
) -> Iterator[tuple[str, str, str]]:
    total, elements = Sum(), 0
    for box, holders in boxes.items():
        values: dict[_Numbers, list[int]] = {}
        for holder in holders:
            values.setdefault(told[holder.rank][holder.place], []).append(holder.rank)
        if len(values) > 1:
            described = ", ".join(f"{Sum(one, other)} at rank(s) {ranks}" for (one, other, _), ranks in values.items())
            yield f"{entry.name} at {list(box.start)} + {list(box.shape)}", "the same in every copy", described
            return
        ((one, other, count),) = values
        total += Sum(one, other)
        elements += count
    expected, found = f"{prod(entry.shape)} elements", f"{elements} elements"
    if elements == prod(entry.shape) and proved and entry.sum:
        expected, found = entry.sum, str(total)
    if found != expected:
        ranks = sorted({holder.rank for who in boxes.values() for holder in who})
        yield f"{entry.name} (held by rank(s) {ranks})", expected, found
