"""Whether requests should be sent here, from the state that the engine is really in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weightcast.control.engine import Engine
from weightcast.control.problems import clipped
from weightcast.engines.base import WeightsStatus
from weightcast.engines.states import TABLE, ReplicaState
from weightcast.errors import NotReady


@dataclass(frozen=True)
class Health:
    """An engine at one moment. `asleep` are the tags without memory; `legacy_status` is the integer of the old protocol."""

    healthy: bool
    reason: str
    paused: bool
    asleep: tuple[str, ...]
    legacy_status: int

    @classmethod
    def of(cls, engine: Engine) -> Health:
        """Ask the engine. It is healthy only if its state, its weights and its user all let it answer."""
        status, paused = engine.status, engine.is_paused
        row = TABLE[ReplicaState(status.state)]
        weights = _weights(engine)
        asleep = weights.asleep if weights else ()
        return cls(
            healthy=status.healthy and row.healthy and not paused and not asleep,
            reason="paused" if row.healthy and paused else status.reason,
            paused=paused,
            asleep=asleep,
            legacy_status=weights.legacy_status if weights else int(row.legacy),
        )


def _weights(engine: Engine) -> WeightsStatus | None:
    """None before the first start is done, and in every other state in which the engine cannot tell."""
    try:
        return engine.weights
    except NotReady:
        return None


def health_content(engine: Engine) -> dict[str, Any]:
    """The body of `/health`."""
    status, health = engine.status, Health.of(engine)
    return {
        "status": "ok" if health.healthy else "unavailable",
        "state": status.state,
        "reason": clipped(health.reason),
        "since": status.since,
        "version": status.version or None,
        "root_digest": status.root_digest or None,
        "restarts": status.restarts,
        "paused": health.paused,
        "legacy_status": health.legacy_status,
    }
