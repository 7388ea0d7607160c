"""Deltas on their way into a model: as a source gave them, and decoded along what the model holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from weightcast.clock import Deadline
from weightcast.delta import ArrayState, Delta, decode, decode_chain, fold, move
from weightcast.delta.container import check_table, packing_of
from weightcast.delta.sparse import check_specs
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec
from weightcast.transports.base import Provider, Receiver
from weightcast.wire.manifest import Manifest
from weightcast.worker.fit import Plan
from weightcast.worker.staging import Staging


def live_state(plan: Plan) -> ArrayState:
    """What the model holds, under the names that a version has for it."""
    return ArrayState(
        {entry.name: landing.slot.live() for landing in plan.landings for entry in (landing.entry, *landing.same)}
    )


@dataclass(frozen=True)
class DeltaChain:
    """Deltas that follow one another: packed, or, from a provider, worked out beforehand.

    `specs` are the tensors that the packed ones must be about, as the manifest of the last one says.
    """

    payloads: tuple[memoryview, ...] = ()
    ready: tuple[Delta, ...] = ()
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.payloads or self.ready)

    @property
    def nbytes(self) -> int:
        """Bytes that were fetched."""
        return sum(map(len, self.payloads))

    @property
    def needs_no_base(self) -> bool:
        """Whether it can be decoded without the state it starts on."""
        return all(packing_of(payload) == "gaps" for payload in self.payloads)

    def fits(self, plan: Plan, manifest: Manifest) -> bool:
        """Whether it can be decoded along a model that holds the version it starts on. A model that ignores tensors of the
        version can follow only a packing that needs no base.
        """
        return _holds_all(plan, manifest) or self.needs_no_base

    def along(self, plan: Plan, manifest: Manifest) -> Delta:
        """All of it as one delta, decoded along the live weights, which hold the version that the first is based on."""
        if self.ready:
            folded = reduce(fold, self.ready)
        elif _holds_all(plan, manifest):
            return decode_chain(self.payloads, live_state(plan))
        else:
            folded = reduce(fold, (decode(payload, specs=self.specs) for payload in self.payloads))
        entries = plan.entries
        touched = folded.tensors.keys() & entries.keys()
        check_specs({name: folded.tensors[name].spec for name in touched}, {name: entries[name].spec for name in touched})
        return folded

    def alone(self) -> Delta:
        """All of it as one delta, decoded without the state it starts on: packed as `gaps`. In the caller's thread, as it
        runs beside an engine.
        """
        return reduce(fold, self.ready or [decode(payload, specs=self.specs, threads=1) for payload in self.payloads])

    def move(self, arrays: Mapping[str, Array], version: str, deadline: Deadline) -> None:
        """Bring private arrays from the version that the first is based on to the last, `version`."""
        for payload in self.payloads:
            move(arrays, decode(payload, arrays))
            deadline.check(f"decoding the deltas to {version}")
        for delta in self.ready:
            move(arrays, delta)


def fetched_chain(receiver: Receiver, deltas: Sequence[Manifest], *, checksum: bool, deadline: Deadline) -> DeltaChain:
    """The deltas, each whole and, unless declined, as published."""
    if isinstance(receiver, Provider):
        return DeltaChain(ready=tuple(receiver.changes(manifest) for manifest in deltas))
    fetched: list[memoryview] = []
    specs: dict[str, TensorSpec] = {}
    for manifest in deltas:
        specs = {entry.name: entry.spec for entry in manifest.tensors}
        staging = Staging(manifest.transfers())
        staging.fill(receiver, manifest, deadline)
        verified = staging.verify(manifest, checksum=checksum, deadline=deadline)
        (payload,) = verified.arrays.values()
        check_table(payload.data, specs)
        fetched.append(payload.data)
    return DeltaChain(payloads=tuple(fetched), specs=specs)


def _holds_all(plan: Plan, manifest: Manifest) -> bool:
    held = {entry.name for landing in plan.landings for entry in (landing.entry, *landing.same)}
    return held == {entry.name for entry in manifest.tensors}
