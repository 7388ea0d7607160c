"""Answers to requests: what has come is kept until it is asked for, and every one of them ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from types import TracebackType
from typing import Self

from weightcast.engines.embedded.messages import FinishReason, Output
from weightcast.errors import InvalidInput, Overloaded


class Answer:
    """The outputs of one request, as they come: an async iterator for one reader, which ends after the one with `finish`.

    Use it as an async context manager, or call `close`: a request that nobody reads is computed all the same until then.
    """

    __slots__ = ("_finished", "_forget", "_outputs", "_reader", "id", "made", "version")

    def __init__(self, request_id: str, version: str, forget: Callable[[Answer], None]) -> None:
        self.id, self.version = request_id, version
        self.made = 0  # tokens
        self._forget = forget
        self._outputs: deque[Output] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._finished = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while not self._outputs:
            if self._finished:
                raise StopAsyncIteration
            if self._reader is not None:
                raise InvalidInput(f"the answer to request {self.id} has a reader already.")
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._outputs.popleft()

    def put(self, output: Output) -> None:
        """Called by the replica: the next output. Nothing comes after one with `finish`."""
        if self._finished:
            return
        self._outputs.append(output)
        self.version, self._finished = output.version, output.finish is not None
        self.made += len(output.tokens)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def end(self, finish: FinishReason, reason: str) -> None:
        """Called by the replica: nothing more will come from the ranks."""
        self.put(Output(id=self.id, tokens=(), version=self.version, finish=finish, reason=reason))

    def cancel(self, reason: str = "the request was cancelled") -> None:
        """The rest is not wanted. What came so far can still be read, then the answer ends with "abort". Safe twice."""
        if not self._finished:
            self._forget(self)
            self.end("abort", reason)

    def close(self) -> None:
        """Cancel what runs and drop what came. Safe twice."""
        self.cancel()
        self._outputs.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Answers:
    """Every request in flight, at most `limit`."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise InvalidInput(f"max_requests must be 1 or more, not {limit}.")
        self._limit = limit
        self._open: dict[str, Answer] = {}
        self._dropped = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request_id: str, version: str, cancel: Callable[[str], None]) -> Answer:
        """A new request. `cancel` tells the ranks that it is not wanted any more."""
        if len(self._open) >= self._limit:
            raise Overloaded(f"{len(self._open)} requests are in flight, which is the most that is taken. Try again later.")
        if request_id in self._open:
            raise InvalidInput(f"a request with the id {request_id!r} is in flight already.")

        def forget(answer: Answer) -> None:
            if self._open.get(answer.id) is answer:
                self.drop(answer)
                cancel(answer.id)

        answer = self._open[request_id] = Answer(request_id, version, forget)
        return answer

    def __iter__(self) -> Iterator[Answer]:
        return iter(list(self._open.values()))

    def drop(self, answer: Answer) -> None:
        """The request is not in flight any more."""
        self._open.pop(answer.id, None)
        self._dropped.set()

    def deliver(self, outputs: Iterable[Output]) -> None:
        """Hand outputs to those who asked. Some may be of requests that were just cancelled."""
        for output in outputs:
            answer = self._open.get(output.id)
            if answer is not None:
                answer.put(output)
                if output.finish is not None:
                    self.drop(answer)

    def end_all(self, finish: FinishReason, reason: str) -> int:
        """End every request in flight. Returns how many there were."""
        answers = list(self._open.values())
        for answer in answers:
            self.drop(answer)
            answer.end(finish, reason)
        return len(answers)

    async def idle(self) -> None:
        """Wait until no request is in flight. The caller sees to it that this comes about."""
        while self._open:
            self._dropped.clear()
            await self._dropped.wait()

    async def gone(self, answers: Collection[Answer]) -> None:
        """Wait until none of these is in flight any more."""
        while any(self._open.get(answer.id) is answer for answer in answers):
            self._dropped.clear()
            await self._dropped.wait()
