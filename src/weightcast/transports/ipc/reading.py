"""Reading one transfer: a memory of a publisher, and what the manifest or the buckets say lies in it."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import dataclass

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, SourceFailed, WrongState
from weightcast.tensors.flat import BLOCK_NBYTES, Array, Piece, from_bytes
from weightcast.transports.ipc.attachment import Attachment
from weightcast.transports.ipc.descriptions import decode_description
from weightcast.transports.ipc.device import Device, Memory
from weightcast.transports.ipc.messages import Ack, Done, End, Ready, Span
from weightcast.wire.manifest import Manifest, TensorEntry

log = logs.get(__name__)

_TOLD_S = 1.0

Buckets = Generator[Iterator[Piece], None, Manifest]


@dataclass(frozen=True)
class Transfer:
    """Transfer `epoch` of what one publisher has of a version, in a memory that is mapped here."""

    attachment: Attachment
    epoch: int
    part: Manifest
    device: Device
    memory: Memory

    @property
    def _where(self) -> str:
        return f"the publisher at {self.attachment.place.path}"

    def array(self, entry: TensorEntry) -> Array:
        """A tensor of a held version, in place."""
        return from_bytes(self._read(entry.name, entry.offset, entry.nbytes), entry.spec)

    def entries(self, manifest: Manifest) -> Iterable[TensorEntry]:
        """What this publisher has of a version: of its tensors, or, if it is asked for as a delta, of its payloads."""
        return (self.part.as_delta() if manifest.kind == "delta" else self.part).transfers().values()

    def blocks(self, manifest: Manifest, names: Collection[str] | None, deadline: Deadline) -> Iterator[Piece]:
        """The bytes of a held version."""
        for entry in self.entries(manifest):
            if names is not None and entry.name not in names:
                continue
            for start in range(0, entry.nbytes, BLOCK_NBYTES):
                deadline.check(f"reading {self.part.version} from {self._where}")
                nbytes = min(BLOCK_NBYTES, entry.nbytes - start)
                yield Piece(entry.name, start, self._read(entry.name, entry.offset + start, nbytes))

    def buckets(self, deadline: Deadline) -> Buckets:
        """A stream bucket by bucket, each to be read to its end. Returns the manifest with its digests."""
        what, sequence = f"receiving {self.part.version} from {self._where}", 0
        while True:
            message = self.attachment.receive(self.epoch, deadline=deadline, what=what)
            if isinstance(message, End):
                sealed = decode_description(message.manifest, self._where)
                self._check_same(sealed)
                self._tell_done(deadline)
                return sealed
            if not isinstance(message, Ready) or message.sequence != sequence:
                raise SourceFailed(
                    f"{self._where} sent {type(message).__name__} {message.sequence} instead of bucket {sequence} of "
                    f"{self.part.version}."
                )
            yield self._bucket(message)
            sequence += 1

    def _tell_done(self, deadline: Deadline) -> None:
        """Let the publisher know, and see that it does: whoever reads a stream may hang up right afterwards.

        The version is whole whatever it answers.
        """
        told = Deadline.after(min(_TOLD_S, deadline.remaining()))
        try:
            self.attachment.ask(Done(epoch=self.epoch), End, deadline=told, what=f"ending {self.part.version}")
        except (DeadlineExceeded, SourceFailed) as error:
            log.debug("transfer ended", version=self.part.version, error=error)

    def _bucket(self, message: Ready) -> Iterator[Piece]:
        """The pieces of a bucket; acknowledged when the consumer asks for more than there are."""
        for span in message.spans:
            yield self._piece(span)
        self.attachment.send(Ack(epoch=self.epoch, sequence=message.sequence))

    def _piece(self, span: Span) -> Piece:
        if not 0 <= span.tensor < len(self.part.tensors):
            raise SourceFailed(f"{self._where} sent tensor {span.tensor} of {len(self.part.tensors)}.")
        entry = self.part.tensors[span.tensor]
        return Piece(entry.name, span.offset, self._read(entry.name, span.at, span.nbytes), span.digest)

    def _read(self, name: str, start: int, nbytes: int) -> memoryview:
        if not 0 <= start <= start + nbytes <= self.memory.nbytes:
            raise SourceFailed(f"{self._where} says that {name!r} lies outside of its memory: {nbytes} bytes at {start}.")
        try:
            return self.device.read(self.memory, start, start + nbytes)
        except WrongState as error:  # it was closed: whoever noticed first that the publisher died did that
            raise SourceFailed(f"{self._where} died while {name!r} was read. No weights were changed.") from error

    def _check_same(self, sealed: Manifest) -> None:
        before = [(entry.spec, entry.offset) for entry in self.part.tensors]
        if not sealed.sealed or before != [(entry.spec, entry.offset) for entry in sealed.tensors]:
            raise SourceFailed(f"{self._where} ended {self.part.version} as another version than it began.")
