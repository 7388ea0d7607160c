"""A version on its way into a trainer's own memory: where everything will lie, and what it is once it lies there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_spec
from typing import NamedTuple

from msgspec.structs import replace

from weightcast.errors import InvalidInput
from weightcast.publish.memory_parts import MemoryPart, in_a_row, in_memory, part_files, parts_for
from weightcast.publish.memory_shelf import MemoryHolding
from weightcast.publish.shares import Given
from weightcast.store import layout
from weightcast.store.writer import index_of
from weightcast.tensors.boxes import Box
from weightcast.tensors.digest import Algorithm, bytes_digest
from weightcast.tensors.flat import Bytes
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import Digests, box_sum
from weightcast.wire.manifest import BoxEntry, FileEntry, Manifest, TensorEntry, compute_root, entry_of, summed_names
from weightcast.wire.shares import Share, ShareEntry, share_root


@dataclass(frozen=True)
class Release:
    """What a publisher says of a version beside its tensors."""

    sequence: int
    step: int
    metadata: Mapping[str, str]
    created_s: float = field(default_factory=time.time)


class Files(NamedTuple):
    """A version as files: what it is, the headers of its parts, and the files that are not parts."""

    manifest: Manifest
    headers: Sequence[bytes]
    small: Mapping[str, bytes]


@dataclass(frozen=True)
class Draft:
    """A version of which all is known but its digests. `places` are offsets in the memory; a share has no `parts`."""

    version: str
    own: Mapping[str, Given]
    tied: Mapping[str, str]
    rank: int
    ranks: int
    algorithm: Algorithm
    parts: tuple[MemoryPart, ...]
    places: Mapping[str, int]
    memory_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are here, or of what is here of them."""
        return sum(one.held.nbytes for one in self.own.values())

    def tensors(self) -> dict[str, object]:
        """What is to be copied."""
        return {name: one.tensor for name, one in self.own.items()}

    def targets(self) -> list[TensorEntry]:
        """Where it is to be copied to."""
        summed_as = summed_names(self.tied) if self.ranks == 1 else {}
        return [
            entry_of(one.held, offset=self.places[name], summed_as=summed_as.get(name, "")) for name, one in self.own.items()
        ]

    def boxes(self) -> dict[str, tuple[TensorSpec, Box]]:
        """The whole tensors, and which box of each is here."""
        return {name: (one.spec, one.box) for name, one in self.own.items()}

    def sealed(self, memory: Bytes, digests: Mapping[str, Digests], release: Release) -> MemoryHolding:
        """The version, now that everything was copied."""
        boxes = {name: (one.box, self.places[name]) for name, one in self.own.items()}
        if self.ranks > 1:
            share = self._share(memory, release, digests)
            manifest = _as_share(self._manifest(release, digests), share)
            return MemoryHolding(manifest, memory, boxes, share=share)
        files = self.files(digests, release)
        for part, header in zip(self.parts, files.headers, strict=True):
            memory[part.at : part.at + len(header)].data[:] = header
        return MemoryHolding(files.manifest, memory, boxes, parts=part_files(self.parts), small=files.small)

    def files(self, digests: Mapping[str, Digests], release: Release) -> Files:
        """A version that is not shared, as the files that a store would have."""
        names, summed_as = list(part_files(self.parts)), summed_names(self.tied)
        headers = [part.header(file) for part, file in zip(self.parts, names, strict=True)]
        parts = tuple(
            part.entry(file, header, self.algorithm) for part, file, header in zip(self.parts, names, headers, strict=True)
        )
        places = {place.spec.name: (number, place) for number, part in enumerate(self.parts) for place in part.places}
        entries = tuple(
            entry_of(
                one.spec,
                part=places[name][0],
                offset=places[name][1].offset,
                digests=digests[name],
                summed_as=summed_as.get(name, ""),
            )
            for name, one in self.own.items()
        )
        index = index_of(parts, entries)
        listed = FileEntry(file=layout.INDEX, nbytes=len(index), digest=bytes_digest(index, self.algorithm))
        manifest = replace(
            self._manifest(release, digests),
            parts=parts,
            tensors=entries,
            files=(listed,),
            root_digest=compute_root(entries, self.algorithm),
        )
        return Files(manifest, headers, {layout.INDEX: index})

    def _manifest(self, release: Release, digests: Mapping[str, Digests]) -> Manifest:
        """What is the same for all versions."""
        return Manifest(
            version=self.version,
            sequence=release.sequence,
            step=release.step,
            kind="full",
            created_s=release.created_s,
            algorithm=self.algorithm,
            root_digest="",
            parts=(),
            tensors=tuple(entry_of(one.spec, digests=digests[name]) for name, one in self.own.items()),
            tied=dict(self.tied),
            metadata=dict(release.metadata),
        )

    def _share(self, memory: Bytes, release: Release, digests: Mapping[str, Digests]) -> Share:
        entries = tuple(
            ShareEntry(
                name=name,
                dtype=one.spec.dtype,
                shape=one.spec.shape,
                box=one.box,
                digest=digests[name].digest,
                sum=digests[name].sum,
            )
            for name, one in self.own.items()
        )
        return Share(
            version=self.version,
            sequence=release.sequence,
            step=release.step,
            created_s=release.created_s,
            rank=self.rank,
            ranks=self.ranks,
            algorithm=self.algorithm,
            root_digest=share_root(entries, self.algorithm),
            entries=entries,
            tied=dict(self.tied),
            metadata=dict(release.metadata),
            tied_sums={name: self._sum_as(name, holder, memory) for name, holder in self.tied.items()},
        )

    def _sum_as(self, name: str, holder: str, memory: Bytes) -> str:
        """What a box adds to the sum of its tensor under another name."""
        one, at = self.own[holder], self.places[holder]
        array = memory[at : at + one.held.nbytes].view(one.spec.dtype.numpy).reshape(one.box.shape)
        return str(box_sum(replace_spec(one.spec, name=name), one.box, array))


def _as_share(manifest: Manifest, share: Share) -> Manifest:
    """What is known of a version here: the boxes of one rank. It never leaves the process."""
    boxes = {entry.name: (_box_entry(entry, share.rank),) for entry in share.entries}
    return replace(manifest, root_digest=share.root_digest, boxes=boxes)


def _box_entry(entry: ShareEntry, rank: int) -> BoxEntry:
    box = entry.box
    return BoxEntry(start=box.start, shape=box.shape, digest=entry.digest, ranks=(rank,), sum=entry.sum)


def drafted(
    version: str, own: Mapping[str, Given], tied: Mapping[str, str], *, rank: int, ranks: int, algorithm: Algorithm
) -> Draft:
    """Where the tensors of a version will lie: as the parts of a store, or, if ranks share it, one box after the other."""
    if not own:
        raise InvalidInput(f"version {version} has no tensors: there is nothing to publish.")
    specs = [one.held for one in own.values()]
    if ranks > 1:
        places, nbytes = in_a_row(specs)
        return Draft(version, own, tied, rank, ranks, algorithm, (), places, nbytes)
    parts = parts_for(specs)
    nbytes = parts[-1].at + parts[-1].nbytes
    return Draft(version, own, tied, rank, ranks, algorithm, tuple(parts), in_memory(parts), nbytes)
