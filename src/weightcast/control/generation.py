"""Running a plan on an engine: one request to the engine per answer, followed until each has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from weightcast import logs
from weightcast.control.choices import Choice, Piece
from weightcast.control.engine import Answer, Engine
from weightcast.control.plan import Plan
from weightcast.control.tokenizer import Tokenizer
from weightcast.engines.embedded.messages import Submit
from weightcast.errors import ReplicaFailed

Listener = Callable[[Choice, Piece], Awaitable[None]]


class Generation:
    """The answers to one request. `choices` always holds what has come so far."""

    def __init__(self, engine: Engine, plan: Plan, tokenizer: Tokenizer, request_id: str) -> None:
        self._engine, self._plan, self._id = engine, plan, request_id
        self.choices = [Choice(wanted, tokenizer.detokenizer(), plan.stops) for wanted in plan.choices]

    async def run(self, listener: Listener) -> None:
        """Submit everything, and tell `listener` of each output until all answers have ended.

        Raises what the engine raises. Being left in any way cancels what still runs in the engine.
        """
        async with AsyncExitStack() as stack:
            answers = [await stack.enter_async_context(self._submit(choice)) for choice in self.choices]
            if len(answers) == 1:
                await _follow(self.choices[0], answers[0], listener)
                return
            try:
                async with asyncio.TaskGroup() as group:
                    for choice, answer in zip(self.choices, answers, strict=True):
                        group.create_task(_follow(choice, answer, listener))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None

    def _submit(self, choice: Choice) -> Answer:
        wanted = choice.wanted
        return self._engine.submit(
            Submit(
                id=f"{self._id}-{wanted.index}",
                prompt=wanted.prompt,
                sampling=wanted.sampling,
                record_routing=self._plan.record_routing,
                replay=self._plan.replay,
                request_id=logs.ids().get("request_id", ""),
            )
        )


async def _follow(choice: Choice, answer: Answer, listener: Listener) -> None:
    async for output in answer:
        piece = choice.take(output)
        if choice.finish is not None:
            answer.cancel()  # a stop string ends it for us only
        await listener(choice, piece)
        if choice.finish is not None:
            return
    raise ReplicaFailed("the engine ended the answer without saying why.")
