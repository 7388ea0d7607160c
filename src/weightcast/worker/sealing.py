"""What the digests of a version must be, also where they come late: a live stream has none in its manifest at first."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from weightcast.clock import Deadline
from weightcast.errors import SourceFailed
from weightcast.tensors.flat import Piece
from weightcast.tensors.sums import Sum
from weightcast.transports.base import Receiver
from weightcast.wire.manifest import Manifest, TensorEntry, compute_root


class Expected:
    """The digests that the tensors of one version must have: those of its manifest, or those that came with the pieces."""

    def __init__(self, receiver: Receiver, manifest: Manifest) -> None:
        self._receiver, self._manifest = receiver, manifest
        self._late: dict[str, str] = {}

    @property
    def sealed(self) -> bool:
        """Whether the manifest had all digests from the beginning."""
        return self._manifest.sealed

    def note(self, piece: Piece) -> None:
        """Remember the digest that a piece may carry."""
        if self.sealed or not piece.digest:
            return
        if self._late.setdefault(piece.tensor, piece.digest) != piece.digest:
            raise SourceFailed(f"{self._receiver.url} sent two digests of {piece.tensor!r}.")

    def digest(self, entry: TensorEntry) -> str:
        """What the digest of a tensor must be; empty if nobody has said it yet."""
        if self.sealed:
            return entry.proof
        empty = str(Sum()) if entry.nbytes == 0 else ""  # of an empty one no piece is sent that could carry it
        return self._late.get(entry.name, empty)

    def complete(self, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Tensors that have all come, with their digests. `SourceFailed` lists those that nobody said the digest of."""
        if self.sealed:
            return dict(entries)
        found = {name: replace(entry, sum=self.digest(entry)) for name, entry in entries.items()}
        lacking = [name for name, entry in found.items() if not entry.sum]
        if lacking:
            raise SourceFailed(
                f"{self._receiver.url} sent {self._manifest.version} without the digest of {len(lacking)} tensor(s), so "
                f"they cannot be proved: {', '.join(lacking)}."
            )
        return found

    def seal(self, entries: Mapping[str, TensorEntry], deadline: Deadline) -> Manifest:
        """The manifest with all digests, once all pieces of these tensors have come.

        A stream is asked for it again. `SourceFailed` lists everything in which it differs from what was sent.
        """
        before = self._manifest
        if self.sealed:
            return before
        sent = self.complete(entries)
        after = self._receiver.manifest(before.version, deadline=deadline)
        problems = differences(before, after)
        if not problems:
            now = {entry.name: entry.sum for entry in after.tensors}
            problems = [
                f"{entry.name} came with {entry.sum} and has {now[entry.name]}"
                for entry in sent.values()
                if entry.sum != now[entry.name]
            ]
        if problems:
            raise SourceFailed(
                f"{self._receiver.url} describes {before.version} otherwise than it was sent: {'; '.join(problems)}."
            )
        return after


def summed(manifest: Manifest, sums: Mapping[str, str]) -> Manifest:
    """A manifest with the sums of its tensors, which it lacked."""
    tensors = tuple(replace(entry, sum=sums[entry.name]) for entry in manifest.tensors)
    return replace(manifest, tensors=tensors, root_digest=compute_root(tensors, manifest.algorithm))


def differences(before: Manifest, after: Manifest) -> list[str]:
    """Why a manifest cannot be the sealed form of another."""
    if not after.sealed or after.algorithm != before.algorithm:
        return ["it still has no digests, or of another kind, though all of it was sent"]
    problems = []
    if (after.version, after.kind, after.step, after.tied) != (before.version, before.kind, before.step, before.tied):
        problems.append("it is another version, or ties other names")
    specs = [{entry.name: entry.spec for entry in manifest.tensors} for manifest in (before, after)]
    other = sorted(name for name in specs[0].keys() | specs[1].keys() if specs[0].get(name) != specs[1].get(name))
    problems += [f"tensor {name} is not the same" for name in other]
    if not problems and compute_root(after.tensors, after.algorithm) != after.root_digest:
        problems.append("its root digest does not follow from its tensors")
    return problems
