"""The gate before the ranks: while it is closed, requests are accepted and wait here."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from weightcast.engines.embedded.messages import Submit
from weightcast.errors import InvalidInput


class Gate:
    """Open at first. What waits is sent, in the order it came, when the gate is opened."""

    def __init__(self) -> None:
        self.closed = False
        self._waiting: dict[str, Submit] = {}

    def close(self) -> None:
        """From now on requests wait."""
        self.closed = True

    def hold(self, request: Submit) -> None:
        """Keep a request until the gate opens."""
        self._waiting[request.id] = request

    def waits(self, request_id: str) -> bool:
        """Whether a request waits here."""
        return request_id in self._waiting

    def forget(self, request_id: str) -> bool:
        """The request is not wanted any more. False if it does not wait here."""
        return self._waiting.pop(request_id, None) is not None

    def open(self, send: Callable[[Submit], None]) -> None:
        """Let everything through. What cannot be sent is the sender's to end."""
        self.closed = False
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            send(request)

    def drop(self) -> None:
        """Forget what waits: somebody else has ended it."""
        self._waiting.clear()


def check_types(request: Submit) -> None:
    """Structs take whatever they are given, and rank 0, which checks, would fail for all over the mistake of one."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Submit)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"request {request.id!r} cannot be sent to the ranks: {error}.") from error
