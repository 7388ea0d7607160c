"""What one rank sees of a version: its own parameters, cut from the published tensors, as a version of their own.

    shard = cut(receiver, manifest, shards, held=serving, mode="copy", checksum=True, deadline=deadline, progress=told)
    live.update(shard.newest(), source=shard)

A `ShardVersion` has a manifest and digests like any other version, so whatever stages and commits versions of whole tensors
needs to know nothing of slices, fused or transposed layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.delta import Delta, TensorDelta
from weightcast.delta import slice as slice_delta
from weightcast.errors import InvalidInput, SourceFailed
from weightcast.tensors.boxes import Held
from weightcast.tensors.digest import DEFAULT
from weightcast.tensors.flat import Array
from weightcast.transports.base import CatchUpReceiver, Receiver, StateReceiver, delta_use
from weightcast.wire.manifest import BaseRef, Manifest, TensorEntry, compute_root
from weightcast.worker.buffers import Buffers
from weightcast.worker.deltas import fetched_chain
from weightcast.worker.hashing import watched_digest
from weightcast.worker.result import CommitMode
from weightcast.worker.route import NO_DELTA, insist_on_deltas, plan_route
from weightcast.worker.serving import Stopwatch
from weightcast.worker.shard_assembly import assembled, needed, needed_nbytes
from weightcast.worker.shard_layout import HeldVersion, Shape, Shards
from weightcast.worker.shard_stream import Origin, Progress, Proof, Tally
from weightcast.worker.shard_version import ShardVersion

__all__ = ["CutMode", "HeldVersion", "Shape", "ShardVersion", "Shards", "cut"]

log = logs.get(__name__)

CutMode = CommitMode | Literal["auto"]

_INPLACE_NBYTES = 256 << 20  # of parameters that are done with, kept for the next: fresh memory would lengthen the pause
_MODES = ("copy", "swap", "delta", "inplace", "auto")


def cut(
    receiver: Receiver,
    manifest: Manifest,
    shards: Shards,
    *,
    held: HeldVersion | None,
    mode: CutMode,
    checksum: bool,
    deadline: Deadline,
    progress: Progress,
    buffers: Buffers | None = None,
    restore: Receiver | None = None,
) -> ShardVersion:
    """Fetch what a rank needs of a version, prove it, and put the rank's parameters together. Runs beside the engine.

    `held` is what the rank serves: nothing is fetched if it is the same state under another name. A delta on it
    becomes a delta of the rank's own parameters, proved against the full new state, unless `mode` is "inplace" or dtypes
    differ. With "inplace" everything is read and proved now, and streamed a
    second time by `pieces`, so the receiver must stay open. `restore` is where `held` can be streamed from again.
    `progress` is told bytes done and in total. Memory for parameters comes from `buffers`, but for "inplace", which holds
    only parameters that are not complete yet, and a little.

    Raises `VersionDoesNotFit` with every mismatch before anything is fetched, `DigestMismatch` with every tensor that is
    damaged. Nothing live is touched here.
    """
    if mode not in _MODES:
        raise InvalidInput(f"unknown commit mode {mode!r}: choose one of {', '.join(_MODES)}.")
    if mode == "inplace" and not manifest.sealed:
        raise InvalidInput(
            f"version {manifest.version} is a live stream, which can be read once, and slices that are committed in place "
            "are read twice: to be proved, and to be written. Publish it held, or commit by copy or swap."
        )
    shards.check(manifest)
    memory = Buffers(_INPLACE_NBYTES) if mode == "inplace" or buffers is None else buffers
    job = _Cut(Origin(receiver, manifest), shards, held, checksum, deadline, progress, memory, restore)
    watch = Stopwatch()
    same = job.is_held()
    deltas = job.deltas_from_held() if mode != "inplace" and not same else ()
    if not deltas and not same:
        why = "a commit in place takes none" if mode == "inplace" else NO_DELTA
        insist_on_deltas(receiver, manifest, held.full if held is not None else None, why)
    version = job.by_delta(deltas) if deltas or same else job.whole(keep=mode != "inplace")
    log.debug(
        "shard fetched",
        version=manifest.version,
        delta=version.by_delta,
        parameters=len(shards.held),
        nbytes=version.nbytes,
        ms=logs.ms(watch.lap()),
        source=receiver.url,
    )
    return version


@dataclass(frozen=True)
class _Cut:
    origin: Origin
    shards: Shards
    held: HeldVersion | None
    checksum: bool
    deadline: Deadline
    progress: Progress
    buffers: Buffers
    restore: Receiver | None

    def is_held(self) -> bool:
        """Whether the rank serves this very state, proved. The root digest says which state it is, not the name."""
        manifest, held = self.origin.manifest, self.held
        if held is None or not held.proved or not held.full.root_digest or not self._same_layout(held):
            return False
        return (held.full.root_digest, held.full.tied) == (manifest.root_digest, manifest.tied)

    def _same_layout(self, held: HeldVersion) -> bool:
        return {entry.spec for entry in held.shard.tensors} == {one.spec for one in self.shards.held}

    def deltas_from_held(self) -> tuple[Manifest, ...]:
        """The deltas that lead from what is held to the version; none if there is no such way, or it cannot be gone."""
        receiver, manifest, held = self.origin.receiver, self.origin.manifest, self.held
        if held is None or not held.proved or delta_use(receiver) == "never":
            return ()
        if not isinstance(receiver, StateReceiver | CatchUpReceiver):
            return ()
        entries = manifest.by_name()
        converted = any(entries[p.source].dtype != one.spec.dtype for one in self.shards.held for p in one.placements)
        if converted or not self._same_layout(held) or held.full.tied != manifest.tied:
            return ()
        if isinstance(receiver, CatchUpReceiver):
            short = receiver.shortcut(manifest, held.full, sliced=True, deadline=self.deadline)
            return (short,) if short is not None else ()
        if manifest.base is None:
            return ()
        route = plan_route(receiver, manifest, held=held.full, deadline=self.deadline)
        return route.deltas if route.full is None else ()

    def whole(self, *, keep: bool) -> ShardVersion:
        """All parameters, cut from the whole tensors; kept, or only hashed."""
        self.origin.check_readable()
        held = self.shards.named_as(self.origin.manifest)
        tally = Tally(needed_nbytes(self.origin, held), self.progress)
        arrays: dict[str, Array] | None = {} if keep else None
        proof = Proof(self.origin, checksum=self.checksum)
        digests = self._digests(held, tally, arrays, proof)
        full = proof.seal(needed(self.origin, held), self.deadline)
        return self._version(full, self._manifest(digests), tally, proof, arrays=arrays)

    def by_delta(self, deltas: tuple[Manifest, ...]) -> ShardVersion:
        """The changes of all parameters; without deltas there are none. Digests follow from the full new state, for
        parameters that it changes.
        """
        manifest, before = self.origin.manifest, self.held
        if before is None:
            raise InvalidInput(f"version {manifest.version} cannot be reached by deltas from here.")
        held = self.shards.named_as(manifest)
        specs = {one.spec.name: one.spec for one in held}
        changes = self._sliced(self._folded(deltas), held) if deltas else Delta(specs, {})
        changed = _changed(before.full, manifest)
        touched = [
            one for one in held if one.spec.name in changes.tensors or any(p.source in changed for p in one.placements)
        ]
        payloads = sum(delta.payload.nbytes for delta in deltas if delta.payload is not None)
        reads = 0 if self.origin.boxes else needed_nbytes(self.origin, touched)
        tally = Tally(payloads + reads, self.progress)
        tally.add(payloads)
        proof = Proof(self.origin, checksum=self.checksum)
        digests = {entry.name: entry.digest for entry in before.shard.tensors} | self._new_digests(touched, tally, proof)
        shard = self._manifest(digests, base=before.shard)
        changes = replace(changes, base_root=before.shard.root_digest, new_root=shard.root_digest)
        return self._version(manifest, shard, tally, proof, changes=changes)

    def _folded(self, deltas: tuple[Manifest, ...]) -> Delta:
        """The changes of all tensors as one delta."""
        receiver = self.origin.receiver
        if isinstance(receiver, StateReceiver):
            return receiver.folded(deltas, deadline=self.deadline)
        return fetched_chain(receiver, deltas, checksum=self.checksum, deadline=self.deadline).alone()

    def _new_digests(self, touched: Sequence[Held], tally: Tally, proof: Proof) -> dict[str, str]:
        """The digests that these parameters must have in the new state: the source's, or taken from it here."""
        if self.origin.boxes is None:
            return self._digests(touched, tally, None, proof)
        if not touched:
            return {}
        told = self.origin.boxes.held_digests(self.origin.manifest, touched, deadline=self.deadline)
        lacking = sorted({one.spec.name for one in touched} - told.keys())
        if lacking:
            raise SourceFailed(f"{self.origin.receiver.url} did not tell the digests of {', '.join(lacking)}.")
        return {one.spec.name: told[one.spec.name] for one in touched}

    def _sliced(self, delta: Delta, held: Sequence[Held]) -> Delta:
        """What the parameters take of a delta, one after the other."""
        tensors: dict[str, TensorDelta] = {}
        for one in held:
            tensors |= slice_delta(delta, [one]).tensors
            self.deadline.check(f"slicing the deltas to {self.origin.manifest.version}")
        return Delta({one.spec.name: one.spec for one in held}, tensors)

    def _digests(self, held: Sequence[Held], tally: Tally, kept: dict[str, Array] | None, proof: Proof) -> dict[str, str]:
        """The digests of parameters as they are put together. They go into `kept`, or back to the buffers."""
        algorithm = self.origin.manifest.algorithm or DEFAULT
        check = partial(self.deadline.check, f"hashing the parameters of {self.origin.manifest.version}")
        digests: dict[str, str] = {}
        with closing(
            assembled(self.origin, held, self.buffers, proof=proof, deadline=self.deadline, tally=tally)
        ) as parameters:
            for one, array in parameters:
                digests[one.spec.name] = watched_digest(array, algorithm, check)
                if kept is not None:
                    kept[one.spec.name] = array
                del array  # its memory is for the next one
        return digests

    def _manifest(self, digests: Mapping[str, str], base: Manifest | None = None) -> Manifest:
        full = self.origin.manifest
        algorithm = full.algorithm or DEFAULT
        tensors = tuple(_entries(self.shards, digests))
        return Manifest(
            version=full.version,
            sequence=full.sequence,
            step=full.step,
            kind="full" if base is None else "delta",
            created_s=full.created_s,
            algorithm=algorithm,
            root_digest=compute_root(tensors, algorithm),
            parts=(),
            tensors=tensors,
            base=None if base is None else BaseRef(version=base.version, root_digest=base.root_digest),
        )

    def _version(
        self,
        full: Manifest,
        shard: Manifest,
        tally: Tally,
        proof: Proof,
        *,
        arrays: dict[str, Array] | None = None,
        changes: Delta | None = None,
    ) -> ShardVersion:
        return ShardVersion(
            Origin(self.origin.receiver, full), shard, self.shards, self.buffers,
            held=self.held, restore=self.restore, arrays=arrays, changes=changes, nbytes=tally.nbytes,
            unproved=proof.unproved,
        )  # fmt: skip


def _changed(before: Manifest, after: Manifest) -> set[str]:
    """The tensors that have other bytes in the second version, or digests that cannot be compared."""
    digests = {entry.name: entry.digest for entry in before.tensors}
    return {entry.name for entry in after.tensors if digests.get(entry.name) != entry.digest}


def _entries(shards: Shards, digests: Mapping[str, str]) -> Iterator[TensorEntry]:
    for one in shards.held:
        spec = one.spec
        yield TensorEntry(
            name=spec.name,
            dtype=spec.dtype,
            shape=spec.shape,
            part=0,
            offset=0,
            nbytes=spec.nbytes,
            digest=digests[spec.name],
        )
