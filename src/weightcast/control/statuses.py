"""The one table of error codes and HTTP statuses."""

from __future__ import annotations

from weightcast.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    ReplicaFailed,
    WeightcastError,
)

STATUS: dict[str, int] = {
    InvalidInput.code: 422,
    NotFound.code: 404,
    Conflict.code: 409,
    Overloaded.code: 429,
    NotReady.code: 503,
    ReplicaFailed.code: 503,
    DeadlineExceeded.code: 504,
    WeightcastError.code: 500,
}
RETRY_AFTER_S: dict[int, int] = {429: 1, 503: 2}


def status_of(error: type[WeightcastError]) -> int:
    """The HTTP status of an error: its own, or that of the nearest class above it."""
    return next(STATUS[cls.code] for cls in error.__mro__ if issubclass(cls, WeightcastError) and cls.code in STATUS)
