"""A depot: versions served over HTTP/1.1 by threads of its own."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.depot.access import Gate
from weightcast.depot.acks import AckRoutes
from weightcast.depot.connection import Connection, Service, small_answer
from weightcast.depot.exchange import Route
from weightcast.depot.files import FileRoutes
from weightcast.depot.holding import Shelf
from weightcast.depot.replies import failure
from weightcast.depot.routing import Routes
from weightcast.errors import InvalidInput
from weightcast.store.acks import Acks

if TYPE_CHECKING:
    import ssl

log = logs.get(__name__)

STALL_S = 30.0
KEEP_S = 120.0
MAX_CONNECTIONS = 1024
MAX_HALF_SENT = 64  # heads of one address of which only a part has come
_BACKLOG = 1024
_JOIN_S = 30.0
_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[^\[\]:]*)):(?P<port>\d{1,5})", re.ASCII)
_FULL = small_answer(failure(503, "overloaded", "this depot has no room for another client.", {"Retry-After": "1"}))


@dataclass(frozen=True)
class DepotStats:
    """What a depot has done so far. `connections` is how many there are now."""

    connections: int
    accepted: int
    refused: int
    requests: int
    failures: int
    sent_nbytes: int


class Depot:
    """Serves the versions of a shelf until it is closed. The shelf and the acknowledgements stay the caller's.

        with StoredShelf(path) as shelf, Depot(shelf, "0.0.0.0:8300", token=token) as depot:
            print(depot.url)

    `listen` is HOST:PORT, [ADDRESS]:PORT for IPv6; port 0 takes a free one. With a `token`, all requests but /health must
    carry it. With `tls`, the depot speaks only TLS. `acks` is where receivers are noted, by default in memory only. Further
    `routes` are answered too.

    A client that stops in the middle of a request, or does not take its answer, is dropped after `stall_s`, or after
    `HEAD_S` if it has not shown a token yet; one that asks for nothing after `keep_s`. One address can have `MAX_HALF_SENT`
    heads half sent. At `max_connections`, or three quarters of the files that the process may open, a client that the depot
    waits for is closed to make room: first those that have not shown a token, then idle ones, then stalled ones. If all are
    busy, the new one is refused with status 503.
    """

    def __init__(
        self,
        shelf: Shelf,
        listen: str = "127.0.0.1:0",
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        acks: Acks | None = None,
        routes: Sequence[Route] = (),
        stall_s: float = STALL_S,
        keep_s: float = KEEP_S,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        if not (stall_s > 0 and keep_s > 0 and max_connections > 0):
            raise InvalidInput(f"stall_s={stall_s}, keep_s={keep_s} and max_connections={max_connections} must be positive.")
        closing = threading.Event()
        self.acks = Acks(None) if acks is None else acks
        table = Routes([*FileRoutes(shelf, closing).routes(), *AckRoutes(self.acks).routes(), *routes])
        service = Service(table, Gate(token), tls, stall_s, keep_s, closing)
        listening = _listening(listen)
        self.url = _url_of(listening, "http" if tls is None else "https")
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._hall = _Hall(listening, service, min(max_connections, max(1, descriptors * 3 // 4)))
        self._end = weakref.finalize(self, _close, self._hall, os.getpid())
        self._hall.open()
        log.info("depot listening", url=self.url, token=token is not None, tls=tls is not None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def listening(self) -> socket.socket:
        """The socket that it listens on, for whoever must tell its address."""
        return self._hall.listening

    @property
    def port(self) -> int:
        """The number of the port."""
        return int(self.url.rpartition(":")[2])

    def stats(self) -> DepotStats:
        """What was done so far."""
        return self._hall.stats()

    def close(self) -> None:
        """Stop listening, cut every connection and wait for all threads. Safe twice, and in a child of a fork."""
        if self._end.alive:
            self._end()
            done = self.stats()
            log.info("depot closed", requests=done.requests, failures=done.failures, sent_nbytes=done.sent_nbytes)


class _Hall:
    """The listening socket and everybody who came in by it. Its threads do not keep the `Depot` alive."""

    def __init__(self, listening: socket.socket, service: Service, most: int) -> None:
        self.listening, self._service, self._most = listening, service, most
        self._lock = threading.Lock()
        self._inside: dict[Connection, threading.Thread] = {}
        self._accepted = self._refused = self._requests = self._failures = self._sent_nbytes = 0
        self._listener = threading.Thread(target=self._listen, name="depot listener", daemon=True)

    def open(self) -> None:
        self._listener.start()

    def close(self) -> None:
        deadline = Deadline.after(_JOIN_S)
        self._service.closing.set()
        with suppress(OSError):  # wakes the listener; closing alone would not, and a forked child may have it open
            self.listening.shutdown(socket.SHUT_RDWR)
        if self._listener.is_alive():
            self._listener.join(timeout=deadline.remaining())
        self.listening.close()
        with self._lock:
            inside = dict(self._inside)
        for connection in inside:
            connection.cut()
        for connection, thread in inside.items():
            if thread is not threading.current_thread():
                thread.join(timeout=deadline.remaining())
            if thread.is_alive():
                log.warning("client left", client=connection.peer, why="its answer is still being worked out")

    def stats(self) -> DepotStats:
        with self._lock:
            inside = list(self._inside)
            return DepotStats(
                connections=len(inside),
                accepted=self._accepted,
                refused=self._refused,
                requests=self._requests + sum(one.requests for one in inside),
                failures=self._failures + sum(one.failures for one in inside),
                sent_nbytes=self._sent_nbytes + sum(one.sent_nbytes for one in inside),
            )

    def _listen(self) -> None:
        while not self._service.closing.is_set():
            try:
                accepted, address = self.listening.accept()
            except OSError as error:
                if self._service.closing.is_set():
                    return
                log.warning("accept failed", error=error)
                if error.errno != errno.ECONNABORTED:  # no file descriptor or no memory
                    with self._lock:
                        self._make_room()
                    time.sleep(0.1)
                continue
            self._welcome(Connection(accepted, address[0], address[1], self._service, self._limit_half_sent), accepted)

    def _welcome(self, connection: Connection, accepted: socket.socket) -> None:
        peer = connection.peer
        thread = threading.Thread(target=self._serve, args=(connection,), name=f"depot client {peer}", daemon=True)
        with self._lock:
            self._accepted += 1
            room = len(self._inside) < self._most or self._make_room()
            if room:
                self._inside[connection] = thread
        if room:
            try:
                thread.start()
            except RuntimeError as error:  # the system allows no more threads
                log.warning("client refused", client=peer, error=error)
                with self._lock:
                    del self._inside[connection]
                room = False
        if not room:
            self._refuse(accepted)

    def _make_room(self) -> bool:
        """Cut the connection whose turn it is. False if all are busy. The caller holds the lock."""
        # one that was cut already, and has not gone yet, made room for somebody else
        now = time.monotonic()
        waited_for = [(turn, one) for one in self._inside if (turn := one.yields(now)) is not None]
        if waited_for:
            min(waited_for, key=lambda item: item[0])[1].cut()
        return bool(waited_for)

    def _limit_half_sent(self, address: str) -> None:
        """Cut the oldest half-sent heads of an address beyond `MAX_HALF_SENT`."""
        with self._lock:
            half_sent = [
                (since, one)
                for one in self._inside
                if one.address == address and one.is_half_sent and not one.was_cut and (since := one.waits_since) is not None
            ]
            for _, one in sorted(half_sent, key=lambda item: item[0])[:-MAX_HALF_SENT]:
                one.cut()

    def _refuse(self, accepted: socket.socket) -> None:
        with self._lock:
            self._refused += 1
        with accepted, suppress(OSError):
            accepted.settimeout(0)
            if self._service.tls is None:
                accepted.send(_FULL)

    def _serve(self, connection: Connection) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                self._inside.pop(connection, None)
                self._requests += connection.requests
                self._failures += connection.failures
                self._sent_nbytes += connection.sent_nbytes


def _close(hall: _Hall, owner: int) -> None:
    if os.getpid() == owner:  # in a child of a fork everything belongs to the parent
        hall.close()


def listening_host(listen: str) -> str:
    """The IP address that `listen` means. Raises `InvalidInput` if it means none."""
    return _resolved(listen)[1][0]


def _resolved(listen: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    given = _ADDRESS.fullmatch(listen)
    if given is None or int(given["port"]) > 65535:
        raise InvalidInput(f"{listen!r} is no address to listen on: give HOST:PORT, 0.0.0.0:8300 say.")
    host, port = given["ipv6"] or given["host"] or None, int(given["port"])
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(listen, error) from error
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))


def _listening(listen: str) -> socket.socket:
    family, address = _resolved(listen)
    try:
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(listen, error) from error


def _cannot_listen(listen: str, error: Exception) -> InvalidInput:
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return InvalidInput(f"cannot listen on {listen}: {why}. Choose another address or port.")


def _url_of(listening: socket.socket, scheme: str) -> str:
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
