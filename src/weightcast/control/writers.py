"""Writing the reply to a client: in one piece, or as server-sent events while the answer grows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Send

from weightcast.control.choices import Choice, Piece
from weightcast.control.replies import error_content, error_reply, json_reply
from weightcast.control.shapes import Shape
from weightcast.errors import WeightcastError

LAST_WORDS_S = 5.0  # for a client that does not read

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Writer(Protocol):
    """Told everything that happens to an answer; exactly one of `finish` and `fail` comes last."""

    async def piece(self, choice: Choice, piece: Piece) -> None:
        """The engine has said something more."""

    async def finish(self) -> None:
        """All answers have ended."""

    async def fail(self, error: WeightcastError) -> None:
        """The answers end here, unfinished."""


class WholeWriter:
    """Writes once, at the end. An error carries what had been answered until then."""

    def __init__(self, send: Send, shape: Shape, choices: Sequence[Choice]) -> None:
        self._send, self._shape, self._choices = send, shape, choices
        self._written = False

    async def piece(self, choice: Choice, piece: Piece) -> None:
        """Nothing is written yet."""

    async def finish(self) -> None:
        """The answer."""
        self._written = True
        await write(json_reply(self._shape.whole(self._choices)), self._send)

    async def fail(self, error: WeightcastError) -> None:
        """The error, unless an answer is being sent and has come too late only for a slow client."""
        if self._written:
            return
        answered = any(choice.tokens for choice in self._choices)
        for choice in self._choices:
            choice.flush()
        await write(error_reply(error, partial=self._shape.whole(self._choices) if answered else None), self._send)


class StreamWriter:
    """Writes an event for every output of the engine. Nothing is sent before the first, so that an error has its status."""

    def __init__(self, send: Send, shape: Shape, choices: Sequence[Choice]) -> None:
        self._send, self._shape, self._choices = send, shape, choices
        self._started = False
        self._lock = asyncio.Lock()  # several answers of a request grow at the same time

    async def piece(self, choice: Choice, piece: Piece) -> None:
        """One event."""
        await self._write(self._shape.event(choice, piece))

    async def finish(self) -> None:
        """The usage, if asked for, and the end."""
        await self._write(self._shape.ending(self._choices), last=True)

    async def fail(self, error: WeightcastError) -> None:
        """The error: as an event if the stream has begun, which then ends without OpenAI's last word."""
        if not self._started:
            await write(error_reply(error), self._send)
        else:
            await self._write(b"data: " + msgspec.json.encode(error_content(error)) + b"\n\n", last=True)

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        async with self._lock:
            if not self._started:
                await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
                self._started = True
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})


async def write(response: Response, send: Send) -> None:
    """Write a whole reply."""
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})
