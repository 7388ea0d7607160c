"""What a publisher answers its receivers: which versions there are, what they are, and where their bytes lie."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from weightcast import logs
from weightcast.errors import SourceFailed, VersionNotFound, WeightcastError, WrongState
from weightcast.publish.desk import Desk, Session
from weightcast.publish.shelf import Reader, Shelf
from weightcast.publish.streaming import LiveStream
from weightcast.transports.ipc.descriptions import encode_description
from weightcast.transports.ipc.device import Device, Handle, Memory
from weightcast.transports.ipc.messages import (
    Ack,
    Ask,
    Cancel,
    Describe,
    Description,
    Done,
    End,
    Failure,
    FromPublisher,
    FromReceiver,
    Layout,
    Listing,
    Open,
)
from weightcast.wire.manifest import Manifest

log = logs.get(__name__)


@dataclass(frozen=True)
class _Question:
    """A receiver that waits for a newer version than one."""

    session: Session
    epoch: int
    after: str


class Clerk:
    """Who answers at a publisher's desk. All but `take_buckets` is called with `changed` held, most by the desk's thread."""

    def __init__(self, device: Device, changed: threading.Condition, *, slabs: int, hold_s: float) -> None:
        self._device, self._changed, self._closed = device, changed, False
        self.shelf = Shelf(device, changed, limit=slabs, hold_s=hold_s, drop=self._drop)
        self.stream: LiveStream | None = None
        self.buckets: tuple[Memory, Handle] | None = None
        self.newest = ""
        self.desk: Desk | None = None
        self._questions: list[_Question] = []

    # -- what the desk asks -------------------------------------------------------------------------------------------

    def answer(self, session: Session, message: FromReceiver) -> None:
        """See `Answers`."""
        try:
            self._answer(session, message)
        except VersionNotFound:
            versions = self._versions()
            asked = message.version if isinstance(message, Describe | Open) else ""
            self._post(session, Failure(epoch=message.epoch, code=VersionNotFound.code, message=asked, known=versions))
        except WeightcastError as error:
            self._post(session, Failure(epoch=message.epoch, code=error.code, message=str(error)))

    def _answer(self, session: Session, message: FromReceiver) -> None:
        match message:
            case Ask():
                self._questions = [question for question in self._questions if question.session is not session]
                self._questions.append(_Question(session, message.epoch, "\0" if message.after is None else message.after))
                self.answer_questions()
            case Describe():
                self._post(session, self._described(message))
            case Open():
                with logs.bound(request_id=message.request_id, update_id=message.update_id):
                    self._post(session, self._open(session, message))
                    log.info("transfer begun", pid=session.pid, version=message.version)
            case Ack() if self.stream is not None:
                self.stream.acknowledge(session, message.epoch, message.sequence)
            case Done():
                self._done(session, message)
            case Cancel():
                self._leave(session, "it gave up")

    def gone(self, session: Session) -> None:
        """See `Answers`."""
        self._leave(session, "it died or hung up")

    def descriptor(self, memory: int) -> int | None:
        """See `Answers`."""
        for owned, handle in self._memories():
            if handle.id == memory:
                return getattr(owned, "descriptor", None)
        return None

    # -- what the trainer's thread tells ------------------------------------------------------------------------------

    def announce(self, version: str) -> None:
        """A version is the newest from now on."""
        self.newest = version
        self.answer_questions()

    def take_buckets(self, memory: Memory) -> tuple[Memory, Handle]:
        """Memory for streams, this one's and all that follow."""
        with self._changed:
            if self._closed:
                memory.close()
                raise WrongState("stream", "closed", ["open"])
            self.buckets = memory, self._device.export(memory)
            return self.buckets

    def begin(self, stream: LiveStream) -> None:
        """A stream can be joined from now on."""
        if self._closed:
            raise WrongState(f"stream {stream.manifest.version}", "closed", ["open"])
        self.stream = stream
        self.announce(stream.manifest.version)

    def withdraw(self, stream: LiveStream, newest: str) -> None:
        """A stream did not come to its end, so the version before it is the newest again."""
        if self.stream is stream:
            self.stream = None
        if self.newest == stream.manifest.version:
            self.newest = newest

    def answer_questions(self) -> None:
        """Tell those who wait for a newer version."""
        waiting, self._questions = self._questions, []
        for question in waiting:
            if question.after != self.newest:
                listing = Listing(epoch=question.epoch, newest=self.newest, versions=self._versions())
                self._post(question.session, listing)
            else:
                self._questions.append(question)

    def close(self, why: str) -> None:
        """End every transfer, and let go of the memory."""
        self._closed = True
        for slab in self.shelf.memories:
            for reader in list(slab.readers):
                self._drop(reader, why)
        if self.stream is not None:
            self.stream.close(why)
        self.shelf.close()
        if self.buckets is not None:
            self.buckets[0].close()
            self.buckets = None

    # -- steps --------------------------------------------------------------------------------------------------------

    def _versions(self) -> tuple[str, ...]:
        versions = [slab.manifest.version for slab in self.shelf.held if slab.manifest]
        if self.stream is not None and not self.stream.ended:
            versions.append(self.stream.manifest.version)
        return tuple(versions)

    def _memories(self) -> list[tuple[Memory, Handle]]:
        return [(slab.memory, slab.handle) for slab in self.shelf.memories] + ([self.buckets] if self.buckets else [])

    def _described(self, message: Describe) -> FromPublisher:
        slab = self.shelf.find(message.version)
        if slab is not None and slab.manifest is not None:
            described = encode_description(slab.manifest)
            return Description(epoch=message.epoch, manifest=described, held=slab.handle.kind == "memfd")
        if self.stream is not None and self.stream.manifest.version == message.version:
            return Description(epoch=message.epoch, manifest=encode_description(self.stream.manifest), held=False)
        raise VersionNotFound(message.version, "this publisher", self._versions())

    def _open(self, session: Session, message: Open) -> FromPublisher:
        ids = tuple(handle.id for _, handle in self._memories())
        slab = self.shelf.find(message.version) if message.root_digest else None
        if slab is not None and slab.manifest is not None and _is_described(slab.manifest, message):
            self.shelf.begin(slab, session, message.epoch)
            return Layout(epoch=message.epoch, memory=slab.handle, memories=ids)
        if self.stream is not None and not message.root_digest and _is_described(self.stream.announced, message):
            self.stream.join(session, message.epoch)
            return Layout(epoch=message.epoch, memory=self.stream.handle, memories=ids)
        raise VersionNotFound(message.version, "this publisher", self._versions())

    def _done(self, session: Session, message: Done) -> None:
        slab = self.shelf.reading(session, message.epoch)
        if slab is not None:
            self.shelf.leave(session)
            if slab.publication is not None:
                slab.publication.taken.append(session.name)
        elif self.stream is None or not self.stream.done(session, message.epoch):
            raise SourceFailed("the publisher does not know of this transfer, or has ended it.")
        self._post(session, End(epoch=message.epoch))

    def _leave(self, session: Session, why: str) -> None:
        self._questions = [question for question in self._questions if question.session is not session]
        self.shelf.leave(session)
        if self.stream is not None:
            self.stream.leave(session, why)

    def _drop(self, reader: Reader, why: str) -> None:
        log.warning("receiver dropped", pid=reader.session.pid, why=why)
        text = f"the publisher did not keep the version for this receiver: {why}."
        self._post(reader.session, Failure(epoch=reader.epoch, code=SourceFailed.code, message=text))

    def _post(self, session: Session, message: FromPublisher) -> None:
        if self.desk is not None:
            self.desk.post(session, message)


def _is_described(manifest: Manifest, message: Open) -> bool:
    same = (manifest.version, manifest.root_digest) == (message.version, message.root_digest)
    return same and message.described in (0, manifest.sequence)
