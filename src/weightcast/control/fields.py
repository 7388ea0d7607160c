"""Reading the fields of a JSON body strictly: no unknown ones, no types bent to fit, and every problem told at once."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError

from weightcast.control.problems import Problems
from weightcast.errors import InvalidInput


class Strict(BaseModel):
    """The base of everything that a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


AnyBody = TypeVar("AnyBody", bound=Strict)


MAX_DEPTH = 16
MAX_KEYS = 64  # of one object
MAX_VALUES = 100_000  # strings, lists and objects, all of them; numbers are counted by the size of the body

_TOKEN = re.compile(rb'["\[\]{}]|[^"\[\]{}]{1,65536}+')  # one that gives shape, or a run between two
_STRING = re.compile(rb'(?:[^"\\]{1,4096}+|\\.){0,64}+("?)', re.DOTALL)  # the next part of one; its end is a group


def check_shape(body: bytes) -> None:
    """Raise `InvalidInput` for a body that is too deep or holds too much, before memory is taken for what it holds.

    A body that is not JSON may pass. The expressions match short runs, so that other threads are not held up.
    """
    position, values, after_string = 0, 0, False
    keys: list[int] = []  # of each list and object that is open
    while token := _TOKEN.match(body, position):
        position, text = token.end(), token[0]
        if text == b'"':
            values += 1
            while (part := _STRING.match(body, position)) and part[0]:
                position = part.end()
                if part[1]:
                    break
        elif text in b"[{":
            values += 1
            keys.append(0)
        elif text in b"]}":
            del keys[-1:]
        elif after_string and keys and text.lstrip().startswith(b":"):
            keys[-1] += 1
        after_string = text == b'"' or (after_string and text.isspace())
        if len(keys) > MAX_DEPTH:
            raise InvalidInput(f"the body is nested more than {MAX_DEPTH} levels deep.")
        if keys and keys[-1] > MAX_KEYS:
            raise InvalidInput(f"an object in the body has more than {MAX_KEYS} keys.")
        if values > MAX_VALUES:
            raise InvalidInput(f"the body holds more than {MAX_VALUES} strings, lists and objects.")


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises `InvalidInput`."""
    check_shape(body)
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
