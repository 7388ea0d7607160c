"""Requests that never end: the load under which a replica is updated."""

from __future__ import annotations

import asyncio
from itertools import count
from types import TracebackType
from typing import Self

import numpy as np

from weightcast.engines.embedded.messages import Sampling, Submit
from weightcast.engines.embedded.replica.replica import Replica
from weightcast.errors import DeadlineExceeded, ReplicaFailed

PROMPT_TOKENS = 16
ANSWER_TOKENS = 32  # then another request: contexts stay short, and so does what is computed anew after a commit
PRINTABLE = (32, 127)

_PATIENCE_S = 60.0
_NUMBERS = count()  # no request has the id of an earlier one, of whichever streams


class Streams:
    """So many requests at once, each followed by another. An async context manager; leaving it cancels them."""

    def __init__(self, replica: Replica, width: int, *, seed: int) -> None:
        self._replica, self._width = replica, width
        self._random = np.random.default_rng([seed, width])
        self._tasks: list[asyncio.Task[None]] = []
        self._came = asyncio.Event()
        self.tokens = 0

    async def _run(self) -> None:
        while True:
            prompt = tuple(self._random.integers(*PRINTABLE, size=PROMPT_TOKENS).tolist())
            request = Submit(id=f"stream-{next(_NUMBERS)}", prompt=prompt, sampling=Sampling(max_tokens=ANSWER_TOKENS))
            async with self._replica.submit(request) as answer:
                async for output in answer:
                    if output.finish in ("error", "abort"):
                        raise ReplicaFailed(f"a request ended with {output.finish}: {output.reason}")
                    self.tokens += len(output.tokens)
                    self._came.set()

    async def more(self, tokens: int) -> None:
        """Wait until so many more tokens came. Raises what a request failed with."""
        wanted = self.tokens + tokens
        while self.tokens < wanted:
            self._came.clear()
            waiting = asyncio.create_task(self._came.wait())
            try:
                done, _ = await asyncio.wait(
                    [waiting, *self._tasks], timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                waiting.cancel()
            if not done:
                raise DeadlineExceeded("the next token", _PATIENCE_S)
            self.check()

    def check(self) -> None:
        """Raise what a request failed with."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(), name=f"stream-{number}") for number in range(self._width)]
        try:
            await self.more(2 * self._width)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.check()
        finally:
            await self._end()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
