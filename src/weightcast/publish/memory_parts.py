"""Versions laid out in one memory: as the safetensors files that a store would have, or as boxes one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightcast.publish.filling import aligned
from weightcast.store import layout
from weightcast.store.safetensors_file import Place, encoded_header, header_room_for
from weightcast.tensors.digest import Algorithm, bytes_digest
from weightcast.tensors.spec import TensorSpec
from weightcast.wire.manifest import PartEntry

PART_NBYTES = 1 << 30
_PAGE = 4096


@dataclass(frozen=True)
class MemoryPart:
    """A safetensors file in memory, from `at` on: its header, and its tensors without a gap."""

    at: int
    header_nbytes: int
    places: tuple[Place, ...]
    nbytes: int

    def header(self, file: str) -> bytes:
        """The bytes before the tensors."""
        return encoded_header(Path(file), self.places, self.header_nbytes, {"format": "pt"})

    def entry(self, file: str, header: bytes, algorithm: Algorithm, pieces: bytes) -> PartEntry:
        """The part as a manifest lists it."""
        return PartEntry(
            file=file,
            nbytes=self.nbytes,
            header_nbytes=self.header_nbytes,
            header_digest=bytes_digest(header, algorithm),
            pieces=pieces,
        )


def parts_for(specs: Iterable[TensorSpec], part_nbytes: int = PART_NBYTES) -> list[MemoryPart]:
    """Tensors in parts of about `part_nbytes`, each part on a page of the memory.

    The widest elements of a part come first: so each tensor lies on a multiple of its item size although there are no gaps.
    """
    groups: list[list[TensorSpec]] = [[]]
    nbytes = 0  # of the last group
    for spec in specs:
        if groups[-1] and nbytes + spec.nbytes > part_nbytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(spec)
        nbytes += spec.nbytes
    parts: list[MemoryPart] = []
    at = 0
    for group in groups:
        header_nbytes = header_room_for(group)
        end, places = header_nbytes, []
        for spec in sorted(group, key=lambda one: -one.dtype.itemsize):
            places.append(Place(spec, end))
            end += spec.nbytes
        parts.append(MemoryPart(at, header_nbytes, tuple(places), end))
        at = -(-(at + end) // _PAGE) * _PAGE
    return parts


def part_files(parts: Sequence[MemoryPart]) -> dict[str, tuple[int, int]]:
    """Where the parts lie in the memory, by the names of their files."""
    return {layout.part_name(index, len(parts)): (part.at, part.at + part.nbytes) for index, part in enumerate(parts)}


def in_memory(parts: Sequence[MemoryPart]) -> dict[str, int]:
    """Where each tensor lies in the memory."""
    return {place.spec.name: part.at + place.offset for part in parts for place in part.places}


def in_a_row(specs: Iterable[TensorSpec]) -> tuple[dict[str, int], int]:
    """Places for tensors one after the other, and the size of all."""
    places, at = {}, 0
    for spec in specs:
        places[spec.name] = at = aligned(at)
        at += spec.nbytes
    return places, at
