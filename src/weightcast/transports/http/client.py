"""Requests to one depot, over connections that are kept open."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import (
    AccessRefused,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    SourceFailed,
    UpdateCancelled,
    VersionNotFound,
    VersionNotSet,
    WeightcastError,
    rebuilt,
)
from weightcast.store.layout import MANIFEST
from weightcast.store.version_file import LIMIT_NBYTES, YAML_NAME, parse_version_yaml
from weightcast.transports.base import Follow
from weightcast.transports.http.access import Access
from weightcast.transports.http.connection import Address, Connection, Dropped, Head
from weightcast.transports.http.patience import Patience
from weightcast.wire.decoding import decode
from weightcast.wire.depot import ID_HEADERS, PREFIX, Ack, Catalogue, Failure, Newest, file_tag, is_tag
from weightcast.wire.manifest import MAX_MANIFEST_NBYTES, Manifest, decode_manifest

# Receiving takes a core of its own for each connection, and the other half of them has to serve meanwhile.
CONNECTIONS = min(4, max(1, len(os.sched_getaffinity(0)) // 2))
STALL_S = 10.0
CONNECT_S = 5.0
_POLL_S = 1.0  # between two looks at version.yaml
_END_S, _MAX_END_NBYTES = 1.0, 256  # for what follows the last of several ranges
_MAX_FAILURE_NBYTES = 1 << 20
_MAX_ANSWER_NBYTES = 1 << 30

_CONTENT_RANGE = re.compile(rb"^content-range:[ \t]*bytes (\d{1,18})-(\d{1,18})/", re.IGNORECASE | re.MULTILINE)

log = logs.get(__name__)

_Answer = TypeVar("_Answer")


class Response:
    """An answer whose body is still to be received. Only whoever asked may use it, and only inside of the context."""

    def __init__(self, connection: Connection, head: Head, patience: Patience, left: int) -> None:
        self.status, self.reason, self.headers = head.status, head.reason, head.headers
        self.nbytes = self.left = left  # of the body, and of it still to come
        self.connection, self._keep = connection, head.keep
        self._patience = patience
        self.several = False  # ranges, each of which begins with lines of its own

    def begin(self, start: int, stop: int) -> None:
        """Wait for a range, all bytes of which come next. Raises `OneRange` if it is another one, or the body ends first."""
        if not self.several:
            return
        lines = self.connection.lines(self._patience, self.left)
        self.left -= len(lines) + len(b"\r\n\r\n")
        told = _CONTENT_RANGE.search(lines)
        if told is None or (int(told[1]), int(told[2]) + 1) != (start, stop) or self.left < stop - start:
            raise OneRange(f"{self.connection.url} was asked for bytes {start} to {stop} and answers {lines[:200]!r}.")

    def end(self) -> None:
        """Receive the few bytes that follow the last of several ranges. Without them the connection is not used again."""
        if self.several and self.left <= _MAX_END_NBYTES:
            patience = Patience(self.connection.url, self._patience.what, deadline=Deadline.after(_END_S), stall_s=_END_S)
            with suppress(SourceFailed, DeadlineExceeded):  # the ranges are complete without these bytes
                while self.left:
                    self.left -= self.connection.receive([memoryview(bytearray(self.left))], patience)

    def receive(self, views: Sequence[memoryview]) -> int:
        """Fill the first bytes of `views`, which are no more than are `left`, with those that come next; how many came."""
        count = self.connection.receive(views, self._patience)
        self.left -= count
        return count

    def stream(self, memory: memoryview, follow: Follow | None) -> int:
        """Fill a memory with what comes next, as far as it comes without a pause; each chunk is given to `follow` at once.
        How much came: an error that is met later is raised by the next call.
        """
        count = self.connection.stream(memory, follow, self._patience)
        self.left -= count
        return count

    def readinto(self, memory: memoryview) -> None:
        """Fill all of a memory. Raises `SourceFailed` if the answer is shorter or breaks off."""
        if len(memory) > self.left:
            raise SourceFailed(
                f"{self.connection.url} answers with {self.left} more byte(s) where {len(memory)} are expected, "
                f"while {self._patience.what}."
            )
        while memory:
            memory = memory[self.receive([memory]) :]

    def read(self, limit: int = _MAX_ANSWER_NBYTES) -> bytes:
        """All that is left of the body."""
        if self.left > limit:
            raise SourceFailed(f"{self.connection.url} answers with {self.left} bytes; up to {limit} can be right here.")
        data = bytearray(self.left)
        self.readinto(memoryview(data))
        return bytes(data)

    @property
    def whole(self) -> bool:
        """Whether the exchange is over, and another one can follow on the same connection."""
        return self._keep and self.left == 0 and self.connection.clean


class DepotClient:
    """Asks one depot. Any thread may call; each call has a connection to itself.

    Errors that the depot reports are raised as what they are, with its URL. One that cannot be reached, breaks off, is
    silent for `stall_s` or does not make sense is `SourceFailed`; one that wants another token is `AccessRefused`.
    """

    def __init__(
        self,
        url: str,
        *,
        access: Access | None = None,
        connections: int = CONNECTIONS,
        stall_s: float = STALL_S,
        connect_s: float = CONNECT_S,
    ) -> None:
        """`connections` are kept open between requests."""
        self._address = parse_address(url)
        self.url = self._address.url
        self._access, self._keep, self._stall_s = access or Access(), connections, stall_s
        self._connect_s = min(connect_s, stall_s)
        self._is_plain = False
        self.takes_several = True  # ranges in one request: as far as is known
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._lock = threading.Lock()

    # -- what there is ------------------------------------------------------------------------------------------------

    def catalogue(self, *, deadline: Deadline) -> Catalogue:
        """Everything that the depot has."""
        return self.ask("GET", f"{PREFIX}/versions", None, Catalogue, deadline=deadline)

    def newest(self, *, deadline: Deadline, after: str = "", wait_s: float = 0.0) -> Newest | None:
        """The version to take; None if it is still `after` when `wait_s` are over. `VersionNotSet`: there is none.

        A plain server of a store's files is asked for version.yaml, again and again.
        """
        if not self._is_plain:
            query = {"after": after, "wait": f"{wait_s:.3f}"} if after or wait_s else {}
            path = f"{PREFIX}/newest" + (f"?{urlencode(query)}" if query else "")
            try:
                with self.stream("GET", path, None, deadline=deadline, patience_s=wait_s + self._stall_s) as response:
                    return None if response.status == 204 else self._decoded(response, Newest)
            except NoSuchPath:
                self._is_plain = True
        until = monotonic() + wait_s
        while (version := self._named(deadline)) == after:
            if monotonic() >= until:
                return None
            deadline.check(f"waiting for a newer version than {after} from {self.url}")
            sleep(min(_POLL_S, until - monotonic(), deadline.remaining()))
        manifest = self.manifest(version, deadline=deadline)
        return Newest(version, manifest.sequence, manifest.root_digest)

    def _named(self, deadline: Deadline) -> str:
        """The version that version.yaml names."""
        try:
            with self.stream("GET", f"/{YAML_NAME}", None, deadline=deadline) as response:
                return parse_version_yaml(response.read(LIMIT_NBYTES), f"{self.url}/{YAML_NAME}").version
        except NoSuchPath as error:
            raise VersionNotSet(f"{self.url} has no {YAML_NAME}: nothing has been published there yet.") from error

    def manifest(self, version: str, *, deadline: Deadline) -> Manifest:
        """What a version is, with all that can be checked about it checked."""
        path = store_path(version, MANIFEST)
        try:
            with self.stream("GET", path, None, deadline=deadline) as response:
                manifest = decode_manifest(response.read(MAX_MANIFEST_NBYTES), f"{self.url}{path}")
        except NoSuchPath as error:
            raise rebuilt(VersionNotFound.code, f"version {version} is not at {self.url}.") from error
        if manifest.version != version:
            raise SourceFailed(f"{self.url} was asked for {version} and describes {manifest.version}.")
        return manifest

    # -- bytes --------------------------------------------------------------------------------------------------------

    def read(self, manifest: Manifest, file: str, start: int, memory: memoryview, *, deadline: Deadline) -> None:
        """Fill a memory with the bytes of a file of a version from `start` on."""
        if memory:
            with self.opened_range(manifest, file, start, start + len(memory), deadline=deadline) as response:
                response.readinto(memory)

    @contextmanager
    def opened_range(
        self, manifest: Manifest, file: str, start: int, stop: int, *, deadline: Deadline
    ) -> Iterator[Response]:
        """The answer with a range of a file. Raises `SourceFailed` if it is a depot that has other bytes under that name."""
        with self.opened_ranges(manifest, file, [(start, stop)], deadline=deadline) as response:
            yield response

    @contextmanager
    def opened_ranges(
        self, manifest: Manifest, file: str, ranges: Sequence[tuple[int, int]], *, deadline: Deadline
    ) -> Iterator[Response]:
        """The same with several ranges, one after the other; `Response.begin` comes before the bytes of each. Raises
        `OneRange` if the server does not send several in one answer, as not all do: then it is not asked for that again.
        """
        headers = {"Range": "bytes=" + ",".join(f"{start}-{stop - 1}" for start, stop in ranges)}
        path = store_path(manifest.version, file)
        with self.stream("GET", path, None, deadline=deadline, headers=headers) as response:
            tag, found = file_tag(manifest, file), response.headers.get("etag", "")
            if is_tag(found) and found != tag:
                raise OtherBytes(
                    f"{self.url} has other bytes than were asked for as {file} of version {manifest.version}: {found} and "
                    f"not {tag}."
                )
            if len(ranges) > 1:
                yield from self._several(response)
                return
            start, stop = ranges[0]
            told = response.headers.get("content-range", "").partition("/")[0]
            if (response.status, told, response.left) != (206, f"bytes {start}-{stop - 1}", stop - start):
                raise SourceFailed(
                    f"{self.url} was asked for bytes {start} to {stop} of {file} and answers {response.status} with "
                    f"{response.left} byte(s), {told or 'of no range'}."
                )
            yield response

    def _several(self, response: Response) -> Iterator[Response]:
        kind = response.headers.get("content-type", "").lower()
        try:
            if response.status != 206 or not kind.startswith("multipart/byteranges"):
                raise OneRange(f"{self.url} does not send several ranges in one answer.")
            response.several = True
            yield response
        except OneRange as error:
            log.debug("ranges asked for one by one", url=self.url, why=error)
            self.takes_several = False
            raise
        response.end()

    # -- questions ----------------------------------------------------------------------------------------------------

    def acknowledge(self, ack: Ack, *, deadline: Deadline) -> None:
        """Tell which version a receiver serves. A plain server of files does not want to know."""
        with suppress(NoSuchPath), self.stream("POST", f"{PREFIX}/acks", ack, deadline=deadline):
            return

    def ask(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None,
        answer: type[_Answer],
        *,
        deadline: Deadline,
        headers: Mapping[str, str] | None = None,
        patience_s: float = 0.0,
    ) -> _Answer:
        """Send a message and receive one. `patience_s` is how long the depot may be silent, if longer than usual."""
        with self.stream(method, path, body, deadline=deadline, headers=headers, patience_s=patience_s) as response:
            return self._decoded(response, answer)

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None,
        *,
        deadline: Deadline,
        headers: Mapping[str, str] | None = None,
        patience_s: float = 0.0,
    ) -> Iterator[Response]:
        """An open answer whose status is a success. A body that is not read to its end costs the connection."""
        data = b"" if body is None else msgspec.json.encode(body)
        lines = [f"{method} {self._address.base}{path} HTTP/1.1", f"Host: {self._address.authority}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        lines += [f"{ID_HEADERS[name]}: {value}" for name, value in logs.ids().items() if name in ID_HEADERS]
        if self._access.token is not None:
            lines.append(f"Authorization: Bearer {self._access.token}")
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        request = "\r\n".join([*lines, "", ""]).encode("latin-1") + data
        what = f"waiting for the answer to {method} {path}"
        connection, head = self._exchange(request, what, deadline, max(patience_s, self._stall_s))
        response = None
        try:
            patience = Patience(self.url, f"receiving {path}", deadline=deadline, stall_s=self._stall_s)
            response = Response(connection, head, patience, 0 if method == "HEAD" else head.nbytes)
            if not 200 <= head.status < 300:
                raise self._refusal(response, method, path)
            yield response
        finally:
            self._release(connection, whole=response is not None and response.whole)

    def _exchange(self, request: bytes, what: str, deadline: Deadline, patience_s: float) -> tuple[Connection, Head]:
        """Send a request, and again on a new connection if one that was kept turns out to be closed."""
        while True:
            connection = self._connected(deadline)
            try:
                patience = Patience(self.url, what, deadline=deadline, stall_s=patience_s)
                connection.send(request, patience)
                return connection, connection.head(patience)
            except BaseException as error:
                kept = connection.used
                self._release(connection, whole=False)
                if not (kept and isinstance(error, Dropped)):
                    raise

    def _connected(self, deadline: Deadline) -> Connection:
        deadline.check(f"asking {self.url}")
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if not connection.stale():
                    self._busy.add(connection)
                    return connection
                connection.close()
        patience = Patience(self.url, "connecting", deadline=deadline, stall_s=self._connect_s)
        connection = Connection(self._address, self._access, patience)
        with self._lock:
            self._busy.add(connection)
        return connection

    def _release(self, connection: Connection, *, whole: bool) -> None:
        """Keep a connection for the next request, or hang up; also if `close` ended it meanwhile."""
        with self._lock:
            keep = whole and connection in self._busy and len(self._idle) < self._keep
            self._busy.discard(connection)
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()

    def _decoded(self, response: Response, answer: type[_Answer]) -> _Answer:
        try:
            return decode(response.read(), answer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SourceFailed(f"{self.url} answers something that is not a {answer.__name__}: {error}.") from error

    def _refusal(self, response: Response, method: str, path: str) -> WeightcastError:
        """The error that an answer is."""
        status = f"{response.status} {response.reason}".strip()
        try:
            failure = decode(response.read(_MAX_FAILURE_NBYTES), Failure)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            failure = Failure("", f"it answers {status} to {method} {path.partition('?')[0]}.")
            if response.status in (404, 405, 501):
                return NoSuchPath(f"{self.url}: {failure.message}")
        if response.status in (401, 403):
            return AccessRefused(f"{self.url} refuses access: {failure.message} Give its token: {self.url}?token_file=PATH.")
        error = rebuilt(failure.code, f"{self.url}: {failure.message}")
        if type(error) is WeightcastError or isinstance(error, DeadlineExceeded | UpdateCancelled):  # its own, not ours
            return SourceFailed(str(error))
        return error

    def close(self) -> None:
        """Hang up; what other threads wait for fails. It connects again if it is used again."""
        with self._lock:
            idle, self._idle = self._idle, []
            busy, self._busy = self._busy, set()
        for connection in idle:
            connection.close()
        for connection in busy:
            connection.abort()


class OtherBytes(SourceFailed):
    """A depot has a version of that name, and it is another one."""


class OneRange(SourceFailed):
    """A server sends one range at a time."""


class NoSuchPath(NotFound):
    """A server that is no depot, but may have the files of a store, has nothing at a path."""


def store_path(version: str, file: str) -> str:
    """The path of a file of a version, which is that in a store."""
    return f"/versions/{quote(version, safe='')}/{quote(file, safe='')}"


def version_path(version: str, *rest: str) -> str:
    """The path of something that a depot answers about a version."""
    return "/".join([f"{PREFIX}/versions", *(quote(part, safe="") for part in (version, *rest))])


def parse_address(url: str) -> Address:
    """The address in the URL of one depot. Raises `InvalidInput`; a password in it is refused, and not repeated."""
    try:
        parts = urlsplit(url)
        host, port, secret = parts.hostname, parts.port, parts.username is not None
    except ValueError as error:
        raise InvalidInput(f"{url!r} is not the URL of a depot: {error}.") from error
    if secret:
        raise InvalidInput("the URL of a depot must not hold a name or password: give a token by ?token_file=PATH.")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise InvalidInput(f"{url!r} is not the URL of a depot: http://host:port or https://host:port.")
    default = 443 if parts.scheme == "https" else 80
    return Address(parts.scheme, host, default if port is None else port, parts.path.rstrip("/"))
