"""Reading the fields of a JSON body strictly: no unknown ones, no types bent to fit, and every problem told at once."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError

from weightcast.control.problems import Problems
from weightcast.errors import InvalidInput


class Strict(BaseModel):
    """The base of everything that a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


AnyBody = TypeVar("AnyBody", bound=Strict)


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises `InvalidInput`."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not JSON that can be read: {error}.") from error
    if not isinstance(content, dict):
        raise InvalidInput("the body must be a JSON object.")
    return content


def read_fields(kind: type[AnyBody], content: dict[str, Any], problems: Problems) -> AnyBody | None:
    """What `content` says, or None if a field is wrong; then `problems` has every field that is."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        for one in error.errors(include_url=False, include_context=False, include_input=False):
            problems.add(_path(one["loc"]), _words(one["type"], one["msg"]))
    return None


def _path(place: tuple[int | str, ...]) -> str:
    """Where in the body, as a person writes it."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _words(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "unknown field"
    return "missing" if kind == "missing" else message[:1].lower() + message[1:]
