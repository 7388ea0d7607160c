"""`checkpoint://`: a directory of safetensors files is a version, whoever wrote it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from weightcast.clock import Deadline
from weightcast.errors import DigestMismatch, InvalidInput, PartCorrupt, SourceFailed, VersionNotFound, VersionNotSet
from weightcast.store import layout
from weightcast.store.checkpoint import Checkpoint
from weightcast.store.files import read_small, refusals
from weightcast.store.reader import VersionReader
from weightcast.store.safetensors_file import SafetensorsFile
from weightcast.store.version_file import VersionFile, read_version_file, step_of
from weightcast.tensors.digest import DEFAULT, Algorithm, bytes_digest
from weightcast.tensors.flat import BLOCK_NBYTES, Pieces
from weightcast.tensors.sums import Digests, TensorHasher
from weightcast.transports.prefetch import prefetched, ring
from weightcast.wire.manifest import (
    MAX_MANIFEST_NBYTES,
    Manifest,
    PartEntry,
    check_version_id,
    compute_root,
    decode_manifest,
    entry_of,
)

NEWEST_TIMEOUT_S = 3600.0

Stamps = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class _Hashed:
    """What was found when every byte was read. `stamps` tell, cheaply, whether the files were touched since."""

    stamps: Stamps
    contents: Manifest


class CheckpointReceiver:
    """Reads a checkpoint directory. Memory: four blocks of 4 MiB, whatever its size.

    The version is that of the manifest in it, if it is the directory of a version in a store; else that of its
    version.yaml; else its root digest is its name. The directory is taken for what its bytes say: they are all read
    once, and again only if a file was touched.
    """

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        self._hashed: _Hashed | None = None
        self._root = ""  # of the version that the files were found to be
        self.url = f"checkpoint://{directory.absolute()}"

    def newest(self) -> str:
        """The version that the directory holds. Without any file that names it, every byte is read to tell."""
        return self._named() or self.identify(deadline=Deadline.after(NEWEST_TIMEOUT_S)).version

    def manifest(self, version: str, *, deadline: Deadline) -> Manifest:
        """The directory as a version; every byte was read for it."""
        named = self._named()
        if named is not None and named != version:
            raise VersionNotFound(version, self.url, [named])
        found = self.identify(deadline=deadline)
        if found.version != version:
            raise VersionNotFound(version, self.url, [found.version])
        return found

    def identify(self, *, deadline: Deadline) -> Manifest:
        """The manifest of whatever version the directory holds. Reads every byte, unless it did so before.

        Raises `DigestMismatch` or `PartCorrupt` if it holds a manifest and its files are not what that says, and
        `SourceFailed` if a file is touched meanwhile.
        """
        sealed = self._sealed()
        algorithm = sealed.algorithm if sealed is not None and sealed.algorithm else DEFAULT
        contents = self._contents(algorithm, deadline)
        if sealed is not None:
            _check_sealed(self._dir, sealed, contents)
            self._root = sealed.root_digest
            places = {entry.name: entry for entry in contents.tensors}
            tensors = (replace(one, part=places[one.name].part, offset=places[one.name].offset) for one in sealed.tensors)
            pieces = {part.file: part.pieces for part in sealed.parts}
            parts = (replace(part, pieces=pieces.get(part.file, b"")) for part in contents.parts)
            return replace(sealed, parts=tuple(parts), tensors=tuple(tensors))
        self._root = contents.root_digest
        named = self._version_file()
        if named is None:
            return replace(contents, version=contents.root_digest)
        return replace(contents, version=named.version, step=step_of(named.version) if named.step is None else named.step)

    def pieces(self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None) -> Pieces:
        """The bytes in the order they lie on the medium, read ahead in a thread.

        Raises `SourceFailed` if a file was touched since this receiver read it for the manifest. One that is given a
        manifest from elsewhere only streams: digests decide.
        """
        hashed = self._hashed
        known = hashed if hashed is not None and manifest.root_digest == self._root else None

        def produce() -> Pieces:
            self._check_untouched(known)
            with VersionReader(self._dir, manifest) as reader:
                yield from reader.pieces(deadline, names=names, buffers=ring(BLOCK_NBYTES), check=False)
            self._check_untouched(known)

        return prefetched(produce, deadline=deadline, what=f"reading {manifest.version} from {self.url}")

    def close(self) -> None:
        """Forget what was read; files are only open while they are read."""
        self._hashed = None

    def _contents(self, algorithm: Algorithm, deadline: Deadline) -> Manifest:
        """The tensors of the directory with their digests, as a version without a name."""
        stamps = _stamps(self._dir)  # before the first byte is read, so that no change goes unseen
        hashed = self._hashed
        if hashed is None or hashed.stamps != stamps or hashed.contents.algorithm != algorithm:
            hashed = _Hashed(stamps, _read_contents(self._dir, algorithm, deadline, f"hashing {self.url}"))
            self._check_untouched(hashed)
            self._hashed = hashed
        return hashed.contents

    def _check_untouched(self, known: _Hashed | None) -> None:
        now = _stamps(self._dir) if known is not None else ()
        if known is not None and now != known.stamps:
            names = sorted({name for name, *_ in set(now) ^ set(known.stamps)})
            raise SourceFailed(
                f"{self._dir} changed while a version was read from it: {', '.join(names)}. Never write into a checkpoint "
                "that is served; publish the new one elsewhere."
            )

    def _sealed(self) -> Manifest | None:
        path = self._dir / layout.MANIFEST
        try:
            manifest = decode_manifest(read_small(path, MAX_MANIFEST_NBYTES), path)
        except FileNotFoundError:
            return None
        if manifest.kind == "delta" or manifest.shares:
            what = (
                f"a delta on {manifest.base.version}"
                if manifest.base and not manifest.shares
                else "in shares of several ranks"
            )
            raise InvalidInput(
                f"{self._dir} holds version {manifest.version}, which is {what}: open the store it is in instead "
                "(file:///store)."
            )
        return manifest

    def _named(self) -> str | None:
        """The version that a file in the directory names."""
        sealed = self._sealed()
        if sealed is not None:
            return sealed.version
        file = self._version_file()
        return file.version if file is not None else None

    def _version_file(self) -> VersionFile | None:
        try:
            file = read_version_file(self._dir)
        except VersionNotSet:
            return None
        check_version_id(file.version)
        return file


def _read_contents(directory: Path, algorithm: Algorithm, deadline: Deadline, what: str) -> Manifest:
    """Read and hash every tensor of a directory."""
    Checkpoint(directory)  # headers, index, no tensor twice
    parts, entries = [], []
    for index, path in enumerate(_weights(directory)):
        with SafetensorsFile(path) as file:
            header = bytes_digest(file.header, algorithm)
            parts.append(PartEntry(file=path.name, nbytes=file.nbytes, header_nbytes=len(file.header), header_digest=header))
            entries += [entry_of(place.spec, part=index, offset=place.offset) for place in file.places.values()]
    unnamed = Manifest(
        version="", sequence=0, step=0, kind="full", created_s=0.0, algorithm=algorithm, root_digest="",
        parts=tuple(parts), tensors=tuple(entries),
    )  # fmt: skip
    digests = dict(_digests(directory, unnamed, algorithm, deadline, what))
    tensors = tuple(replace(entry, digest=digests[entry.name].digest, sum=digests[entry.name].sum) for entry in entries)
    return replace(unnamed, tensors=tensors, root_digest=compute_root(tensors, algorithm))


def _digests(
    directory: Path, manifest: Manifest, algorithm: Algorithm, deadline: Deadline, what: str
) -> Iterator[tuple[str, Digests]]:
    def produce() -> Pieces:
        with VersionReader(directory, manifest) as reader:
            yield from reader.pieces(deadline, buffers=ring(BLOCK_NBYTES), check=False)

    hashers = {entry.name: TensorHasher(entry.spec, algorithm) for entry in manifest.tensors}
    with closing(prefetched(produce, deadline=deadline, what=what)) as pieces:
        for piece in pieces:
            hashers[piece.tensor].update(piece.data)
            deadline.check(what)
    yield from ((name, hasher.finish()) for name, hasher in hashers.items())


def _check_sealed(directory: Path, sealed: Manifest, found: Manifest) -> None:
    """Raise unless the files of a directory are what its manifest says."""
    path = directory / layout.MANIFEST
    there, wanted = {entry.spec: entry for entry in found.tensors}, {entry.spec: entry for entry in sealed.tensors}
    if there.keys() != wanted.keys():
        missing = sorted(spec.name for spec in wanted.keys() - there.keys())
        extra = sorted(spec.name for spec in there.keys() - wanted.keys())
        raise PartCorrupt(
            path, f"the files beside it hold other tensors than it says: missing {missing}, not listed {extra}"
        )
    wrong = [(entry.name, entry.digest, there[spec].digest) for spec, entry in wanted.items()]
    wrong = [(name, expected, actual) for name, expected, actual in wrong if expected != actual]
    if wrong:
        raise DigestMismatch(str(directory), wrong)


def _weights(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def _stamps(directory: Path) -> Stamps:
    with refusals("look at the checkpoint", directory):
        found = [(path.name, path.stat()) for path in _weights(directory)]
    return tuple((name, status.st_size, status.st_mtime_ns, status.st_ino) for name, status in found)
