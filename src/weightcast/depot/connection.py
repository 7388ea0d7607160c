"""One client of a depot: requests are read, answered and sent one after the other, in a thread of its own."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.depot.access import Gate
from weightcast.depot.exchange import FileRange, Handler, Reply, Request
from weightcast.depot.heads import MAX_HEAD_NBYTES, Head, Refusal, end_of_head, parse_head
from weightcast.depot.replies import failure, reply_of
from weightcast.depot.routing import Routes
from weightcast.errors import PartCorrupt, WeightcastError
from weightcast.wire.depot import ID_HEADERS

if TYPE_CHECKING:
    import ssl

log = logs.get(__name__)

REQUEST_S = 600.0  # for a handler to work an answer out; sending it takes as long as it takes, if only it goes on
HEAD_S = 5.0  # for a request up to its token: a client that has not shown one is never waited for any longer
STALLED_S = 1.0  # a client in the middle of a request makes room if it has not moved for so long
_LINGER_S = 1.0
_READ_NBYTES = 64 << 10
_SMALL_NBYTES = 1 << 10  # a block that is not worth a packet of its own, as the head of a range
_BODY_NBYTES_PER_S = 100_000  # a body must come at least this fast, after `stall_s`
_TLS_NBYTES = 256 << 10  # what is sent over TLS at once: a call returns only when all of it was taken, unlike a plain one


@dataclass(frozen=True)
class Service:
    """What all connections of a depot share."""

    routes: Routes
    gate: Gate
    tls: ssl.SSLContext | None
    stall_s: float
    keep_s: float
    closing: threading.Event


class Connection:
    """A connected client. Other threads may call only `cut` and `yields`, and read the public attributes.

    `waits_since` is set while the depot waits for the client: for a request, for the rest of one, or to take its answer;
    and while the client waits for a new version.
    `is_half_sent` while a part of a head has come; `half_sent` is called when that begins. `is_admitted` once a request had
    the token, or none was asked for.
    """

    def __init__(
        self, accepted: socket.socket, address: str, port: int, service: Service, half_sent: Callable[[str], None]
    ) -> None:
        self._socket, self._service, self.address, self.peer = accepted, service, address, f"{address}:{port}"
        self._half_sent = half_sent
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self.waits_since: float | None = time.monotonic()
        self.is_half_sent = self.is_admitted = self.was_cut = False
        self._is_idle = True
        self.requests = self.failures = self.sent_nbytes = 0

    def run(self) -> None:
        """Serve until the client or the depot ends it."""
        with logs.bound(client=self.peer):
            self._run()

    def _run(self) -> None:
        try:
            self._shake_hands()
            while not self._service.closing.is_set() and self._serve_one():
                pass
        except OSError as error:
            log.debug("client lost", error=error)
            self._abandon()
        except Exception:  # nothing above this would say what went wrong
            log.exception("client cut")
        finally:
            with self._lock:
                self._socket.close()

    def cut(self) -> None:
        """End it at once, whatever it is doing: its thread finds the connection broken."""
        self.was_cut = True
        with self._lock, suppress(OSError):
            # not SSLSocket.shutdown, which takes the encryption off under the thread that is sending
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def yields(self, now: float) -> tuple[int, float] | None:
        """Whether the connection can be cut to make room, and its turn: the least is cut first. None if it is busy.

        First those that were never admitted, then idle ones, then those that stopped in the middle of a request; of each
        kind the one that has been waited for the longest time.
        """
        since = self.waits_since
        if since is None or self.was_cut:
            return None
        if not self.is_admitted:
            return 0, since
        if self._is_idle:
            return 1, since
        return (2, since) if now - since >= STALLED_S else None

    @property
    def _patience_s(self) -> float:
        """How long the client may keep the depot waiting in the middle of a request."""
        return self._service.stall_s if self.is_admitted else min(HEAD_S, self._service.stall_s)

    def _abandon(self) -> None:
        """Have the system forget what the client did not take. It learns that its answer is not whole."""
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    # -- reading ------------------------------------------------------------------------------------------------------

    def _shake_hands(self) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(self._patience_s)
        if self._service.tls is None:
            return
        with self._lock:
            wrapped = self._service.tls.wrap_socket(self._socket, server_side=True, do_handshake_on_connect=False)
            self._socket = wrapped
        if not self._service.closing.is_set():  # whoever cut it just now may have met the socket before it was wrapped
            wrapped.do_handshake()  # the timeout is for all of it

    def _serve_one(self) -> bool:
        """Read a request and answer it. False if there can be no other one."""
        head = self._read_head()
        if head is None:
            return False
        began, sent = time.monotonic(), self.sent_nbytes
        self.requests += 1
        if isinstance(head, Refusal):
            return self._refuse(None, failure(head.status, head.code, head.message))
        given = {name: head.headers.get(header.lower(), "") for name, header in ID_HEADERS.items()}
        with logs.bound(**given):
            keeps = self._answer(head)
            seconds, nbytes = time.monotonic() - began, self.sent_nbytes - sent
            log.debug(
                "request answered",
                method=head.method,
                path=head.path[:200],
                nbytes=nbytes,
                ms=logs.ms(seconds),
            )
        return keeps

    def _read_head(self) -> Head | Refusal | None:
        self.waits_since, self._is_idle = time.monotonic(), True
        try:
            return self._wait_for_head()
        finally:
            self.waits_since, self._is_idle, self.is_half_sent = None, False, False

    def _wait_for_head(self) -> Head | Refusal | None:
        if not self._buffer and not self._receive(self._service.keep_s):
            return None
        deadline = Deadline.after(min(HEAD_S, self._service.stall_s))
        while True:
            while self._buffer[:2] == b"\r\n":  # an empty line after the body before
                del self._buffer[:2]
            end = end_of_head(self._buffer)
            if end > MAX_HEAD_NBYTES or (not end and len(self._buffer) >= MAX_HEAD_NBYTES):
                return Refusal(431, "invalid_input", f"the head of the request is longer than {MAX_HEAD_NBYTES} bytes.")
            if end:
                head = bytes(self._buffer[:end])
                del self._buffer[:end]
                return parse_head(head)
            if not self.is_half_sent:
                self.is_half_sent = True
                self._half_sent(self.address)
            if not self._receive(deadline.remaining()):
                if deadline.remaining() > 0:
                    return None
                return Refusal(408, "deadline_exceeded", f"the request did not come within {deadline.seconds:g} s.")

    def _receive(self, timeout_s: float) -> bool:
        """Take in what has come. False if nothing does in time, or nothing more will."""
        if timeout_s <= 0:
            return False
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(_READ_NBYTES)
        except TimeoutError:
            return False
        self._buffer += data
        return bool(data)

    def _read_body(self, nbytes: int) -> bytes | None:
        """The body; None if it does not come in time."""
        patience_s = self._patience_s
        deadline = Deadline.after(patience_s + nbytes / _BODY_NBYTES_PER_S if self.is_admitted else patience_s)
        self.waits_since = time.monotonic()
        while len(self._buffer) < nbytes:
            if not self._receive(min(patience_s, deadline.remaining())):
                return None
        self.waits_since = None
        body = bytes(self._buffer[:nbytes])
        del self._buffer[:nbytes]
        return body

    def _is_connected(self) -> bool:
        """Whether the client may still want its answer: it has not ended the connection, and nobody has cut it."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return not poll.poll(0)

    @contextmanager
    def _parked(self) -> Iterator[None]:
        """While the client waits for a new version its connection is as good as idle."""
        self.waits_since, self._is_idle = time.monotonic(), True
        try:
            yield
        finally:
            self.waits_since, self._is_idle = None, False

    # -- answering ----------------------------------------------------------------------------------------------------

    def _answer(self, head: Head) -> bool:
        try:
            if self._service.gate.is_open or head.segments != ("health",):
                self._service.gate.check(head.headers)
                self.is_admitted = True
        except WeightcastError as error:
            return self._refuse(head, reply_of(error))
        found = self._service.routes.find(head.method, head.segments)
        if isinstance(found, list):
            return self._refuse(head, _no_route(head, found))
        if head.expects and head.body_nbytes > len(self._buffer):
            self._send(memoryview(b"HTTP/1.1 100 Continue\r\n\r\n"))
        body = self._read_body(head.body_nbytes)
        if body is None:
            return self._refuse(head, failure(408, "deadline_exceeded", "the body of the request did not come in time."))
        handler, values = found
        deadline = Deadline.after(REQUEST_S, cancelled=self._service.closing)
        request = Request(
            head.method, values, head.query, head.headers, body, deadline, self._is_connected, self._parked, self.address
        )
        with ExitStack() as stack:
            reply = _handled(handler, request, stack)
            close_body = getattr(reply.body, "close", None)
            if close_body is not None:
                stack.callback(close_body)
            keeps = head.keeps and self.is_admitted
            return self._send_reply(reply, method=head.method, keeps=keeps) and keeps

    def _refuse(self, head: Head | None, reply: Reply) -> bool:
        """Answer a request that is not carried out. If its body is not known or not read, nothing can follow it.

        Nor can anything without a token: a client that sends many requests at once is refused once.
        """
        keeps = head is not None and head.keeps and head.body_nbytes == 0 and self.is_admitted
        sent = self._send_reply(reply, method=head.method if head else "GET", keeps=keeps)
        if keeps:
            return sent
        self._linger()
        return False

    def _send_reply(self, reply: Reply, *, method: str, keeps: bool) -> bool:
        """Send it. False if the connection cannot be used any more because the body was not what was promised."""
        self.failures += reply.status >= 500
        head = _head_of(reply, keeps=keeps and not self._service.closing.is_set())
        self._socket.settimeout(self._patience_s)
        if method == "HEAD" or reply.status in (204, 304):
            self._send(memoryview(head))
            return True
        if isinstance(reply.body, tuple) and reply.nbytes <= _READ_NBYTES:
            answer = b"".join((head, *reply.body))
            self._send(memoryview(answer))
            return len(answer) == len(head) + reply.nbytes
        self._send(memoryview(head), more=reply.nbytes > 0)
        left = reply.nbytes
        try:
            for block in reply.body:
                if isinstance(block, FileRange):
                    nbytes = block.stop - block.start
                    if nbytes > left:
                        break
                    self._send_file(block)
                else:
                    view = memoryview(block).cast("B")
                    nbytes = view.nbytes
                    if nbytes > left:
                        break
                    self._send(view, more=nbytes < min(left, _SMALL_NBYTES))
                left -= nbytes
            else:
                if left == 0:
                    return True
        except WeightcastError as error:
            log.warning("client cut", left=left, error=error)
            return False
        log.error("client cut", why=f"its answer was to have {reply.nbytes} bytes, not more or less")
        return False

    def _send(self, data: memoryview, *, more: bool = False) -> None:
        """Send all of it. Every call must get on in time: the timeout of the socket. `more`: what follows goes with it."""
        most, flags = (len(data), socket.MSG_MORE if more else 0) if self._service.tls is None else (_TLS_NBYTES, 0)
        while data:
            self.waits_since = time.monotonic()
            sent = self._socket.send(data[:most], flags)
            self.waits_since = None
            self.sent_nbytes += sent
            data = data[sent:]

    def _send_file(self, block: FileRange) -> None:
        """Send bytes of a file. Raises `PartCorrupt` if it has become too short."""
        if self._service.tls is not None:
            buffer = memoryview(bytearray(_TLS_NBYTES))
            for start in range(block.start, block.stop, _TLS_NBYTES):
                data = buffer[: block.stop - start]
                block.file.read_into(data, start)
                self._send(data)
            return
        ready = select.poll()
        ready.register(self._socket, select.POLLOUT)
        start = block.start
        while start < block.stop:
            try:
                sent = os.sendfile(self._socket.fileno(), block.file.fd, start, block.stop - start)
            except BlockingIOError:
                self.waits_since = time.monotonic()
                if not ready.poll(1000 * self._patience_s):
                    raise TimeoutError("timed out") from None
                self.waits_since = None
                continue
            if sent == 0:
                raise PartCorrupt(block.file.path, f"it ends at byte {start}, in the middle of its data")
            self.sent_nbytes += sent
            start += sent

    def _linger(self) -> None:
        """Let the client read the answer: closing with bytes unread would take it away from it."""
        deadline = Deadline.after(_LINGER_S)
        self.waits_since = time.monotonic()
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            while self._receive(deadline.remaining()):
                self._buffer.clear()


def small_answer(reply: Reply) -> bytes:
    """An answer after which the connection ends, whole."""
    body = reply.body if isinstance(reply.body, tuple) else ()
    return b"".join((_head_of(reply, keeps=False), *body))


def _handled(handler: Handler, request: Request, stack: ExitStack) -> Reply:
    try:
        return handler(request, stack)
    except WeightcastError as error:
        return reply_of(error)
    except Exception:  # a mistake of ours must not end the thread without an answer
        log.exception("handler crashed", method=request.method, path=list(request.path.values()))
        return failure(500, "error", "the depot could not answer because of a mistake in it; its log says more.")


def _no_route(head: Head, allowed: list[str]) -> Reply:
    if allowed:
        message = f"{head.path} answers {', '.join(allowed)}, not {head.method}."
        return failure(405, "invalid_input", message, {"Allow": ", ".join(allowed)})
    return failure(404, "not_found", f"there is nothing at {head.path[:200]}.")


@lru_cache(maxsize=2)
def _date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)


def _head_of(reply: Reply, *, keeps: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}",
        f"Date: {_date(int(time.time()))}",
        *(f"{name}: {value}" for name, value in reply.headers.items()),
    ]
    if reply.status not in (204, 304):
        lines.append(f"Content-Length: {reply.nbytes}")
    if not keeps:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
