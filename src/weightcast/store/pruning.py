"""Removing what a store needs no more: old versions, replaced payloads, and what writers that died left behind."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from weightcast import logs
from weightcast.errors import WeightcastError
from weightcast.store import layout
from weightcast.store.catalog import Catalog
from weightcast.store.files import aside_path, refusals, remove_dir, remove_file, sync_dir
from weightcast.store.retention import plan_retention
from weightcast.wire.manifest import Manifest

log = logs.get(__name__)


@dataclass(frozen=True)
class GcReport:
    """What `gc` removed and what it kept, with the reasons."""

    removed: list[str]
    garbage: list[str]
    kept: dict[str, str]
    freed_nbytes: int
    dry_run: bool


def prune(
    catalog: Catalog,
    *,
    keep_last: int,
    keep_full_every: int | None,
    protect: Collection[str],
    served: Collection[str] = (),
    dry_run: bool,
) -> GcReport:
    """See `Store.gc`; `served` are the versions that receivers are at. The caller holds the store's lock."""
    manifests = [listing.manifest for listing in catalog.listings() if listing.manifest]
    keep = plan_retention(
        manifests,
        keep_last=keep_last,
        keep_full_every=keep_full_every,
        newest=_announced(catalog),
        protect={*protect, *served},
    )
    keep |= dict.fromkeys(keep.keys() & set(served) - set(protect), "a receiver serves it")
    removed = [manifest.version for manifest in manifests if manifest.version not in keep]
    unsealed = sorted(path.name for path in catalog.directories() if not (path / layout.MANIFEST).exists())
    kept = [manifest for manifest in manifests if manifest.version in keep]
    if not dry_run:
        for manifest in kept:  # a fold that died may have renamed this manifest without making that safe
            if manifest.kind == "delta":
                sync_dir(catalog.directory(manifest.version))
    freed = sum(remove_version(catalog.directory(version), dry_run=dry_run) for version in [*unsealed, *removed])
    strays = [path for manifest in kept for path in unreferenced(catalog.directory(manifest.version), manifest)]
    # Files that were being written aside when their writer died. Depots write their receivers under a lock of their own,
    # so that file may be in use; the next acknowledgement replaces it.
    receivers = aside_path(catalog.path / layout.RECEIVERS)
    strays += sorted(path for path in catalog.path.glob(".*.tmp") if path != receivers)
    for path in strays:
        with refusals("look at", path):
            freed += path.lstat().st_size
        if not dry_run:
            remove_file(path)
    garbage = unsealed + [_name(catalog.path, path) for path in strays]
    log.info("store pruned", store=catalog.path, removed=removed, garbage=garbage, freed_nbytes=freed, dry_run=dry_run)
    return GcReport(removed=removed, garbage=garbage, kept=keep, freed_nbytes=freed, dry_run=dry_run)


def remove_version(directory: Path, *, dry_run: bool) -> int:
    """Remove a version, its manifest first, and return the bytes freed."""
    if dry_run:
        return sum(file.lstat().st_size for file in directory.iterdir())
    manifest = directory / layout.MANIFEST
    freed = manifest.stat().st_size if manifest.exists() else 0
    remove_file(manifest)
    sync_dir(directory)  # the version is gone for good before the first of its bytes is
    return freed + remove_dir(directory)


def unreferenced(directory: Path, manifest: Manifest) -> list[Path]:
    """The files in a version's directory that its manifest does not know."""
    known = {layout.MANIFEST, *manifest.listed_files}
    return sorted(path for path in directory.iterdir() if path.name not in known and not path.is_dir())


def _name(store: Path, path: Path) -> str:
    return path.name if path.parent == store else f"{path.parent.name}/{path.name}"


def _announced(catalog: Catalog) -> str | None:
    try:
        return catalog.newest()
    except WeightcastError as error:
        log.warning("version file unreadable", store=catalog.path, error=error)
        return None
