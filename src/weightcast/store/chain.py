"""Chains: a delta version leads over its bases back to a full one. Finding the way, checking it and walking it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from weightcast.clock import Deadline
from weightcast.delta import ArrayState, Delta, MovedState, State, decode_payloads, fold, move
from weightcast.delta.container import Block
from weightcast.errors import BaseVersionMismatch, DeltaCorrupt, InvalidInput, ManifestCorrupt, VersionNotFound
from weightcast.store import layout
from weightcast.store.catalog import Catalog
from weightcast.store.part_state import PartState
from weightcast.store.payload import read_payloads
from weightcast.store.reader import VersionReader
from weightcast.store.streaming import Proof
from weightcast.store.watching import WatchedState
from weightcast.tensors.flat import Array, Buffer, flat_bytes
from weightcast.tensors.lanes import lane_count
from weightcast.tensors.spec import TensorSpec
from weightcast.wire.manifest import Manifest, chosen_payloads

_PROOF_LANES = 1 << 20  # blocks that stay in the cache between being read and hashed


@dataclass(frozen=True)
class Chain:
    """A full version and the deltas that lead from it to a version, in the order they are applied."""

    full: Manifest
    deltas: tuple[Manifest, ...]

    @property
    def end(self) -> Manifest:
        """The version that the chain leads to."""
        return self.deltas[-1] if self.deltas else self.full

    def __len__(self) -> int:
        """How many versions it has, the full one included."""
        return 1 + len(self.deltas)

    def split(self, version: str) -> tuple[Chain, tuple[Manifest, ...]] | None:
        """The chain that ends at one of its versions, and the deltas after that; None if the version is not on it."""
        versions = [self.full.version, *(manifest.version for manifest in self.deltas)]
        if version not in versions:
            return None
        place = versions.index(version)
        return Chain(self.full, self.deltas[:place]), self.deltas[place:]


def resolve(catalog: Catalog, version: str) -> Chain:
    """The chain of a version. Every base must be there and be the very state that the delta on it was made on."""
    manifest = catalog.manifest(version)
    deltas: list[Manifest] = []
    while manifest.kind == "delta":
        deltas.append(manifest)
        manifest = _base_of(catalog, manifest)
        if any(manifest.version == later.version for later in deltas):
            path = layout.manifest_path(catalog.path, version)
            raise ManifestCorrupt(path, f"its chain of bases comes back to {manifest.version} and never to a full version")
    return Chain(manifest, tuple(reversed(deltas)))


def _base_of(catalog: Catalog, manifest: Manifest) -> Manifest:
    base = manifest.base
    if base is None:
        raise InvalidInput(f"version {manifest.version} is a full version: it has no base.")
    try:
        found = catalog.manifest(base.version)
    except VersionNotFound as error:
        where = f"{catalog.path}, where version {manifest.version} needs it as its base"
        raise VersionNotFound(base.version, where, error.present) from error
    if found.root_digest != base.root_digest:
        raise BaseVersionMismatch(
            version=manifest.version,
            base=base.version,
            base_root=base.root_digest,
            serving=found.version,
            serving_root=found.root_digest,
        )
    return found


@contextmanager
def opened_state(
    store: Path, chain: Chain, *, threads: int | None = None, deadline: Deadline | None = None
) -> Iterator[State]:
    """The state that a chain leads to, read from the medium as it is asked for. Any number of threads may read.

    Memory: the changes since the full version, about 6 bytes each for 16-bit elements. Nothing is proved yet: see `prove`.
    Nothing is read any more after the deadline, if there is one.
    """
    with PartState(layout.version_dir(store, chain.full.version), chain.full) as parts:
        what = f"reading version {chain.end.version} from {store}"
        state: State = parts if deadline is None else WatchedState(parts, deadline, what)
        yield moved(state, fold_deltas(store, chain.deltas, state, threads=threads, deadline=deadline))


def moved(state: State, folded: Delta | None) -> State:
    """A state that is read from files, with a delta applied or as it is."""
    return state if folded is None else MovedState(state, folded, in_place=True)


def fold_deltas(
    store: Path,
    deltas: Sequence[Manifest],
    base: State,
    *,
    start: Delta | None = None,
    threads: int | None = None,
    deadline: Deadline | None = None,
) -> Delta | None:
    """Deltas that follow one another as one that leads from `base` to the last. `start` is one that was folded before.

    Payloads are read one at a time, and each is compared with its digest and with what the manifest says of it.
    """
    folded = start
    for manifest in deltas:
        if deadline is not None:
            deadline.check(f"decoding version {manifest.version} in {store}")
        step = decode_step(store, manifest, moved(base, folded), threads)
        folded = step if folded is None else fold(folded, step)
    return folded


def decode_step(store: Path, manifest: Manifest, base: State, threads: int | None = None) -> Delta:
    """The delta that a version is, along the state it was made on; every promise of payload and manifest compared."""
    return decoded_step(read_payloads(layout.version_dir(store, manifest.version), manifest), manifest, base, threads)


def decoded_step(payloads: Sequence[Buffer], manifest: Manifest, base: State, threads: int | None = None) -> Delta:
    """The same for payloads that are as published."""
    based_on = manifest.base.version if manifest.base else ""
    try:
        step = decode_payloads(payloads, base, specs=base.specs, threads=threads, takes=_taking(manifest, base.specs))
    except DeltaCorrupt as error:
        # The payload is what was published, so it is the base that is not.
        problem = f"version {manifest.version} does not decode along its base {based_on}, whose bytes may be damaged"
        raise DeltaCorrupt(f"{problem}: {error.problem}") from error
    unlisted = step.tensors.keys() - {entry.name for entry in manifest.tensors}
    if unlisted:
        raise DeltaCorrupt(f"the payload of version {manifest.version} changes {min(unlisted)!r}, which is no tensor of it")
    promised = (manifest.base.root_digest if manifest.base else "", manifest.root_digest)
    if (step.base_root, step.new_root) not in (promised, ("", "")):  # one of several payloads does not know the roots
        leads = f"leads from {step.base_root} to {step.new_root}"
        raise DeltaCorrupt(f"the payload of version {manifest.version} {leads}, its manifest says {' to '.join(promised)}")
    return replace(step, base_root=promised[0], new_root=promised[1])


def _taking(manifest: Manifest, specs: Mapping[str, TensorSpec]) -> Callable[[int, Block], bool] | None:
    """Which of several payloads tells of a box that several publishers hold; None if no box is in several payloads."""
    elsewhere = manifest.counted_elsewhere()
    if not elsewhere:
        return None
    ranks = [payload.part for payload in chosen_payloads(manifest)]
    return lambda index, block: not block.meets(specs[block.tensor], elsewhere.get((ranks[index], block.tensor), ()))


def load_chain(store: Path, chain: Chain, *, threads: int | None = None) -> dict[str, Array]:
    """All tensors that a chain leads to in fresh memory, proved. Tied names share one array.

    The deltas are applied in place one after another: faster than reading through them folded, for the memory of the state.
    """
    with VersionReader(layout.version_dir(store, chain.full.version), chain.full) as reader:
        loaded = reader.load_all()
    arrays = {entry.name: loaded[entry.name] for entry in chain.full.tensors}
    for manifest in chain.deltas:
        move(arrays, decode_step(store, manifest, ArrayState(arrays), threads))
    prove(ArrayState(arrays), chain.end, f"version {chain.end.version} in {store}")
    return arrays | {name: arrays[holder] for name, holder in chain.end.tied.items()}


def prove(state: State, manifest: Manifest, where: str) -> None:
    """Read a whole state and compare it with the digests of a version. Raises `DigestMismatch` listing every tensor."""
    proof = Proof(where, manifest.tensors)
    for entry in manifest.tensors:
        lanes = lane_count(entry.spec)
        proof.begin(entry.name)
        for start in range(0, lanes, _PROOF_LANES):
            proof.update(flat_bytes(state.lanes(entry.name, start, min(start + _PROOF_LANES, lanes))).data)
        proof.close(entry.name)
    proof.conclude()
