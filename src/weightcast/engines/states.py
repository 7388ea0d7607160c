"""The one table of what a replica may do: operations, HTTP statuses, health and the legacy integers follow from it.

             every rank voted yes          every rank committed
    READY ──► STAGING ──► STAGED ──► COMMITTING ──► READY (new version)
      ▲          │ fail      │ abort      │ fail, undone on all ──► READY (old version)
      └──────────┴───────────┘            │ fail, not undone somewhere ──► FAILED (refuses to serve; recovers from a source)
    SLEEPING(tags) ◄─► READY       CLEARED = SLEEPING(weight)

An update may begin in any resting state, and goes back to it if it fails. Paused or not is independent of all this.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from weightcast.errors import NotReady, UpdateInProgress, WeightcastError, WrongState
from weightcast.worker.states import LegacyStatus


class ReplicaState(StrEnum):
    """What a replica is doing."""

    STARTING = "STARTING"
    READY = "READY"
    STAGING = "STAGING"
    STAGED = "STAGED"
    COMMITTING = "COMMITTING"
    SLEEPING = "SLEEPING"
    CLEARED = "CLEARED"
    FAILED = "FAILED"
    RESTARTING = "RESTARTING"
    DRAINING = "DRAINING"
    CLOSED = "CLOSED"


class Operation(StrEnum):
    """What can be asked of a replica."""

    GENERATE = "generate"
    UPDATE = "update weights"
    CANCEL = "cancel the update"
    ROLLBACK = "roll back"
    VERIFY = "verify weights"
    PAUSE = "pause"
    RESUME = "resume"
    ABORT = "abort requests"
    SLEEP = "sleep"
    WAKE = "wake up"


@dataclass(frozen=True)
class Row:
    """One state: what may be asked in it, and its name in the legacy protocol.

    `away` tells why everything else is refused: the replica cannot be spoken to (503), or it is the wrong moment (409).
    `resting` states are those that an update begins in, and goes back to if it fails.
    """

    allowed: frozenset[Operation]
    legacy: LegacyStatus
    away: bool = False
    resting: bool = False

    @property
    def healthy(self) -> bool:
        """Whether a router should send requests: they are taken, and answered at once or after a short commit."""
        return Operation.GENERATE in self.allowed


_O = Operation
_ASK = frozenset({_O.PAUSE, _O.ABORT, _O.VERIFY})
_REST = _ASK | {_O.UPDATE, _O.RESUME, _O.SLEEP, _O.WAKE}
_NOTHING: frozenset[Operation] = frozenset()

TABLE: dict[ReplicaState, Row] = {
    ReplicaState.STARTING: Row(_NOTHING, LegacyStatus.UPDATING, away=True),
    ReplicaState.READY: Row(_REST | {_O.GENERATE, _O.ROLLBACK}, LegacyStatus.NORMAL, resting=True),
    ReplicaState.STAGING: Row(_ASK | {_O.GENERATE, _O.CANCEL, _O.RESUME}, LegacyStatus.NORMAL),
    ReplicaState.STAGED: Row(_ASK | {_O.GENERATE, _O.CANCEL, _O.RESUME}, LegacyStatus.NORMAL),
    ReplicaState.COMMITTING: Row(frozenset({_O.GENERATE, _O.ABORT}), LegacyStatus.UPDATING),
    ReplicaState.SLEEPING: Row(_REST - {_O.RESUME, _O.VERIFY}, LegacyStatus.NORMAL, resting=True),
    ReplicaState.CLEARED: Row(_REST - {_O.RESUME, _O.VERIFY}, LegacyStatus.CLEARED, resting=True),
    ReplicaState.FAILED: Row(frozenset({_O.UPDATE, _O.SLEEP, _O.WAKE, _O.PAUSE}), LegacyStatus.FAILED, resting=True),
    ReplicaState.RESTARTING: Row(_NOTHING, LegacyStatus.UPDATING, away=True),
    ReplicaState.DRAINING: Row(_NOTHING, LegacyStatus.NORMAL, away=True),
    ReplicaState.CLOSED: Row(_NOTHING, LegacyStatus.CLEARED, away=True),
}

UPDATING = (
    ReplicaState.STAGING,
    ReplicaState.STAGED,
    ReplicaState.COMMITTING,
)  # what is served meanwhile is the resting state's


def refusal(operation: Operation, state: ReplicaState, reason: str) -> WeightcastError | None:
    """The error for an operation that is not allowed now, or None. Its class decides the HTTP status."""
    row = TABLE[state]
    if operation in row.allowed:
        return None
    if row.away or operation is Operation.GENERATE:
        return NotReady(f"the replica cannot {operation} now: it is {state} ({reason}).")
    if operation is Operation.UPDATE:
        return UpdateInProgress(state)
    return WrongState(operation, state, [other for other, known in TABLE.items() if operation in known.allowed])
