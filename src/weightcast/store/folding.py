"""Deltas over several versions at once: for a version whose chain is long, and for a replica that is behind."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.delta import Delta, Encoder, MovedState, Packing, State, inspect, pack
from weightcast.delta.sparse import check_specs
from weightcast.errors import InvalidInput, NotFound
from weightcast.store import layout
from weightcast.store.catalog import Catalog
from weightcast.store.chain import Chain, fold_deltas, opened_state, prove, resolve
from weightcast.store.files import put_back, refusals, replace_synced, sync_dir, write_synced
from weightcast.store.payload import payload_of, read_payload
from weightcast.tensors.digest import DEFAULT, bytes_digest
from weightcast.wire.manifest import BaseRef, FileEntry, Manifest, decode_manifest, encode_manifest

log = logs.get(__name__)


def fold_version(catalog: Catalog, version: str, onto: str | None, *, threads: int | None = None) -> Manifest:
    """Rewrite a delta version so that it leads from an older base in one step. The caller holds the store's lock."""
    chain = resolve(catalog, version)
    manifest, directory = chain.end, catalog.directory(version)
    if not chain.deltas:
        raise InvalidInput(f"version {version} is a full version: there is nothing to fold.")
    split = chain.split(chain.full.version if onto is None else onto)
    if split is None or not split[1]:
        bases = ", ".join(base.version for base in (chain.full, *chain.deltas[:-1]))
        raise InvalidInput(f"version {version} cannot be folded onto {onto}: its bases are {bases}.")
    base, steps = split
    if len(steps) == 1:
        log.info("nothing to fold", version=version, base=base.end.version)
        return manifest
    with opened_state(catalog.path, base, threads=threads) as state:
        folded = _folded(catalog.path, steps, base, state, threads)
        prove(MovedState(state, folded), manifest, str(directory))
        packing = inspect(read_payload(directory, manifest)).packing  # receivers that hold slices need what was chosen
        packed = pack(folded, packing=packing or "classes", base=state, threads=threads)
    payload = FileEntry(
        file=layout.next_payload_name(directory),
        nbytes=len(packed),
        digest=bytes_digest(packed, manifest.algorithm or DEFAULT),
    )
    ref = BaseRef(version=base.end.version, root_digest=base.end.root_digest)
    replacement = msgspec.structs.replace(manifest, base=ref, payload=payload)
    _replace(directory, replacement, payload.file, packed)
    log.info(
        "versions folded",
        version=version,
        base=ref.version,
        steps=len(steps),
        nbytes=payload.nbytes,
        before_nbytes=payload_of(manifest).nbytes,
        store=catalog.path,
    )
    return replacement


def _replace(directory: Path, manifest: Manifest, file: str, packed: bytes) -> None:
    """Write the new payload beside the old one, which readers may be in the middle of, and then the manifest by rename."""
    path = directory / layout.MANIFEST
    encoded = encode_manifest(manifest)
    decode_manifest(encoded, path)
    with refusals("read", path):
        before = path.read_bytes()
    try:
        write_synced(directory / file, packed)
        sync_dir(directory)
        replace_synced(path, encoded)
    except BaseException:
        if put_back(path, before):  # else the manifest names the new payload, which must then stay
            with suppress(OSError):  # what failed first is what the caller must hear of; gc removes the rest
                (directory / file).unlink(missing_ok=True)
        raise


def delta_between(
    catalog: Catalog,
    old: str,
    new: str,
    *,
    packing: Packing = "classes",
    threads: int | None = None,
    limit: int | None = None,
    deadline: Deadline | None = None,
) -> bytes:
    """One packed delta from a version to another, proved. See `Store.delta_between`.

    Raises `NotFound` if it has more than `limit` bytes.
    """
    chain = resolve(catalog, new)
    split = chain.split(old)
    written = _Written(f"the delta from {old} to {new}", limit)
    if split is None:
        _encode_directly(catalog, resolve(catalog, old), chain, written, packing, threads, deadline)
    else:
        base, steps = split
        with opened_state(catalog.path, base, threads=threads, deadline=deadline) as state:
            folded = _folded(catalog.path, steps, base, state, threads)
            prove(MovedState(state, folded), chain.end, str(catalog.directory(new)))
            written.add(pack(folded, packing=packing, base=state, threads=threads))
    return b"".join(written.pieces)


class _Written:
    """What was written of a packed delta, up to a limit."""

    def __init__(self, what: str, limit: int | None) -> None:
        self._what, self._limit = what, limit
        self._nbytes = 0
        self.pieces: list[bytes] = []

    def add(self, data: bytes) -> None:
        self._nbytes += len(data)
        if self._limit is not None and self._nbytes > self._limit:
            raise NotFound(f"{self._what} has more than {self._limit} bytes.")
        self.pieces.append(data)


def _folded(store: Path, steps: tuple[Manifest, ...], base: Chain, state: State, threads: int | None) -> Delta:
    folded = fold_deltas(store, steps, state, threads=threads)
    return folded or Delta(state.specs, {}, base.end.root_digest, base.end.root_digest)


def _encode_directly(
    catalog: Catalog,
    old: Chain,
    new: Chain,
    written: _Written,
    packing: Packing,
    threads: int | None,
    deadline: Deadline | None,
) -> None:
    with ExitStack() as using:
        before, after = (
            using.enter_context(opened_state(catalog.path, chain, threads=threads, deadline=deadline))
            for chain in (old, new)
        )
        check_specs(before.specs, after.specs)
        for chain, state in ((old, before), (new, after)):
            prove(state, chain.end, str(catalog.directory(chain.end.version)))
        with Encoder(written.add, packing=packing, threads=threads) as encoder:
            for name, spec in before.specs.items():
                encoder.add(spec, partial(before.lanes, name), partial(after.lanes, name))
            encoder.finish(base_root=old.end.root_digest, new_root=new.end.root_digest)
