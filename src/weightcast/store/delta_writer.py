"""Writing a delta version: each tensor is compared with the base as it arrives, and only the changes are written."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain as chained
from pathlib import Path

import numpy as np

from weightcast import logs
from weightcast.delta import Delta, Encoder, State, pack
from weightcast.delta.container import Table
from weightcast.delta.encoder import TooManyChanges
from weightcast.delta.states import tensor_proof
from weightcast.errors import DigestMismatch, InvalidInput
from weightcast.store import layout
from weightcast.store.delta_policy import FEW_CHANGES, DeltaPolicy, estimate_changes
from weightcast.store.draft import Contents, Draft
from weightcast.store.files import FileWriter, remove_file, rename, write_synced
from weightcast.store.payload import packed_entry, payload_entry
from weightcast.store.replay import replayed
from weightcast.store.writer import NamedTensors, survey
from weightcast.tensors.bridges import LazyTensor, host_array, spec_of
from weightcast.tensors.digest import Hasher, PieceHasher
from weightcast.tensors.flat import Array, flat_bytes
from weightcast.tensors.lanes import check_finite, lane_count, lane_range
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import Digests, Sum, is_sum
from weightcast.wire.manifest import BaseRef, Manifest, PayloadEntry, TensorEntry, compute_root, entry_of, summed_names

log = logs.get(__name__)

Named = tuple[str, object]

_COLLECTED_SHARE = 16  # of the state: changes up to this are handed on in memory instead of being read back
_TOLD_SHARE = 1 / 16  # of the state: so much of it tells how many changes the rest has


@dataclass(frozen=True)
class NoDelta:
    """Why no delta was written, and how to get the same tensors once more, for a full version.

    `sums` are those of the tensors that were taken from an iterator: given again, they must be the same. What was written
    of the payload is in `leftover`.
    """

    why: str
    tensors: AbstractContextManager[NamedTensors]
    sums: Mapping[str, str] = field(default_factory=dict)
    leftover: Path | None = None

    def conclude(self, written: tuple[TensorEntry, ...]) -> None:
        """The tensors were written: compare those that were given twice, and remove what is left of the payload."""
        given = [(entry.name, self.sums.get(entry.name, entry.sum), entry.sum) for entry in written]
        wrong = [item for item in given if item[1] != item[2]]
        if wrong:
            raise DigestMismatch("tensors taken back from an unfinished delta", wrong)
        if self.leftover is not None:
            remove_file(self.leftover)


class DeltaWriter:
    """The payload of one version, made on `base`, whose state is read, and proved, while it is written.

    `choosing`: write it only if it pays, as far as samples of the tensors tell, and stop if they were wrong.
    """

    def __init__(
        self, draft: Draft, base: Manifest, state: State, policy: DeltaPolicy, *, choosing: bool, finite: bool = False
    ) -> None:
        self._draft, self._base, self._state, self._policy = draft, base, state, policy
        self._specs = {entry.name: entry.spec for entry in base.tensors}
        self._summed_as = summed_names(base.tied)
        self._proofs = {entry.name: entry.sum or entry.digest for entry in base.tensors}
        self._damaged: list[str] = []
        self._base_nbytes = base.nbytes  # once: it is a sum over all tensors
        self._limit = policy.max_share * self._base_nbytes
        self._choosing, self._finite = choosing, finite
        self._lanes = max(1, sum(map(lane_count, self._specs.values())))
        self._sampled: set[str] = set()
        self._sampled_lanes = self._encoded_lanes = 0
        self._expected = 0.0  # changes of the tensors that were sampled
        self._path = draft.directory / layout.unsealed_payload_name()
        self._taken: dict[str, TensorSpec] = {}  # tensors that were given to the encoder

    def write(self, tensors: NamedTensors) -> Contents | NoDelta:
        """Write the payload of a mapping or an iterator, or say why that is not possible or not worth it."""
        if not isinstance(tensors, Mapping):
            if self._base.tied:
                return NoDelta(f"{self._base.version} has tied names and an iterator has none", nullcontext(tensors))
            return self._encode(iter(tensors), once=True)
        specs, tied = survey(tensors)
        why = next(filter(None, map(self._misfit, specs.values())), None) or self._missing(specs)
        if why is None and tied != self._base.tied:
            why = f"its tied names are not those of {self._base.version}"
        for spec in specs.values():
            if why is not None:
                break
            if _at_hand(tensors[spec.name]):
                self._sample(spec, host_array(spec.name, tensors[spec.name]))
                why = self._too_many(self._expected)
        if why is not None:
            return NoDelta(why, nullcontext(tensors))
        try:
            outcome = self._encode(((name, tensors[name]) for name in specs), once=False)
        except TooManyChanges:
            outcome = NoDelta(self._dearer(self._policy.stop_changes(self._base_nbytes)), nullcontext(()))
        if isinstance(outcome, Contents):
            return outcome
        remove_file(self._path)
        return NoDelta(outcome.why, nullcontext(tensors))

    def _encode(self, tensors: Iterator[Named], *, once: bool) -> Contents | NoDelta:
        """Encode tensors as they come. `once`: they are borrowed, and a tensor that was taken cannot be had again."""
        hasher, pieces = Hasher(self._draft.algorithm), PieceHasher(self._draft.algorithm)
        with FileWriter(self._path) as file, self._encoder(file, (hasher, pieces), once=once) as encoder:
            why, rest = self._encode_all(encoder, tensors, borrowed=once)
            if why is not None and not once:
                return NoDelta(why, nullcontext(()))
            encoder.flush()
            sums = {name: str(total) for name, total in encoder.sums.items()}
            entries = tuple(
                entry_of(spec, digests=Digests("", sums[name]), summed_as=self._summed_as.get(name, ""))
                for name, spec in self._taken.items()
            )
            why = why or self._damage(encoder)
            root = compute_root(entries, self._draft.algorithm) if why is None else ""
            table = encoder.finish(base_root=self._base.root_digest, new_root=root)
            if why is None:
                why = self._too_large(file.position) or self._wrong(encoder.changes)
            if why is None:
                file.sync()
            nbytes = file.position
        if why is not None:
            return self._given_back(why, table, rest, sums)
        name = layout.payload_name(1)
        rename(self._path, self._draft.directory / name)
        delta = encoder.delta(base_root=self._base.root_digest, new_root=root)
        return Contents(
            "delta",
            entries,
            self._base.tied,
            base=BaseRef(version=self._base.version, root_digest=self._base.root_digest),
            payloads=(payload_entry(name, nbytes, hasher.digest(), pieces.digests(), table), *self._beside(delta)),
            density=_density(table),
            delta=delta,
        )

    def _beside(self, delta: Delta | None) -> Iterator[PayloadEntry]:
        """The same changes in the other packings that are wanted, each in a file of its own."""
        for number, packing in enumerate(self._policy.packings[1:], start=2):
            if delta is None:
                log.warning("one packing only", version=self._draft.version, why="its changes are too many to be kept")
                return
            packed = pack(
                delta, packing=packing, slicing=self._policy.slicing, base=self._state, threads=self._policy.threads
            )
            name = layout.payload_name(number)
            write_synced(self._draft.directory / name, packed)
            yield packed_entry(name, packed, self._draft.algorithm)

    def _encoder(self, file: FileWriter, hashers: tuple[Hasher, PieceHasher], *, once: bool) -> Encoder:
        """An encoder. One for tensors that are given once is not stopped in the middle of a tensor."""

        def write(data: bytes) -> None:
            for hasher in hashers:
                hasher.update(data)
            file.write(data)

        room, most = self._base_nbytes // _COLLECTED_SHARE, math.inf
        if self._choosing and not once:
            most = self._policy.stop_changes(self._base_nbytes, spent=1 - self._sampled_lanes / self._lanes)
        return Encoder(
            write,
            packing=self._policy.packings[0],
            slicing=self._policy.slicing,
            threads=self._policy.threads,
            collect_nbytes=room,
            most_changes=most,
        )

    def _encode_all(
        self, encoder: Encoder, tensors: Iterator[Named], *, borrowed: bool
    ) -> tuple[str | None, Iterable[Named]]:
        """Why it ended early, and the tensors that were not encoded then."""
        for name, tensor in tensors:
            spec = spec_of(name, tensor)
            if name in self._taken:
                raise InvalidInput(f"tensor {name!r} was given twice for version {self._draft.version}.")
            why = self._misfit(spec)
            if why is None:
                array = host_array(name, tensor)
                if self._finite:
                    check_finite(spec, flat_bytes(np.ascontiguousarray(array)))
                self._sample(spec, array)
                why = self._too_many(self._projected())
            if why is not None:
                return why, chained([(name, tensor)], tensors)
            self._add(encoder, spec, array, borrowed=borrowed)
            why = self._too_large(encoder.nbytes) or self._wrong(encoder.changes)
            if why is not None:
                return why, tensors
        return self._missing(self._taken), ()

    def _add(self, encoder: Encoder, spec: TensorSpec, array: Array, *, borrowed: bool) -> None:
        """Encode a tensor. A base without sums, in format 1, is hashed first."""
        expected = self._proofs[spec.name]
        if not is_sum(expected) and tensor_proof(self._state, spec.name, expected) != expected:
            self._damaged.append(spec.name)
        old, new = partial(self._state.lanes, spec.name), partial(lane_range, array, spec.dtype)
        encoder.add(spec, old, new, borrowed=borrowed, summed_as=self._summed_as.get(spec.name))
        self._encoded_lanes += lane_count(spec)
        self._taken[spec.name] = spec

    def _damage(self, encoder: Encoder) -> str | None:
        """What is wrong with the base: its sum and the growth by the changes must make the sum of the new tensor."""
        wrong = self._damaged + [
            name
            for name in self._taken
            if is_sum(self._proofs[name]) and Sum.parse(self._proofs[name]) + encoder.grown[name] != encoder.sums[name]
        ]
        if not wrong:
            return None
        return f"tensor {wrong[0]} of {self._base.version} is damaged in the store: its digest is wrong"

    def _sample(self, spec: TensorSpec, array: Array) -> None:
        """Estimate how much of a tensor changes, once."""
        if self._choosing and spec.name not in self._sampled:
            new, lanes = partial(lane_range, array, spec.dtype), lane_count(spec)
            self._expected += estimate_changes(lanes, partial(self._state.lanes, spec.name), new)
            self._sampled.add(spec.name)
            self._sampled_lanes += lanes

    def _projected(self) -> float:
        """The changes of the whole state, told by the tensors that were sampled. Few of them tell nothing of the rest."""
        sampled = self._sampled_lanes / self._lanes
        return self._expected / sampled if sampled >= _TOLD_SHARE and self._expected > FEW_CHANGES else self._expected

    def _too_many(self, changes: float) -> str | None:
        """Why a delta does not pay, told by samples."""
        if not self._choosing:
            return None
        most = self._policy.most_changes(self._base_nbytes, spent=self._encoded_lanes / self._lanes)
        return self._dearer(changes) if changes > most else None

    def _wrong(self, changes: int) -> str | None:
        """Why a delta does not pay, told by the changes that were found."""
        if not self._choosing:
            return None
        stop = self._policy.stop_changes(self._base_nbytes, spent=self._encoded_lanes / self._lanes)
        return self._dearer(changes) if changes > stop else None

    def _dearer(self, changes: float) -> str:
        share = changes / self._lanes
        return f"about {share:.1%} of its elements or more change, so that a full version is served sooner"

    def _given_back(self, why: str, table: Table, rest: Iterable[Named], sums: Mapping[str, str]) -> NoDelta:
        """An iterator from its beginning: what was encoded is taken back from the payload, then come the rest."""

        def again() -> Generator[Named, None, None]:
            with closing(replayed(self._path, table, self._state)) as taken:
                yield from taken
            yield from rest

        return NoDelta(why, closing(again()), sums, leftover=self._path)

    def _misfit(self, spec: TensorSpec) -> str | None:
        there = self._specs.get(spec.name)
        if there == spec:
            return None
        if there is None:
            return f"{self._base.version} has no tensor {spec.name}"
        return f"tensor {spec.name} is {spec.describe()}, in {self._base.version} it is {there.describe()}"

    def _missing(self, names: Iterable[str]) -> str | None:
        missing = sorted(self._specs.keys() - set(names))
        return f"{len(missing)} tensor(s) of {self._base.version} are missing, {missing[0]} among them" if missing else None

    def _too_large(self, nbytes: int) -> str | None:
        if nbytes < self._limit:
            return None
        return f"its payload would be {self._policy.max_share:g} of the full size or more (max_share)"


def _at_hand(tensor: object) -> bool:
    """Whether a few elements can be read without copying a whole tensor from a device, converting or gathering it."""
    on_host = getattr(getattr(tensor, "device", None), "type", "cpu") == "cpu"
    return on_host and not isinstance(tensor, LazyTensor)


def _density(table: Table) -> float:
    changes = sum(block.changes for chunk in table.chunks for block in chunk.blocks)
    return changes / max(1, sum(lane_count(spec) for spec in table.specs.values()))
