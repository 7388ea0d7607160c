"""Versions that are streamed: through two buckets, once, to the receivers that were there when it began."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, InvalidInput, ReceiversLost, SourceFailed, WrongState
from weightcast.publish.desk import Desk, Session
from weightcast.publish.filling import aligned
from weightcast.publish.publication import Publication
from weightcast.tensors.bridges import spec_of
from weightcast.tensors.sums import RunningSum
from weightcast.transports.ipc.descriptions import encode_description
from weightcast.transports.ipc.device import Block, Device, Handle, Memory
from weightcast.transports.ipc.messages import End, Failure, Ready, Span
from weightcast.wire.manifest import Manifest, compute_root

BUCKETS = 2
_LOOK_S = 0.5


@dataclass(eq=False)
class Member:
    """A receiver of a stream: its transfer, and the buckets that it has not acknowledged, with when they were sent."""

    session: Session
    epoch: int
    waiting: dict[int, float] = field(default_factory=dict)


@dataclass(eq=False)
class LiveStream:
    """One version on its way. `manifest` has no digests until it has ended. Guarded by `changed`, but for the filling."""

    manifest: Manifest
    memory: Memory
    handle: Handle
    device: Device
    desk: Desk
    changed: threading.Condition
    stall_s: float
    publication: Publication
    began: bool = False
    ended: bool = False
    closed: bool = False
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.announced = self.manifest
        self._described = b""

    # -- what receivers say, by the desk ------------------------------------------------------------------------------

    def join(self, session: Session, epoch: int) -> None:
        """A receiver wants to have it."""
        if self.began:
            raise SourceFailed(f"the stream of {self.manifest.version} has begun without this receiver.")
        self.leave(session, "it asked for the same stream again")
        self.members.append(Member(session, epoch))

    def acknowledge(self, session: Session, epoch: int, sequence: int) -> None:
        """A receiver has copied a bucket."""
        for member in self._members_of(session, epoch):
            member.waiting.pop(sequence, None)
            self._tell_end(member)

    def done(self, session: Session, epoch: int) -> bool:
        """A receiver has everything. False if it is none of the members."""
        members = self._members_of(session, epoch)
        for member in members:
            self.members.remove(member)
            self.publication.taken.append(session.name)
        return bool(members)

    def leave(self, session: Session, why: str) -> None:
        """A receiver is gone, or has given up."""
        for member in [one for one in self.members if one.session is session]:
            self._lose(member, why)

    def _members_of(self, session: Session, epoch: int) -> list[Member]:
        return [one for one in self.members if one.session is session and one.epoch == epoch]

    def _lose(self, member: Member, why: str) -> None:
        self.members.remove(member)
        if self.began:
            self.publication.dropped.append(f"{member.session.name}: {why}")

    # -- sending, by the trainer --------------------------------------------------------------------------------------

    def gather(self, receivers: int, deadline: Deadline) -> None:
        """Wait until this many receivers are there; from then on it is for them alone."""
        with self.changed:
            while len(self.members) < receivers:
                self._check_open()
                if deadline.remaining() == 0:
                    there = f"{len(self.members)} of {receivers} receiver(s) came"
                    what = f"waiting for the receivers of {self.manifest.version} ({there})"
                    raise DeadlineExceeded(what, deadline.seconds)
                self.changed.wait(timeout=min(deadline.remaining(), _LOOK_S))
            self.began = True
            self.publication.expected = len(self.members)

    def run(self, tensors: Iterable[tuple[str, object]], deadline: Deadline) -> None:
        """Send every tensor. When this returns they may change; receivers may still be reading the last buckets."""
        writer = _BucketWriter(self, deadline)
        to_come = {entry.name: number for number, entry in enumerate(self.manifest.tensors) if entry.nbytes}
        sums = {entry.name: entry.sum for entry in self.manifest.tensors if not entry.nbytes}
        empty = set(sums)
        for name, tensor in tensors:
            if name in empty or name in self.manifest.tied:
                continue
            number = to_come.pop(name, None)
            if number is None:
                raise InvalidInput(f"tensor {name!r} of {self.manifest.version} comes twice, or was not announced.")
            entry = self.manifest.tensors[number]
            spec = spec_of(name, tensor)
            if spec != entry.spec:
                raise InvalidInput(f"tensor {name!r} is {spec.describe()}, and {entry.spec.describe()} was announced.")
            sums[name] = writer.add(number, name, tensor)
        if to_come:
            missing = ", ".join(sorted(to_come))
            raise InvalidInput(f"tensors of {self.manifest.version} were announced and did not come: {missing}.")
        writer.flush()
        self._end(sums)

    def _end(self, sums: dict[str, str]) -> None:
        tensors = tuple(replace(entry, sum=sums[entry.name]) for entry in self.manifest.tensors)
        sealed = replace(self.manifest, tensors=tensors, root_digest=compute_root(tensors, self.manifest.algorithm))
        with self.changed:
            self.manifest = self.publication.manifest = sealed
            self.ended, self._described = True, encode_description(sealed)
            for member in self.members:
                self._tell_end(member)
            self._check_members()

    def _tell_end(self, member: Member) -> None:
        """Only a receiver that has acknowledged every bucket in time has the version: the last ones may be filled again."""
        if self.ended and not member.waiting:
            self.desk.post(member.session, End(epoch=member.epoch, manifest=self._described))

    def send(self, sequence: int, spans: tuple[Span, ...]) -> None:
        """Tell everybody of a bucket."""
        self.device.synchronise()
        with self.changed:
            now = time.monotonic()
            for member in self.members:
                member.waiting[sequence] = now
                self.desk.post(member.session, Ready(epoch=member.epoch, sequence=sequence, spans=spans))

    def wait_free(self, sequence: int, deadline: Deadline) -> None:
        """Wait until everybody has copied a bucket; drop those that take too long."""
        with self.changed:
            while True:
                now = time.monotonic()
                slow = [one for one in self.members if sequence in one.waiting]
                for member in [one for one in slow if now - one.waiting[sequence] >= self.stall_s]:
                    slow.remove(member)
                    self._drop(member, f"it took more than {self.stall_s:g} s for a bucket")
                self._check_members()
                if not slow:
                    return
                deadline.check(f"streaming {self.manifest.version}")
                soonest = min(one.waiting[sequence] for one in slow) + self.stall_s - now
                self.changed.wait(timeout=max(0.001, min(soonest, _LOOK_S, deadline.remaining())))

    def finish(self) -> None:
        """Wait for the last acknowledgements, or drop who does not give them: the buckets are needed."""
        with self.changed:
            end = time.monotonic() + self.stall_s
            while self.members and time.monotonic() < end:
                self.changed.wait(timeout=max(0.001, min(_LOOK_S, end - time.monotonic())))
            for member in list(self.members):
                self._drop(member, f"it did not end its transfer within {self.stall_s:g} s")

    def fail(self, why: str) -> None:
        """The trainer cannot go on: tell everybody."""
        with self.changed:
            for member in list(self.members):
                self._drop(member, why)

    def close(self, why: str) -> None:
        """The same, for good: also the trainer's thread is told if it is still sending."""
        self.closed = True
        self.fail(why)
        self.changed.notify_all()

    def _drop(self, member: Member, why: str) -> None:
        self._lose(member, why)
        text = f"the stream of {self.manifest.version} ended for this receiver: {why}."
        self.desk.post(member.session, Failure(epoch=member.epoch, code=SourceFailed.code, message=text))
        self.changed.notify_all()

    def _check_open(self) -> None:
        if self.closed:
            raise WrongState(f"stream {self.manifest.version}", "closed", ["open"])

    def _check_members(self) -> None:
        self._check_open()
        if not self.members and not self.publication.taken:
            raise ReceiversLost(self.manifest.version, self.publication.dropped)


class _BucketWriter:
    """Fills the buckets in turn. A tensor goes on in the next one where it does not fit."""

    def __init__(self, stream: LiveStream, deadline: Deadline) -> None:
        self._stream, self._deadline = stream, deadline
        self._size = stream.memory.nbytes // BUCKETS
        self._sequence = self._used = 0
        self._spans: list[Span] = []

    def add(self, number: int, name: str, tensor: object) -> str:
        """Send a tensor; gives its sum."""
        hasher, offset = RunningSum(self._stream.manifest.tensors[number].sum_spec), 0
        for block in self._stream.device.blocks(name, tensor):
            start = 0
            while start < block.nbytes:
                nbytes = self._put(number, offset, block, start, hasher)
                start, offset = start + nbytes, offset + nbytes
            self._deadline.check(f"streaming {name}")
        last, digest = self._spans[-1], hasher.digest()
        self._spans[-1] = Span(last.tensor, last.offset, last.at, last.nbytes, digest)
        return digest

    def _put(self, number: int, offset: int, block: Block, start: int, hasher: RunningSum) -> int:
        """Copy as much of a block as fits; gives how much that was."""
        fresh = not self._spans or self._spans[-1].tensor != number
        at = aligned(self._used) if fresh else self._used
        if at >= self._size:
            self.flush()
            self._stream.wait_free(self._sequence - BUCKETS, self._deadline)
            at = 0
        stream, nbytes = self._stream, min(block.nbytes - start, self._size - at)
        place = self._sequence % BUCKETS * self._size + at
        stream.device.copy(block.part(start, start + nbytes), stream.memory, place)
        hasher.update(stream.device.read(stream.memory, place, place + nbytes))
        last = self._spans[-1] if self._spans else None
        if last is not None and last.tensor == number:
            self._spans[-1] = Span(number, last.offset, last.at, last.nbytes + nbytes)
        else:
            self._spans.append(Span(number, offset, place, nbytes))
        self._used = at + nbytes
        return nbytes

    def flush(self) -> None:
        """Send what is in the bucket."""
        if self._spans:
            self._stream.send(self._sequence, tuple(self._spans))
            self._sequence, self._used, self._spans = self._sequence + 1, 0, []
