"""Where receivers are met: one thread that owns the sockets of a publisher."""

from __future__ import annotations

import hmac
import os
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from weightcast import logs
from weightcast.errors import MissingExtra, StorageFailed
from weightcast.transports.ipc.lifeline import Line, Listener, closed_in_children, wanted_memory
from weightcast.transports.ipc.messages import (
    MAX_QUESTION_NBYTES,
    PROTOCOL,
    Failure,
    FromPublisher,
    FromReceiver,
    Hello,
    Welcome,
    decode_from_receiver,
    encode,
)
from weightcast.transports.ipc.place import Claim

try:
    import zmq
except ImportError as error:
    raise MissingExtra("pyzmq", "ipc", "a Publisher") from error

log = logs.get(__name__)

_GREETED_S = 5.0  # for a receiver to take up its lifeline
_LINGER_MS = 1000  # for last messages to be delivered
_JOIN_S = 10.0
_TICK_MS = 1000


@dataclass(eq=False)
class Session:
    """One receiver. `line` is None until it has taken up its lifeline; without one it is told nothing."""

    identity: bytes
    pid: int
    secret: bytes
    since_s: float = field(default_factory=time.monotonic)
    line: Line | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"process {self.pid}"


@dataclass(eq=False)
class _Call:
    """A lifeline that was accepted. `session` is None until it has given the secret of one."""

    line: Line
    session: Session | None = None
    since_s: float = field(default_factory=time.monotonic)


class Answers(Protocol):
    """What the desk asks. Everything is called by its thread while it holds `changed`."""

    def answer(self, session: Session, message: FromReceiver) -> None:
        """A message of a receiver that has been greeted."""

    def gone(self, session: Session) -> None:
        """A receiver has died or hung up."""

    def descriptor(self, memory: int) -> int | None:
        """The descriptor of a memory, or None if there is none by this id."""


class Desk:
    """`changed` guards the state of the publisher, this and the clerk's, and is notified of every change by a receiver.

    `post` may be called by any thread that holds it. `close` delivers what was posted.
    """

    def __init__(self, claim: Claim, *, rank: int, ranks: int, clerk: Answers, changed: threading.Condition) -> None:
        self._claim, self._rank, self._ranks, self._clerk, self._changed = claim, rank, ranks, clerk, changed
        self._sessions: dict[bytes, Session] = {}
        self._lines: dict[int, _Call] = {}
        self._outbox: deque[tuple[bytes, FromPublisher]] = deque()
        self._closing = self._releases_itself = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._listener: Listener | None = None
        try:
            self._listener = Listener(claim.place.lifeline)
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.LINGER, _LINGER_MS)
            self._router.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_NBYTES)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router.bind(claim.place.control)
        except zmq.ZMQError as error:
            self._release()
            raise StorageFailed("listen on", claim.place.control, OSError(error.errno, str(error))) from error
        except BaseException:
            self._release()
            raise
        closed_in_children(self)
        self._thread = threading.Thread(target=self._run, name=f"publisher {claim.place.path}", daemon=True)
        self._thread.start()

    @property
    def sessions(self) -> list[Session]:
        """The receivers that are connected."""
        return [session for session in self._sessions.values() if session.line is not None]

    def post(self, session: Session, message: FromPublisher) -> None:
        """Let a message be sent. One to a receiver that is gone is dropped, and so is every one after `close`."""
        if self._closing:
            return
        self._outbox.append((session.identity, message))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send what was posted, hang up, and end the thread."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        if threading.current_thread() is self._thread:  # the collector runs in any thread
            self._releases_itself = True
            return
        self._thread.join(timeout=_JOIN_S)
        self._release()

    def forget(self) -> None:
        """Called in a child of a fork: close what it shares with its parent."""
        if self._listener is not None:
            self._listener.close()
        for call in self._lines.values():
            call.line.close()
        self._claim.forget()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        if self._listener is not None:
            poller.register(self._listener.fileno(), zmq.POLLIN)
        while True:
            events = dict(poller.poll(_TICK_MS))
            with self._changed:
                if self._wake in events:
                    os.eventfd_read(self._wake)
                if self._listener is not None and self._listener.fileno() in events:
                    self._accept(poller)
                for descriptor in [one for one in events if one in self._lines]:
                    self._read_line(descriptor, poller)
                if self._router in events:
                    self._read_messages()
                self._drop_silent(poller)
                self._send_all()
                if self._closing:
                    break
        if self._releases_itself:
            self._release()

    def _read_messages(self) -> None:
        while True:
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode_from_receiver(frames[0])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError) as error:
                log.warning("message dropped", nbytes=sum(map(len, frames)), error=error)
                continue
            session = self._sessions.get(identity)
            if isinstance(message, Hello):
                self._greet(identity, message)
            elif session is not None and session.line is not None:
                self._clerk.answer(session, message)
                self._changed.notify_all()

    def _greet(self, identity: bytes, hello: Hello) -> None:
        if not hmac.compare_digest(hello.token.encode(), self._claim.token.encode()):
            log.warning("receiver refused", pid=hello.pid, why="wrong token")
            refusal = Failure(code="invalid_input", message="the token is wrong: the publisher gives nothing.")
        elif hello.protocol != PROTOCOL:
            text = f"the publisher speaks protocol {PROTOCOL}, the receiver {hello.protocol}: install one release."
            refusal = Failure(code="invalid_input", message=text)
        elif identity in self._sessions:
            refusal = Failure(code="invalid_input", message="a receiver says hello once.")
        else:
            session = Session(identity, hello.pid, secrets.token_bytes(16))
            self._sessions[identity] = session
            self._outbox.append(
                (identity, Welcome(protocol=PROTOCOL, session=session.secret, rank=self._rank, ranks=self._ranks))
            )
            return
        self._outbox.append((identity, refusal))

    def _accept(self, poller: zmq.Poller) -> None:
        line = self._listener.accept() if self._listener is not None else None
        if line is not None:
            self._lines[line.fileno()] = _Call(line)
            poller.register(line.fileno(), zmq.POLLIN)

    def _read_line(self, descriptor: int, poller: zmq.Poller) -> None:
        call = self._lines[descriptor]
        packet = call.line.receive()
        if packet is not None and (packet == b"" or not self._told(call, packet)):
            self._hang_up(descriptor, poller)

    def _told(self, call: _Call, packet: bytes) -> bool:
        """Answer what came over a lifeline. False if it is to be hung up."""
        if call.session is None:
            return self._take_up(call, packet)
        wanted = wanted_memory(packet)
        found = self._clerk.descriptor(wanted) if wanted is not None else None
        return call.line.refuse(packet) if found is None else call.line.grant(packet, found)

    def _take_up(self, call: _Call, secret: bytes) -> bool:
        """Tie a lifeline to the session whose secret it knows."""
        for session in self._sessions.values():
            if session.line is None and hmac.compare_digest(session.secret, secret):
                session.line, call.session = call.line, session
                log.info("receiver attached", pid=session.pid)
                return call.line.grant(secret)
        return False

    def _hang_up(self, descriptor: int, poller: zmq.Poller) -> None:
        poller.unregister(descriptor)
        call = self._lines.pop(descriptor)
        call.line.close()
        if call.session is not None:
            del self._sessions[call.session.identity]
            self._clerk.gone(call.session)
            self._changed.notify_all()
            log.info("receiver detached", pid=call.session.pid)

    def _drop_silent(self, poller: zmq.Poller) -> None:
        """Forget those that said hello, or called, and then nothing."""
        late = time.monotonic() - _GREETED_S
        for session in [one for one in self._sessions.values() if one.line is None and one.since_s < late]:
            del self._sessions[session.identity]
        for descriptor in [one for one, call in self._lines.items() if call.session is None and call.since_s < late]:
            self._hang_up(descriptor, poller)

    def _send_all(self) -> None:
        while self._outbox:
            identity, message = self._outbox.popleft()
            try:
                self._router.send_multipart((identity, encode(message)), zmq.NOBLOCK)
            except zmq.ZMQError as error:  # it is gone, or reads nothing: its lifeline or a deadline tells what to do
                log.debug("message dropped", type=type(message).__name__, error=error)

    def _release(self) -> None:
        for call in self._lines.values():
            call.line.close()
        self._lines.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._context.destroy(linger=_LINGER_MS)
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
