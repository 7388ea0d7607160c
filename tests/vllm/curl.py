"""What anybody can do to a server with curl."""

from __future__ import annotations

import json
from typing import Any

import httpx
from servers import VllmServer


def begin(server: VllmServer, version: str | None, source: str, **info: object) -> httpx.Response:
    """Start an update and stage a version; the answer to the second."""
    assert server.post("/start_weight_update").status_code == 200, server.said()
    return server.post("/update_weights", {"update_info": {"version": version, "source": source, **info}})


def update(server: VllmServer, version: str, source: str, **info: object) -> None:
    reply = begin(server, version, source, **info)
    assert reply.status_code == 200, reply.text
    reply = server.post("/finish_weight_update", {"weight_version": version})
    assert reply.status_code == 200, reply.text


def version_of(server: VllmServer) -> str:
    return server.get("/weight_info").json()["weight_version"]


def statuses(server: VllmServer) -> list[dict[str, Any]]:
    return [json.loads(status) for status in server.call("weightcast_status")]
