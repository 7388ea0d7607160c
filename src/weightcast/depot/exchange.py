"""One request to a depot and the reply to it, apart from sockets: what handlers are written against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from weightcast.clock import Deadline
from weightcast.errors import InvalidInput
from weightcast.tensors.flat import Buffer
from weightcast.wire.decoding import decode

_Body = TypeVar("_Body", bound=msgspec.Struct)


@dataclass(frozen=True)
class Request:
    """What a client asks. `path` are the values of the `{names}` in the pattern of the route; header names are lower case.

    A handler that waits for something may ask whether the client is still `connected`.
    """

    method: str
    path: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    deadline: Deadline
    connected: Callable[[], bool] = field(default=lambda: True, repr=False)

    def read(self, kind: type[_Body]) -> _Body:
        """The body as a message. Raises `InvalidInput` if it is not one."""
        try:
            return decode(self.body, kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the body of the request is not a {kind.__name__}: {error}.") from error


@dataclass(frozen=True)
class Reply:
    """What the client gets. The blocks of `body` are sent from where they lie, as they come, and are `nbytes` together.

    A block is borrowed: the next one is asked for when it was sent.
    """

    status: int
    body: Iterable[Buffer] = ()
    nbytes: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def message(cls, message: msgspec.Struct, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
        """A message as JSON."""
        data = msgspec.json.encode(message)
        return cls(status, (data,), len(data), {"Content-Type": "application/json", **(headers or {})})


# A handler raises errors of ours; the server makes replies of them. What it enters into the stack lasts until the reply was
# sent, or could not be.
Handler = Callable[[Request, ExitStack], Reply]


@dataclass(frozen=True)
class Route:
    """Which requests a handler answers: `/v1/versions/{version}/files/{file}`, say."""

    method: str
    pattern: str
    handler: Handler
