"""Sockets between processes of one host and one user: a name to meet at, messages with a length, and descriptors."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, SourceFailed
from weightcast.tensors.digest import bytes_digest
from weightcast.wire.manifest import MAX_MANIFEST_NBYTES

Check = Callable[[], None]

_LENGTH = struct.Struct("<Q")
_BACKLOG = 128
_DESCRIPTORS = 250  # the kernel passes 253 at once
_NAME_NBYTES = 107
_SLICE_S = 0.1  # between two looks at whether somebody said stop
_CHUNK_NBYTES = 1 << 20
LONGEST_S = 7 * 24 * 3600.0  # no wait is longer, whatever the deadline


class Patience:
    """How long to wait for somebody who has the same deadline: `grace_s` longer, for him to say that it has passed."""

    def __init__(self, what: str, deadline: Deadline, grace_s: float = 0.0) -> None:
        self._what, self._deadline = what, deadline
        self._end_s = time.monotonic() + min(deadline.remaining(), LONGEST_S) + grace_s

    def check(self) -> None:
        """Raise `DeadlineExceeded` when it is over, `UpdateCancelled` as soon as somebody says stop."""
        try:
            self._deadline.check(self._what)
        except DeadlineExceeded:
            if time.monotonic() >= self._end_s:
                raise


def address_of(name: str) -> str:
    """Where processes of this user meet: in the abstract namespace, which leaves nothing behind."""
    address = f"\0weightcast-{os.getuid()}-{name}"
    if len(address.encode()) > _NAME_NBYTES:
        address = f"\0weightcast-{os.getuid()}-{bytes_digest(name.encode())}"
    return address


def listen_at(address: str) -> socket.socket | None:
    """A listener; None if somebody else has the address."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise SourceFailed(f"the host copy cannot be shared with other processes: {error}.") from error
    return listener


def connect_to(address: str) -> socket.socket | None:
    """A line to whoever listens; None if nobody does. `BlockingIOError` if too many others wait to be heard."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.settimeout(_SLICE_S)
        line.connect(address)
        check_user(line)
    except ConnectionRefusedError:
        line.close()
        return None
    except BlockingIOError:
        line.close()
        raise
    except OSError as error:
        line.close()
        raise SourceFailed(f"the process that keeps the host's copy cannot be reached: {error}.") from error
    except BaseException:
        line.close()
        raise
    return line


def check_user(line: socket.socket) -> None:
    """Refuse a process of another user, unless it is root's."""
    _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user not in (os.getuid(), 0):
        raise SourceFailed("the host copy is kept by, or asked for by, a process of another user.")


def send(line: socket.socket, message: bytes, check: Check, descriptors: list[int] | None = None) -> None:
    """Send a message. Raises `OSError` if the other end is gone."""
    line.settimeout(_SLICE_S)
    head = memoryview(_LENGTH.pack(len(message)))
    if descriptors:
        while head.nbytes == _LENGTH.size:
            try:
                head = head[socket.send_fds(line, [head], descriptors) :]
            except TimeoutError:
                check()
    for data in (head, memoryview(message)):
        rest = data
        while rest:
            with suppress(TimeoutError):
                rest = rest[line.send(rest[:_CHUNK_NBYTES]) :]
            check()


def receive(line: socket.socket, check: Check, most: int = MAX_MANIFEST_NBYTES) -> bytes:
    """A message that has no descriptors. Raises `OSError` if the other end is gone, `SourceFailed` if it is too long."""
    line.settimeout(_SLICE_S)
    return _exactly(line, _length(_exactly(line, _LENGTH.size, check), most), check)


def receive_with_descriptors(line: socket.socket, check: Check) -> tuple[bytes, list[int]]:
    """A message and the descriptors that came with it, which are the caller's to close."""
    line.settimeout(_SLICE_S)
    while True:
        check()
        try:
            head, descriptors, flags, _ = socket.recv_fds(line, _LENGTH.size, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            continue
        break
    try:
        if flags & socket.MSG_CTRUNC:
            raise SourceFailed("the descriptors of the host's copy could not be taken: this process has too many open.")
        head += _exactly(line, _LENGTH.size - len(head), check)
        return _exactly(line, _length(head, MAX_MANIFEST_NBYTES), check), descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _length(head: bytes, most: int) -> int:
    nbytes: int = _LENGTH.unpack(head)[0]
    if nbytes > most:
        raise SourceFailed(f"a message of {nbytes} bytes about the host's copy is longer than {most}.")
    return nbytes


def _exactly(line: socket.socket, nbytes: int, check: Check) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        check()
        try:
            more = line.recv(min(nbytes - len(data), _CHUNK_NBYTES))
        except TimeoutError:
            continue
        if not more:
            raise ConnectionResetError("it hung up")
        data += more
    return bytes(data)
