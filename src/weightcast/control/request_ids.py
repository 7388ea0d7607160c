"""The id of a request, which its reply carries: the caller's own, if it sent one that can be returned, else a new one."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weightcast import logs

log = logs.get(__name__)

_KEY = "weightcast.request_id"


@dataclass
class RequestId:
    """`given` tells whether the caller chose it."""

    value: str
    given: bool


class RequestIds:
    """Gives every reply an `x-request-id`, which every line that is logged for it carries too. Mistakes of ours end here."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application around another."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        usable = logs.usable_id(given)
        request_id = scope[_KEY] = RequestId(given if usable else uuid.uuid4().hex, usable)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id.value
            await send(message)

        with logs.bound(request_id=request_id.value):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:  # the reply was sent, or uvicorn ends the connection
                log.exception("request crashed", method=scope["method"], path=scope["path"])


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
