"""Receiving a version: every byte exactly once, then proved against the manifest."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from weightcast.clock import Deadline
from weightcast.errors import DigestMismatch, SourceFailed
from weightcast.tensors.digest import DEFAULT, bytes_digest
from weightcast.tensors.flat import Array, Bytes, Piece, empty, flat_bytes
from weightcast.transports.base import Receiver
from weightcast.wire.manifest import Manifest, TensorEntry


@dataclass(frozen=True)
class Verified:
    """Staged tensors whose every byte arrived and, unless the caller declined, matched its digest.

    Only `Staging.verify` makes one; committing takes nothing else. `digests` are of the bytes as staged.
    """

    arrays: Mapping[str, Array]
    digests: Mapping[str, str]


class Coverage:
    """Which bytes of each tensor have come. A byte that comes twice, or lies outside, is the source's mistake."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._entries = entries
        self._seen: dict[str, list[tuple[int, int]]] = {name: [] for name in entries}
        self.nbytes = 0

    @property
    def names(self) -> Collection[str]:
        """The tensors to cover."""
        return self._entries.keys()

    def add(self, piece: Piece) -> bool:
        """Count a piece in; True when its tensor is complete with it."""
        entry = self._entries.get(piece.tensor)
        start, end = piece.offset, piece.offset + len(piece.data)
        if entry is None:
            raise SourceFailed(f"the source sent tensor {piece.tensor!r}, which nobody asked for.")
        if start < 0 or end > entry.nbytes:
            raise SourceFailed(f"the source sent bytes {start} to {end} of {piece.tensor!r}, which has {entry.nbytes}.")
        seen = self._seen[piece.tensor]
        at = bisect_right(seen, (start, end))
        if (at > 0 and seen[at - 1][1] > start) or (at < len(seen) and seen[at][0] < end):
            raise SourceFailed(f"the source sent bytes {start} to {end} of {piece.tensor!r} twice.")
        seen.insert(at, (start, end))
        if at + 1 < len(seen) and seen[at + 1][0] == end:
            seen[at : at + 2] = [(start, seen[at + 1][1])]
        if at > 0 and seen[at - 1][1] == start:
            seen[at - 1 : at + 1] = [(seen[at - 1][0], seen[at][1])]
        self.nbytes += len(piece.data)
        return seen == [(0, entry.nbytes)]

    def check_complete(self) -> None:
        """Raise `SourceFailed` listing every tensor that did not come whole."""
        short = [
            f"{name} ({sum(end - start for start, end in self._seen[name])} of {entry.nbytes} bytes)"
            for name, entry in self._entries.items()
            if entry.nbytes and self._seen[name] != [(0, entry.nbytes)]
        ]
        if short:
            raise SourceFailed(f"the source ended early; {len(short)} tensor(s) are not complete: {', '.join(short)}.")


def received(
    receiver: Receiver, manifest: Manifest, coverage: Coverage, deadline: Deadline
) -> Generator[tuple[Piece, bool], None, None]:
    """The pieces of the tensors to cover, each with whether it completes its tensor. Ends only when all are complete.

    Close it when leaving early: the transport stops then, and not when the garbage collector comes by.
    """
    wanted = coverage.names if len(coverage.names) < len(manifest.transfers()) else None
    with closing(receiver.pieces(manifest, deadline=deadline, names=wanted)) as pieces:
        for piece in pieces:
            yield piece, coverage.add(piece)
            deadline.check(f"receiving {manifest.version} from {receiver.url}")
    coverage.check_complete()


class Staging:
    """Host memory for the tensors of one update, filled while the model goes on serving."""

    def __init__(self, entries: Mapping[str, TensorEntry], arrays: Mapping[str, Array] | None = None) -> None:
        """`arrays` are tensors that are here already and only have to be proved."""
        self._entries = entries
        self.arrays = dict(arrays) if arrays is not None else {name: empty(entry.spec) for name, entry in entries.items()}
        self._flat: dict[str, Bytes] = {name: flat_bytes(array) for name, array in self.arrays.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self._entries.values())

    def fill(self, receiver: Receiver, manifest: Manifest, deadline: Deadline) -> None:
        """Receive everything. The source may reuse its buffers at once: the bytes are copied here."""
        with closing(received(receiver, manifest, Coverage(self._entries), deadline)) as pieces:
            for piece, _ in pieces:
                end = piece.offset + len(piece.data)
                self._flat[piece.tensor][piece.offset : end] = np.frombuffer(piece.data, dtype=np.uint8)

    def verify(self, manifest: Manifest, *, checksum: bool, deadline: Deadline | None = None) -> Verified:
        """Prove the bytes as they lie in staging memory. Without `checksum` their digests are only taken."""
        algorithm = manifest.algorithm or DEFAULT
        digests: dict[str, str] = {}
        for name, flat in self._flat.items():
            digests[name] = bytes_digest(flat.data, algorithm)
            if deadline is not None:
                deadline.check(f"verifying {manifest.version}")
        if checksum:
            check_digests(f"version {manifest.version} as received", self._entries, digests)
        return Verified(arrays=self.arrays, digests=digests)


def provided(entries: Mapping[str, TensorEntry], arrays: Mapping[str, Array], url: str) -> Staging:
    """Tensors that a provider has in memory, as they are. `SourceFailed` lists all that differ from their entries."""
    wrong = []
    for name, entry in entries.items():
        array = arrays.get(name)
        if array is None:
            wrong.append(f"{name} is missing")
        elif (array.dtype, array.shape) != (entry.dtype.numpy, entry.shape):
            wrong.append(f"{name} is {array.dtype}{list(array.shape)}, not {entry.spec.describe()}")
        elif not (array.flags.c_contiguous and array.flags.writeable):
            wrong.append(f"{name} is not contiguous or cannot be written to")
    if wrong:
        raise SourceFailed(f"{url} gave other tensors than its manifest says: {'; '.join(wrong)}.")
    return Staging(entries, {name: arrays[name] for name in entries})


def check_digests(where: str, entries: Mapping[str, TensorEntry], found: Mapping[str, str]) -> None:
    """Raise `DigestMismatch` listing every tensor whose digest differs from its entry."""
    wrong = [(name, entry.digest, found[name]) for name, entry in entries.items() if found[name] != entry.digest]
    if wrong:
        raise DigestMismatch(where, wrong)
