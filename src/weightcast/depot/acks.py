"""What a depot answers about its receivers: they tell which version they serve, and whoever asks is told of all."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec

from weightcast.depot.exchange import Reply, Request, Route
from weightcast.store.acks import Acks
from weightcast.wire.depot import PREFIX, Ack


class AckRoutes:
    """The routes over the acknowledgements of a depot."""

    def __init__(self, acks: Acks) -> None:
        self._acks = acks

    def routes(self) -> list[Route]:
        """Both of them."""
        return [
            Route("POST", f"{PREFIX}/acks", self.note),
            Route("GET", f"{PREFIX}/receivers", self.receivers),
        ]

    def note(self, request: Request, _stack: ExitStack) -> Reply:
        """A receiver tells where it is."""
        self._acks.note(request.read(Ack), request.client)
        return Reply(204)

    def receivers(self, _request: Request, _stack: ExitStack) -> Reply:
        """Who is where."""
        data = msgspec.json.encode(self._acks.receivers())
        return Reply(200, (data,), len(data), {"Content-Type": "application/json"})
