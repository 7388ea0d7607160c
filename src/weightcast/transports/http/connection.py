"""One connection to a depot: HTTP/1.1 heads, and bodies that are received straight into the caller's memory."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from weightcast.errors import SourceFailed
from weightcast.transports.base import Follow
from weightcast.transports.http.access import Access
from weightcast.transports.http.patience import TICK_S, Patience, wait_ready

_HEAD_NBYTES = 16 << 10
_MAX_HEAD_NBYTES = 64 << 10
_BLOCK_NBYTES = 4 << 20  # received at once at most
_CHUNK_NBYTES = 64 << 10  # received and looked at: it stays in the cache of a core, where hashing takes next to no time
_MAX_VIEWS = 64
_TICK = struct.pack("ll", 0, int(TICK_S * 1e6))
# A host that is gone without a word is noticed even while nothing has to be sent to it.
_ALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))


@dataclass(frozen=True)
class Address:
    """Where a depot is. `base` stands before the paths of all its requests, for one that is behind a proxy."""

    scheme: str
    host: str
    port: int
    base: str = ""

    @property
    def authority(self) -> str:
        """Host and port as they are written in URLs."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The depot's URL."""
        return f"{self.scheme}://{self.authority}{self.base}"


class Dropped(SourceFailed):
    """A connection that ended before any byte of an answer: if it had been kept open, the depot hung up meanwhile."""


@dataclass(frozen=True)
class Head:
    """The first lines of an answer; names of headers are lower case. `nbytes` of a body follow."""

    status: int
    reason: str
    headers: Mapping[str, str]
    nbytes: int
    keep: bool


class Connection:
    """Speaks to one depot, one exchange at a time. After an error it can only be closed."""

    def __init__(self, address: Address, access: Access, patience: Patience) -> None:
        self.url = address.url
        self.used = False
        self._early = memoryview(b"")  # bytes that came with a head, or the lines before a range
        self._encrypted = address.scheme == "https"
        self._sock = _connect(address, patience)
        try:
            if self._encrypted:
                from weightcast.transports.http.tls import secured  # noqa: PLC0415 - plain http does not need it

                self._sock = secured(self._sock, access.tls, address.host, patience)
            self._prepare()
        except BaseException:
            self._sock.close()
            raise

    def _prepare(self) -> None:
        """Let every call return after a moment, so that whoever waits can look whether to go on."""
        sock = self._sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _ALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        if self._encrypted:
            sock.settimeout(TICK_S)
        else:  # the kernel waits until all that was asked for has come, which takes fewer calls than polling
            sock.setblocking(True)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK)

    def stale(self) -> bool:
        """Whether the depot hung up since the last exchange: nothing can come that was not asked for."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))

    def send(self, data: bytes, patience: Patience) -> None:
        """Send a request."""
        left = memoryview(data)
        while left:
            try:
                sent = self._sock.send(left)
            except (BlockingIOError, TimeoutError):
                patience.check()
                continue
            except OSError as error:
                raise Dropped(f"the connection to {self.url} broke while {patience.what}: {error}.") from error
            patience.moved()
            left = left[sent:]

    def head(self, patience: Patience) -> Head:
        """Wait for the head of the answer."""
        while True:
            head = _parsed(self.lines(patience), self.url)
            if head.status >= 200:
                self.used = True
                return head

    def lines(self, patience: Patience, most_nbytes: int = _MAX_HEAD_NBYTES) -> bytes:
        """What comes next, up to an empty line and without it. Nothing if the next `most_nbytes`, or 64 KiB, have none."""
        data, most = bytearray(self._early), min(most_nbytes, _MAX_HEAD_NBYTES)
        while (end := data.find(b"\r\n\r\n", 0, most)) < 0 and len(data) < most:
            data += self._first(data, patience)
        self._early = memoryview(bytes(data[end + 4 :]))
        return bytes(data[: max(end, 0)])

    def _first(self, before: bytearray, patience: Patience) -> memoryview:
        block = memoryview(bytearray(_HEAD_NBYTES))
        try:
            return block[: self._some([block], 0, patience)]
        except _Ended as error:
            if before:
                raise
            raise Dropped(str(error)) from error

    @property
    def clean(self) -> bool:
        """Whether nothing came that no answer accounts for."""
        return not self._early

    def receive(self, views: Sequence[memoryview], patience: Patience) -> int:
        """Fill the first bytes of `views` with those of a body that come next; how many came."""
        if self._early:
            count = 0
            for view in views:
                part = self._early[: len(view)]
                view[: len(part)] = part
                self._early, count = self._early[len(part) :], count + len(part)
            return count
        return self._some(views, socket.MSG_WAITALL, patience)

    def stream(self, memory: memoryview, follow: Follow | None, patience: Patience) -> int:
        """Fill a memory as far as bytes come without a pause; each chunk is given to `follow` at once. How many came: an
        error is raised only before the first.
        """
        at = count = self.receive([memory[:_CHUNK_NBYTES]], patience)
        if follow is not None:
            follow(memory[:at])
        receive, whole = self._sock.recv_into, socket.MSG_WAITALL
        # Nothing more in this loop than there must be: after every chunk, the code too has to come back to the cache.
        while count == _CHUNK_NBYTES and at < len(memory):
            chunk = memory[at : at + _CHUNK_NBYTES]
            try:
                count = self._decrypted(chunk, whole=True) if self._encrypted else receive(chunk, 0, whole)
            except OSError:
                return at  # the next call meets it, too
            if follow is not None:
                follow(chunk[:count])
            at += count
        return at

    def _some(self, views: Sequence[memoryview], flags: int, patience: Patience) -> int:
        while True:
            try:
                if self._encrypted:
                    count = self._decrypted(views[0][:_BLOCK_NBYTES], whole=bool(flags & socket.MSG_WAITALL))
                elif len(views) == 1:
                    count = self._sock.recv_into(views[0][:_BLOCK_NBYTES], 0, flags)
                else:
                    count = self._sock.recvmsg_into(views[:_MAX_VIEWS], 0, flags)[0]
            except (BlockingIOError, TimeoutError):
                patience.check()
                continue
            except OSError as error:
                raise _Ended(f"the connection to {self.url} broke while {patience.what}: {error}.") from error
            if count == 0:
                raise _Ended(f"{self.url} closed the connection while {patience.what}.")
            patience.moved()
            patience.check()
            return count

    def _decrypted(self, view: memoryview, *, whole: bool) -> int:
        """What an encrypted connection gives at once is little: take what comes until a moment is over."""
        count, end = 0, monotonic() + TICK_S
        while True:
            try:
                found = self._sock.recv_into(view[count:])
            except TimeoutError:
                if count:
                    return count
                raise
            count += found
            if not whole or not found or count == len(view) or monotonic() >= end:
                return count

    def abort(self) -> None:
        """End whatever another thread waits for here. That thread closes it."""
        try:  # not the method of encrypted sockets, which would have the other thread read on, unencrypted
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            return  # the other end was faster

    def close(self) -> None:
        """Hang up. Safe twice."""
        self._sock.close()


class _Ended(SourceFailed):
    """The other end closed the connection, or it broke."""


def _connect(address: Address, patience: Patience) -> socket.socket:
    """A connected socket that does not block."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SourceFailed(f"the host of {address.url} cannot be found: {error}.") from error
    why: OSError | None = None
    for family, kind, protocol, _, where in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(where)
            if code == errno.EINPROGRESS:
                wait_ready(sock, select.POLLOUT, patience)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == 0:
                return sock
            why = OSError(code, os.strerror(code))
            sock.close()
        except BaseException:
            sock.close()
            raise
    raise SourceFailed(f"{address.url} cannot be reached: {why}. Is a depot running there?") from why


def _parsed(data: bytes, url: str) -> Head:
    """A head, believing nothing."""
    try:
        first, *lines = data.decode("latin-1").split("\r\n")
        protocol, status, *reason = first.split(" ", 2)
        if protocol not in ("HTTP/1.1", "HTTP/1.0") or not (status.isdecimal() and len(status) == 3):
            raise ValueError(first[:80])
        pairs = [line.split(":", 1) for line in lines]
        headers = {name.lower(): value.strip() for name, value in pairs}
        lengths = {value.strip() for name, value in pairs if name.lower() == "content-length"}
        bodiless = int(status) < 200 or int(status) in (204, 304)
        nbytes = 0 if bodiless else _length(lengths, headers)
    except ValueError as error:
        raise SourceFailed(f"{url} answered something that is not HTTP as depots speak it: {error}.") from error
    keep = protocol == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    return Head(int(status), "".join(reason), headers, nbytes, keep)


def _length(lengths: set[str], headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers or len(lengths) != 1 or not (length := lengths.pop()).isdecimal():
        raise ValueError("its body has no length")
    return int(length)
