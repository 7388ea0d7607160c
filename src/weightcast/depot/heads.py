"""The head of an HTTP/1.1 request, read strictly: what two readers could understand differently is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

MAX_HEAD_NBYTES = 64 << 10
MAX_BODY_NBYTES = 16 << 20
MAX_FIELDS = 128

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE"})
_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e\x80-\xff]+) HTTP/(\d)\.(\d)")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*((?:[^\x00-\x08\x0a-\x1f\x7f]*[^\x00-\x20\x7f])?)[ \t]*")
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_SINGLE = frozenset({"content-length", "host", "authorization", "range", "if-range", "transfer-encoding", "expect"})


@dataclass(frozen=True)
class Refusal:
    """Why a request is not even looked at: the status, and the code and message of an error of ours."""

    status: int
    code: str
    message: str


@dataclass(frozen=True)
class Head:
    """What comes before the body. `segments` is the path, split and then decoded; header names are lower case."""

    method: str
    segments: tuple[str, ...]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body_nbytes: int
    keeps: bool
    expects: bool

    @property
    def path(self) -> str:
        """The path for messages."""
        return "/" + "/".join(self.segments)


def end_of_head(data: bytearray) -> int:
    """Where the body starts; 0 if the head is not whole yet. Bare line feeds end it too: then it is refused."""
    ends = [found + len(mark) for mark in (b"\n\r\n", b"\n\n") if (found := data.find(mark)) >= 0]
    return min(ends, default=0)


def parse_head(data: bytes) -> Head | Refusal:
    """The head, or why it is none that can be answered."""
    lines = data.removesuffix(b"\r\n\r\n").split(b"\r\n")
    line = _LINE.fullmatch(lines[0])
    if line is None:
        return _malformed(f"its first line is {lines[0][:200]!r}")
    headers = _fields(lines[1:])
    if isinstance(headers, Refusal):
        return headers
    place = _place(line[2].decode("latin-1"))
    if isinstance(place, Refusal):
        return place
    method, old = line[1].decode(), line[4] == b"0"
    refusal = next(_refusals(method, line[3] == b"1", old, headers), None)
    if refusal is not None:
        return refusal
    closes = "close" in [token.strip().lower() for token in headers.get("connection", "").split(",")]
    segments, query = place
    body_nbytes, expects = int(headers.get("content-length", 0)), "expect" in headers and not old
    return Head(method, segments, query, headers, body_nbytes, not (old or closes), expects)


def _refusals(method: str, first: bool, old: bool, headers: Mapping[str, str]) -> Iterator[Refusal]:
    """Everything that cannot be answered in a head that can be read."""
    if not first:
        yield Refusal(505, "invalid_input", "this depot speaks HTTP/1.1.")
    if method not in _METHODS:
        yield Refusal(501, "invalid_input", f"the method {method[:40]} is not known here.")
    if "host" not in headers and not old:
        yield _malformed("it has no Host")
    length, coding = headers.get("content-length"), headers.get("transfer-encoding")
    if length is not None and coding is not None:
        yield _malformed("it has both a Content-Length and a Transfer-Encoding")
    if coding is not None and coding.lower() != "chunked":
        yield Refusal(501, "invalid_input", f"the transfer coding {coding[:40]!r} is not known here.")
    if coding is not None or (length is None and method in ("POST", "PUT", "PATCH")):
        yield Refusal(411, "invalid_input", "a body must come with its Content-Length.")
    if length is not None and not _NUMBER.fullmatch(length):
        yield _malformed(f"its Content-Length is {length[:40]!r}")
    if length is not None and int(length) > MAX_BODY_NBYTES:
        yield Refusal(413, "invalid_input", f"a body of {length} bytes is larger than {MAX_BODY_NBYTES}: ask in several.")
    expect = headers.get("expect", "100-continue")
    if expect.lower() != "100-continue":
        yield Refusal(417, "invalid_input", f"the expectation {expect[:40]!r} cannot be met.")


def _fields(lines: list[bytes]) -> dict[str, str] | Refusal:
    if len(lines) > MAX_FIELDS:
        return Refusal(431, "invalid_input", f"the request has {len(lines)} header fields, more than {MAX_FIELDS}.")
    fields: dict[str, str] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            return _malformed(f"{line[:80]!r} is not a header field")
        name, value = field[1].decode().lower(), field[2].decode("latin-1")
        if name in fields and name in _SINGLE:
            return _malformed(f"it has the header field {name} twice")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return fields


def _place(target: str) -> tuple[tuple[str, ...], dict[str, str]] | Refusal:
    """The path and the query. A path is split before it is decoded, so that an encoded slash stays inside of its segment."""
    try:
        parts = urlsplit(target)
        if not target.startswith("/") and parts.scheme not in ("http", "https"):
            return _malformed(f"{target[:80]!r} is not a path")
        path, _, query_text = (target if target.startswith("/") else f"{parts.path or '/'}?{parts.query}").partition("?")
        segments = tuple(unquote(segment, encoding="utf-8", errors="strict") for segment in path.split("/")[1:])
        pairs = (
            parse_qsl(query_text, keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS) if query_text else ()
        )
    except (ValueError, UnicodeError) as error:
        return _malformed(f"{target[:80]!r} is not a path: {error}")
    return segments, dict(pairs)


def _malformed(problem: str) -> Refusal:
    return Refusal(400, "invalid_input", f"this is not an HTTP request: {problem}.")
