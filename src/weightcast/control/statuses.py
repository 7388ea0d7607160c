"""The one table of error codes and HTTP statuses."""

from __future__ import annotations

from weightcast.errors import (
    AccessRefused,
    CommitFailed,
    Conflict,
    Corrupt,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    ReplicaFailed,
    SourceFailed,
    SourceNotAllowed,
    UpdateFailed,
    VerificationUnavailable,
    VersionDoesNotFit,
    VersionNotServed,
    WeightcastError,
)

STATUS: dict[str, int] = {
    InvalidInput.code: 422,
    VersionDoesNotFit.code: 422,
    VerificationUnavailable.code: 422,
    SourceNotAllowed.code: 403,
    NotFound.code: 404,
    Conflict.code: 409,
    Overloaded.code: 429,
    UpdateFailed.code: 500,
    CommitFailed.code: 500,
    Corrupt.code: 502,
    SourceFailed.code: 502,
    AccessRefused.code: 502,
    NotReady.code: 503,
    ReplicaFailed.code: 503,
    DeadlineExceeded.code: 504,
    WeightcastError.code: 500,
}
RETRY_AFTER_S: dict[int, int] = {429: 1, 503: 2}
_RETRY_VERSION_S = 1  # the next update may bring the version that a request waits for


def status_of(error: type[WeightcastError]) -> int:
    """The HTTP status of an error: its own, or that of the nearest class above it."""
    return next(STATUS[cls.code] for cls in error.__mro__ if issubclass(cls, WeightcastError) and cls.code in STATUS)


def headers_of(error: WeightcastError) -> dict[str, str]:
    """When to try again; after a deadline not at all by itself, since the same would happen again."""
    status = status_of(type(error))
    wait_s = _RETRY_VERSION_S if isinstance(error, VersionNotServed) else RETRY_AFTER_S.get(status)
    if wait_s is not None:
        return {"retry-after": str(wait_s)}
    return {"x-should-retry": "false"} if status == 504 else {}
