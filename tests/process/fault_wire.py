"""What lies between a receiver and a depot in the fault trials: a wire that does one wrong thing at one byte.

It forwards whole exchanges, so that it can also do what a broken proxy or a broken depot does: show another token, or answer
with bytes of an older version. Everything is counted in bytes of answers, heads included, over all connections.
"""

from __future__ import annotations

import re
import select
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Literal

Deed = Literal[
    "close",  # the connection is closed in good order, in the middle of an answer
    "reset",  # it is reset
    "silence",  # it stays open, and nothing comes any more
    "flip",  # one bit of an answer is another
    "flip request",  # one bit of a number in the body of a request is
    "token",  # the request shows another token
    "old",  # an older depot answers, in all honesty
    "old as new",  # an older depot answers, and its answer is labelled as what was asked for
    "recorded",  # the answer is the one to an earlier request for the same path
]
BREAKS: tuple[Deed, ...] = ("close", "reset")

_BLOCK_NBYTES = 32 << 10
_TICK_S = 0.02
_AT_ONCE = struct.pack("ii", 1, 0)  # to linger no time: closing resets the connection
_RECORDED = 8
_RECORD_NBYTES = 4 << 20
Address = tuple[str, int]


@dataclass
class Fault:
    """What happens when so many bytes of answers have been forwarded, and `again` bytes into each answer (or request) after
    it if it is `lasting`. `struck_s` is when it did first.
    """

    deed: Deed
    at: int
    lasting: bool = False
    again: int = 0
    bit: int = 0
    struck: int = 0
    struck_s: float = 0.0

    def due(self, seen: int) -> bool:
        """Whether it is time, when so many bytes have been seen."""
        return seen >= self.at and (self.lasting or not self.struck)

    def strike(self) -> None:
        """It happens."""
        if not self.struck:
            self.struck_s = time.monotonic()
        self.struck += 1


class _Over(Exception):
    """This connection has ended."""


@dataclass
class _Line:
    """One connection of a client, and those that it needs to depots."""

    client: socket.socket
    stack: ExitStack
    depots: dict[Address, socket.socket] = field(default_factory=dict)

    def depot(self, address: Address) -> socket.socket:
        if address not in self.depots:
            try:
                connected = socket.create_connection(address, timeout=2)
            except OSError as error:
                raise _Over from error
            self.depots[address] = self.stack.enter_context(connected)
        return self.depots[address]


class Wire:
    """Listens on a port of this host and forwards to `upstream`. `older` is a depot with other bytes under the same names.

    `rate` is how many bytes it passes on per second, if not as many as it can.
    """

    def __init__(
        self, upstream: Address, older: Address | None = None, *, listen: str = "127.0.0.1", rate: float | None = None
    ) -> None:
        self._upstream, self._older, self._rate = upstream, older, rate
        self.fault: Fault | None = None
        self.seen = 0
        self._recorded: dict[str, list[tuple[bytes, bytes]]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._lines: dict[threading.Thread, socket.socket] = {}
        self._listening = socket.create_server((listen, 0))
        self.host = f"{listen}:{self._listening.getsockname()[1]}"
        self._listener = threading.Thread(target=self._listen, name="wire", daemon=True)
        self._listener.start()

    def arm(self, fault: Fault | None) -> None:
        """Have something happen from now on, or nothing any more."""
        with self._lock:
            self.fault, self.seen = fault, 0

    @property
    def lines(self) -> int:
        """How many clients are connected."""
        with self._lock:
            return len(self._lines)

    def close(self) -> None:
        self._closing.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listener.join(5)
        self._listening.close()
        with self._lock:
            lines = dict(self._lines)
        for thread, client in lines.items():
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            assert not thread.is_alive(), "a thread of the wire is stuck"

    # -- connections --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), name="wire line", daemon=True)
            with self._lock:
                self._lines[thread] = client
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with ExitStack() as stack:
            stack.enter_context(client)
            stack.callback(self._gone)
            stack.enter_context(suppress(OSError, _Over))
            line = _Line(client, stack)
            while not self._closing.is_set():
                self._exchange(line)

    def _gone(self) -> None:
        with self._lock:
            self._lines.pop(threading.current_thread(), None)

    # -- one exchange -------------------------------------------------------------------------------------------------

    def _exchange(self, line: _Line) -> None:
        head, body = self._message(line.client, line.client)
        method, path, _ = head.split(b" ", 2)
        upstream = self._upstream
        label = b""
        due = self._before(path, body)
        if due is not None:
            if due.deed == "flip request":
                digits = [at for at, byte in enumerate(body) if chr(byte).isdecimal()]
                body = _flipped(body, digits[due.again % len(digits)], due.bit % 3)  # most often another digit
            elif due.deed == "token":
                head = re.sub(rb"(?i)(authorization: bearer )\S+", rb"\1another-token-than-ours", head)
            elif due.deed == "recorded":
                self._forward(self._record(path, body), line)
                return
            else:
                upstream = self._older or upstream
                if due.deed == "old as new":
                    found = re.search(rb'(?i)if-range: ("[^"]*")', head)
                    label = found[1] if found else b""
                    head = re.sub(rb"(?i)if-range: [^\r]*\r\n", b"", head)
        depot = line.depot(upstream)
        depot.sendall(head + body)
        answer, begun = self._message(depot, line.client, body=False)
        if label:
            answer = re.sub(rb"(?i)(etag: )[^\r]*", lambda match: match[1] + label, answer)
        left = 0 if method == b"HEAD" else _length(answer)
        kept = [answer] if method == b"POST" and left < _RECORD_NBYTES else None
        blocks = self._blocks(depot, line.client, begun, left)
        self._forward_all(answer, blocks, line, kept)
        if kept is not None and due is None:
            self._keep(path, body, b"".join(kept))

    def _forward_all(self, answer: bytes, blocks, line: _Line, kept: list[bytes] | None) -> None:
        start = self._forward(answer, line)
        for block in blocks:
            start = self._forward(block, line, start)
            if kept is not None:
                kept.append(block)

    def _before(self, path: bytes, body: bytes) -> Fault | None:
        """The fault that changes this exchange as a whole, if there is one."""
        with self._lock:
            fault = self.fault
            if fault is None or not fault.due(self.seen):
                return None
            wanted = {
                "flip request": any(chr(byte).isdecimal() for byte in body),
                "token": True,
                "old": b"/manifest" not in path,  # another version of that name is no lie about this one
                "old as new": b"-000" in path,
                "recorded": self._record(path, body) != b"",
            }
            if not wanted.get(fault.deed, False):
                return None
            fault.strike()
            return fault

    def _forward(self, data: bytes, line: _Line, sent: int = 0) -> int:
        """Pass bytes of an answer on, unless a fault strikes in them; how many of it have been sent then."""
        if self._rate is not None:
            self._closing.wait(len(data) / self._rate)
        with self._lock:
            fault, seen = self.fault, self.seen
            self.seen += len(data)
            at = None
            if fault is not None and fault.deed in ("close", "reset", "silence", "flip"):
                place = fault.at - seen if not fault.struck else (fault.again - sent if fault.lasting else -1)
                if 0 <= place < len(data):
                    at = place
                    fault.strike()
        if at is None or fault is None:
            line.client.sendall(data)
            return sent + len(data)
        if fault.deed == "flip":
            line.client.sendall(_flipped(data, at, fault.bit))
            return sent + len(data)
        line.client.sendall(data[:at])
        if fault.deed == "silence":
            while not self._closing.wait(_TICK_S) and not _hung_up(line.client):
                pass
        elif fault.deed == "reset":
            line.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        raise _Over

    # -- recorded answers -----------------------------------------------------------------------------------------------

    def _keep(self, path: bytes, body: bytes, answer: bytes) -> None:
        with self._lock:
            kept = self._recorded.setdefault(path.decode(), [])
            kept[:] = [*(one for one in kept if one[0] != body), (body, answer)][-_RECORDED:]

    def _record(self, path: bytes, body: bytes) -> bytes:
        """The answer to an earlier request of the same path that was not the same; one of equal size, if there is."""
        others = [one for one in self._recorded.get(path.decode(), []) if one[0] != body]
        others.sort(key=lambda one: len(one[0]) == len(body))
        return others[-1][1] if others else b""

    # -- reading --------------------------------------------------------------------------------------------------------

    def _message(self, source: socket.socket, client: socket.socket, *, body: bool = True) -> tuple[bytes, bytes]:
        """A head, and what came with it: all of the body, if asked for."""
        data = b""
        while (end := data.find(b"\r\n\r\n") + 4) < 4:
            data += self._received(source, client)
        if body:
            while len(data) < end + _length(data[:end], absent=0):
                data += self._received(source, client)
        return data[:end], data[end:]

    def _blocks(self, depot: socket.socket, client: socket.socket, begun: bytes, left: int):
        if begun:
            yield begun
        left -= len(begun)
        while left > 0:
            block = self._received(depot, client, min(left, _BLOCK_NBYTES))
            yield block
            left -= len(block)

    def _received(self, source: socket.socket, client: socket.socket, most: int = _BLOCK_NBYTES) -> bytes:
        """What comes next; nothing is waited for any more when the client has hung up."""
        poll = select.poll()
        poll.register(source, select.POLLIN)
        while not poll.poll(_TICK_S * 1000):
            if self._closing.is_set() or (source is not client and _hung_up(client)):
                raise _Over
        data = source.recv(most)
        if not data:
            raise _Over
        return data


def _flipped(data: bytes, at: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed)


def _length(head: bytes, absent: int = 0) -> int:
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return int(found[1]) if found else absent


def _hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
