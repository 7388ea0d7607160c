"""What may stand in the bodies of control calls. A field that is null counts as absent; one that is unknown is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from weightcast.control.fields import Strict
from weightcast.control.problems import Problems
from weightcast.engines.base import TAGS, UPDATE_TIMEOUT_S, PauseMode, Tag, TransferMode, UpdateRequest
from weightcast.tensors.digest import DEFAULT, Algorithm
from weightcast.worker.result import CommitMode

PAUSE_TIMEOUT_S = 60.0
WAKE_TIMEOUT_S = 300.0
LEGACY_TIMEOUT_S = 300.0  # what the old protocol waited

MAX_NAMES = 10_000  # of tensors or requests, in one call
_LONGEST_S = 7 * 24 * 3600.0  # more would overflow the clocks that some waits are made with
Seconds = Annotated[float, Field(gt=0, le=_LONGEST_S)]
Name = Annotated[str, Field(min_length=1, max_length=4096)]


def _not_too_many(names: Any) -> Any:
    """Before each of them is looked at."""
    if isinstance(names, list) and len(names) > MAX_NAMES:
        raise PydanticCustomError("too_long", f"takes {MAX_NAMES} names at most, not {len(names)}")
    return names


Names = Annotated[list[Name], BeforeValidator(_not_too_many)]


class NoFields(Strict):
    """Of a call that takes none."""


class UpdateBody(Strict):
    """Of `/v1/update_weights` and `/v1/weights/recover`."""

    version: Name | None = None
    source: Name | None = None
    transfer_mode: TransferMode | None = None
    verify_checksum: bool | None = None
    timeout: Seconds | None = None
    commit: Literal[CommitMode, "auto"] | None = None
    pause: PauseMode | None = None
    clear_cache: bool | None = None
    release_cache: bool | None = None
    wait: bool = True

    def request(self, defaults: UpdateRequest) -> UpdateRequest:
        """What is absent is taken from `defaults`, but for the way of transfer: that is of their source alone."""
        given = self.model_dump(exclude_none=True, exclude={"wait"})
        if "timeout" in given:
            given["timeout_s"] = given.pop("timeout")
        if "source" in given:
            given.setdefault("transfer_mode", "auto")
        return msgspec.structs.replace(defaults, **given)


class VerifyBody(Strict):
    """Of `/v1/weights/verify` and `/v1/weights/rollback`."""

    timeout: Seconds = UPDATE_TIMEOUT_S


class DigestBody(Strict):
    """Of `/v1/weights/digest`."""

    names: Names = Field(min_length=1)
    algorithm: Algorithm = DEFAULT
    timeout: Seconds = UPDATE_TIMEOUT_S


class PauseBody(Strict):
    """Of `/v1/pause`."""

    mode: PauseMode = "abort"
    clear_cache: bool = False
    timeout: Seconds = PAUSE_TIMEOUT_S


class ResumeBody(Strict):
    """Of `/v1/resume`."""

    timeout: Seconds = PAUSE_TIMEOUT_S


class AbortBody(Strict):
    """Of `/v1/abort_requests`."""

    abort_all: bool = False
    req_ids: Names = Field(default_factory=list)
    timeout: Seconds = PAUSE_TIMEOUT_S


class SleepBody(Strict):
    """Of `/v1/sleep`. `tags` is one string with commas, or a list."""

    tags: Any = None
    mode: PauseMode = "abort"
    timeout: Seconds = PAUSE_TIMEOUT_S


class WakeBody(Strict):
    """Of `/v1/wakeup`."""

    tags: Any = None
    timeout: Seconds = WAKE_TIMEOUT_S


def read_tags(body: Any, query: Sequence[str], problems: Problems) -> tuple[Tag, ...]:
    """The tags that a call names, once each and in our order. The body wins over the query; neither means all."""
    given = body if body is not None else list(query) or list(TAGS)
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        problems.add("tags", 'must be a string such as "weight,kv_cache", or a list of strings')
        return ()
    named = [name for text in texts for part in text.split(",") if (name := part.strip())]
    unknown = [name for name in dict.fromkeys(named) if name not in TAGS]
    if unknown:
        problems.add("tags", f"unknown: {', '.join(unknown)}; known are {', '.join(TAGS)}")
    elif not named:
        problems.add("tags", f"names none of {', '.join(TAGS)}; leave it out for all of them")
    return tuple(tag for tag in TAGS if tag in named)
