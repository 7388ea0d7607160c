"""The payloads of a delta version: packed deltas, one in each file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from weightcast.clock import Deadline
from weightcast.delta.container import Table, check_table, read_table
from weightcast.errors import DigestMismatch
from weightcast.store.byte_file import ByteFile
from weightcast.store.reader import sized_file
from weightcast.store.streaming import Proof, Readable, Readables, stream_pieces
from weightcast.tensors.digest import DEFAULT, Algorithm, bytes_digest, piece_digests
from weightcast.tensors.flat import Pieces
from weightcast.wire.manifest import Manifest, PayloadEntry, chosen_payloads


def payload_entry(file: str, nbytes: int, digest: str, pieces: bytes, table: Table) -> PayloadEntry:
    """What a manifest says of a packed delta."""
    return PayloadEntry(
        file=file,
        nbytes=nbytes,
        digest=digest,
        pieces=pieces,
        packing=table.packing,
        table=table.offset,
        seal=table.seal.hex(),
    )


def packed_entry(file: str, packed: bytes, algorithm: Algorithm) -> PayloadEntry:
    """The same of one that is in memory."""
    table = read_table(memoryview(packed))
    return payload_entry(file, len(packed), bytes_digest(packed, algorithm), piece_digests(packed, algorithm), table)


def read_payloads(directory: Path, manifest: Manifest) -> list[memoryview]:
    """Packed deltas that together lead to a version, whole in memory, compared with their digests."""
    specs = {entry.name: entry.spec for entry in manifest.tensors}
    found = [read_payload(directory, payload, manifest.algorithm or DEFAULT) for payload in chosen_payloads(manifest)]
    for data in found:
        check_table(data, specs)
    return found


def read_payload(directory: Path, payload: PayloadEntry, algorithm: Algorithm) -> memoryview:
    """One packed delta, whole in memory, compared with its digest."""
    with sized_file(directory / payload.file, payload.nbytes) as file:
        data = memoryview(bytearray(payload.nbytes))
        file.read_into(data, 0)
    found = bytes_digest(data, algorithm)
    if found != payload.digest:
        raise DigestMismatch(str(directory), [(payload.file, payload.digest, found)])
    return data


def payload_pieces(
    directory: Path,
    manifest: Manifest,
    deadline: Deadline,
    buffers: Sequence[memoryview],
    names: Collection[str] | None = None,
) -> Pieces:
    """The bytes of payloads in pieces that rotate through `buffers`, each as a tensor named after its file. Not verified."""
    wanted = [payload for payload in manifest.payloads if names is None or payload.file in names]
    entries = manifest.transfers()

    def readables() -> Readables:
        with ExitStack() as stack:
            for payload in wanted:
                file = stack.enter_context(sized_file(directory / payload.file, payload.nbytes))
                yield Readable(entries[payload.file].spec, partial(_read, file))

    what = f"reading version {manifest.version} from {directory}"
    return stream_pieces(readables(), Proof(str(directory), ()), deadline, what=what, buffers=buffers)


def _read(file: ByteFile, start: int, buffer: memoryview) -> None:
    file.read_into(buffer, start)
