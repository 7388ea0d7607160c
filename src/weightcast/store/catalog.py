"""Which versions a store holds, read from their manifests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weightcast.errors import ManifestCorrupt, StoreNotFound, VersionNotFound, WeightcastError
from weightcast.store import layout
from weightcast.store.files import read_small, refusals
from weightcast.store.version_file import read_version_file
from weightcast.tensors.digest import raw_digest
from weightcast.wire.manifest import MAX_MANIFEST_NBYTES, Manifest, check_version_id, decode_manifest

_KNOWN_MANIFESTS = 64


@dataclass(frozen=True)
class Listing:
    """A version directory that has a manifest: the manifest, or why it cannot be read."""

    version: str
    manifest: Manifest | None
    error: str | None = None


class Catalog:
    """The versions in a store's directory, as they are at the moment of each call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: dict[str, tuple[bytes, Manifest]] = {}  # the digest of the bytes that a manifest was decoded from

    def check_exists(self) -> None:
        """Raise `StoreNotFound` if there is no such directory."""
        with refusals("look at", self.path):
            exists = self.path.is_dir()
        if not exists:
            raise StoreNotFound(self.path, "the directory does not exist")

    def directory(self, version: str) -> Path:
        """The directory of a version, sealed or not."""
        return layout.version_dir(self.path, version)

    def directories(self) -> list[Path]:
        """Every version directory, with or without a manifest."""
        root = layout.versions_dir(self.path)
        with refusals("list", root):
            return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []

    def present(self) -> list[str]:
        """The ids of all version directories that have a manifest."""
        return sorted(path.name for path in self.directories() if (path / layout.MANIFEST).exists())

    def manifest(self, version: str) -> Manifest:
        """What a version is. Everything in it was checked against its seal and itself."""
        check_version_id(version)
        path = layout.manifest_path(self.path, version)
        try:
            data = read_small(path, MAX_MANIFEST_NBYTES)
        except FileNotFoundError:
            self.check_exists()
            raise VersionNotFound(version, self.path, self.present()) from None
        digest, known = raw_digest(data), self._read.get(version)
        if known is not None and known[0] == digest:
            return known[1]
        manifest = decode_manifest(data, path)
        if manifest.version != version:
            raise ManifestCorrupt(path, f"it describes version {manifest.version}")
        if len(self._read) >= _KNOWN_MANIFESTS:
            self._read.pop(next(iter(self._read)), None)
        self._read[version] = digest, manifest
        return manifest

    def listings(self) -> list[Listing]:
        """Every version directory that has a manifest, readable or not, in the order of publication."""
        self.check_exists()
        found = []
        for path in self.directories():
            try:
                found.append(Listing(path.name, self.manifest(path.name)))
            except VersionNotFound:
                continue
            except WeightcastError as error:
                found.append(Listing(path.name, None, str(error)))
        return sorted(found, key=lambda item: (item.manifest is None, item.manifest.sequence if item.manifest else 0))

    def next_sequence(self) -> int:
        """The number of the next version in the order of publication."""
        return 1 + max((item.manifest.sequence for item in self.listings() if item.manifest), default=0)

    def newest(self) -> str:
        """The id of the version that version.yaml names."""
        self.check_exists()
        named = read_version_file(self.path)
        only_step = named.step is not None and named.version.isdecimal()  # as legacy files have it
        if only_step and not layout.manifest_path(self.path, named.version).exists():
            same_step = [item.version for item in self.listings() if item.manifest and item.manifest.step == named.step]
            if same_step:
                return same_step[-1]
        return named.version
