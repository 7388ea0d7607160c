"""The envelope of every control reply, and what stands beside it for an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from weightcast.control.problems import Problem, clipped, mismatch_problems
from weightcast.control.replies import json_reply
from weightcast.control.statuses import headers_of, status_of
from weightcast.errors import VersionDoesNotFit, WeightcastError

SUCCESS = "Success"


@dataclass(frozen=True)
class Reply:
    """What a control call achieved. `beside` stands beside the envelope's own keys."""

    result: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)


def success_reply(request_id: str, reply: Reply) -> Response:
    """The call did what it was asked for, or (202) has begun to."""
    content = {"request_id": request_id, "status": "success", "error_message": SUCCESS, "result": reply.result}
    return json_reply({**content, **reply.beside}, reply.status, reply.headers)


def failure_content(request_id: str, message: str, code: str, problems: Iterable[Any] = ()) -> dict[str, Any]:
    """The body for a call that failed."""
    content = {"request_id": request_id, "status": "error", "error_message": clipped(message), "result": None, "code": code}
    listed = msgspec.to_builtins(list(problems))
    return content | {"problems": listed} if listed else content


def failure_reply(
    request_id: str,
    error: WeightcastError,
    problems: Iterable[Problem] = (),
    *,
    beside: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The whole reply for an error. One of status 422 lists all that is wrong."""
    status = status_of(type(error))
    listed = (list(problems) or _problems_of(error)) if status == 422 else []
    content = failure_content(request_id, str(error), error.code, listed)
    return json_reply({**content, **(beside or {})}, status, {**headers_of(error), **(headers or {})})


def _problems_of(error: WeightcastError) -> list[Problem]:
    """What the engine found wrong. An error that came from another process has its message only."""
    mismatches = getattr(error, "mismatches", ()) if isinstance(error, VersionDoesNotFit) else ()
    return mismatch_problems(mismatches) or [Problem(None, clipped(str(error)))]
