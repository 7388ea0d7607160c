"""`inplace`: stream a version straight into the live parameters, with no staging memory."""

from __future__ import annotations

from contextlib import closing

import numpy as np

from weightcast.clock import Deadline
from weightcast.tensors.digest import DEFAULT, array_digest
from weightcast.tensors.flat import Array, Bytes, empty, flat_bytes
from weightcast.transports.base import Receiver
from weightcast.wire.manifest import Manifest, TensorEntry
from weightcast.worker.fit import Plan
from weightcast.worker.staging import Coverage, check_digests, received
from weightcast.worker.targets.base import Slot


class InplaceCommit:
    """One streamed commit of a full version. `touched` tells whether live bytes have been overwritten, and so whether a
    failure matters.
    """

    def __init__(self, plan: Plan, receiver: Receiver, manifest: Manifest) -> None:
        self._plan, self._receiver, self._manifest = plan, receiver, manifest
        self._adopted: list[Slot] = []
        self._bounce: dict[str, Array] = {}
        self.touched = False

    def apply(self, *, checksum: bool, deadline: Deadline) -> None:
        """Stream every tensor into place and prove it there. A tensor whose live memory is not contiguous takes a detour
        through memory of its own size; extra memory is otherwise only the transport's.
        """
        entries = self._plan.entries
        slots = self._plan.slots()
        digests: dict[str, str] = {}
        for name, entry in entries.items():
            if entry.nbytes == 0:
                self._finish(entry, slots[name], digests)
        into: dict[str, Bytes] = {}
        with closing(received(self._receiver, self._manifest, Coverage(entries), deadline)) as pieces:
            for piece, complete in pieces:
                if piece.tensor not in into:
                    into[piece.tensor] = self._destination(entries[piece.tensor], slots[piece.tensor][0])
                end = piece.offset + len(piece.data)
                into[piece.tensor][piece.offset : end] = np.frombuffer(piece.data, dtype=np.uint8)
                if complete:
                    del into[piece.tensor]
                    self._finish(entries[piece.tensor], slots[piece.tensor], digests)
        if checksum:
            check_digests(f"version {self._manifest.version} in the live model", entries, digests)

    def release_adopted(self) -> None:
        """Drop the memory that slots without any were given: the way back of a first load."""
        for slot in self._adopted:
            slot.install(None)

    def _adopt(self, slot: Slot) -> None:
        self._adopted.append(slot)
        slot.install(slot.make(empty(slot.spec)))

    def _destination(self, entry: TensorEntry, slot: Slot) -> Bytes:
        if not slot.resident:
            self._adopt(slot)
        else:
            self.touched = True
        if slot.on_host and slot.live().flags.c_contiguous:
            return flat_bytes(slot.live())
        self._bounce[entry.name] = empty(entry.spec)  # the slot is filled when the tensor is complete
        return flat_bytes(self._bounce[entry.name])

    def _finish(self, entry: TensorEntry, slots: list[Slot], digests: dict[str, str]) -> None:
        bounced = self._bounce.pop(entry.name, None)
        if bounced is not None:
            slots[0].write(bounced)
        for slot in slots:
            if not slot.resident:
                self._adopt(slot)
            if slot is not slots[0]:
                self.touched = True
                slot.write(np.ascontiguousarray(slots[0].live()))
            found = array_digest(slot.live(), self._manifest.algorithm or DEFAULT)
            if found != entry.digest or entry.name not in digests:  # of several slots, the one that is wrong counts
                digests[entry.name] = found
