"""How a control call is read and answered. What the calls do is told by the tables of routes in the files beside."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import Response

from weightcast import logs
from weightcast.control.body import NoBody, read_body
from weightcast.control.control_replies import Reply, failure_content, failure_reply, success_reply
from weightcast.control.engine import Engine
from weightcast.control.fields import AnyBody, Strict, decode_object, read_fields
from weightcast.control.problems import Problems, clipped
from weightcast.control.replies import json_reply
from weightcast.control.request_ids import control_id_of
from weightcast.control.service import LARGE_BODY, Service
from weightcast.errors import DeadlineExceeded, WeightcastError

log = logs.get(__name__)

Body = TypeVar("Body", bound=Strict)


@dataclass(frozen=True)
class Call(Generic[Body]):
    """One control call. What is wrong with it beyond single fields is added to `problems`, and checked by the handler.

    `headers` are those of the reply, also if it fails.
    """

    service: Service
    request: Request
    body: Body
    problems: Problems
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        """What the call is about."""
        return self.service.engine


@dataclass(frozen=True)
class Route:
    """A path, what its body may hold, and what it does. The docstring of `handler` is its description.

    `query` are the names that may stand in the URL. A `legacy` path replies with the keys of the old protocol as well.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    body: type[Strict]
    handler: Callable[[Call[Any]], Awaitable[Reply]]
    query: tuple[str, ...] = ()
    legacy: bool = False


def add_routes(app: FastAPI, service: Service, routes: Iterable[Route]) -> None:
    """Have `app` answer them."""
    for route in routes:
        app.add_api_route(
            route.path,
            _endpoint(service, route),
            methods=[route.method],
            name=route.handler.__name__,
            description=route.handler.__doc__,
            deprecated=_deprecated(route) or None,
            response_class=Response,
            openapi_extra=_described(route),
        )


def legacy_keys(message: str) -> dict[str, Any]:
    """What callers of the old protocol read."""
    return {"dp_rank": 0, "local_dp_rank": 0, "msg": clipped(message)}


def _deprecated(route: Route) -> bool:
    return route.legacy and route.method == "GET"


def _endpoint(service: Service, route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        ids = {"request_id": control_id_of(request.scope), "update_id": request.path_params.get("update_id")}
        with logs.bound(**ids):
            return await answered(request)

    async def answered(request: Request) -> Response:
        began = time.monotonic()
        response = await _answer(service, route, request)
        if _deprecated(route):
            response.headers["deprecation"] = "true"
        level = logging.DEBUG if route.method == "GET" and not route.legacy else logging.INFO
        log.at(
            level,
            "control call answered",
            method=route.method,
            path=route.path,
            status=response.status_code,
            ms=logs.ms(time.monotonic() - began),
        )
        return response

    return endpoint


async def _answer(service: Service, route: Route, request: Request) -> Response:
    request_id, problems, headers = control_id_of(request.scope), Problems(), dict[str, str]()
    if _deprecated(route) and not service.settings.legacy_get:
        message = f"a GET changes nothing here: POST {route.path}, or start the server with --legacy-get."
        content = failure_content(request_id, message, "wrong_method")
        return json_reply(content | legacy_keys(message), 405, {"allow": "POST"})
    try:
        data = await _data(service, route, request)
        if data is NoBody.TOO_LARGE:
            message = f"the body has more than the {service.settings.max_control_body_nbytes} bytes allowed."
            content = failure_content(request_id, message, data.value)
            return json_reply(content | (legacy_keys(message) if route.legacy else {}), 413)
        if isinstance(data, NoBody):
            return Response(status_code=400)  # to nobody: the client has gone
        if len(data) < LARGE_BODY:
            body = _read(route, request, data, problems)
        else:
            body = await asyncio.to_thread(_read, route, request, data, problems)
        reply = await route.handler(Call(service, request, body, problems, headers))
    except WeightcastError as error:
        beside = legacy_keys(str(error)) if route.legacy else None
        return failure_reply(request_id, error, problems.found, beside=beside, headers=headers)
    return success_reply(request_id, reply)


async def _data(service: Service, route: Route, request: Request) -> bytes | NoBody:
    if route.method != "POST":
        return b""
    settings, limit = service.settings, service.settings.max_control_body_nbytes
    data = await read_body(request.scope, request.receive, limit=limit, timeout_s=settings.body_timeout_s)
    if data is NoBody.TOO_SLOW:
        raise DeadlineExceeded("reading the body", settings.body_timeout_s)
    return data


def _read(route: Route, request: Request, data: bytes, problems: Problems) -> Strict:
    """The fields of a call, or `InvalidInput` with all that is wrong with them. No body is an empty one."""
    for name in dict.fromkeys(request.query_params):
        if name not in route.query:
            problems.add(name, "unknown in the URL" + ("; send it in the body" if name in route.body.model_fields else ""))
    content = decode_object(data) if data.strip() else {}
    body = read_fields(route.body, _without_nulls(route.body, content), problems)
    problems.check()
    if body is None:
        raise AssertionError("a body that cannot be read has problems")
    return body


def _without_nulls(kind: type[AnyBody], content: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if value is not None or name not in kind.model_fields}


def _described(route: Route) -> dict[str, Any]:
    """For the OpenAPI page: bodies and parameters are read by us."""
    places = [(part.strip("{}"), "path") for part in route.path.split("/") if part.startswith("{")]
    places += [(name, "query") for name in route.query]
    described: dict[str, Any] = {}
    if places:
        described["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}} for name, place in places
        ]
    if route.method == "POST" and route.body.model_fields:
        described["requestBody"] = {"content": {"application/json": {"schema": route.body.model_json_schema()}}}
    return described
