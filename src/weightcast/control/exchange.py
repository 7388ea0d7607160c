"""One request for answers, from its body to the last byte of the reply."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weightcast import logs
from weightcast.control.body import NoBody, disconnected, read_body
from weightcast.control.choices import Choice, Piece
from weightcast.control.generation import Generation
from weightcast.control.metrics import Record
from weightcast.control.plan import Endpoint, Plan
from weightcast.control.problems import Problems
from weightcast.control.replies import envelope, error_reply, json_reply
from weightcast.control.request_ids import request_id_of
from weightcast.control.service import Service
from weightcast.control.shapes import Shape
from weightcast.control.writers import LAST_WORDS_S, StreamWriter, WholeWriter, Writer, write
from weightcast.errors import DeadlineExceeded, NotFound, WeightcastError

log = logs.get(__name__)

_PREFIX = {"completions": "cmpl", "chat": "chatcmpl"}


class Exchange(Response):
    """Reads a request, has it answered, and writes the reply.

    A client that goes away cancels its request. So does the deadline, which ends in an error with what had been answered.
    """

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        super().__init__()
        self._service, self._endpoint = service, endpoint
        self._caller_id: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run it: a response is an ASGI application."""
        settings = self._service.settings
        with self._service.metrics.request(self._endpoint) as record:
            body = await read_body(scope, receive, limit=settings.max_body_nbytes, timeout_s=settings.body_timeout_s)
            if isinstance(body, NoBody):
                record.outcome = body.value
                await self._refuse(body, send)
            else:
                caller = request_id_of(scope)
                self._caller_id = caller.value if caller.given else None
                await self._answer(body, receive, send, record)
        log.debug("request answered", endpoint=self._endpoint, outcome=record.outcome, ms=logs.ms(record.seconds))

    async def _refuse(self, why: NoBody, send: Send) -> None:
        settings = self._service.settings
        if why is NoBody.TOO_LARGE:
            message = f"the body has more than the {settings.max_body_nbytes} bytes allowed."
            await write(json_reply(envelope(message, 413, why.value), 413), send)
        elif why is NoBody.TOO_SLOW:
            await write(error_reply(DeadlineExceeded("reading the body", settings.body_timeout_s)), send)

    async def _answer(self, body: bytes, receive: Receive, send: Send, record: Record) -> None:
        """Reply, unless the client goes first."""
        gone = asyncio.create_task(disconnected(receive))
        work = asyncio.create_task(self._reply(body, send, record))
        try:
            await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
            else:
                record.outcome = "disconnected"
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait((gone, work))

    async def _reply(self, body: bytes, send: Send, record: Record) -> None:
        began = asyncio.get_running_loop().time()
        problems = Problems()
        try:
            plan = await self._service.plan(self._endpoint, body, problems)
        except NotFound as error:
            record.outcome = "model_not_found"
            await write(json_reply(envelope(str(error), 404, "model_not_found", "model"), 404), send)
        except WeightcastError as error:
            record.outcome = error.code
            await write(error_reply(error, problems.found), send)
        else:
            await self._generate(plan, send, record, began)

    async def _generate(self, plan: Plan, send: Send, record: Record, began: float) -> None:
        service = self._service
        request_id = f"{_PREFIX[plan.endpoint]}-{uuid.uuid4().hex}"
        timeout_s = min(service.settings.request_timeout_s, plan.timeout_s or service.settings.request_timeout_s)
        name = service.settings.model_name
        shape = Shape(plan, service.tokenizer, request_id=request_id, model=name, created=int(time.time()))
        generation = Generation(service.engine, plan, service.tokenizer, request_id)
        writer: Writer = (StreamWriter if plan.stream else WholeWriter)(send, shape, generation.choices)

        async def listen(choice: Choice, piece: Piece) -> None:
            record.said_something()
            await writer.piece(choice, piece)

        failure: WeightcastError | None = None
        try:
            async with asyncio.timeout_at(began + timeout_s):
                if plan.weight_version is not None:
                    await service.engine.check_version(plan.weight_version)
                with service.in_flight.called(self._caller_id, request_id):
                    await generation.run(listen)
                await writer.finish()
        except TimeoutError:
            failure = DeadlineExceeded("the answer", timeout_s)
        except WeightcastError as error:
            failure = error
        finally:
            _count_tokens(record, plan, generation)
        aborted = any(choice.finish == "abort" for choice in generation.choices)
        record.outcome = failure.code if failure else "aborted" if aborted else "ok"
        if failure:
            await _say_last(writer.fail(failure))


def _count_tokens(record: Record, plan: Plan, generation: Generation) -> None:
    cached = sum(choice.cached_tokens for choice in generation.choices[:: plan.per_prompt])
    if any(choice.tokens for choice in generation.choices):
        record.used(plan.prompt_tokens, cached, sum(len(choice.tokens) for choice in generation.choices))
    for choice in generation.choices:
        for span in choice.spans:
            record.answered(span.version, span.end - span.start)


async def _say_last(words: Coroutine[None, None, None]) -> None:
    """Tell the client how it ended. One that does not read what it is sent is not waited for."""
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            await words
    except TimeoutError:
        log.warning("connection dropped", why=f"the client did not read the end of its answer within {LAST_WORDS_S:.0f} s")
