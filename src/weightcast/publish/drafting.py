"""A version on its way into a trainer's own memory: where everything will lie, and what it is once it lies there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from dataclasses import replace as replace_spec
from typing import NamedTuple

from msgspec.structs import replace

from weightcast.errors import InvalidInput
from weightcast.publish.changes import Compared, most_payload_nbytes, packed_changes
from weightcast.publish.memory_parts import MemoryPart, in_a_row, in_memory, part_files, parts_for
from weightcast.publish.memory_shelf import MemoryHolding
from weightcast.publish.shares import Given
from weightcast.store import layout
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.writer import index_of
from weightcast.tensors.boxes import Box
from weightcast.tensors.digest import PIECE_NBYTES, Algorithm, piece_digests
from weightcast.tensors.flat import Array, Bytes
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import Digests, box_sum
from weightcast.wire.manifest import (
    BaseRef,
    Manifest,
    PayloadEntry,
    ShareFile,
    TensorEntry,
    compute_root,
    entry_of,
    file_entry,
    summed_names,
)
from weightcast.wire.shares import Share, ShareEntry, share_file, share_root


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


class ChangesSince(NamedTuple):
    """The changes since a version that the publisher holds too, and what a manifest says of them."""

    base: BaseRef
    payload: PayloadEntry
    data: bytes


class Filled(NamedTuple):
    """A version that lies in memory: where everything lies, and its sums."""

    draft: Draft
    memory: Bytes
    digests: Mapping[str, Digests]
    held: MemoryHolding


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

    def sealed(
        self,
        memory: Bytes,
        digests: Mapping[str, Digests],
        release: Release,
        threads: int,
        changes: ChangesSince | None = None,
    ) -> MemoryHolding:
        """The version, now that everything was copied. `threads` hash the pieces of its files."""
        payloads = () if changes is None else (changes.payload,)
        beside = {} if changes is None else {changes.payload.file: changes.data}
        if self.ranks > 1:
            pieces = _hashed(memory[: self.memory_nbytes], self.algorithm, threads)
            share = self._share(memory, release, digests, pieces)
            share = replace(share, base=changes.base if changes else None, payloads=payloads)
            manifest = replace(
                self._manifest(release, digests),
                root_digest=share.root_digest,
                shares=(ShareFile(file=share_file(self.rank), nbytes=share.nbytes, pieces=pieces),),
                payloads=payloads,
            )  # what is known of the version here; it never leaves the process
            parts = {share_file(self.rank): (0, share.nbytes)}
            return MemoryHolding(manifest, memory, parts, self.nbytes, share=share, small=beside)
        headers = self.headers()
        for part, header in zip(self.parts, headers, strict=True):
            memory[part.at : part.at + len(header)].data[:] = header
        pieces_of = [_hashed(memory[one.at : one.at + one.nbytes], self.algorithm, threads) for one in self.parts]
        files = self.files(digests, release, headers, pieces_of)
        manifest = replace(files.manifest, base=changes.base if changes else None, payloads=payloads)
        return MemoryHolding(manifest, memory, part_files(self.parts), self.nbytes, small={**files.small, **beside})

    def changes_since(
        self, before: Filled, memory: Bytes, digests: Mapping[str, Digests], policy: DeltaPolicy
    ) -> ChangesSince | None:
        """What changed since a version that lies in another memory; None if that is another model, or it does not pay."""
        old = before.draft
        layout_of = [[(name, one.spec, one.box) for name, one in draft.own.items()] for draft in (self, old)]
        if layout_of[0] != layout_of[1] or self.tied != old.tied or (self.rank, self.ranks) != (old.rank, old.ranks):
            return None
        summed_as = summed_names(self.tied) if self.ranks == 1 else {}
        compared = [
            Compared(
                one.spec,
                replace_spec(one.spec, name=summed_as[name]) if name in summed_as else one.spec,
                one.box,
                old.array(name, before.memory),
                self.array(name, memory),
                before.digests[name].sum,
                digests[name].sum,
            )
            for name, one in self.own.items()
            if one.held.nbytes
        ]
        most = most_payload_nbytes(policy, self.nbytes, self.ranks)
        packed = packed_changes(self.version, compared, policy, most_nbytes=most)
        if packed is None:
            return None
        sums = {name: one.sum for name, one in before.digests.items()} | before.held.tied_sums if self.ranks > 1 else {}
        base = BaseRef(version=old.version, root_digest=before.held.manifest.root_digest, sums=sums)
        payload = packed.entry(layout.payload_name(self.rank + 1), self.algorithm, part=self.rank)
        return ChangesSince(base, payload, packed.data)

    def array(self, name: str, memory: Bytes) -> Array:
        """A tensor, or the box that is here of it, in a memory that this was copied to."""
        one, at = self.own[name], self.places[name]
        return memory[at : at + one.held.nbytes].view(one.spec.dtype.numpy).reshape(one.box.shape)

    def headers(self) -> list[bytes]:
        """The headers of the parts."""
        return [part.header(file) for part, file in zip(self.parts, part_files(self.parts), strict=True)]

    def files(
        self, digests: Mapping[str, Digests], release: Release, headers: Sequence[bytes], pieces: Sequence[bytes]
    ) -> Files:
        """A version that is not shared, as the files that a store would have."""
        names, summed_as = list(part_files(self.parts)), summed_names(self.tied)
        parts = tuple(
            part.entry(file, header, self.algorithm, own)
            for part, file, header, own in zip(self.parts, names, headers, pieces, strict=True)
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
        manifest = replace(
            self._manifest(release, digests),
            parts=parts,
            tensors=entries,
            files=(file_entry(layout.INDEX, index, self.algorithm),),
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
            piece_nbytes=PIECE_NBYTES,
        )

    def _share(self, memory: Bytes, release: Release, digests: Mapping[str, Digests], pieces: bytes) -> Share:
        entries = tuple(
            ShareEntry(
                name=name,
                dtype=one.spec.dtype,
                shape=one.spec.shape,
                box=one.box,
                offset=self.places[name],
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
            nbytes=self.memory_nbytes,
            pieces=pieces,
            piece_nbytes=PIECE_NBYTES,
            tied=dict(self.tied),
            metadata=dict(release.metadata),
            tied_sums={name: self._sum_as(name, holder, memory) for name, holder in self.tied.items()},
        )

    def _sum_as(self, name: str, holder: str, memory: Bytes) -> str:
        """What a box adds to the sum of its tensor under another name."""
        one = self.own[holder]
        return str(box_sum(replace_spec(one.spec, name=name), one.box, self.array(holder, memory)))


def _hashed(memory: Bytes, algorithm: Algorithm, threads: int) -> bytes:
    """The digests of the pieces of a file that lies in memory."""
    step = -(-len(memory) // (threads * PIECE_NBYTES)) * PIECE_NBYTES
    stretches = [memory[start : start + step].data for start in range(0, len(memory), step or 1)]
    with ThreadPoolExecutor(threads, thread_name_prefix="publish") as pool:
        return b"".join(pool.map(lambda data: piece_digests(data, algorithm), stretches))


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
