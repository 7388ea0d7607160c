"""Writing a snapshot in the legacy layout: safetensors content under the legacy names, and a manifest of ours beside."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from weightcast import logs
from weightcast.errors import InvalidInput, StorageFailed
from weightcast.store.files import make_dir, refusals, remove_file, rename, replace_synced, sync_dir
from weightcast.store.part_series import PartSeries
from weightcast.store.safetensors_file import HEADER_ROOM, header_room_for
from weightcast.store.snapshot.names import check_device_id, check_rank, manifest_name, parse, part_name, single_name
from weightcast.store.snapshot.reader import MANIFEST, PART, VERSION, WRITE
from weightcast.store.writer import NamedTensors
from weightcast.tensors.bridges import host_array, spec_of
from weightcast.tensors.digest import DEFAULT, Algorithm
from weightcast.wire.manifest import RANK, RANKS, check_version_id
from weightcast.wire.snapshot_manifest import SnapshotManifest, encode_snapshot_manifest

log = logs.get(__name__)

_ASIDE = ".tmp"
_STREAMED_HEADER_ROOM = 4 << 20  # a single file whose tensors are not known before: about 20,000 of them


def write_snapshot(
    directory: Path,
    tensors: NamedTensors,
    *,
    rank: int,
    ranks: int,
    device_id: str,
    version: str,
    part_nbytes: int | None,
    algorithm: Algorithm = DEFAULT,
) -> SnapshotManifest:
    """Replace the snapshot of rank `rank` of `ranks` and of a device id.

    Tensors from an iterator are written as they come and not kept.

    Parts are numbered from 0 and closed when the next tensor would make them larger than `part_nbytes`; a tensor larger
    than that has a part of its own. None writes one file.

    All files are first written aside, so a failure before the last tensor leaves the old snapshot as it was; the medium
    must have room for both. Then the old manifest is removed, the files are renamed, stale ones removed and the new manifest
    written. Whoever dies in between leaves files that readers refuse. One writer per rank and device id at a time.
    """
    check_rank(rank)
    check_device_id(device_id)
    check_version_id(version)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks <= rank:
        raise InvalidInput(f"rank {rank} of {ranks!r} ranks cannot be: give the number of ranks that the snapshots are for.")
    if part_nbytes is not None and part_nbytes <= 0:
        raise InvalidInput(f"part_nbytes must be a positive number of bytes or None, not {part_nbytes}.")
    begin_s = time.monotonic()
    make_dir(directory)
    sealed = manifest_name(rank, device_id)
    recorded = {"format": "pt", VERSION: version, RANK: str(rank), RANKS: str(ranks)}
    recorded |= {MANIFEST: sealed, WRITE: secrets.token_hex(8)}

    def name_of(index: int) -> str:
        return single_name(rank, device_id) if part_nbytes is None else part_name(rank, device_id, index)

    series = PartSeries(
        lambda index: directory / f".{name_of(index)}{_ASIDE}",
        part_nbytes=part_nbytes,
        algorithm=algorithm,
        metadata_of=lambda index: recorded | ({} if part_nbytes is None else {PART: str(index)}),
    )
    _remove_aside(directory, rank, device_id)
    try:
        _add_all(series, tensors, one_file=part_nbytes is None)
        series.finish()
        if not series.entries:
            raise InvalidInput("there are no tensors to write into a snapshot.")
        files = tuple(
            msgspec.structs.replace(part, file=name_of(index), pieces=b"") for index, part in enumerate(series.parts)
        )
        manifest = SnapshotManifest(
            version=version,
            rank=rank,
            device_id=device_id,
            created_s=time.time(),
            algorithm=algorithm,
            files=files,
            tensors=tuple(series.entries),
            ranks=ranks,
        )
        _replace(directory, manifest)
    except BaseException:
        series.close()
        try:
            _remove_aside(directory, rank, device_id)
        except StorageFailed as error:  # what failed first is what the caller must hear of; the next write removes the rest
            log.warning("files left", version=version, error=error)
        raise
    log.info(
        "snapshot written",
        version=version,
        rank=rank,
        ranks=ranks,
        device_id=device_id,
        files=len(files),
        nbytes=sum(part.nbytes for part in files),
        ms=logs.ms(time.monotonic() - begin_s),
        path=directory,
    )
    return manifest


def _add_all(series: PartSeries, tensors: NamedTensors, *, one_file: bool) -> None:
    if isinstance(tensors, Mapping):
        specs = [spec_of(name, tensor) for name, tensor in tensors.items()]  # all are checked before the first is written
        needed = max(HEADER_ROOM, header_room_for(specs))
        series.header_room = needed if one_file else min(needed, 16 * HEADER_ROOM)
        if one_file:  # those that would put others off their alignment come last, the widest of them first
            specs.sort(key=lambda spec: (spec.nbytes % 8 != 0, -spec.dtype.itemsize if spec.nbytes % 8 else 0))
        for spec in specs:
            series.add(spec, host_array(spec.name, tensors[spec.name]))
        return
    if one_file:
        series.header_room = _STREAMED_HEADER_ROOM
    names: set[str] = set()
    for name, tensor in tensors:
        if name in names:
            raise InvalidInput(f"tensor {name!r} was given twice for one snapshot.")
        names.add(name)
        series.add(spec_of(name, tensor), host_array(name, tensor))


def _replace(directory: Path, manifest: SnapshotManifest) -> None:
    """The moment of change: from here on the old snapshot is gone, and with the last line the new one is there."""
    new = {part.file for part in manifest.files}
    sealed = directory / manifest_name(manifest.rank, manifest.device_id)
    remove_file(sealed)
    sync_dir(directory)
    for part in manifest.files:
        rename(directory / f".{part.file}{_ASIDE}", directory / part.file)
    for path in _weights(directory, manifest.rank, manifest.device_id):
        if path.name not in new:
            remove_file(path)
            log.info("snapshot file removed", path=path, version=manifest.version, why="the version has no such file")
    sync_dir(directory)
    replace_synced(sealed, encode_snapshot_manifest(manifest))


def _weights(directory: Path, rank: int, device_id: str) -> Iterator[Path]:
    """The parts and the single file of a rank and device id, under whatever spelling of the part numbers."""
    with refusals("list", directory):
        paths = sorted(directory.iterdir())
    for path in paths:
        name = parse(path.name)
        if name and name.kind in ("part", "single") and (name.rank, name.device_id) == (rank, device_id):
            yield path


def _remove_aside(directory: Path, rank: int, device_id: str) -> None:
    """Remove what an interrupted write of the same rank and device id left aside."""
    with refusals("remove files that were written aside in", directory):
        for path in directory.iterdir():
            if path.name.startswith(".") and path.name.endswith(_ASIDE):
                name = parse(path.name[1 : -len(_ASIDE)])
                if name and name.kind != "legacy" and (name.rank, name.device_id) == (rank, device_id):
                    path.unlink(missing_ok=True)
