"""`inplace`: stream a version straight into the live parameters, with no staging memory but that of the deltas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from weightcast.clock import Deadline
from weightcast.delta.edit import move_tensor
from weightcast.errors import SourceFailed
from weightcast.tensors.flat import Array, Bytes, empty, flat_bytes
from weightcast.tensors.sums import Sum
from weightcast.transports.base import Receiver
from weightcast.wire.manifest import Manifest, TensorEntry
from weightcast.worker.commits.staged import StagedCommit, Tick, silent
from weightcast.worker.deltas import DeltaChain
from weightcast.worker.fit import Plan, check_ties
from weightcast.worker.sealing import Expected
from weightcast.worker.staging import Coverage, check_digests, received
from weightcast.worker.targets.base import Slot, live_proof

Replan = Callable[[Manifest], Plan]


@dataclass
class Stream:
    """A full version, `base`, and the deltas from it to `manifest`, written over the live weights as they come.

    `base_plan` and `plan` say where their tensors go. `touched` tells whether live bytes have been overwritten. A live
    stream gets its digests as it comes: `manifest` and `plan` have them when it has ended.
    """

    receiver: Receiver
    base: Manifest
    base_plan: Plan
    manifest: Manifest
    plan: Plan
    deltas: DeltaChain
    checksum: bool
    deadline: Deadline
    replan: Replan
    tick: Tick = silent
    touched: bool = False
    _adopted: list[Slot] = field(default_factory=list)
    _bounce: dict[str, Array] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes to fetch."""
        return self.base_plan.nbytes + self.deltas.nbytes

    def run(self) -> None:
        """Stream the full version, then scatter the deltas, and prove what came out. A tensor whose live memory is not
        contiguous takes a detour through memory of its own size; extra memory is otherwise only the transport's.
        """
        self._bounce.clear()
        expected = Expected(self.receiver, self.base)
        digests = self._receive(expected)
        if self.checksum:
            entries = expected.complete(self.base_plan.entries)
            check_digests(f"version {self.base.version} in the live model", entries, digests)
        if not self.base.sealed:
            self.base = self.manifest = expected.seal(self.base_plan.entries, self.deadline)
            self.base_plan = self.plan = self.replan(self.manifest)
        if self.deltas:
            self._scatter()
        check_ties(self.manifest.version, self.plan, lambda landing: landing.slot.live())

    def release_adopted(self) -> None:
        """Drop the memory that slots without any were given: the way back of a first load."""
        while self._adopted:
            self._adopted[-1].install(None)
            self._adopted.pop()
            self.tick()

    def _receive(self, expected: Expected) -> dict[str, str]:
        entries, slots = self.base_plan.entries, self.base_plan.slots()
        digests: dict[str, str] = {}
        for name, entry in entries.items():
            if entry.nbytes == 0:
                self._finish(entry, slots[name], expected, digests)
        into: dict[str, Bytes] = {}
        with closing(received(self.receiver, self.base, Coverage(entries), self.deadline)) as pieces:
            for piece, complete in pieces:
                name = piece.tensor
                expected.note(piece)
                if name not in into:
                    into[name] = self._destination(entries[name], slots[name][0])
                into[name][piece.offset : piece.offset + len(piece.data)] = np.frombuffer(piece.data, dtype=np.uint8)
                del piece  # the sender may have use for its memory
                self.tick()
                if complete:
                    del into[name]
                    self._finish(entries[name], slots[name], expected, digests)
        return digests

    def _scatter(self) -> None:
        delta = self.deltas.along(self.base_plan, self.base)
        digests: dict[str, str] = {}
        for landing in self.plan.landings:
            change = delta.tensors.get(landing.entry.name)
            if change is not None:
                self.touched = True
                move_tensor(landing.slot.lanes(), change)
            self._digest(landing.slot, landing.entry, landing.entry.proof, digests)
        if self.checksum:
            check_digests(f"version {self.manifest.version} in the live model", self.plan.entries, digests)

    def _destination(self, entry: TensorEntry, slot: Slot) -> Bytes:
        if not slot.resident:
            self._adopt(slot)
        else:
            self.touched = True
        if slot.on_host and slot.live().flags.c_contiguous:
            return flat_bytes(slot.live())
        self._bounce[entry.name] = empty(entry.spec)  # the slot is filled when the tensor is complete
        return flat_bytes(self._bounce[entry.name])

    def _finish(self, entry: TensorEntry, slots: list[Slot], expected: Expected, digests: dict[str, str]) -> None:
        bounced = self._bounce.pop(entry.name, None)
        if bounced is not None:
            slots[0].write(bounced)
        for slot in slots:
            if not slot.resident:
                self._adopt(slot)
            if slot is not slots[0]:
                self.touched = True
                slot.write(np.ascontiguousarray(slots[0].live()))
            self._digest(slot, entry, expected.digest(entry), digests)

    def _adopt(self, slot: Slot) -> None:
        self._adopted.append(slot)
        slot.install(slot.make(empty(slot.spec)))

    def _digest(self, slot: Slot, entry: TensorEntry, wanted: str, digests: dict[str, str]) -> None:
        found = live_proof(slot, entry.sum_spec, wanted or str(Sum()), self.tick)
        if found != wanted or entry.name not in digests:  # of several slots, the one that is wrong counts
            digests[entry.name] = found
        self.tick()


class StreamedCommit(StagedCommit):
    """Streams into the live parameters, and proves them, while the engine pauses. It holds nothing to go back with.

    `back` makes the stream of the version that is served now, for undoing; None where the weights came from elsewhere.
    `whole` is false for a model that holds no whole version anyway: then there is nothing to go back to.
    """

    undoes_alone = False

    def __init__(self, plan: Plan, stream: Stream, *, whole: bool, back: Callable[[], Stream] | None) -> None:
        super().__init__(plan, tick=stream.tick)
        self._stream, self._whole, self._back = stream, whole, back
        self._restored = False

    @property
    def harmless(self) -> bool:
        """Whether there was nothing to put back."""
        return not (self._stream.touched and self._whole)

    def prepare(self, deadline: Deadline) -> None:
        """The deltas are here already, and the rest is not to be held."""

    def apply(self) -> None:
        """Stream everything and prove it in place."""
        self._stream.run()
        self.sealed = self._stream.manifest, self._stream.plan

    def prove(self) -> None:
        """It was proved as it came."""

    def undo(self) -> None:
        """Stream the version that was served before. Raises `SourceFailed` if that cannot be; it may be tried again."""
        self._stream.release_adopted()
        if self.harmless or self._restored:
            return
        try:
            if self._back is None:
                raise SourceFailed("the model did not come from a version, so there is none to go back to.")
            self._back().run()
        except Exception as error:
            raise SourceFailed(f"what was served before could not be restored: {type(error).__name__}: {error}") from error
        self._restored = True

    def keep_way_back(self) -> bool:
        """It has none of its own."""
        self._stream.deltas = DeltaChain()
        return False
