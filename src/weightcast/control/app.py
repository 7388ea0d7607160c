"""The HTTP surface: every path, and the envelope of every error.

Answers and reports have OpenAI's; control calls have their own, whatever goes wrong with them.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp

from weightcast import __version__
from weightcast.control.control_replies import failure_content
from weightcast.control.control_routes import add_routes
from weightcast.control.exchange import Exchange
from weightcast.control.guard import Guard
from weightcast.control.health import health_content
from weightcast.control.legacy_routes import LEGACY_ROUTES
from weightcast.control.metrics import read_stats
from weightcast.control.pause_routes import PAUSE_ROUTES
from weightcast.control.prometheus import CONTENT_TYPE
from weightcast.control.replies import envelope, error_reply, json_reply
from weightcast.control.request_ids import RequestIds, control_id_of
from weightcast.control.schemas import ChatRequest, CompletionRequest
from weightcast.control.service import Service
from weightcast.control.statuses import RETRY_AFTER_S
from weightcast.control.weights_routes import WEIGHTS_ROUTES
from weightcast.engines.embedded.messages import Describe, RankStats
from weightcast.errors import NotReady, WeightcastError

_DESCRIBE_TIMEOUT_S = 2.0
_CONTROL = (*WEIGHTS_ROUTES, *PAUSE_ROUTES, *LEGACY_ROUTES)
_CONTROL_PATHS = tuple(compile_path(route.path)[0] for route in _CONTROL)


def build_app(service: Service) -> ASGIApp:
    """The ASGI application of one server."""
    app = FastAPI(title="weightcast", version=__version__, docs_url=None, redoc_url=None)
    _add_answers(app, service)
    _add_reports(app, service)
    add_routes(app, service, _CONTROL)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(WeightcastError, _on_known)
    app.add_exception_handler(Exception, _on_unknown)
    return RequestIds(Guard(app, service.settings, _CONTROL_PATHS))


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_class=Response, openapi_extra=_body_of(CompletionRequest))
    async def completions() -> Response:
        """Continue a prompt."""
        return Exchange(service, "completions")

    @app.post("/v1/chat/completions", response_class=Response, openapi_extra=_body_of(ChatRequest))
    async def chat_completions() -> Response:
        """Answer a chat."""
        return Exchange(service, "chat")


def _add_reports(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_class=Response)
    @app.get("/ping", response_class=Response)
    async def health() -> Response:
        """200 if requests are taken, else 503 with the state and its reason."""
        return _health(service)

    @app.get("/v1/models", response_class=Response)
    async def models() -> Response:
        """The one model that is served."""
        return json_reply({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}", response_class=Response)
    async def model(name: str) -> Response:
        """The model, if that is its name."""
        if name != service.settings.model_name:
            return json_reply(envelope(f"The model `{name}` does not exist.", 404, "model_not_found", "model"), 404)
        return json_reply(_model(service))

    @app.get("/v1/stats", response_class=Response)
    async def stats() -> Response:
        """The counters of every rank."""
        return json_reply({"object": "list", "data": await _describe(service)})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """For Prometheus. Without the ranks' counters while the replica is not ready."""
        try:
            ranks = await _describe(service)
        except WeightcastError:
            ranks = []  # the state, which is reported, says why
        return Response(service.metrics.render(service.engine, ranks), media_type=CONTENT_TYPE)


async def _describe(service: Service) -> list[RankStats]:
    return read_stats(await service.engine.command(Describe(), timeout_s=_DESCRIBE_TIMEOUT_S))


def _health(service: Service) -> Response:
    content = health_content(service.engine)
    if content["status"] == "ok":
        return json_reply(content)
    return json_reply(content, 503, {"retry-after": str(RETRY_AFTER_S[503])})


def _model(service: Service) -> dict[str, Any]:
    status = service.engine.status
    try:
        max_length = service.engine.limits.max_length
    except NotReady:
        max_length = None
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "weightcast",
        "max_model_len": max_length,
        "weight_version": status.version or None,
        "root_digest": status.root_digest or None,
    }


def _body_of(kind: type[CompletionRequest | ChatRequest]) -> dict[str, Any]:
    """For the OpenAPI page: bodies are read by us, so that all that is wrong can be told at once."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}


async def _on_http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = str(getattr(error, "detail", error))
    headers = dict(getattr(error, "headers", None) or {})
    return _error(request, f"{detail}.", status, {404: "unknown_url", 405: "wrong_method"}.get(status, "http"), headers)


async def _on_known(_: Request, error: Exception) -> Response:
    return error_reply(error if isinstance(error, WeightcastError) else WeightcastError(str(error)))


async def _on_unknown(request: Request, error: Exception) -> Response:
    """A mistake of ours. It is logged with its trace by the HTTP server; the client learns no more than its kind."""
    message = f"internal error ({type(error).__name__}); see the server's log."
    return _error(request, message, 500, "internal_error")


def _error(request: Request, message: str, status: int, code: str, headers: dict[str, str] | None = None) -> Response:
    """An error that is none of the engine's, in the envelope that callers of the path expect."""
    if any(pattern.match(request.url.path) for pattern in _CONTROL_PATHS):
        return json_reply(failure_content(control_id_of(request.scope), message, code), status, headers)
    return json_reply(envelope(message, status, code), status, headers)
