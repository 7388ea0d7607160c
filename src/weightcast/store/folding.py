"""Deltas over several versions at once: for a version whose chain is long, and for a replica that is behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from weightcast import logs
from weightcast.delta import Delta, MovedState, Packing, State, pack
from weightcast.errors import InvalidInput, NotFound
from weightcast.store import layout
from weightcast.store.catalog import Catalog
from weightcast.store.chain import Chain, fold_deltas, opened_state, prove, resolve
from weightcast.store.compare import Progress, no_progress
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.files import put_back, refusals, replace_synced, sync_dir, write_synced
from weightcast.store.payload import packed_entry
from weightcast.tensors.digest import DEFAULT
from weightcast.wire.manifest import BaseRef, Manifest, decode_manifest, encode_manifest

log = logs.get(__name__)


def fold_version(
    catalog: Catalog, version: str, onto: str | None, *, policy: DeltaPolicy, progress: Progress = no_progress
) -> Manifest:
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
    threads, slicing = policy.threads, policy.slicing
    if len(steps) == 1:
        log.info("nothing to fold", version=version, base=base.end.version)
        return manifest
    with opened_state(catalog.path, base, threads=threads) as state:
        share = manifest.nbytes // (len(steps) + 1)  # each delta reads the state once, and so does the proof
        folded = _folded(catalog.path, steps, base, state, threads, lambda: progress(share))
        prove(MovedState(state, folded), manifest, str(directory))
        progress(manifest.nbytes - share * len(steps))
        chosen = list(dict.fromkeys(payload.packing or "gaps" for payload in manifest.payloads))
        packed = {packing: pack(folded, packing=packing, slicing=slicing, base=state, threads=threads) for packing in chosen}
    names = layout.next_payload_names(directory, len(packed))
    written = dict(zip(names, packed.values(), strict=True))
    payloads = tuple(packed_entry(name, data, manifest.algorithm or DEFAULT) for name, data in written.items())
    ref = BaseRef(version=base.end.version, root_digest=base.end.root_digest)
    replacement = msgspec.structs.replace(manifest, base=ref, payloads=payloads, boxes={})
    _replace(directory, replacement, written)
    log.info(
        "versions folded",
        version=version,
        base=ref.version,
        steps=len(steps),
        nbytes=replacement.payload_nbytes,
        before_nbytes=manifest.payload_nbytes,
        store=catalog.path,
    )
    return replacement


def _replace(directory: Path, manifest: Manifest, packed: Mapping[str, bytes]) -> None:
    """Write the new payloads beside the old ones, which readers may be in the middle of, and then the manifest by rename."""
    path = directory / layout.MANIFEST
    encoded = encode_manifest(manifest)
    decode_manifest(encoded, path)
    with refusals("read", path):
        before = path.read_bytes()
    try:
        for file, data in packed.items():
            write_synced(directory / file, data)
        sync_dir(directory)
        replace_synced(path, encoded)
    except BaseException:
        if put_back(path, before):  # else the manifest names the new payloads, which must then stay
            for file in packed:
                with suppress(OSError):  # what failed first is what the caller must hear of; gc removes the rest
                    (directory / file).unlink(missing_ok=True)
        raise


def delta_between(
    catalog: Catalog,
    old: str,
    new: str,
    *,
    packing: Packing,
    policy: DeltaPolicy,
) -> bytes:
    """The deltas that lead from a version to another as one, packed and proved. See `Store.delta_between`."""
    chain = resolve(catalog, new)
    split = chain.split(old)
    if split is None:
        bases = ", ".join(base.version for base in (chain.full, *chain.deltas[:-1]))
        built = f"is a delta on {bases}" if chain.deltas else "is a full version"
        raise NotFound(f"no deltas lead from version {old} to {new}, which {built}. Take the full version.")
    base, steps = split
    threads = policy.threads
    with opened_state(catalog.path, base, threads=threads) as state:
        folded = _folded(catalog.path, steps, base, state, threads)
        prove(MovedState(state, folded), chain.end, str(catalog.directory(new)))
        return pack(folded, packing=packing, slicing=policy.slicing, base=state, threads=threads)


def _folded(
    store: Path,
    steps: tuple[Manifest, ...],
    base: Chain,
    state: State,
    threads: int | None,
    done: Callable[[], None] = lambda: None,
) -> Delta:
    folded = None
    for manifest in steps:
        folded = fold_deltas(store, [manifest], state, start=folded, threads=threads)
        done()
    return folded or Delta(state.specs, {}, base.end.root_digest, base.end.root_digest)
