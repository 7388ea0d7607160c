"""Reading the body of a request, and noticing that its sender has gone."""

from __future__ import annotations

import asyncio
from enum import Enum

from starlette.types import Receive, Scope


class NoBody(Enum):
    """Why there is no body to work on."""

    GONE = "disconnected"
    TOO_LARGE = "too_large"
    TOO_SLOW = "deadline_exceeded"


async def read_body(scope: Scope, receive: Receive, *, limit: int, timeout_s: float) -> bytes | NoBody:
    """The whole body, of at most `limit` bytes."""
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit:
        return NoBody.TOO_LARGE
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return NoBody.GONE
                body += message.get("body", b"")
                if len(body) > limit:
                    return NoBody.TOO_LARGE
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        return NoBody.TOO_SLOW


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone, and not before. To be called after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
