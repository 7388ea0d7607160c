"""The versions of a store, as a depot serves them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.depot.exchange import FileRange
from weightcast.errors import (
    AnyPath,
    InvalidInput,
    ManifestCorrupt,
    NotFound,
    PartCorrupt,
    StoreNotFound,
    VersionNotFound,
    VersionNotSet,
    WeightcastError,
    WrongState,
)
from weightcast.store import layout
from weightcast.store.byte_file import ByteFile, PooledFile
from weightcast.store.catalog import Catalog
from weightcast.store.files import read_small
from weightcast.store.version_file import TXT_NAME, YAML_NAME
from weightcast.wire.depot import Newest, Offer
from weightcast.wire.manifest import MAX_MANIFEST_NBYTES, FileListing, Manifest, check_version_id, decode_listing

log = logs.get(__name__)

POLL_S = 0.05
KEEP_S = 300.0
LINGER_S = 30.0
KEPT_VERSIONS = 32  # that stay open unread: each takes its manifest, some KiB per tensor
KEPT_GONE = 256  # the same of versions that have left the store, which cannot be opened again
_TURN_S = 1.0  # how often unread versions are closed

Stamp = tuple[int, int, int]  # what changes whenever a file is replaced


class StoredVersion:
    """A holding whose bytes are read from the files of a store, or sent from them.

    A file that is removed from the store stays readable until this is let go, unless the process has too many other files
    open. The size of a file is compared with the manifest when it is opened and before each block is given out.
    """

    def __init__(self, directory: Path, manifest: FileListing, encoded: bytes) -> None:
        self.manifest = manifest
        self._encoded = encoded
        self._sizes = {file: entry.nbytes for file, entry in manifest.listed_files.items()}
        self._files = {file: _opened(directory / file, nbytes) for file, nbytes in self._sizes.items() if nbytes}

    def take_over(self, before: StoredVersion) -> None:
        """Serve the files too that only an earlier manifest of the same state knew: a payload that a fold has replaced."""
        if before.manifest.root_digest == self.manifest.root_digest:
            self._sizes = {**before._sizes, **self._sizes}
            self._files = {**before._files, **self._files}

    @property
    def encoded(self) -> bytes:
        """The manifest as it is sent: sealed."""
        return self._encoded

    @property
    def files(self) -> Mapping[str, int]:
        """The files that the version is made of, and their sizes."""
        return self._sizes

    def views(self, file: str, start: int, stop: int, *, deadline: Deadline) -> list[memoryview]:
        """The bytes of a range, read into fresh memory. Raises `PartCorrupt` if the file has another size than published."""
        return [block.read() for block in self.sendable(file, start, stop, deadline=deadline)]

    def sendable(self, file: str, start: int, stop: int, *, deadline: Deadline) -> list[FileRange]:  # noqa: ARG002 - all is here
        """The range of the file. Raises `PartCorrupt` if the file has another size than published."""
        nbytes = self._sizes.get(file)
        if nbytes is None:
            raise NotFound(f"version {self.manifest.version} has no file {file!r}: it has {', '.join(self._sizes)}.")
        if not 0 <= start <= stop <= nbytes:
            raise InvalidInput(f"{file} of version {self.manifest.version} has {nbytes} bytes: not {start} to {stop}.")
        return [FileRange(_checked(self._files[file].opened(), nbytes), start, stop)] if start < stop else []


def _opened(path: Path, nbytes: int) -> PooledFile:
    file = PooledFile(path)
    _checked(file.opened(), nbytes)
    return file


def _checked(file: ByteFile, nbytes: int) -> ByteFile:
    found = file.size_now
    if found != nbytes:
        raise PartCorrupt(file.path, f"it has {found} bytes now, not {nbytes} as published")
    return file


@dataclass
class _Kept:
    """An opened version, how many read it now, and when it was last let go of."""

    stamp: Stamp
    version: StoredVersion
    readers: int = 0
    used_s: float = field(default_factory=time.monotonic)


class StoredShelf:
    """Serves what is published in a store, by whichever process. Opening it reads nothing; the store may come later.

    Versions that were asked for stay open: for `keep_s` after they were last read, but only for `linger_s` once they have
    left the store, so that a receiver in the middle of one can go on with its next range. Of unread versions only
    the last `KEPT_VERSIONS` stay open, and `KEPT_GONE` of those that have left the store. `poll_s` is how often the store
    is looked at while somebody waits for a new version; one thread does that for all.
    """

    def __init__(self, path: AnyPath, *, poll_s: float = POLL_S, keep_s: float = KEEP_S, linger_s: float = LINGER_S) -> None:
        if not (poll_s > 0 and keep_s >= 0 and linger_s >= 0):
            raise InvalidInput(f"poll_s={poll_s} must be positive, keep_s={keep_s} and linger_s={linger_s} not negative.")
        self.path = Path(path)
        self._versions = str(layout.versions_dir(self.path))
        self._catalog = Catalog(self.path)
        self._poll_s, self._keep_s, self._linger_s = poll_s, keep_s, linger_s
        self._changed = threading.Condition()
        self._opening = threading.Lock()  # one version is opened at a time, so that none is opened twice
        self._kept: dict[str, _Kept] = {}
        self._offers: dict[str, tuple[Stamp, Offer]] = {}
        self._newest: Newest | None = None
        self._looking = threading.Lock()
        self._seen: object = None  # what the version file looked like when `_newest` was read
        self._trouble = ""  # why it could not be read the last time: said once
        self._waiting = 0
        self._keeper: threading.Thread | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- what there is ------------------------------------------------------------------------------------------------

    def offers(self) -> list[Offer]:
        """What there is, in the order of publication. A version whose manifest is damaged is left out and logged."""
        found: dict[str, tuple[Stamp, Offer]] = {}
        for directory in self._catalog.directories():
            version = directory.name
            stamp = _stamp(directory / layout.MANIFEST)
            known = self._offers.get(version)
            if stamp is None:
                continue
            if known is not None and known[0] == stamp:
                found[version] = known
                continue
            try:
                found[version] = stamp, _offer(self._catalog.manifest(version))
            except VersionNotFound:
                continue
            except WeightcastError as error:
                log.warning("version left out", store=self.path, version=version, error=error)
        self._offers = found
        return sorted((offer for _, offer in found.values()), key=lambda offer: offer.sequence)

    def newest(self) -> Newest | None:
        """The version that version.yaml names; None if none does yet, or if it cannot be had."""
        self._look()
        return self._newest

    def wait_newer(self, after: str, *, deadline: Deadline) -> Newest | None:
        """The newest version once it is another than `after`; None if it is not before the deadline, or this is closed."""
        self._look()
        with self._changed:
            self._waiting += 1
            try:
                self._keep()
                self._changed.wait_for(lambda: self._closed or self._is_newer(after), timeout=deadline.remaining())
            finally:
                self._waiting -= 1
            return self._newest if self._is_newer(after) else None

    def _is_newer(self, after: str) -> bool:
        return self._newest is not None and self._newest.version != after

    def _look(self) -> None:
        """Read the version file again if it is another one. One thread at a time: an older answer never follows a newer."""
        with self._looking:
            seen = (_stamp(self.path / YAML_NAME), _stamp(self.path / TXT_NAME))
            if seen == self._seen:
                return
            newest, trouble = None, ""
            try:
                _, listing = self._described(self._catalog.newest())
                newest = Newest(listing.version, listing.sequence, listing.root_digest)
            except (VersionNotSet, StoreNotFound) as error:
                log.debug("no newest version", store=self.path, error=error)
            except WeightcastError as error:
                trouble = str(error)
                if trouble != self._trouble:
                    log.warning("no newest version", store=self.path, error=error)
            with self._changed:
                self._seen, self._newest, self._trouble = None if trouble else seen, newest, trouble
                self._changed.notify_all()

    # -- versions -----------------------------------------------------------------------------------------------------

    @contextmanager
    def holding(self, version: str) -> Iterator[StoredVersion]:
        """A version, kept for as long as the context lasts. Raises `VersionNotFound`, or `PartCorrupt` if it is damaged."""
        kept = self._take(check_version_id(version))
        try:
            yield kept.version
        finally:
            with self._changed:
                kept.readers -= 1
                kept.used_s = time.monotonic()

    def _take(self, version: str) -> _Kept:
        kept = self._taken(version)
        if kept is None:
            with self._opening:
                kept = self._taken(version) or self._open(version)
        return kept

    def _taken(self, version: str) -> _Kept | None:
        """The version if it is open as it is now, or if it has left the store and is still read by who began with it."""
        stamp = _stamp(f"{self._versions}/{version}/{layout.MANIFEST}")  # for every request, and `Path` takes long
        with self._changed:
            if self._closed:
                raise WrongState(f"read version {version}", "closed", ["open"])
            kept = self._kept.get(version)
            if kept is None or stamp not in (None, kept.stamp):
                return None
            kept.readers += 1
            return kept

    def _open(self, version: str) -> _Kept:
        kept = self._read(version)
        with self._changed:
            before = self._kept.get(version)
            if before is not None and (before.readers or time.monotonic() - before.used_s < self._linger_s):
                kept.version.take_over(before.version)
            kept.readers += 1
            if not self._closed:
                self._kept[version] = kept
                self._limit()
                self._keep()
        return kept

    def _limit(self) -> None:
        """Forget those that were unread for the longest time, if there are too many. The caller holds the condition."""
        if len(self._kept) <= min(KEPT_VERSIONS, KEPT_GONE):
            return
        unread: dict[bool, list[str]] = {True: [], False: []}
        for version, one in sorted(self._kept.items(), key=lambda item: item[1].used_s):
            if not one.readers:
                unread[_stamp(layout.manifest_path(self.path, version)) == one.stamp].append(version)
        for is_there, most in ((True, KEPT_VERSIONS), (False, KEPT_GONE)):
            for version in unread[is_there][: max(0, len(unread[is_there]) - most)]:
                del self._kept[version]
                log.debug("version let go", version=version, store=self.path)

    def _read(self, version: str) -> _Kept:
        path = layout.manifest_path(self.path, version)
        while True:
            stamp = _stamp(path)
            try:
                data, listing = self._described(version)
                if stamp is not None:
                    return _Kept(stamp, StoredVersion(path.parent, listing, data))
            except PartCorrupt:
                if _stamp(path) == stamp:  # else it was removed or folded meanwhile
                    raise

    def _described(self, version: str) -> tuple[bytes, FileListing]:
        """The bytes of a manifest, and the files that it lists."""
        path = layout.manifest_path(self.path, check_version_id(version))
        try:
            data = read_small(path, MAX_MANIFEST_NBYTES)
        except FileNotFoundError:
            raise VersionNotFound(version, self.path, self._catalog.present()) from None
        listing = decode_listing(data, path)
        if listing.version != version:
            raise ManifestCorrupt(path, f"it describes version {listing.version}")
        return data, listing

    # -- the thread that looks after both -----------------------------------------------------------------------------

    def _keep(self) -> None:
        """Have the thread run that waits for others. The caller holds the condition."""
        if self._keeper is None and not self._closed:
            self._keeper = threading.Thread(target=self._run, name="depot shelf", daemon=True)
            self._keeper.start()

    def _run(self) -> None:
        turn_s = time.monotonic()
        while True:
            with self._changed:
                if self._closed or not (self._waiting or self._kept):
                    self._keeper = None
                    return
                self._changed.wait_for(lambda: self._closed, timeout=self._poll_s if self._waiting else _TURN_S)
                waiting = self._waiting
            if waiting:
                self._look()
            if time.monotonic() - turn_s >= _TURN_S:
                self._let_go()
                turn_s = time.monotonic()

    def _let_go(self) -> None:
        """Close versions that no request reads."""
        with self._changed:
            kept = list(self._kept.items())
        for version, one in kept:
            stays = _stamp(layout.manifest_path(self.path, version)) == one.stamp
            with self._changed:
                unused_s = time.monotonic() - one.used_s
                if not one.readers and unused_s >= (self._keep_s if stays else self._linger_s):
                    if self._kept.get(version) is one:
                        del self._kept[version]
                    log.debug("version let go", version=version, store=self.path)

    def close(self) -> None:
        """Let go of everything. What is being read stays readable for whoever reads it. Safe twice."""
        with self._changed:
            self._closed = True
            self._kept.clear()
            keeper = self._keeper
            self._changed.notify_all()
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join()


def _offer(manifest: Manifest) -> Offer:
    return Offer(
        version=manifest.version,
        sequence=manifest.sequence,
        step=manifest.step,
        kind=manifest.kind,
        root_digest=manifest.root_digest,
        nbytes=manifest.nbytes,
        base=manifest.base.version if manifest.base is not None else None,
    )


def _stamp(path: AnyPath) -> Stamp | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - not always a Path
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
