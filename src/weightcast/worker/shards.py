"""What one rank sees of a version: its own parameters, cut from the published tensors, as a version of their own.

    shard = cut(receiver, manifest, shards, held=serving, mode="copy", checksum=True, deadline=deadline, progress=told)
    live.update(shard.newest(), source=shard)

A `ShardVersion` has a manifest with sums like any other version, so whatever stages and commits versions of whole tensors
needs to know nothing of slices, fused or transposed layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.delta import Delta
from weightcast.errors import InvalidInput
from weightcast.tensors.boxes import Held
from weightcast.tensors.digest import DEFAULT
from weightcast.tensors.flat import Array
from weightcast.tensors.sums import Digests, array_sum
from weightcast.transports.base import Receiver, delta_use
from weightcast.wire.manifest import BaseRef, Manifest, compute_root, entry_of
from weightcast.worker.buffers import Buffers
from weightcast.worker.deltas import Parameters, Unaligned, fetched_chain
from weightcast.worker.result import CommitMode
from weightcast.worker.route import NO_DELTA, insist_on_deltas, plan_route
from weightcast.worker.serving import Stopwatch
from weightcast.worker.shard_assembly import assembled, needed, needed_nbytes
from weightcast.worker.shard_boxes import GROUP_NBYTES, STREAMED_NBYTES
from weightcast.worker.shard_layout import HeldVersion, Shape, Shards
from weightcast.worker.shard_stream import Origin, Progress, Proof, Tally
from weightcast.worker.shard_sums import BoxSum, ConvertedSums, is_converted, sum_parameter
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
    live: Parameters | None = None,
    keep: bool | None = None,
) -> ShardVersion:
    """Fetch what a rank needs of a version, prove it, and put the rank's parameters together. Runs beside the engine.

    `held` is what the rank serves: nothing is fetched if it is the same state under another name. A delta on it becomes a
    delta of the rank's own parameters, unless `mode` is "inplace" or dtypes differ; the sums of all ranks together prove
    it. `live` gives the parameters as they are: `classes` are decoded along them. With "inplace" everything is read and
    proved now, and streamed a second time by `pieces`, so the receiver must stay open. `restore` is where `held` can be
    streamed from again. `progress` is told bytes done and in total. Memory for parameters comes from `buffers`, but for
    "inplace", which holds only parameters that are not complete yet, and a little. `keep`: whether parameters that are cut
    whole stay in memory, if `mode` does not tell.

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
    job = _Cut(Origin(receiver, manifest), shards, held, checksum, deadline, progress, memory, restore, live)
    watch = Stopwatch()
    same = job.is_held()
    deltas = job.deltas_from_held() if mode != "inplace" and not same else ()
    if not deltas and not same:
        why = "a commit in place takes none" if mode == "inplace" else NO_DELTA
        insist_on_deltas(receiver, manifest, held.full if held is not None else None, why)
    version = None
    if deltas or same:
        try:
            version = job.by_delta(deltas)
        except Unaligned as why:
            insist_on_deltas(receiver, manifest, held.full if held is not None else None, str(why))
            log.info("delta not used", version=manifest.version, why=str(why))
    version = version or job.whole(keep=mode != "inplace" if keep is None else keep)
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


class _Summed(NamedTuple):
    """The sum of a parameter under its own name, and those of its boxes under the names of the version."""

    parameter: str
    boxes: list[BoxSum]


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
    live: Parameters | None

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
        entries = manifest.by_name()
        if manifest.base is None or not self._same_layout(held) or held.full.tied != manifest.tied:
            return ()
        if any(one.name not in entries or one.sum_spec != entries[one.name].sum_spec for one in held.full.tensors):
            log.info("delta not used", version=manifest.version, why="tied tensors were summed under other names before")
            return ()
        if any(is_converted(one, entries[p.source]) for one in self.shards.held for p in one.placements):
            log.info("delta not used", version=manifest.version, why="the rank converts weights and keeps no published bits")
            return ()
        route = plan_route(receiver, manifest, held=held.full, deadline=self.deadline)
        return route.deltas if route.full is None else ()

    def whole(self, *, keep: bool) -> ShardVersion:
        """All parameters, cut from the whole tensors. Those that are kept are summed when they are staged, others here."""
        self.origin.check_readable()
        held = self.shards.named_as(self.origin.manifest)
        tally = Tally(needed_nbytes(self.origin, held), self.progress)
        proof = Proof(self.origin, checksum=self.checksum)
        arrays: dict[str, Array] = {}
        converted: ConvertedSums = {}
        summed: dict[str, _Summed] = {}
        check = partial(self.deadline.check, f"summing the parameters of {self.origin.manifest.version}")
        entries = self.origin.manifest.by_name()
        with closing(
            assembled(
                self.origin,
                held,
                self.buffers,
                proof=proof,
                deadline=self.deadline,
                tally=tally,
                converted=converted,
                group_nbytes=GROUP_NBYTES if keep else STREAMED_NBYTES,
            )
        ) as parameters:
            for one, array in parameters:
                if keep:
                    arrays[one.spec.name] = array
                else:
                    own = str(array_sum(one.spec, array, check))
                    summed[one.spec.name] = _Summed(own, sum_parameter(one, entries, array, converted, check))
                del array  # its memory is for the next one
        full = proof.seal(needed(self.origin, held), self.deadline)
        shard = self._manifest({name: one.parameter for name, one in summed.items()})
        boxes = () if keep else tuple(total for one in held for total in summed[one.spec.name].boxes)
        kept = arrays if keep else None
        return self._version(full, shard, tally, proof.unproved, arrays=kept, sums=boxes, converted=converted)

    def by_delta(self, deltas: tuple[Manifest, ...]) -> ShardVersion:
        """The changes of all parameters; without deltas there are none. What they lead to is summed when they are staged."""
        manifest, before = self.origin.manifest, self.held
        if before is None:
            raise InvalidInput(f"version {manifest.version} cannot be reached by deltas from here.")
        held = self.shards.named_as(manifest)
        specs = {one.spec.name: one.spec for one in held}
        changes, nbytes = self._changes(deltas, held) if deltas else (Delta(specs, {}), 0)
        tally = Tally(nbytes, self.progress)
        tally.add(nbytes)
        shard = self._manifest({}, base=before.shard)
        changes = replace(changes, base_root=before.shard.root_digest)
        return self._version(manifest, shard, tally, {}, changes=changes)

    def _changes(self, deltas: tuple[Manifest, ...], held: Sequence[Held]) -> tuple[Delta, int]:
        """What deltas change in the parameters, and how many bytes were fetched for it."""
        receiver, version = self.origin.receiver, self.origin.manifest.version
        chain = fetched_chain(receiver, deltas, checksum=self.checksum, deadline=self.deadline, held=held)
        check = partial(self.deadline.check, f"decoding the deltas to {version}")
        return chain.sliced(held, self.live, check), chain.nbytes

    def _manifest(self, sums: Mapping[str, str], base: Manifest | None = None) -> Manifest:
        """What the parameters are. They have no sums yet if they are summed when they are staged."""
        full = self.origin.manifest
        algorithm = full.algorithm or DEFAULT
        tensors = tuple(entry_of(one.spec, digests=Digests("", sums.get(one.spec.name, ""))) for one in self.shards.held)
        return Manifest(
            version=full.version,
            sequence=full.sequence,
            step=full.step,
            kind="full" if base is None else "delta",
            created_s=full.created_s,
            algorithm=algorithm,
            root_digest=compute_root(tensors, algorithm) if sums else "",
            parts=(),
            tensors=tensors,
            base=None if base is None else BaseRef(version=base.version, root_digest=base.root_digest),
        )

    def _version(
        self,
        full: Manifest,
        shard: Manifest,
        tally: Tally,
        unproved: Mapping[str, str],
        *,
        arrays: dict[str, Array] | None = None,
        changes: Delta | None = None,
        sums: tuple[BoxSum, ...] = (),
        converted: ConvertedSums | None = None,
    ) -> ShardVersion:
        return ShardVersion(
            Origin(self.origin.receiver, full), shard, self.shards, self.buffers,
            held=self.held, restore=self.restore, arrays=arrays, changes=changes, nbytes=tally.nbytes,
            unproved=unproved, converted=converted or {}, sums=sums,
        )  # fmt: skip
