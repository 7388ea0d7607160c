"""One request to a depot and the reply to it, apart from sockets: what handlers are written against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np

from weightcast.clock import Deadline
from weightcast.errors import InvalidInput
from weightcast.store.byte_file import ByteFile
from weightcast.tensors.flat import Buffer
from weightcast.wire.decoding import decode

_Body = TypeVar("_Body", bound=msgspec.Struct)


@dataclass(frozen=True)
class Request:
    """What a client asks. `path` are the values of the `{names}` in the pattern of the route; header names are lower case.

    A handler that waits for a new version does so inside `parked()`, where the depot may cut the client to make room for
    others, and asks now and then whether the client is still `connected`. `client` is its address.
    """

    method: str
    path: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    deadline: Deadline
    connected: Callable[[], bool] = field(default=lambda: True, repr=False)
    parked: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, repr=False)
    client: str = ""

    def read(self, kind: type[_Body]) -> _Body:
        """The body as a message. Raises `InvalidInput` if it is not one."""
        try:
            return decode(self.body, kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the body of the request is not a {kind.__name__}: {error}.") from error


@dataclass(frozen=True)
class FileRange:
    """Bytes of an open file, which a socket sends without a copy in this process."""

    file: ByteFile
    start: int
    stop: int

    def read(self) -> memoryview:
        """The bytes in fresh memory. Raises `PartCorrupt` if the file ends before."""
        memory = np.empty(self.stop - self.start, dtype=np.uint8)
        self.file.read_into(memory.data, self.start)
        return memory.data.toreadonly()


@dataclass(frozen=True)
class Reply:
    """What the client gets. The blocks of `body` are sent from where they lie, as they come, and are `nbytes` together.

    A block is borrowed: the next one is asked for when it was sent.
    """

    status: int
    body: tuple[Buffer, ...] | Iterator[Buffer | FileRange] = ()
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
    """Which requests a handler answers: `/versions/{version}/{file}`, say."""

    method: str
    pattern: str
    handler: Handler
