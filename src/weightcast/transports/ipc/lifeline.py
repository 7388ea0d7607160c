"""The lifeline: a socket between a receiver and its publisher that hangs up the moment one of them dies.

ZeroMQ connects again by itself and tells nobody that a peer is gone; the kernel closes this socket with the process. It
also passes the file descriptors of shared memory, which no message can.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import weakref
from pathlib import Path
from time import sleep
from typing import Protocol

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import SourceFailed, StorageFailed

log = logs.get(__name__)

_BACKLOG = 128
_BREATH_S = 0.05
_PACKET_NBYTES = 256
_ID = struct.Struct("<q")
_GRANTED, _REFUSED = b"+", b"-"
_SLICE_S = 0.2


class _Inherited(Protocol):
    def forget(self) -> None:
        """Close the descriptors, and nothing else."""


_here: weakref.WeakSet[_Inherited] = weakref.WeakSet()


def closed_in_children(holder: _Inherited) -> None:
    """Let `forget` be called in children of a fork (workers that load data): they must not keep a lifeline from hanging up
    when their parent dies.
    """
    _here.add(holder)


def _forget_all() -> None:
    for holder in list(_here):
        holder.forget()


os.register_at_fork(after_in_child=_forget_all)


class Listener:
    """The publisher's end: it accepts lifelines of this user's processes."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(str(path))
            path.chmod(0o600)
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise StorageFailed("listen on", path, error) from error

    def fileno(self) -> int:
        """To be polled."""
        return self._socket.fileno()

    def accept(self) -> Line | None:
        """A new lifeline; None if there was none, or it was a stranger's."""
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:  # no descriptors are left, most likely: whoever wants to connect waits
            log.warning("accept failed", error=error)
            sleep(_BREATH_S)
            return None
        connection.setblocking(False)
        if _peer_uid(connection) not in (os.geteuid(), 0):
            connection.close()
            return None
        return Line(connection)

    def close(self) -> None:
        """Accept no more."""
        self._socket.close()


class Line:
    """One accepted lifeline. Nothing here waits."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def fileno(self) -> int:
        """To be polled."""
        return self._socket.fileno()

    def receive(self) -> bytes | None:
        """What the receiver sent; empty if it is gone, None if there is nothing."""
        try:
            return self._socket.recv(_PACKET_NBYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def grant(self, question: bytes, descriptor: int | None = None) -> bool:
        """Answer yes to a question, with a copy of a descriptor. False if the receiver cannot be told."""
        try:
            if descriptor is None:
                self._socket.send(_GRANTED + question)
            else:
                socket.send_fds(self._socket, [_GRANTED + question], [descriptor])
        except OSError:
            return False
        return True

    def refuse(self, question: bytes) -> bool:
        """Answer no. False if the receiver cannot be told."""
        try:
            self._socket.send(_REFUSED + question)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def _peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other end, as the kernel knows it."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def wanted_memory(packet: bytes) -> int | None:
    """The id of the memory that a receiver asks for; None if the packet is none of ours."""
    return _ID.unpack(packet)[0] if len(packet) == _ID.size else None


class Lifeline:
    """The receiver's end, connected before the first message is sent: from then on no death goes unnoticed.

    One thread at a time may ask. Every answer repeats its question, so that one that comes late is not taken for another.
    """

    def __init__(self, path: Path) -> None:
        """Raises `OSError` if nobody listens."""
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect(str(path))
        except BaseException:
            self._socket.close()
            raise

    @property
    def peer_uid(self) -> int:
        """The user of the publisher, as the kernel knows it."""
        return _peer_uid(self._socket)

    def take_up(self, secret: bytes, *, deadline: Deadline) -> None:
        """Tie it to the connection that was given this secret."""
        self._ask(secret, deadline)

    def fileno(self) -> int:
        """To be polled: readable between questions means that the publisher hung up."""
        return self._socket.fileno()

    def descriptor(self, memory: int, *, deadline: Deadline) -> int:
        """The descriptor of a memory, the caller's to close."""
        descriptors = self._ask(_ID.pack(memory), deadline)
        if not descriptors:
            raise SourceFailed(f"the publisher behind {self._path} sent no descriptor.")
        return descriptors[0]

    def hung_up(self) -> bool:
        """Whether the publisher is gone."""
        if self._socket.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._socket, 0)  # hang-ups are always told
        return bool(poll.poll(0))

    def close(self) -> None:
        """Hang up. Safe twice."""
        self._socket.close()

    def _ask(self, question: bytes, deadline: Deadline) -> list[int]:
        try:
            self._socket.settimeout(_SLICE_S)
            self._socket.send(question)
            return self._answer(question, deadline)
        except OSError as error:
            raise SourceFailed(f"the publisher behind {self._path} hung up: {error}.") from error

    def _answer(self, question: bytes, deadline: Deadline) -> list[int]:
        while True:
            deadline.check(f"waiting for the publisher behind {self._path}")
            self._socket.settimeout(max(0.001, min(deadline.remaining(), _SLICE_S)))
            try:
                answer, descriptors, _, _ = socket.recv_fds(self._socket, _PACKET_NBYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except TimeoutError:
                continue
            if answer == _GRANTED + question:
                return descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            if answer and answer[1:] != question:
                continue  # to a question that was given up
            what = "refused this receiver, or has the memory no more" if answer else "hung up"
            raise SourceFailed(f"the publisher behind {self._path} {what}.")
