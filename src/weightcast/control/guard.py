"""Who may call what. Every request passes here before its body is read.

Inference wants the API key, if there is one; control wants the control token, or a caller on loopback. A page in a browser
can make its user's machine send requests, so control also refuses what such a page can send without being allowed to: other
origins, names that were rebound to this address, and bodies of types that need no preflight. docs/security.md explains each.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weightcast import logs
from weightcast.control.control_replies import failure_content
from weightcast.control.replies import envelope, json_reply
from weightcast.control.request_ids import control_id_of
from weightcast.control.settings import ServerSettings

log = logs.get(__name__)

_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
_ALLOWED_SITES = ("same-origin", "none")  # of sec-fetch-site: the same page, or somebody who typed the URL
_HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(?::\d+)?")


@dataclass(frozen=True)
class _Refusal:
    status: int
    code: str
    message: str


class Guard:
    """Refuses what may not pass, and hands everything else to `app`. `control` are the patterns of control's paths."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, control: Sequence[re.Pattern[str]]) -> None:
        self._app, self._settings, self._control = app, settings, control
        names = {"localhost", settings.host, socket.gethostname(), *settings.allow_hosts}
        self._names = {name.lower().rstrip(".") for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application around another."""
        if scope["type"] == "http":
            path = scope["path"]
            control = any(pattern.match(path) for pattern in self._control)
            refusal = self._of_control(scope) if control else self._of_inference(scope) if path.startswith("/v1/") else None
            if refusal is not None:
                log.info("call refused", method=scope["method"], path=path[:200], status=refusal.status, code=refusal.code)
                await _reply(scope, refusal, control=control)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _of_inference(self, scope: Scope) -> _Refusal | None:
        key = self._settings.api_key
        if key is None or key.is_shown(Headers(scope=scope)):
            return None
        return _Refusal(401, "unauthorized", "this server wants its API key: send it as 'Authorization: Bearer KEY'.")

    def _of_control(self, scope: Scope) -> _Refusal | None:
        headers, token = Headers(scope=scope), self._settings.control_token
        proved = token is not None and token.is_shown(headers)
        if token is not None and not proved:
            return _Refusal(
                401, "unauthorized", "control of this server wants its token: send it as 'Authorization: Bearer TOKEN'."
            )
        if not proved and not _is_local(scope, headers):
            return _Refusal(
                403,
                "forbidden",
                "this server has no control token, so that control answers on loopback only. Start it with "
                "--control-token-file FILE to control it from elsewhere.",
            )
        host = headers.get("host", "")
        if not proved and not self._knows(host):
            return _Refusal(
                403,
                "forbidden",
                f"{host[:200]!r} in the Host header is not a name of this server. Call it by address, start it with "
                "--allow-host NAME, or use a control token.",
            )
        if not _is_same_origin(headers, host):
            return _Refusal(403, "forbidden", "control refuses requests of pages of other origins.")
        return _wrong_type(headers, proved=proved) if scope["method"] == "POST" else None

    def _knows(self, host: str) -> bool:
        """Whether this can be said of the server itself. Addresses can: only names are rebound."""
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].lower().rstrip(".")
        return _address(name.strip("[]")) is not None or name in self._names or name.endswith(".localhost")


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _is_local(scope: Scope, headers: Headers) -> bool:
    """Whether the caller is on this machine. A caller behind a proxy counts as remote."""
    client = scope.get("client")
    address = _address(client[0].partition("%")[0]) if client else None
    return address is not None and address.is_loopback and not any(name in headers for name in _FORWARDED)


def _is_same_origin(headers: Headers, host: str) -> bool:
    origin = headers.get("origin")
    if headers.get("sec-fetch-site", "none") not in _ALLOWED_SITES:
        return False
    if origin is None:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def _wrong_type(headers: Headers, *, proved: bool) -> _Refusal | None:
    """A page can send forms and plain text anywhere; it must ask before it sends JSON, a token or a header of ours."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    if kind == "application/json" or (empty and (proved or "x-request-id" in headers)):
        return None
    return _Refusal(
        415,
        "not_json",
        "a control call is JSON: send 'content-type: application/json', with curl --json '{}' URL, for instance. A call "
        "without a body may carry x-request-id instead.",
    )


def _reply(scope: Scope, refusal: _Refusal, *, control: bool) -> Response:
    headers = {"www-authenticate": "Bearer"} if refusal.status == 401 else {}
    if control:
        content = failure_content(control_id_of(scope), refusal.message, refusal.code)
    else:
        content = envelope(refusal.message, refusal.status, refusal.code)
    return json_reply(content, refusal.status, headers)
