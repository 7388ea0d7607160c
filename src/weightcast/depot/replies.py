"""Errors of ours as answers of a depot, in one table."""

from __future__ import annotations

from collections.abc import Mapping

from weightcast.depot.exchange import Reply
from weightcast.errors import (
    AccessRefused,
    Conflict,
    Corrupt,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    Overloaded,
    WeightcastError,
)
from weightcast.wire.depot import Failure

_STATUSES: tuple[tuple[type[WeightcastError], int], ...] = (
    (InvalidInput, 422),
    (NotFound, 404),
    (Conflict, 409),
    (Corrupt, 502),
    (AccessRefused, 401),
    (Overloaded, 503),
    (DeadlineExceeded, 504),
)


def failure(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Reply:
    """An answer that is not a success."""
    return Reply.message(Failure(code, message), status=status, headers=headers)


def reply_of(error: WeightcastError) -> Reply:
    """The answer that tells of an error."""
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    headers = {"WWW-Authenticate": 'Bearer realm="weightcast"'} if status == 401 else {}
    return failure(status, error.code, str(error), headers)
