"""The id of a request, which its reply carries: the caller's own, if it sent one that can be returned, else a new one."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_KEY = "weightcast.request_id"
_LONGEST = 256


@dataclass
class RequestId:
    """`given` tells whether the caller chose it."""

    value: str
    given: bool


class RequestIds:
    """Gives every reply an `x-request-id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application around another."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        usable = 0 < len(given) <= _LONGEST and given.isascii() and given.isprintable()
        request_id = scope[_KEY] = RequestId(given if usable else uuid.uuid4().hex, usable)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id.value
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(scope: Scope) -> RequestId:
    """The id of the request that is being answered."""
    found: RequestId = scope[_KEY]
    return found


def control_id_of(scope: Scope) -> str:
    """The same for a control call, whose own ids begin with "control-"."""
    found = request_id_of(scope)
    if not found.given and not found.value.startswith("control-"):
        found.value = f"control-{uuid.UUID(found.value)}"
    return found.value
