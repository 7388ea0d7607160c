"""A receiver's connection to one publisher: messages, the lifeline, and the memory that is mapped."""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from typing import TypeVar

import msgspec

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import MissingExtra, SourceFailed, VersionNotFound, WeightcastError, rebuilt
from weightcast.transports.ipc.device import Handle, Memory
from weightcast.transports.ipc.devices import device_for
from weightcast.transports.ipc.lifeline import Lifeline, closed_in_children
from weightcast.transports.ipc.messages import (
    MAX_MESSAGE_NBYTES,
    PROTOCOL,
    Failure,
    FromPublisher,
    FromReceiver,
    Hello,
    Message,
    Welcome,
    decode_from_publisher,
    encode,
)
from weightcast.transports.ipc.place import Place

try:
    import zmq
except ImportError as error:
    raise MissingExtra("pyzmq", "ipc", "ipc:// sources") from error

log = logs.get(__name__)

_LOOK_S = 0.1  # how late a cancellation is noticed while nothing comes
_JOIN_S = 5.0
_BEGINS_S = 0.02
_DYING_S = 0.5
_LAST_WORDS_S = 0.1  # a message may arrive a little after the socket that tells of its sender's end

Answer = TypeVar("Answer", bound=Message)


class Mapped:
    """The memory of a publisher that is mapped here. It goes when the publisher does, whoever notices."""

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}
        self._lock = threading.RLock()  # the collector may end an attachment in the midst of this
        self.deserted = False

    def get(self, memory_id: int) -> Memory | None:
        """A memory that is mapped already."""
        return self._memories.get(memory_id)

    def add(self, memory_id: int, memory: Memory) -> None:
        """Keep it mapped: mapping it again costs half as much as copying it."""
        with self._lock:
            if self.deserted:
                memory.close()
            else:
                self._memories[memory_id] = memory

    def keep_only(self, ids: tuple[int, ...]) -> None:
        """Let go of what the publisher has let go of."""
        with self._lock:
            for memory_id in self._memories.keys() - set(ids):
                self._memories.pop(memory_id).close()

    def desert(self) -> None:
        """Let go of everything, also of what comes yet. What is being read stays until it has been read."""
        with self._lock:
            self.deserted = True
            while self._memories:
                self._memories.popitem()[1].close()


class _Held:
    """All that has to be let go of, apart from the attachment, which may be forgotten by those who use it."""

    def __init__(self, lifeline: Lifeline) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)  # kept here: ending a context waits for every socket of it
        self.lifeline = lifeline
        self.watcher: threading.Thread | None = None
        self.mapped = Mapped()
        self.stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def release(self) -> None:
        """Stop watching, unmap, disconnect."""
        os.eventfd_write(self.stop, 1)
        if self.watcher is not None and self.watcher is not threading.current_thread():  # the collector runs anywhere
            self.watcher.join(timeout=_JOIN_S)
        self.mapped.desert()
        self.forget()
        self.context.destroy(linger=0)

    def forget(self) -> None:
        """Close the descriptors that a child of a fork shares with its parent."""
        self.lifeline.close()
        os.close(self.stop)


class Attachment:
    """Connected until `close`, or until the publisher dies: then `alive` is false, and its memory is let go of at once.

    `companions` are the lifelines of the other trainer ranks: if one of them dies, the wait for this one ends too.
    """

    companions: tuple[Lifeline, ...] = ()

    def __init__(self, place: Place, lifeline: Lifeline, *, token: str | None, deadline: Deadline) -> None:
        self.place, self.lifeline = place, lifeline
        self._stamp = place.stamp()
        self._kept: FromPublisher | None = None
        held = self._held = _Held(lifeline)
        self._end = weakref.finalize(self, held.release)
        self._mapped = held.mapped
        try:
            self._socket = held.socket
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES)
            self._socket.connect(place.control)
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._poller.register(lifeline.fileno(), zmq.POLLIN)
            welcome = self._greet(place.read_token() if token is None else token, deadline)
            self.rank, self.ranks = welcome.rank, welcome.ranks
            lifeline.take_up(welcome.session, deadline=deadline)
        except BaseException:
            if lifeline.hung_up():
                _clear_up(place, self._stamp, _DYING_S)
            self._end()
            raise
        closed_in_children(self)
        watch = (lifeline.fileno(), held.stop, held.mapped, place, self._stamp)
        held.watcher = threading.Thread(target=_watch, args=watch, name=f"lifeline {place.path}", daemon=True)
        held.watcher.start()

    @classmethod
    def connect(cls, place: Place, *, token: str | None = None, deadline: Deadline) -> Attachment:
        """Connect to the publisher of a place. Raises `SourceFailed` if there is none; one that died is cleared away."""
        while True:
            if place.deserted():
                place.clear()
                raise SourceFailed(f"there is no publisher at {place.path}. Start the trainer's Publisher first.")
            lifeline = _called(place)
            if lifeline is not None:
                try:
                    return cls(place, lifeline, token=token, deadline=deadline)
                except (OSError, zmq.ZMQError) as error:  # no descriptors or threads are left, most likely
                    lifeline.close()
                    raise SourceFailed(f"the publisher at {place.path} cannot be reached: {error}.") from error
            deadline.check(f"waiting for the publisher at {place.path} to begin")
            time.sleep(_BEGINS_S)

    @property
    def alive(self) -> bool:
        """Whether the publisher is there."""
        return self._end.alive and not self._mapped.deserted and not self.lifeline.hung_up()

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, message: FromReceiver) -> None:
        """Hand a message over; never waits."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise SourceFailed(f"the publisher at {self.place.path} cannot be reached: {error}.") from error

    def ask(self, message: FromReceiver, answer: type[Answer], *, deadline: Deadline, what: str) -> Answer:
        """Send a message and wait for its answer, which is of this type."""
        self.send(message)
        got = self.receive(message.epoch, deadline=deadline, what=what)
        if not isinstance(got, answer):
            raise SourceFailed(f"the publisher at {self.place.path} answered {type(got).__name__} while {what}.")
        return got

    def receive(self, epoch: int, *, deadline: Deadline, what: str) -> FromPublisher:
        """The next message of a transfer. A failure is raised, as what the publisher raised or as `SourceFailed`."""
        while True:
            message = self._next(deadline, what)
            if message.epoch != epoch:
                continue  # of a transfer that was given up
            if isinstance(message, Failure):
                raise self._error(message)
            return message

    def ready(self, epoch: int) -> bool:
        """Whether `receive` would not have to wait for a message of this transfer."""
        while (self._kept is None or self._kept.epoch != epoch) and self._socket.poll(0):
            self._kept = self._take()
        return (self._kept is not None and self._kept.epoch == epoch) or self.lifeline.hung_up()

    def _next(self, deadline: Deadline, what: str) -> FromPublisher:
        kept, self._kept = self._kept, None
        if kept is not None:
            return kept
        while True:
            deadline.check(what)
            events = dict(self._poller.poll(_milliseconds(min(deadline.remaining(), _LOOK_S))))
            if self._socket in events:
                return self._take()
            if events and self.lifeline.hung_up():
                if self._socket.poll(_milliseconds(_LAST_WORDS_S)):
                    return self._take()
                self._mapped.desert()
                _clear_up(self.place, self._stamp, _DYING_S)
                raise SourceFailed(f"the publisher at {self.place.path} died while {what}. No weights were changed.")
            if any(lifeline.hung_up() for lifeline in self.companions):
                raise SourceFailed(f"the publisher of another trainer rank died while {what}. No weights were changed.")

    def _take(self) -> FromPublisher:
        data = self._socket.recv()
        try:
            message: FromPublisher = decode_from_publisher(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            what = f"{len(data)} bytes that are no message: {error}"
            raise SourceFailed(f"the publisher at {self.place.path} sent {what}.") from error
        return message

    def _greet(self, token: str, deadline: Deadline) -> Welcome:
        self.send(Hello(protocol=PROTOCOL, token=token, pid=os.getpid()))
        message = self.receive(0, deadline=deadline, what=f"greeting the publisher at {self.place.path}")
        if not isinstance(message, Welcome) or message.protocol != PROTOCOL:
            text = f"does not speak protocol {PROTOCOL}: install one release on both sides"
            raise SourceFailed(f"the publisher at {self.place.path} {text}.")
        return message

    def _error(self, failure: Failure) -> WeightcastError:
        if failure.code == VersionNotFound.code:
            return VersionNotFound(failure.message, f"the publisher at {self.place.path}", failure.known)
        return rebuilt(failure.code, failure.message)

    # -- memory -------------------------------------------------------------------------------------------------------

    def memory(self, handle: Handle, live: tuple[int, ...], *, deadline: Deadline) -> Memory:
        """The memory of a handle, mapped; `live` are the ids of all memory that the publisher still has."""
        self._mapped.keep_only(live)
        found = self._mapped.get(handle.id)
        if found is not None and found.nbytes == handle.nbytes:
            return found
        began = time.monotonic()
        memory = device_for(handle).open(handle, lambda wanted: self.descriptor(wanted, deadline=deadline))
        self._mapped.add(handle.id, memory)
        seconds = time.monotonic() - began
        log.info("memory mapped", place=self.place.path, memory=handle.id, nbytes=handle.nbytes, ms=logs.ms(seconds))
        return memory

    def descriptor(self, handle: Handle, *, deadline: Deadline) -> int:
        """The descriptor of a memory, the caller's to close."""
        return self.lifeline.descriptor(handle.id, deadline=deadline)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Disconnect and unmap. Safe twice, and after the publisher's death."""
        self._end()

    def forget(self) -> None:
        """Called in a child of a fork: it leaves everything to its parent."""
        if self._end.detach() is not None:
            self._held.forget()


def _milliseconds(seconds: float) -> int:
    return max(1, int(1000 * seconds))


def _called(place: Place) -> Lifeline | None:
    """A lifeline; None if the publisher that lives here cannot be spoken to yet, or not any more."""
    try:
        lifeline = Lifeline(place.lifeline)
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):  # the last: many others wait for the same
        return None
    except OSError as error:
        raise SourceFailed(f"the publisher at {place.path} cannot be reached: {error}.") from error
    try:
        place.check_user(lifeline.peer_uid)  # the owner of the directory need not be who listens in it
        begun = place.stamp() is not None
    except BaseException:
        lifeline.close()
        raise
    if not begun:
        lifeline.close()
    return lifeline if begun else None


def _watch(lifeline: int, stop: int, mapped: Mapped, place: Place, stamp: tuple[int, int] | None) -> None:
    """Let go of the memory of a publisher that dies while nobody asks it for anything, and remove what it left."""
    poll = select.poll()
    poll.register(lifeline, 0)  # hang-ups are always told
    poll.register(stop, select.POLLIN)
    if lifeline not in [descriptor for descriptor, _ in poll.poll()]:
        return
    mapped.desert()
    _clear_up(place, stamp, 5 * _DYING_S)


def _clear_up(place: Place, stamp: tuple[int, int] | None, patience_s: float) -> None:
    """Remove what a publisher left. One that is killed closes its descriptors one by one, maybe its lifelines first."""
    end = time.monotonic() + patience_s
    while place.stamp() == stamp and not place.clear() and time.monotonic() < end:
        time.sleep(_BEGINS_S)
