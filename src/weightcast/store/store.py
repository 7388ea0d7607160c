"""The store: a directory of immutable versions that any number of processes read and one at a time writes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.delta import Packing
from weightcast.errors import AnyPath, ManifestCorrupt
from weightcast.store import layout
from weightcast.store.acks import served_versions
from weightcast.store.catalog import Catalog, Listing
from weightcast.store.chain import load_chain, resolve
from weightcast.store.checkpoint import Checkpoint
from weightcast.store.compare import Progress, VerifyReport, VersionDiff, diff_versions, no_progress, verify_version
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.files import make_dir, sync_dir
from weightcast.store.folding import delta_between, fold_version
from weightcast.store.lock import exclusive
from weightcast.store.pruning import GcReport, prune
from weightcast.store.publishing import Mode, Request, StorePublisher
from weightcast.store.reader import Reader
from weightcast.store.state_reader import open_version
from weightcast.store.version_file import TXT_NAME, VersionFile, migrate_version_file, write_version_file
from weightcast.store.writer import HasStateDict, NamedTensors, PublishAs
from weightcast.tensors.bridges import is_distributed
from weightcast.tensors.digest import DEFAULT, Algorithm
from weightcast.tensors.flat import Array, Piece
from weightcast.tensors.spec import bare_names, check_distinct
from weightcast.wire.manifest import Manifest, decode_manifest, encode_manifest

__all__ = ["DeltaPolicy", "GcReport", "Listing", "Mode", "Store"]

log = logs.get(__name__)

PART_NBYTES = 1 << 30
LOCK_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 3600.0


class Store:
    """A directory of versions. Opening one reads and creates nothing; the first `publish` makes the directory.

    `delta` says when `publish` writes a delta. What is kept of the last published state for that lives as long as this
    object.
    """

    def __init__(self, path: AnyPath, *, lock_timeout: float = LOCK_TIMEOUT_S, delta: DeltaPolicy | None = None) -> None:
        self.path = Path(path)
        self._lock_timeout = lock_timeout
        self._policy = delta or DeltaPolicy()
        self._catalog = Catalog(self.path)
        self._publisher = StorePublisher(self._catalog, self._policy)

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r})"

    # -- writing -------------------------------------------------------------------------------------------------

    def publish(
        self,
        version: str,
        tensors: NamedTensors | HasStateDict,
        mode: Mode = "auto",
        *,
        dtype: str | None = None,
        keep_dtype: Sequence[str] = (),
        strip_wrappers: bool = False,
        finite: bool = False,
        step: int | None = None,
        files: Mapping[str, bytes] | None = None,
        metadata: Mapping[str, str] | None = None,
        part_nbytes: int = PART_NBYTES,
        algorithm: Algorithm = DEFAULT,
    ) -> Manifest:
        """Publish a version from a mapping or an iterator of named tensors, or a module, and make it the newest.

        When this returns, the version is whole and on the medium; when it raises, the store is as before; when the
        process dies, the store holds exactly the old versions or the new one too. Tensors are written as they come, so an
        iterator may reuse its memory, and none is held longer than it takes to write it. A part holds at most
        `part_nbytes`, unless a single tensor is larger. `step` defaults to the number at the end of the version id, else
        to the count of publications.

        `auto` writes a delta on the newest version where the policy of this store allows one and it is expected to pay,
        else a full version, and logs why. `delta` writes one whether it pays or not, and raises `Conflict` where the policy
        does not allow it.

        `dtype` ("BF16") converts tensors of F64, F32, F16 and BF16, one after the other, rounding to the nearest; those
        that match a pattern of `keep_dtype`, and other dtypes, stay as they are. `strip_wrappers` removes from names what
        `torch.compile`, activation checkpointing, FSDP1 and DDP put into them. With `finite` a version with a NaN or an
        infinity is refused.

        DTensors that are sharded over processes (FSDP2) are gathered one after the other. Then every rank of their mesh
        must call this with the same version: the first rank writes, all return the same manifest or raise the same error.
        A rank that does not come ends the others with `GatherFailed`, after the timeout of their process group.
        """
        form = PublishAs.of(dtype, keep_dtype, strip_wrappers=strip_wrappers)
        named = form.named(tensors, version)
        request = Request(
            version=version,
            tensors=named,
            mode=mode,
            step=step,
            files=files or {},
            metadata=metadata or {},
            part_nbytes=part_nbytes,
            algorithm=algorithm,
            finite=finite,
        )

        def write(whole: NamedTensors) -> Manifest:
            return self._publish(replace(request, tensors=form.converted(whole)))

        if isinstance(named, Mapping) and any(map(is_distributed, named.values())):
            from weightcast.tensors.bridges.gathering import gathering_of  # noqa: PLC0415 - torch is an extra

            gathering = gathering_of(version, named)
            if gathering is not None:
                told = gathering.run(lambda whole: encode_manifest(write(whole)))
                return decode_manifest(told, self.path)
        return write(named)

    def _publish(self, request: Request) -> Manifest:
        make_dir(self.path)
        if not layout.versions_dir(self.path).is_dir():
            sync_dir(self.path.parent)  # whoever made the directory may have died before it was safe
        with self._locked():
            return self._publisher.publish(request)

    def publish_checkpoint(
        self,
        version: str,
        directory: AnyPath,
        mode: Mode = "auto",
        *,
        progress: Progress = no_progress,
        dtype: str | None = None,
        keep_dtype: Sequence[str] = (),
        strip_wrappers: bool = False,
        finite: bool = False,
        step: int | None = None,
        part_nbytes: int = PART_NBYTES,
        algorithm: Algorithm = DEFAULT,
    ) -> Manifest:
        """Publish a directory of safetensors files together with its small files (config, tokenizer).

        `dtype`, `keep_dtype`, `strip_wrappers` and `finite` are those of `publish`.
        """
        checkpoint = Checkpoint(Path(directory))
        names = bare_names(checkpoint.specs) if strip_wrappers else {name: name for name in checkpoint.specs}
        check_distinct(names, f"version {version}")

        def reported() -> Iterator[tuple[str, Array]]:
            for name, array in checkpoint.tensors():
                yield names[name], array
                progress(array.nbytes)

        return self.publish(
            version,
            reported(),
            mode,
            dtype=dtype,
            keep_dtype=keep_dtype,
            finite=finite,
            step=step,
            files=dict(checkpoint.files()),
            part_nbytes=part_nbytes,
            algorithm=algorithm,
        )

    def announce(self, version: str) -> None:
        """Make a published version the newest: the one that is taken where no version is asked for."""
        self._catalog.check_exists()
        with self._locked():
            write_version_file(self.path, version=version, step=self.manifest(version).step)

    def fold(self, version: str | None = None, *, onto: str | None = None, progress: Progress = no_progress) -> Manifest:
        """Rewrite a delta version (default: the newest) so that it leads from an older base in one step.

        `onto` is one of the versions it is built on, by default the full one. Id, state and root digest stay; versions in
        between may then be removed by `gc`. So may the replaced payload, which stays until then for its readers.
        `progress` gets shares of the state's bytes that add up to them.
        """
        self._catalog.check_exists()
        with self._locked():
            return fold_version(self._catalog, version or self.newest(), onto, policy=self._policy, progress=progress)

    def gc(
        self,
        *,
        keep_last: int = 3,
        keep_full_every: int | None = None,
        protect: Collection[str] = (),
        ignore_receivers: bool = False,
        dry_run: bool = False,
    ) -> GcReport:
        """Remove old versions, replaced payloads and what interrupted writers left behind.

        `docs/format.md` says what is kept. Versions that receivers told a depot of this store they serve are kept too,
        unless `ignore_receivers`. A version is gone the moment its manifest is; a `gc` that dies leaves garbage that the
        next one removes.
        """
        self._catalog.check_exists()
        with self._locked():
            return prune(
                self._catalog,
                keep_last=keep_last,
                keep_full_every=keep_full_every,
                protect=protect,
                served=() if ignore_receivers else served_versions(self.path),
                dry_run=dry_run,
            )

    def migrate(self) -> VersionFile | None:
        """Turn a legacy version.txt into version.yaml. None if there is nothing to convert."""
        if not (self.path / TXT_NAME).exists():
            return None
        with self._locked():
            return migrate_version_file(self.path)

    def _locked(self) -> AbstractContextManager[None]:
        return exclusive(layout.lock_path(self.path), Deadline.after(self._lock_timeout))

    # -- reading -------------------------------------------------------------------------------------------------

    def versions(self) -> list[str]:
        """The ids of all versions, in the order of publication. One whose manifest is damaged is left out and logged."""
        listings = self.listings()
        for listing in listings:
            if listing.error:
                log.warning("version left out", store=self.path, version=listing.version, error=listing.error)
        return [listing.version for listing in listings if listing.manifest]

    def listings(self) -> list[Listing]:
        """Every version directory that has a manifest, readable or not, in the order of publication."""
        return self._catalog.listings()

    def manifest(self, version: str) -> Manifest:
        """What a version is. Everything in it was checked against its seal and itself."""
        return self._catalog.manifest(version)

    def newest(self) -> str:
        """The id of the version that version.yaml names."""
        return self._catalog.newest()

    def load(self, version: str | None = None) -> dict[str, Array]:
        """All tensors of a version (default: the newest) in fresh memory, verified. Tied names share one array."""
        chosen = self.newest() if version is None else version
        return load_chain(self.path, resolve(self._catalog, chosen), threads=self._policy.threads)

    def read(self, version: str | None = None, *, timeout: float = READ_TIMEOUT_S) -> Iterator[Piece]:
        """All bytes of a version in pieces of a few MiB, each valid until the next is asked for.

        The digests are checked on the way; if any is wrong, the iterator ends in `DigestMismatch`, which lists them all.
        """
        deadline = Deadline.after(timeout)
        with self.reader(version) as reader:
            yield from reader.pieces(deadline)

    def reader(self, version: str | None = None) -> Reader:
        """A version opened for reading by byte range.

        Opening a delta version decodes the payloads that lead to it. Memory: its changes since the full version, about 6
        bytes each for 16-bit elements; tensors are put together as they are read.
        """
        return open_version(self._catalog, self.newest() if version is None else version)

    def verify(self, version: str | None = None, *, progress: Progress = no_progress) -> VerifyReport:
        """Read every byte of a version and compare it with what was published. Look at `ok` of the report.

        A delta version is verified as the state it leads to: with everything that it is built on.
        """
        chosen = self.newest() if version is None else version
        try:
            manifest = self.manifest(chosen)
        except ManifestCorrupt as error:
            return VerifyReport(version=chosen, problems=[str(error)])
        return verify_version(self._catalog, manifest, progress)

    def diff(self, a: str, b: str, *, progress: Progress = no_progress) -> VersionDiff:
        """Which tensors differ between two versions, in how many elements, and how far."""
        with self.reader(a) as first, self.reader(b) as second:
            return diff_versions(first, second, progress)

    def delta_between(self, old: str, new: str, *, packing: Packing | None = None) -> bytes:
        """One packed delta that leads from one version to another, for a replica that is some versions behind.

        The deltas between are folded, and proved against the digests of `new` before they are returned. Raises `NotFound` if
        `new` is not built on `old`. `packing` defaults to that of this store's policy.
        """
        chosen = self._policy.packings[0] if packing is None else packing
        return delta_between(self._catalog, old, new, packing=chosen, policy=self._policy)
