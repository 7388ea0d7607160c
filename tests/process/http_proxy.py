"""A proxy between receivers and a depot that does to the bytes what networks and broken servers do.

It forwards whole exchanges, knows where bodies begin, and counts what it forwards. A `Fault` strikes when so many bytes of
the bodies of matching answers have been forwarded, over all connections.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

Kind = Literal[
    "cut",  # the connection is reset
    "truncate",  # it is closed in the middle of a body, in good order
    "stall",  # it stays open, and nothing comes any more
    "flip",  # one bit of a byte is another
    "drop",  # it is closed before the answer
    "garbage",  # the answer is not HTTP
    "status",  # the answer is a 503 of somebody who knows no JSON
    "replay",  # the answer is that to the same request for another version
    "delay",  # it goes on after `seconds`
]
KINDS: tuple[Kind, ...] = ("cut", "truncate", "stall", "flip", "drop", "garbage", "status", "replay", "delay")
BEFORE_THE_ANSWER = ("drop", "garbage", "status", "replay")

_BLOCK_NBYTES = 64 << 10
_TICK_S = 0.05
_AT_ONCE = struct.pack("ii", 1, 0)  # to linger no time: closing resets the connection


@dataclass
class Fault:
    """What happens, and when: at byte `at` of what is forwarded for paths that contain `path`, and then `times` times."""

    kind: Kind
    at: int = 0
    path: str = "-000"
    times: float = 1
    seconds: float = 0.3
    other: tuple[str, str] = ("", "")  # for `replay`: what to put in the place of what, in the path
    struck: int = 0

    @classmethod
    def drawn(cls, rng: random.Random, nbytes: int, *, other: tuple[str, str], times: float = 1) -> Fault:
        """Any fault at any byte of a version that has so many."""
        kinds = [kind for kind in KINDS if kind != "replay" or other[0]]
        return cls(rng.choice(kinds), at=rng.randrange(max(1, nbytes)), times=times, other=other)


@dataclass(frozen=True)
class Exchange:
    """A request that came, and how many bytes of the body of its answer were forwarded."""

    method: str
    path: str
    headers: dict[str, str]
    sent: list[int] = field(default_factory=lambda: [0])


class Proxy:
    """Listens on a port of its own and forwards to a depot, in threads. `rate` limits the bytes per second, if given."""

    def __init__(self, upstream: str, *faults: Fault, rate: float | None = None) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "", parts.port or 0)
        self.faults, self.rate = list(faults), rate
        self.exchanges: list[Exchange] = []
        self._forwarded: dict[int, int] = {}  # bytes that each fault has seen
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._open: set[socket.socket] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._listen, daemon=True)]
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def forwarded(self, path: str = "-000") -> int:
        """Bytes of the bodies of answers that were forwarded for such paths."""
        with self._lock:
            return sum(one.sent[0] for one in self.exchanges if path in one.path)

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        with self._lock:
            return len(self._open)

    def refuse(self) -> None:
        """Take no new connections any more, and cut those that there are: as if the depot's process were gone."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(5)
        self._listening.close()
        with self._lock:
            for client in self._open:
                with suppress(OSError):
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                    client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closing.set()
        self.refuse()
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive(), "a thread of the proxy is stuck"

    # -- forwarding ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            with self._lock:
                self._open.add(client)
                self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with ExitStack() as stack:
            stack.callback(self._gone, client)
            stack.enter_context(suppress(OSError))
            upstream = stack.enter_context(socket.create_connection(self._upstream, timeout=30))
            requests, answers = client.makefile("rb"), upstream.makefile("rb")
            stack.enter_context(requests)
            stack.enter_context(answers)
            while not self._closing.is_set():
                request = _head(requests)
                if request is None or not self._exchange(request, requests, client, upstream, answers):
                    return

    def _gone(self, client: socket.socket) -> None:
        with self._lock:
            self._open.discard(client)
        client.close()

    def _exchange(self, request, requests, client, upstream, answers) -> bool:
        method, path, _ = request.pop("").split(" ", 2)
        body = requests.read(int(request.get("content-length", "0")))
        exchange = Exchange(method, path, dict(request))
        with self._lock:
            self.exchanges.append(exchange)
        due = self._due(path, 0, before=True)
        if due is not None:
            if due.kind == "drop":
                return False
            if due.kind == "garbage":
                client.sendall(b"\x16\x03\x01 nobody here speaks HTTP\r\n\r\n" * 40)
                return False
            if due.kind == "status":
                client.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 13\r\n\r\n<html></html>")
                return True
            path = path.replace(*due.other)
            request.pop("if-range", None)
        lines = "".join(f"{name}: {value}\r\n" for name, value in request.items())
        upstream.sendall(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body)
        answer = _head(answers)
        if answer is None:
            return False
        first = answer.pop("")
        lines = "".join(f"{name}: {value}\r\n" for name, value in answer.items())
        client.sendall(f"{first}\r\n{lines}\r\n".encode("latin-1"))
        left = 0 if method == "HEAD" or first.split(" ")[1] in ("204", "304") else int(answer["content-length"])
        while left:
            block = answers.read1(min(left, _BLOCK_NBYTES))
            if not block or not self._forward(bytearray(block), exchange, client):
                return False
            left -= len(block)
        return answer.get("connection") != "close"

    def _forward(self, block: bytearray, exchange: Exchange, client: socket.socket) -> bool:
        """Send a block, unless a fault strikes in it: then what is before that, and what the fault makes of the rest."""
        due = self._due(exchange.path, len(block))
        if due is None:
            self._send(block, exchange, client)
            return True
        at = due.at - self._forwarded[id(due)] if due.struck == 1 else 0
        at = min(max(at, 0), len(block) - 1)
        if due.kind == "flip":
            block[at] ^= 1 << (at % 8)
            self._send(block, exchange, client)
            return True
        self._send(block[:at], exchange, client)
        if due.kind == "delay":
            self._closing.wait(due.seconds)
            self._send(block[at:], exchange, client)
            return True
        if due.kind == "stall":
            while not self._closing.wait(_TICK_S) and not _hung_up(client):
                pass
        if due.kind == "cut":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        return False

    def _send(self, data: bytearray, exchange: Exchange, client: socket.socket) -> None:
        if self.rate is not None:
            time.sleep(len(data) / self.rate)
        exchange.sent[0] += len(data)  # before whoever waits for them can look
        try:
            client.sendall(data)
        except OSError:
            exchange.sent[0] -= len(data)
            raise
        with self._lock:
            for fault in self.faults:
                if fault.path in exchange.path:
                    self._forwarded[id(fault)] = self._forwarded.get(id(fault), 0) + len(data)

    def _due(self, path: str, nbytes: int, *, before: bool = False) -> Fault | None:
        """The fault that strikes now: before an answer, or within the next bytes."""
        with self._lock:
            for fault in self.faults:
                seen = self._forwarded.setdefault(id(fault), 0)
                wanted = (fault.kind in BEFORE_THE_ANSWER) == before and fault.path in path
                if wanted and fault.struck < fault.times and (seen >= fault.at if before else seen + nbytes > fault.at):
                    fault.struck += 1
                    return fault
        return None


def _head(stream) -> dict[str, str] | None:
    """The first line, under the empty name, and the headers."""
    first = stream.readline().decode("latin-1").rstrip("\r\n")
    if not first:
        return None
    head = {"": first}
    while line := stream.readline().decode("latin-1").rstrip("\r\n"):
        name, value = line.split(":", 1)
        head[name.lower()] = value.strip()
    return head


def _hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
