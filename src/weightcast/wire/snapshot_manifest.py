"""The manifest of a snapshot: a small sealed file beside the legacy files, written last, that says which belong together."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weightcast.errors import AnyPath, InvalidInput, ManifestCorrupt
from weightcast.tensors.digest import Algorithm
from weightcast.wire.manifest import PartEntry, TensorEntry, check_version_id, place_problems, repeats, tensor_problems
from weightcast.wire.seal import seal, unseal

FORMAT = 1


class SnapshotManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one rank and device id, in the order of loading. `part` of a tensor is an index into `files`.

    `ranks` is the number of ranks that the snapshots of this version are for; None in files of older releases.
    """

    version: str
    rank: int
    device_id: str
    created_s: float
    algorithm: Algorithm
    files: tuple[PartEntry, ...]
    tensors: tuple[TensorEntry, ...]
    format: int = FORMAT
    ranks: int | None = None


def encode_snapshot_manifest(manifest: SnapshotManifest) -> bytes:
    """The bytes of the manifest's file."""
    return seal(manifest)


def decode_snapshot_manifest(data: bytes, path: AnyPath) -> SnapshotManifest:
    """Read a snapshot's manifest, believing nothing. `path` is only for messages.

    Raises `ManifestCorrupt` with all problems, or `UnsupportedFormat` for a newer format.
    """
    manifest = unseal(data, path, SnapshotManifest, newest=FORMAT)
    problems = list(_find_problems(manifest))
    if problems:
        raise ManifestCorrupt(path, problems)
    return manifest


def _find_problems(manifest: SnapshotManifest) -> Iterator[str]:
    try:
        check_version_id(manifest.version)
    except InvalidInput as error:
        yield str(error)
    if manifest.ranks is not None and manifest.ranks <= manifest.rank:
        yield f"it is of rank {manifest.rank} of {manifest.ranks}"
    if not manifest.files:
        yield "it lists no files"
    yield from repeats("file", (part.file for part in manifest.files))
    yield from repeats("tensor", (entry.name for entry in manifest.tensors))
    yield from tensor_problems(manifest.tensors, manifest.algorithm)
    yield from place_problems(manifest.files, manifest.tensors)
