"""Versions that are held: a few slabs of shared memory, each with one whole version in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import WrongState
from weightcast.publish.desk import Session
from weightcast.publish.publication import Publication
from weightcast.transports.ipc.device import Device, Handle, Memory
from weightcast.wire.manifest import Manifest

log = logs.get(__name__)

_LOOK_S = 0.5
_SLACK = 4  # a slab that is this many times too large is given up for a new one


@dataclass(frozen=True)
class Reader:
    """A receiver that reads a slab, in its transfer `epoch`, since a moment."""

    session: Session
    epoch: int
    since_s: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Slab:
    """Shared memory, what lies in it, and who reads that. `manifest` is None while there is no whole version in it."""

    memory: Memory
    handle: Handle
    manifest: Manifest | None = None
    publication: Publication | None = None
    readers: list[Reader] = field(default_factory=list)


class Shelf:
    """At most `limit` slabs, so that a version can be written while those before it are read.

    All but `take` are called with `changed` held. `drop` is told of readers that held a slab for more than `hold_s` seconds
    when it was needed; they are not waited for any more.
    """

    def __init__(
        self, device: Device, changed: threading.Condition, *, limit: int, hold_s: float, drop: Callable[[Reader, str], None]
    ) -> None:
        self._device, self._changed, self._limit, self._hold_s, self._drop = device, changed, limit, hold_s, drop
        self._slabs: list[Slab] = []  # the one that was filled last is the last
        self._closed = False

    @property
    def held(self) -> list[Slab]:
        """Slabs with a whole version, the newest last."""
        return [slab for slab in self._slabs if slab.manifest is not None]

    @property
    def memories(self) -> list[Slab]:
        """All slabs."""
        return list(self._slabs)

    def find(self, version: str) -> Slab | None:
        """The slab with a version."""
        return next((slab for slab in self.held if slab.manifest and slab.manifest.version == version), None)

    def reading(self, session: Session, epoch: int) -> Slab | None:
        """The slab that a receiver reads in this transfer. None if it does not, or was dropped."""
        for slab in self._slabs:
            if any(reader.session is session and reader.epoch == epoch for reader in slab.readers):
                return slab
        return None

    def begin(self, slab: Slab, session: Session, epoch: int) -> None:
        """A receiver reads a slab from now on, and nothing else."""
        self.leave(session)
        slab.readers.append(Reader(session, epoch))

    def leave(self, session: Session) -> None:
        """A receiver does not read any more."""
        for slab in self._slabs:
            slab.readers = [reader for reader in slab.readers if reader.session is not session]

    def take(self, nbytes: int, deadline: Deadline) -> Slab:
        """A slab of at least this size without a version in it, and without readers: the oldest one, or a new one."""
        with self._changed:
            if self._closed:
                raise WrongState("publish", "closed", ["open"])
            slab = self._oldest()
            if slab is not None:
                slab.manifest = slab.publication = None  # from here on nobody can begin to read it
                self._wait_for_readers(slab, deadline)
                if nbytes <= slab.memory.nbytes <= max(nbytes * _SLACK, 1 << 20):
                    return slab
                self._slabs.remove(slab)
                slab.memory.close()
        return self._add(nbytes)

    def put(self, slab: Slab, manifest: Manifest, publication: Publication) -> None:
        """A slab was filled: its version is the newest."""
        if self._closed:
            raise WrongState("publish", "closed", ["open"])
        slab.manifest, slab.publication = manifest, publication
        self._slabs.remove(slab)
        self._slabs.append(slab)

    def provide(self, nbytes: int) -> None:
        """Make the next slab beforehand: its first touch takes several times as long as a copy into it."""
        with self._changed:
            if self._closed or len(self._slabs) >= self._limit:
                return
        self._add(nbytes)

    def close(self) -> None:
        """Let go of all memory. Receivers that still read keep theirs until they have read."""
        self._closed = True
        while self._slabs:
            self._slabs.pop().memory.close()

    def _oldest(self) -> Slab | None:
        empty = next((slab for slab in self._slabs if slab.manifest is None), None)
        if empty is not None:
            return empty
        return self._slabs[0] if len(self._slabs) >= self._limit else None

    def _add(self, nbytes: int) -> Slab:
        began = time.monotonic()
        memory = self._device.allocate(nbytes)  # may take seconds: receivers are served meanwhile
        slab = Slab(memory, self._device.export(memory))
        with self._changed:
            if self._closed:
                memory.close()
                raise WrongState("publish", "closed", ["open"])
            self._slabs.insert(0, slab)
        log.info("memory allocated", memory=slab.handle.id, nbytes=nbytes, ms=logs.ms(time.monotonic() - began))
        return slab

    def _wait_for_readers(self, slab: Slab, deadline: Deadline) -> None:
        while slab.readers:
            now = time.monotonic()
            for reader in [one for one in slab.readers if now - one.since_s >= self._hold_s]:
                slab.readers.remove(reader)
                self._drop(reader, f"it held the memory for more than {self._hold_s:g} s, and the next version needs it")
            if slab.readers:
                deadline.check(f"waiting for {', '.join(one.session.name for one in slab.readers)} to read the last version")
                soonest = min(one.since_s for one in slab.readers) + self._hold_s - now
                self._changed.wait(timeout=max(0.001, min(_LOOK_S, soonest, deadline.remaining())))
