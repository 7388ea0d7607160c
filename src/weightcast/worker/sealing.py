"""What the digests of a version must be, also where they come late: a live stream has none in its manifest at first."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from weightcast.clock import Deadline
from weightcast.errors import SourceFailed
from weightcast.tensors.box_digest import array_boxes_digest
from weightcast.tensors.digest import DEFAULT, bytes_digest
from weightcast.tensors.flat import Array, Piece
from weightcast.transports.base import Receiver
from weightcast.wire.manifest import Manifest, TensorEntry, compute_root

Check = Callable[[], None]


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
            return entry.digest
        if entry.nbytes == 0:  # no piece is sent that could carry it
            return bytes_digest(b"", self._manifest.algorithm or DEFAULT)
        return self._late.get(entry.name, "")

    def complete(self, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Tensors that have all come, with their digests. `SourceFailed` lists those that nobody said the digest of."""
        if self.sealed:
            return dict(entries)
        found = {name: replace(entry, digest=self.digest(entry)) for name, entry in entries.items()}
        lacking = [name for name, entry in found.items() if not entry.digest]
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
            now = {entry.name: entry.digest for entry in after.tensors}
            problems = [
                f"{entry.name} came with {entry.digest} and has {now[entry.name]}"
                for entry in sent.values()
                if entry.digest != now[entry.name]
            ]
        if problems:
            raise SourceFailed(
                f"{self._receiver.url} describes {before.version} otherwise than it was sent: {'; '.join(problems)}."
            )
        return after


def shared_digest(manifest: Manifest, name: str, array: Array, check: Check) -> str | None:
    """The digest of a tensor as a version that publishers share has it: over those of its boxes. None if it is whole."""
    boxes = manifest.boxes.get(name, ())
    if len(boxes) < 2:
        return None
    return array_boxes_digest(array, boxes, manifest.algorithm or DEFAULT, check)


def flattened(manifest: Manifest, digests: Mapping[str, str]) -> Manifest:
    """A version that publishers share, once it is proved: with the digests that its whole tensors were found to have.

    So what a model serves can be compared with the same weights from anywhere else. It still names the boxes.
    """
    tensors = tuple(replace(entry, digest=digests.get(entry.name, entry.digest)) for entry in manifest.tensors)
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
