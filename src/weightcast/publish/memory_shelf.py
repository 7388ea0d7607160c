"""Versions that lie in a trainer's own memory, for a depot to serve them from there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.depot.holding import Holding
from weightcast.errors import Conflict, InvalidInput, NotFound, SourceFailed, VersionNotFound, WrongState
from weightcast.tensors.flat import Bytes
from weightcast.transports.ipc.host_memory import HostMemory, private_memory
from weightcast.wire.depot import Newest, Offer
from weightcast.wire.manifest import Manifest, encode_manifest
from weightcast.wire.shares import Share

log = logs.get(__name__)

QUIET_S = 0.5  # a receiver that has not acknowledged asks for the next range sooner than this
_MAX_READING = 256  # updates of which a slot remembers when they last read
_LOOK_S = 0.1
_SLACK = 4  # memory that is this many times too large is given up for new one


class MemoryHolding:
    """A version in one memory: `parts` tells where its files lie there, and `nbytes` how much is here of all tensors.

    A version that several publishers share has one file here. Receivers get its `share`, and put the version together.
    """

    def __init__(
        self,
        manifest: Manifest,
        memory: Bytes,
        parts: Mapping[str, tuple[int, int]],
        nbytes: int,
        *,
        share: Share | None = None,
        small: Mapping[str, bytes] | None = None,
    ) -> None:
        self.manifest, self.nbytes, self._share = manifest, nbytes, share
        self._memory, self._parts, self._small = memory, parts, small or {}
        self._encoded = b"" if share is not None else encode_manifest(manifest)
        self._why_cut = ""

    @property
    def encoded(self) -> bytes:
        """The manifest, sealed. Raises `Conflict` if this is only a share: what it says would not be the whole version."""
        if self._share is not None:
            raise Conflict(
                f"version {self.manifest.version} is shared by {self.ranks} publishers, and this is rank "
                f"{self._share.rank}: its manifest follows from all their shares "
                f"(/v1/versions/{self.manifest.version}/share). Give the URLs of all of them as source."
            )
        return self._encoded

    @property
    def share(self) -> Share:
        """What is here of a version that several publishers share. Raises `Conflict` if this is all of it."""
        if self._share is None:
            raise Conflict(f"version {self.manifest.version} is not shared: all of it is here. Read its manifest.")
        return self._share

    @property
    def tied_sums(self) -> dict[str, str]:
        """What tied bytes of a share add to the sums of tensors of their other names."""
        return {} if self._share is None else self._share.tied_sums

    @property
    def ranks(self) -> int:
        """How many publishers share the version."""
        return 1 if self._share is None else self._share.ranks

    @property
    def files(self) -> Mapping[str, int]:
        """Parts and small files with their sizes."""
        return {name: stop - start for name, (start, stop) in self._parts.items()} | {
            name: len(data) for name, data in self._small.items()
        }

    def views(self, file: str, start: int, stop: int, *, deadline: Deadline) -> list[memoryview]:  # noqa: ARG002 - all is here
        """The bytes of a range where they lie."""
        if self._why_cut:
            raise SourceFailed(f"version {self.manifest.version} cannot be read any more: {self._why_cut}.")
        nbytes = self.files.get(file)
        if nbytes is None:
            raise NotFound(f"version {self.manifest.version} has no file {file!r}.")
        if not 0 <= start <= stop <= nbytes:
            raise InvalidInput(f"{file} has {nbytes} bytes, and none from {start} to {stop}.")
        if file in self._small:
            return [memoryview(self._small[file])[start:stop]]
        at = self._parts[file][0]
        return [self._memory[at + start : at + stop].data.toreadonly()]

    sendable = views

    @property
    def readable(self) -> bool:
        """Whether its memory still has it."""
        return not self._why_cut

    def cut(self, why: str) -> None:
        """Give nothing out any more."""
        self._why_cut = why


class Lent(Holding, Protocol):
    """A version in memory of the trainer's own. It is on the shelf for as long as it is `active`."""

    nbytes: int
    ranks: int

    @property
    def active(self) -> bool: ...


@dataclass(eq=False)
class Slot:
    """Memory for one version. `held` is None while there is no whole version in it.

    `readers` counts requests that read it now. `reading` has the updates that may ask for more of it, as `current_reader`
    names them, and when each last read.
    """

    memory: HostMemory
    held: MemoryHolding | None = None
    readers: int = 0
    reading: dict[str, float] = field(default_factory=dict)

    def note(self, reader: str) -> None:
        """An update has read something."""
        self.reading.pop(reader, None)
        self.reading[reader] = time.monotonic()
        if len(self.reading) > _MAX_READING:
            del self.reading[next(iter(self.reading))]

    @property
    def read_s(self) -> float:
        """When an update that is not done with it last read something."""
        return max(self.reading.values(), default=float("-inf"))


class MemoryShelf:
    """At most `slots` versions, so that one can be written while those before it are read.

    The oldest makes room for a new one when every update that read it is `finished`, or none has read it for a moment, or
    after `hold_s`. An update that still reads it then is cut off, and never sees bytes of another version: memory that is
    still being sent from is not used again.
    """

    def __init__(self, *, slots: int, hold_s: float, where: str) -> None:
        self._limit, self._hold_s, self.where = slots, hold_s, where
        self._changed = threading.Condition()
        self._slots: list[Slot] = []  # the one that was filled last is the last
        self._lent: list[Lent] = []
        self._closed = False

    # -- for the depot ------------------------------------------------------------------------------------------------

    def offers(self) -> list[Offer]:
        """What there is, in the order of publication."""
        with self._changed:
            return [_offer(held) for held in self._held()]

    def newest(self) -> Newest | None:
        """The version that was published last."""
        with self._changed:
            held = self._held()
        if not held:
            return None
        manifest = held[-1].manifest
        return Newest(manifest.version, manifest.sequence, manifest.root_digest)

    def wait_newer(self, after: str, *, deadline: Deadline) -> Newest | None:
        """The newest version once it is another than `after`; None if it is not before the deadline."""
        with self._changed:
            while not self._closed:
                newest = self.newest()
                if newest is not None and newest.version != after:
                    return newest
                left = deadline.remaining()
                if left <= 0:
                    return None
                self._changed.wait(timeout=left)
        return None

    @contextmanager
    def holding(self, version: str) -> Iterator[Holding]:
        """A version, kept for as long as the context lasts, but for no longer than its memory can be waited for."""
        with self._changed:
            slot = next((one for one in self._slots if one.held and one.held.manifest.version == version), None)
            lent = next((one for one in self._lent if one.active and one.manifest.version == version), None)
            held: Holding | None = slot.held if slot is not None else lent
            if held is None:
                raise VersionNotFound(version, self.where, self.versions())
            if slot is not None:
                slot.readers += 1
        reader = current_reader()
        try:
            yield held
        finally:
            if slot is not None:
                with self._changed:
                    slot.readers -= 1
                    slot.note(reader)
                    self._changed.notify_all()

    def finished(self, reader: str) -> None:
        """An update has been acknowledged: it reads no more of any version."""
        with self._changed:
            for slot in self._slots if reader else ():
                slot.reading.pop(reader, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of all memory. What is being sent stays until it was. Safe twice."""
        with self._changed:
            self._closed = True
            self._lent.clear()
            while self._slots:
                slot = self._slots.pop()
                if slot.held is not None:
                    slot.held.cut("the publisher was closed")
                slot.memory.close()
            self._changed.notify_all()

    # -- for the publisher --------------------------------------------------------------------------------------------

    def versions(self) -> list[str]:
        """The versions that are held, the newest last."""
        with self._changed:
            return [held.manifest.version for held in self._held()]

    def take(self, nbytes: int, deadline: Deadline) -> Slot:
        """Memory of at least this size that nobody reads and that is not on the shelf any more."""
        with self._changed:
            slot = self._oldest()
            if slot is not None:
                self._wait_until_unread(slot, deadline)
                self._check_open()
                self._slots.remove(slot)
                if slot.held is not None:
                    slot.held.cut("its memory was needed for a newer one")
                    slot.held = None
                slot.reading.clear()
                if not slot.readers and nbytes <= slot.memory.nbytes <= max(nbytes * _SLACK, 1 << 20):
                    return slot
                slot.memory.close()  # if it is still being sent from, it stays until that has ended
            self._check_open()
        return Slot(private_memory(nbytes))

    def put(self, slot: Slot, held: MemoryHolding) -> None:
        """A slot was filled: its version is the newest."""
        with self._changed:
            self._check_open()
            slot.held = held
            self._slots.append(slot)
            self._changed.notify_all()

    def give_back(self, slot: Slot) -> None:
        """A slot was not filled: its memory is for the next one."""
        with self._changed:
            if self._closed:
                slot.memory.close()
            else:
                self._slots.insert(0, slot)

    def lend(self, lent: Lent) -> None:
        """A version that lies elsewhere is the newest, as long as it is active."""
        with self._changed:
            self._check_open()
            self._lent = [*(one for one in self._lent if one.active), lent]
            self._changed.notify_all()

    def _held(self) -> list[MemoryHolding | Lent]:
        """In the order of publication."""
        held: list[MemoryHolding | Lent] = [slot.held for slot in self._slots if slot.held is not None]
        held += [one for one in self._lent if one.active]
        return sorted(held, key=lambda one: one.manifest.sequence)

    def _check_open(self) -> None:
        if self._closed:
            raise WrongState("publish", "closed", ["open"])

    def _oldest(self) -> Slot | None:
        empty = next((slot for slot in self._slots if slot.held is None), None)
        if empty is not None:
            return empty
        return self._slots[0] if len(self._slots) >= self._limit else None

    def _wait_until_unread(self, slot: Slot, deadline: Deadline) -> None:
        held = slot.held
        if held is None:
            return
        until = time.monotonic() + self._hold_s
        while not self._closed:
            now = time.monotonic()
            if not slot.readers and now - slot.read_s >= QUIET_S:
                return
            if now >= until:
                log.warning(
                    "readers cut",
                    readers=slot.readers,
                    version=held.manifest.version,
                    why=f"they held its memory for {self._hold_s:g} s, and the next version needs it",
                )
                return
            deadline.check(f"waiting for receivers to read {held.manifest.version}")
            self._changed.wait(timeout=max(0.001, min(_LOOK_S, until - now, deadline.remaining())))


def current_reader() -> str:
    """The update that the request of this thread is part of, on its host; empty if the request does not say."""
    ids = logs.ids()
    return f"{ids['update_id']} {ids.get('client', '').rpartition(':')[0]}" if ids.get("update_id") else ""


def _offer(held: MemoryHolding | Lent) -> Offer:
    manifest = held.manifest
    return Offer(
        version=manifest.version,
        sequence=manifest.sequence,
        step=manifest.step,
        kind="full",
        root_digest=manifest.root_digest,
        nbytes=held.nbytes,
        shares=held.ranks,
    )
