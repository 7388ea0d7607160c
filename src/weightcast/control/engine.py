"""What the server needs of an engine. The embedded engine's `Replica` is one; tests bring a smaller one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Protocol, Self

from weightcast.engines.base import LiveWeights, UpdateStatus
from weightcast.engines.embedded.messages import Action, Output, Submit


class Status(Protocol):
    """How an engine is doing."""

    @property
    def state(self) -> str:
        """The name of a `ReplicaState`."""

    @property
    def reason(self) -> str:
        """Why it is in that state."""

    @property
    def since(self) -> float:
        """When state or reason changed last, in seconds of the Unix clock."""

    @property
    def version(self) -> str:
        """The weight version that is served; empty until it is known."""

    @property
    def root_digest(self) -> str:
        """The digest of all weights; empty until it is known."""

    @property
    def restarts(self) -> int:
        """How often the ranks were started again."""

    @property
    def healthy(self) -> bool:
        """Whether requests are taken now. False too where the state alone does not tell: staging over weights that sleep."""


class Limits(Protocol):
    """What a request must keep within."""

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer together."""

    @property
    def blocks(self) -> int:
        """Blocks of the KV cache."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    def vocab_size(self) -> int:
        """Tokens are numbers below this."""

    @property
    def moe(self) -> bool:
        """Whether the model routes tokens to experts."""


class Answer(Protocol):
    """The outputs of one request, as they come. Leaving the context before the last one cancels the request."""

    def __aiter__(self) -> AsyncIterator[Output]:
        """Ends after the output that has `finish`, which is "error" if the engine died."""

    def cancel(self) -> None:
        """Stop generating. Safe twice, and after the end."""

    async def __aenter__(self) -> Self:
        """Nothing happens here."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Cancel if it is not finished."""


class Engine(LiveWeights, Protocol):
    """One replica of a model. Everything is called from one event loop.

    Waiting for an update (`finish_update`) may be given up at any time, and does not end the update.
    """

    on_update_ended: Callable[[UpdateStatus], None] | None
    """Set by the server; called once at the end of every update and recovery, whoever began it and however it ended."""

    @property
    def status(self) -> Status:
        """How it is doing now."""

    @property
    def limits(self) -> Limits:
        """Raises `NotReady` before the first start is done."""

    async def start(self) -> None:
        """Returns when requests are taken; raises if the engine cannot start."""

    async def close(self, *, drain_s: float) -> None:
        """Take no more requests, let those that run go on for this long, then end everything. A later call can hurry it."""

    def submit(self, request: Submit) -> Answer:
        """Queue a request. Raises `NotReady` or `Overloaded` at once."""

    async def command(self, action: Action, *, timeout_s: float) -> list[Any]:
        """Have every rank execute `action`; returns their results in the order of ranks."""

    async def newest_version(self) -> str:
        """The newest version of the default source. Raises `InvalidInput` without one, else what the source raises."""

    async def ends_pin(self, version: str) -> bool:
        """Whether a version of the default source is newer than what the pin moved away from. True without a pin."""
