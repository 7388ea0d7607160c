"""Replies in OpenAI's envelope: what every client of that API can read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from weightcast.control.problems import Problem, clipped
from weightcast.control.statuses import headers_of, status_of
from weightcast.errors import VersionNotServed, WeightcastError

_KINDS = {429: "rate_limit_error"}


def json_reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON body."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_content(error: WeightcastError, problems: Iterable[Problem] = (), partial: Any = None) -> dict[str, Any]:
    """The body for an error. `partial` is what had been answered until then."""
    content = envelope(str(error), status_of(type(error)), error.code)
    details = content["error"]
    listed = [msgspec.to_builtins(problem) for problem in problems]
    if listed:
        details |= {"param": listed[0]["param"], "problems": listed}
    if isinstance(error, VersionNotServed):
        details["weight_version"] = error.serving or None
    if partial is not None:
        details["partial"] = partial
    return content


def error_reply(error: WeightcastError, problems: Iterable[Problem] = (), partial: Any = None) -> Response:
    """The whole reply for an error."""
    return json_reply(error_content(error, problems, partial), status_of(type(error)), headers_of(error))


def envelope(message: str, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """An error that is none of ours: an unknown path, a body that is too large."""
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": clipped(message), "type": kind, "param": param, "code": code}}
