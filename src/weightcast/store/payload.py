"""The payload of a delta version: one packed delta in one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weightcast.clock import Deadline
from weightcast.delta.container import check_table
from weightcast.errors import DigestMismatch, InvalidInput, PartCorrupt
from weightcast.store.byte_file import ByteFile
from weightcast.store.streaming import Proof, Readable, Readables, stream_pieces
from weightcast.tensors.digest import DEFAULT, bytes_digest
from weightcast.tensors.flat import Pieces
from weightcast.wire.manifest import FileEntry, Manifest


def read_payload(directory: Path, manifest: Manifest) -> memoryview:
    """The packed delta of a version, whole in memory, compared with its digest. Its table fits the version's tensors."""
    payload = payload_of(manifest)
    with _open(directory, payload) as file:
        data = memoryview(bytearray(payload.nbytes))
        file.read_into(data, 0)
    found = bytes_digest(data, manifest.algorithm or DEFAULT)
    if found != payload.digest:
        raise DigestMismatch(str(directory), [(payload.file, payload.digest, found)])
    check_table(data, {entry.name: entry.spec for entry in manifest.tensors})
    return data


def payload_pieces(directory: Path, manifest: Manifest, deadline: Deadline, buffers: Sequence[memoryview]) -> Pieces:
    """The bytes of the payload in pieces that rotate through `buffers`, as one tensor named after its file. Not verified."""
    payload = payload_of(manifest)
    (entry,) = manifest.transfers().values()

    def readables() -> Readables:
        with _open(directory, payload) as file:
            yield Readable(entry.spec, lambda start, buffer: file.read_into(buffer, start))

    what = f"reading version {manifest.version} from {directory}"
    return stream_pieces(readables(), Proof(str(directory), ()), deadline, what=what, buffers=buffers)


def payload_of(manifest: Manifest) -> FileEntry:
    """The file that a delta version's bytes are in."""
    if manifest.payload is None:
        raise InvalidInput(f"version {manifest.version} is a full version: it has no payload.")
    return manifest.payload


def _open(directory: Path, payload: FileEntry) -> ByteFile:
    path = directory / payload.file
    file = ByteFile(path)
    if file.nbytes != payload.nbytes:
        file.close()
        raise PartCorrupt(path, f"it has {file.nbytes} bytes, the manifest says {payload.nbytes}")
    return file
