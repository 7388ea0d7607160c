"""The store: a directory of immutable versions that any number of processes read and one at a time writes."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weightcast.clock import Deadline
from weightcast.errors import (
    AnyPath,
    InvalidInput,
    ManifestCorrupt,
    StoreNotFound,
    VersionExists,
    VersionNotFound,
    WeightcastError,
)
from weightcast.store import layout
from weightcast.store.checkpoint import Checkpoint
from weightcast.store.compare import Progress, VerifyReport, VersionDiff, diff_versions, no_progress, verify_version
from weightcast.store.files import make_dir, read_small, remove_dir, remove_file, sync_dir
from weightcast.store.lock import exclusive
from weightcast.store.reader import VersionReader
from weightcast.store.retention import plan_retention
from weightcast.store.version_file import (
    TXT_NAME,
    VersionFile,
    migrate_version_file,
    put_back_version_file,
    raw_version_file,
    read_version_file,
    step_of,
    write_version_file,
)
from weightcast.store.writer import NamedTensors, VersionWriter
from weightcast.tensors.digest import DEFAULT, Algorithm
from weightcast.tensors.flat import Array, Piece
from weightcast.wire.manifest import MAX_MANIFEST_NBYTES, Manifest, check_version_id, decode_manifest

log = logging.getLogger(__name__)

Mode = Literal["full", "delta", "auto"]
PART_NBYTES = 1 << 30
LOCK_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Listing:
    """A version directory that has a manifest: the manifest, or why it cannot be read."""

    version: str
    manifest: Manifest | None
    error: str | None = None


@dataclass(frozen=True)
class GcReport:
    """What `gc` removed and what it kept, with the reasons."""

    removed: list[str]
    garbage: list[str]
    kept: dict[str, str]
    freed_nbytes: int
    dry_run: bool


class Store:
    """A directory of versions. Opening one reads and creates nothing; the first `publish` makes the directory."""

    def __init__(self, path: AnyPath, *, lock_timeout: float = LOCK_TIMEOUT_S) -> None:
        self.path = Path(path)
        self._lock_timeout = lock_timeout

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r})"

    # -- writing -------------------------------------------------------------------------------------------------

    def publish(
        self,
        version: str,
        tensors: NamedTensors,
        mode: Mode = "auto",
        *,
        step: int | None = None,
        files: Mapping[str, bytes] | None = None,
        metadata: Mapping[str, str] | None = None,
        part_nbytes: int = PART_NBYTES,
        algorithm: Algorithm = DEFAULT,
    ) -> Manifest:
        """Publish a version from a mapping or an iterator of named tensors, and make it the newest.

        When this returns, the version is whole and on the medium; when it raises, the store is as before; when the
        process dies, the store holds exactly the old versions or the new one too. Tensors are written as they come, so an
        iterator may reuse its memory, and none is held longer than it takes to write it. A part holds at most
        `part_nbytes`, unless a single tensor is larger. `step` defaults to the number at the end of the version id, else
        to the count of publications.
        """
        check_version_id(version)
        if mode not in ("full", "auto"):
            raise InvalidInput(f"mode {mode!r} is not available: this release publishes full versions (full, auto).")
        if part_nbytes < 1:
            raise InvalidInput(f"part_nbytes must be positive, not {part_nbytes}.")
        if not isinstance(step, int | None):
            raise InvalidInput(f"step must be an integer, not {step!r}.")
        if not all(isinstance(text, str) for item in (metadata or {}).items() for text in item):
            raise InvalidInput("metadata must map texts to texts.")
        started = time.monotonic()
        make_dir(self.path)
        if not layout.versions_dir(self.path).is_dir():
            sync_dir(self.path.parent)  # whoever made the directory may have died before it was safe
        with exclusive(layout.lock_path(self.path), Deadline.after(self._lock_timeout)):
            manifest = self._publish_locked(
                version,
                tensors,
                step=step,
                files=files or {},
                metadata=metadata or {},
                part_nbytes=part_nbytes,
                algorithm=algorithm,
            )
        log.info(
            "publish version=%s tensors=%d nbytes=%d parts=%d seconds=%.3f store=%s",
            version, len(manifest.tensors), manifest.nbytes, len(manifest.parts), time.monotonic() - started, self.path,
        )  # fmt: skip
        return manifest

    def _publish_locked(
        self,
        version: str,
        tensors: NamedTensors,
        *,
        step: int | None,
        files: Mapping[str, bytes],
        metadata: Mapping[str, str],
        part_nbytes: int,
        algorithm: Algorithm,
    ) -> Manifest:
        if layout.manifest_path(self.path, version).exists():
            raise VersionExists(
                f"version {version} is already published in {self.path}, and a version never changes. Publish under another "
                f"id; if it is not the newest and should be, Store.announce({version!r}) makes it so."
            )
        sequence = 1 + max((listing.manifest.sequence for listing in self.listings() if listing.manifest), default=0)
        writer = VersionWriter(self.path, version, part_nbytes=part_nbytes, algorithm=algorithm)
        before = raw_version_file(self.path)
        try:
            writer.begin()
            writer.add_all(tensors)
            for name, data in files.items():
                writer.add_file(name, data)
            chosen_step = step_of(version, default=sequence) if step is None else step
            manifest = writer.seal(sequence=sequence, step=chosen_step, metadata=metadata)
            write_version_file(self.path, version=version, step=manifest.step)
        except BaseException:
            if put_back_version_file(self.path, before):  # else it names the new version, which must then stay
                writer.abandon()
            raise
        return manifest

    def publish_checkpoint(
        self,
        version: str,
        directory: AnyPath,
        mode: Mode = "auto",
        *,
        progress: Progress = no_progress,
        step: int | None = None,
        part_nbytes: int = PART_NBYTES,
        algorithm: Algorithm = DEFAULT,
    ) -> Manifest:
        """Publish a directory of safetensors files together with its small files (config, tokenizer)."""
        checkpoint = Checkpoint(Path(directory))

        def reported() -> Iterator[tuple[str, Array]]:
            for name, array in checkpoint.tensors():
                yield name, array
                progress(array.nbytes)

        return self.publish(
            version,
            reported(),
            mode,
            step=step,
            files=dict(checkpoint.files()),
            part_nbytes=part_nbytes,
            algorithm=algorithm,
        )

    def announce(self, version: str) -> None:
        """Make a published version the newest: the one that is taken where no version is asked for."""
        self._check_exists()
        with exclusive(layout.lock_path(self.path), Deadline.after(self._lock_timeout)):
            write_version_file(self.path, version=version, step=self.manifest(version).step)

    def gc(
        self,
        *,
        keep_last: int = 3,
        keep_full_every: int | None = None,
        protect: Collection[str] = (),
        dry_run: bool = False,
    ) -> GcReport:
        """Remove old versions and what interrupted publishes left behind.

        `docs/format.md` says what is kept. A version is gone the moment its manifest is; a `gc` that dies leaves garbage
        that the next one removes.
        """
        self._check_exists()
        with exclusive(layout.lock_path(self.path), Deadline.after(self._lock_timeout)):
            manifests = [listing.manifest for listing in self.listings() if listing.manifest]
            keep = plan_retention(
                manifests,
                keep_last=keep_last,
                keep_full_every=keep_full_every,
                newest=self._announced(),
                protect=protect,
            )
            removed = [manifest.version for manifest in manifests if manifest.version not in keep]
            garbage = sorted(path.name for path in self._version_dirs() if not (path / layout.MANIFEST).exists())
            freed = 0
            for version in [*garbage, *removed]:
                freed += self._remove(version, dry_run=dry_run)
            garbage += self._remove_asides(dry_run=dry_run)
        log.info("gc store=%s removed=%s garbage=%s freed=%d dry_run=%s", self.path, removed, garbage, freed, dry_run)
        return GcReport(removed=removed, garbage=garbage, kept=keep, freed_nbytes=freed, dry_run=dry_run)

    def _remove(self, version: str, *, dry_run: bool) -> int:
        directory = layout.version_dir(self.path, version)
        if dry_run:
            return sum(file.lstat().st_size for file in directory.iterdir())
        manifest = directory / layout.MANIFEST
        freed = manifest.stat().st_size if manifest.exists() else 0
        remove_file(manifest)
        sync_dir(directory)  # the version is gone for good before the first of its bytes is
        return freed + remove_dir(directory)

    def _remove_asides(self, *, dry_run: bool) -> list[str]:
        """Files that were being written aside when their writer died."""
        asides = sorted(self.path.glob(".*.tmp"))
        if not dry_run:
            for path in asides:
                remove_file(path)
        return [path.name for path in asides]

    def migrate(self) -> VersionFile | None:
        """Turn a legacy version.txt into version.yaml. None if there is nothing to convert."""
        if not (self.path / TXT_NAME).exists():
            return None
        with exclusive(layout.lock_path(self.path), Deadline.after(self._lock_timeout)):
            return migrate_version_file(self.path)

    # -- reading -------------------------------------------------------------------------------------------------

    def versions(self) -> list[str]:
        """The ids of all versions, in the order of publication. One whose manifest is damaged is left out and logged."""
        listings = self.listings()
        for listing in listings:
            if listing.error:
                log.warning("versions store=%s leaves out %s: %s", self.path, listing.version, listing.error)
        return [listing.version for listing in listings if listing.manifest]

    def listings(self) -> list[Listing]:
        """Every version directory that has a manifest, readable or not, in the order of publication."""
        self._check_exists()
        found = []
        for path in self._version_dirs():
            try:
                found.append(Listing(path.name, self.manifest(path.name)))
            except VersionNotFound:
                continue
            except WeightcastError as error:
                found.append(Listing(path.name, None, str(error)))
        return sorted(found, key=lambda item: (item.manifest is None, item.manifest.sequence if item.manifest else 0))

    def manifest(self, version: str) -> Manifest:
        """What a version is. Everything in it was checked against its seal and itself."""
        check_version_id(version)
        path = layout.manifest_path(self.path, version)
        try:
            manifest = decode_manifest(read_small(path, MAX_MANIFEST_NBYTES), path)
        except FileNotFoundError:
            self._check_exists()
            present = sorted(path.name for path in self._version_dirs() if (path / layout.MANIFEST).exists())
            raise VersionNotFound(version, self.path, present) from None
        if manifest.version != version:
            raise ManifestCorrupt(path, f"it describes version {manifest.version}")
        return manifest

    def newest(self) -> str:
        """The id of the version that version.yaml names."""
        self._check_exists()
        named = read_version_file(self.path)
        if not layout.manifest_path(self.path, named.version).exists() and named.step is not None:
            same_step = [item.version for item in self.listings() if item.manifest and item.manifest.step == named.step]
            if same_step:  # a legacy file knows only the step
                return same_step[-1]
        return named.version

    def load(self, version: str | None = None) -> dict[str, Array]:
        """All tensors of a version (default: the newest) in fresh memory, verified. Tied names share one array."""
        with self.reader(version) as reader:
            return reader.load_all()

    def read(self, version: str | None = None, *, timeout: float = READ_TIMEOUT_S) -> Iterator[Piece]:
        """All bytes of a version in pieces of a few MiB, each valid until the next is asked for.

        The digests are checked on the way; if any is wrong, the iterator ends in `DigestMismatch`, which lists them all.
        """
        deadline = Deadline.after(timeout)
        with self.reader(version) as reader:
            yield from reader.pieces(deadline)

    def reader(self, version: str | None = None) -> VersionReader:
        """A version opened for reading by byte range."""
        chosen = self.newest() if version is None else version
        return VersionReader(layout.version_dir(self.path, chosen), self.manifest(chosen))

    def verify(self, version: str | None = None, *, progress: Progress = no_progress) -> VerifyReport:
        """Read every byte of a version and compare it with what was published. Look at `ok` of the report."""
        chosen = self.newest() if version is None else version
        try:
            manifest = self.manifest(chosen)
        except ManifestCorrupt as error:
            return VerifyReport(version=chosen, problems=[str(error)])
        return verify_version(layout.version_dir(self.path, chosen), manifest, progress)

    def diff(self, a: str, b: str, *, progress: Progress = no_progress) -> VersionDiff:
        """Which tensors differ between two versions, in how many elements, and how far."""
        with self.reader(a) as first, self.reader(b) as second:
            return diff_versions(first, second, progress)

    def _announced(self) -> str | None:
        try:
            return self.newest()
        except WeightcastError as error:
            log.warning("gc store=%s goes on without a readable version file: %s", self.path, error)
            return None

    def _version_dirs(self) -> list[Path]:
        root = layout.versions_dir(self.path)
        if not root.is_dir():
            return []
        return [path for path in root.iterdir() if path.is_dir()]

    def _check_exists(self) -> None:
        if not self.path.is_dir():
            raise StoreNotFound(self.path, "the directory does not exist")
