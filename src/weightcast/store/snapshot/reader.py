"""Reading one snapshot: what its files say about themselves is compared before the first tensor is given out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import PartCorrupt, SnapshotInvalid, StorageFailed
from weightcast.store.files import read_small
from weightcast.store.snapshot.file import SnapshotFile
from weightcast.store.snapshot.lookup import Located, LocatedFile
from weightcast.store.streaming import Proof, Readable, Readables, stream_arrays, stream_pieces
from weightcast.tensors.digest import DEFAULT, Algorithm, bytes_digest
from weightcast.tensors.flat import Array, Pieces
from weightcast.tensors.spec import TensorSpec
from weightcast.wire.manifest import MAX_MANIFEST_NBYTES, RANK, RANKS, TensorEntry, recorded_number
from weightcast.wire.snapshot_manifest import SnapshotManifest, decode_snapshot_manifest

log = logs.get(__name__)

# Keys of the safetensors metadata. `parts` is checked if someone wrote it; our writer streams, does not know it, and puts
# the name of its manifest instead: without that file the snapshot is not complete. `write` is different for every write.
VERSION = "weightcast.version"
PART = "weightcast.part"
PARTS = "weightcast.parts"
MANIFEST = "weightcast.manifest"
WRITE = "weightcast.write"


@dataclass(frozen=True)
class _OpenedFile:
    """What one file said when the snapshot was opened. `stamp` tells whether it was replaced or written since."""

    located: LocatedFile
    nbytes: int
    metadata: dict[str, str]
    header_digest: str
    specs: dict[str, TensorSpec]
    stamp: tuple[int, int, int]


class Snapshot:
    """A snapshot whose files agree with each other, with what was asked for and with the manifest if there is one.

    `version`, `rank` and `ranks` are what the files record, None for files that do not. `specs` is in the
    order of reading. `algorithm` is None and `entries` is empty where there is no manifest: such bytes cannot be proved.
    """

    def __init__(self, located: Located, files: Sequence[_OpenedFile], manifest: SnapshotManifest | None) -> None:
        self.located, self.manifest = located, manifest
        self._files = tuple(files)
        self.version: str | None = manifest.version if manifest else files[0].metadata.get(VERSION)
        self.rank = manifest.rank if manifest else recorded_number(files[0].metadata, RANK)
        self.ranks = manifest.ranks if manifest else recorded_number(files[0].metadata, RANKS)
        self.specs: dict[str, TensorSpec] = {name: spec for file in files for name, spec in file.specs.items()}
        self.algorithm: Algorithm | None = manifest.algorithm if manifest else None
        self.entries: dict[str, TensorEntry] = {entry.name: entry for entry in manifest.tensors} if manifest else {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs.values())

    def pieces(
        self,
        deadline: Deadline,
        *,
        names: Collection[str] | None = None,
        buffers: Sequence[memoryview] | None = None,
        check: bool = True,
    ) -> Pieces:
        """Every byte of the snapshot (or of the named tensors) once, file by file; one file is open at a time.

        The pieces rotate through `buffers` (default: one), so a piece is valid until its buffer comes round again. With
        `check`, the iterator ends in `DigestMismatch` if tensors differed from their digests; it lists all of them.
        """
        what = f"reading the snapshot in {self.located.directory}"
        return stream_pieces(self._readables(names), self._proof(check=check), deadline, what=what, buffers=buffers)

    def tensors(self, *, check: bool = True) -> Iterator[tuple[str, Array]]:
        """Every tensor. An array is borrowed: valid until the next one is asked for. Memory: the largest tensor of a file.

        With `check`, the iterator ends in `DigestMismatch` if tensors differed from their digests.
        """
        return stream_arrays(self._readables(None), self._proof(check=check))

    def _readables(self, names: Collection[str] | None) -> Readables:
        for opened in self._files:
            with self._reopened(opened) as file:
                for name, spec in opened.specs.items():
                    if names is None or name in names:
                        yield Readable(spec, partial(file.read_into, spec))
            log.debug("snapshot file read", path=opened.located.path, label=opened.located.label)
        for opened in self._files:  # foreign files do not say which of them belong together
            if _stamp(opened.located.path) != opened.stamp:
                raise PartCorrupt(opened.located.path, "it was replaced while the snapshot was read: open it again")

    def _proof(self, *, check: bool) -> Proof:
        return Proof(str(self.located.directory), self.entries.values() if check else ())

    def _reopened(self, opened: _OpenedFile) -> SnapshotFile:
        stamp = _stamp(opened.located.path)
        file = SnapshotFile(opened.located.path)
        if _describe(opened.located, file, self.algorithm or DEFAULT, stamp) != opened:
            file.close()
            raise PartCorrupt(opened.located.path, "it was replaced after the snapshot was opened: open it again")
        return file


def open_snapshot(located: Located) -> Snapshot:
    """Read the headers of all files and compare them. The tensors stay on the medium.

    Raises `SnapshotInvalid` with all problems, `PickleRefused` for a pickle that wants more than tensors, and
    `ManifestCorrupt` or `UnsupportedFormat` for a manifest that cannot be read.
    """
    manifest = None
    if located.manifest is not None:
        try:
            manifest = decode_snapshot_manifest(read_small(located.manifest, MAX_MANIFEST_NBYTES), located.manifest)
        except FileNotFoundError as error:
            raise SnapshotInvalid(located.directory, [f"{located.manifest.name} was removed while it was read"]) from error
    problems: list[str] = []
    files: list[_OpenedFile] = []
    for file in located.files:
        try:
            stamp = _stamp(file.path)  # before the first byte is read, so that no change goes unseen
            with SnapshotFile(file.path) as opened:
                files.append(_describe(file, opened, manifest.algorithm if manifest else DEFAULT, stamp))
        except PartCorrupt as error:
            problems.append(str(error))
    problems += _disagreements(located, files)
    problems += _differences(located, files, manifest) if manifest else _missing_manifest(files)
    if not problems and not any(file.specs for file in files):
        problems.append("it holds no tensors")
    if problems:
        raise SnapshotInvalid(located.directory, problems)
    return Snapshot(located, files, manifest)


def _describe(located: LocatedFile, file: SnapshotFile, algorithm: Algorithm, stamp: tuple[int, int, int]) -> _OpenedFile:
    return _OpenedFile(located, file.nbytes, file.metadata, bytes_digest(file.header, algorithm), file.specs, stamp)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Inode, size and time of the last write."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise PartCorrupt(path, "the file is missing") from error
    except OSError as error:
        raise StorageFailed("look at", path, error) from error
    return found.st_ino, found.st_size, found.st_mtime_ns


def _disagreements(located: Located, files: Sequence[_OpenedFile]) -> Iterator[str]:
    """Where the files contradict each other or what was asked for."""
    for key, what in ((VERSION, "versions"), (WRITE, "writes"), (RANKS, "numbers of ranks")):
        said: dict[str | None, list[str]] = {}
        for file in files:
            said.setdefault(file.metadata.get(key), []).append(file.located.path.name)
        if len(said) > 1:
            groups = "; ".join(f"{value or 'none'} in {', '.join(names)}" for value, names in said.items())
            yield f"the files are of different {what}: {groups}"
    holders: dict[str, str] = {}
    for file in files:
        name, part = file.located.path.name, file.located.part
        for key, claim, expected in (
            (RANK, "is of rank", located.rank),
            (PART, "is part", part),
            (PARTS, "belongs to a number of files of", len(located.files)),
        ):
            recorded = file.metadata.get(key)
            if recorded is not None and recorded != str(expected):
                yield f"{name} says that it {claim} {recorded}, not {expected}"
        for tensor in file.specs:
            if holders.setdefault(tensor, name) != name:
                yield f"tensor {tensor!r} is in {holders[tensor]} and in {name}"


def _missing_manifest(files: Sequence[_OpenedFile]) -> Iterator[str]:
    for manifest in sorted({file.metadata[MANIFEST] for file in files if MANIFEST in file.metadata}):
        yield f"{manifest} is missing, so the write of these files was not finished"


def _differences(located: Located, files: Sequence[_OpenedFile], manifest: SnapshotManifest) -> Iterator[str]:
    """Where the files are not what the manifest says."""
    for what, said, asked in (
        ("rank", manifest.rank, located.rank),
        ("device id", manifest.device_id, located.device_id),
    ):
        if said != asked:
            yield f"the manifest is of {what} {said}, not {asked}"
    listed = {part.file: part for part in manifest.files}
    present = {path.name for path in (*(file.path for file in located.files), *located.shadowed)}
    yield from (f"{name} is missing" for name in listed if name not in present)
    yield from (
        f"{name} is not part of version {manifest.version}: it was left by another write"
        for name in sorted(present - set(listed))
    )
    for file in files:
        name = file.located.path.name
        part = listed.get(name)
        if part is None:
            continue
        if file.metadata.get(VERSION) not in (None, manifest.version):
            yield f"{name} is of version {file.metadata[VERSION]}, the manifest of {manifest.version}"
        if file.nbytes != part.nbytes:
            yield f"{name} has {file.nbytes} bytes, the manifest says {part.nbytes}"
        if file.header_digest != part.header_digest:
            yield f"{name} has another header than the one that was written"
        index = manifest.files.index(part)
        if set(file.specs.values()) != {entry.spec for entry in manifest.tensors if entry.part == index}:
            yield f"{name} holds other tensors than the manifest lists"
