"""What one rank holds of the tensors of a model, as data; and whether a version is made of those tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

import numpy as np

from weightcast.errors import InvalidInput, Mismatch
from weightcast.tensors.boxes import Box, Held
from weightcast.tensors.placing import converts
from weightcast.wire.manifest import Manifest, TensorEntry
from weightcast.worker.fit import misfit
from weightcast.worker.shard_sums import BoxSum

Shape = tuple[int, ...]


@dataclass(frozen=True)
class HeldVersion:
    """What a rank serves now: `full` as it was published, `shard` as the rank sees it, and the URL it came from.

    `proved` is false where its digests were not compared: then no delta is worked out from what these manifests say. `sums`
    are what its boxes add to the sums of the version, in the order of the layout.
    """

    full: Manifest
    shard: Manifest
    source: str
    proved: bool = True
    sums: tuple[BoxSum, ...] = ()


@dataclass(frozen=True)
class Shards:
    """The parameters of one rank in the layout of its memory, and the tensors of a version that they are boxes of.

    Elements of a parameter that no placement covers are padding: they are 0. `sources` are all tensors of the model and
    their shapes, also those of which other ranks hold everything: a version must have each of them. `ignore` are patterns
    of tensors that a version has and no model wants.
    """

    held: tuple[Held, ...]
    sources: Mapping[str, Shape]
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = [
            f"{name!r} is held {count} times"
            for name, count in Counter(held.spec.name for held in self.held).items()
            if count > 1
        ]
        problems += [problem for held in self.held for problem in self._problems(held)]
        if problems:
            raise InvalidInput(f"this cannot be what a rank holds: {'; '.join(problems)}.")

    def mismatches(self, manifest: Manifest) -> list[Mismatch]:
        """Everything in which a version differs from what the model is made of."""
        entries = manifest.by_name()
        found = [*self._unlike(entries), *self._unexpected(manifest, entries), *self._inconvertible(entries)]
        if not found and not any(held.placements for held in self.held):  # a rank may have places for no rows
            found.append(Mismatch("nothing to write", manifest.version, "no tensor of the version has a place on this rank"))
        return list(dict.fromkeys(found))

    def check(self, manifest: Manifest) -> None:
        """Raise `VersionDoesNotFit` listing every mismatch."""
        mismatches = self.mismatches(manifest)
        if mismatches:
            raise misfit(manifest.version, manifest.by_name(), mismatches, self.sources)

    def named_as(self, manifest: Manifest) -> tuple[Held, ...]:
        """The same with every source under the name that holds its bytes in a version."""
        entries = manifest.by_name()
        if all(entries[name].name == name for name in self.sources):
            return self.held
        return tuple(
            replace(held, placements=tuple(replace(p, source=entries[p.source].name) for p in held.placements))
            for held in self.held
        )

    def _problems(self, held: Held) -> Iterator[str]:
        name, boxes = held.spec.name, [placement.target for placement in held.placements]
        for placement in held.placements:
            shape = self.sources.get(placement.source)
            if shape is None:
                yield f"{name!r} has a box of {placement.source!r}, which is not a tensor of the model"
            elif not placement.box.fits(shape):
                yield f"{name!r} has {placement.box} of {placement.source!r}, whose shape is {list(shape)}"
        if not all(box.fits(held.spec.shape) for box in boxes):
            yield f"a box lies outside of {name!r}, which is {held.spec.describe()}"
        elif _overlap(held.spec.shape, boxes):
            yield f"boxes of {name!r} overlap"

    def _unlike(self, entries: Mapping[str, TensorEntry]) -> Iterator[Mismatch]:
        for name, shape in self.sources.items():
            entry = entries.get(name)
            if entry is None:
                yield Mismatch("missing", name, f"the model needs it, of shape {list(shape)}")
            elif entry.shape != tuple(shape):
                detail = f"the version has {entry.spec.describe()}, the model needs {list(shape)}"
                yield Mismatch("shape", name, detail)

    def _unexpected(self, manifest: Manifest, entries: Mapping[str, TensorEntry]) -> Iterator[Mismatch]:
        """Names that the model does not have. One whose bytes the model takes under another, tied name is fine."""
        taken = {entries[name].name for name in self.sources if name in entries}
        for name in (*(entry.name for entry in manifest.tensors), *manifest.tied):
            if entries[name].name not in taken and not any(fnmatchcase(name, pattern) for pattern in self.ignore):
                detail = f"the version has {entries[name].spec.describe()}, the model has no such name"
                yield Mismatch("unexpected", name, detail)

    def _inconvertible(self, entries: Mapping[str, TensorEntry]) -> Iterator[Mismatch]:
        for held in self.held:
            for placement in held.placements:
                entry = entries.get(placement.source)
                if entry is not None and not converts(entry.dtype, held.spec.dtype):
                    detail = f"the version has {entry.dtype}, {held.spec.name} is {held.spec.dtype}: it cannot be converted"
                    yield Mismatch("dtype", placement.source, detail)


def padded(held: Held) -> bool:
    """Whether there are elements that no placement covers."""
    return sum(prod(placement.box.shape) for placement in held.placements) < held.spec.numel


def _overlap(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Whether two boxes share an element: counted on the grid that their own edges make."""
    edges = [
        sorted({0, size, *(edge for box in boxes for edge in (box.start[dim], box.start[dim] + box.shape[dim]))})
        for dim, size in enumerate(shape)
    ]
    counts = np.zeros([max(1, len(places) - 1) for places in edges], dtype=np.uint32)
    for box in boxes:
        if prod(box.shape):
            cells = tuple(
                slice(places.index(start), places.index(start + length))
                for places, start, length in zip(edges, box.start, box.shape, strict=True)
            )
            counts[cells] += 1
    return bool((counts > 1).any())
