"""One HTTP exchange with an engine's server, from connecting to the last byte within one deadline."""

from __future__ import annotations

import http.client
import io
import socket
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec

from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, InvalidInput, ReplicaFailed
from weightcast.transports.http.access import Access

if TYPE_CHECKING:
    import ssl

MAX_REPLY_NBYTES = 64 << 20


class Reply(NamedTuple):
    """What a server answered."""

    status: int
    body: bytes


class HttpCaller:
    """Calls one server; a connection for each call, so any number of threads may call. The token is never told to anyone."""

    def __init__(self, url: str, *, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._access = Access(token=token, tls=tls)
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InvalidInput(f"{url!r} is not the URL of a server: {error}.") from error
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.fragment
            or "@" in parts.netloc
        ):
            raise InvalidInput(f"{url!r} is not the URL of a server: write http://HOST:PORT.")
        self._secure, self._host = parts.scheme == "https", parts.hostname
        self._port = port if port is not None else 443 if self._secure else 80
        self._base = parts.path.rstrip("/")
        self.url = f"{parts.scheme}://{parts.netloc}{self._base}"

    def call(self, method: str, path: str, body: object = None, *, what: str, deadline: Deadline) -> Reply:
        """Ask once and read the whole answer, whatever its status. `what` is for messages: what the caller wants.

        Raises `DeadlineExceeded`, or `ReplicaFailed` if there is no server or its answer is none.
        """
        deadline.check(f"{what} at {self.url}")
        connection = self._connection(deadline)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._access.token is not None:
            headers["Authorization"] = f"Bearer {self._access.token}"
        try:
            connection.connect()
            _limit(connection.sock, deadline)
            connection.request(method, self._base + path, None if body is None else msgspec.json.encode(body), headers)
            response = connection.getresponse()
            read = response.read(MAX_REPLY_NBYTES + 1)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{what} at {self.url}", deadline.seconds) from error
        except (OSError, http.client.HTTPException) as error:
            raise ReplicaFailed(
                f"{self.url} cannot be reached, or broke off, while {what}: {type(error).__name__}: {error}. "
                "Look whether the server runs."
            ) from error
        finally:
            connection.close()
        if len(read) > MAX_REPLY_NBYTES:
            raise ReplicaFailed(f"{self.url} answered with more than {MAX_REPLY_NBYTES} bytes while {what}.")
        return Reply(response.status, read)

    def _connection(self, deadline: Deadline) -> http.client.HTTPConnection:
        wait_s = max(deadline.remaining(), 1e-3)
        connection = (
            http.client.HTTPSConnection(self._host, self._port, timeout=wait_s, context=self._access.tls)
            if self._secure
            else http.client.HTTPConnection(self._host, self._port, timeout=wait_s)
        )

        def answer(sock: socket.socket, *args: Any, **options: Any) -> http.client.HTTPResponse:
            return http.client.HTTPResponse(cast("socket.socket", _Wire(sock, deadline)), *args, **options)

        connection.response_class = answer  # type: ignore[assignment]  # any maker of responses will do
        return connection


class _Wire(io.RawIOBase):
    """What is read of a socket, each read within what is left of the deadline: many slow bytes cannot outlast it."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline
        self._raw = sock.makefile("rb", buffering=0)

    def makefile(self, mode: str) -> io.BufferedReader:  # noqa: ARG002 - as a socket's
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        _limit(self._sock, self._deadline)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _limit(sock: socket.socket, deadline: Deadline) -> None:
    left_s = deadline.remaining()
    if left_s <= 0:
        raise TimeoutError("the deadline has passed")
    sock.settimeout(left_s)
