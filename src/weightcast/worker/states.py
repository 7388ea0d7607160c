"""The state table of a live model. Pure data: everything that asks "may I?" asks here.

READY ──► STAGING ──► STAGED ──► COMMITTING ──► READY (new version)
  ▲          │ fail      │ abandon    │ fail, undone ──► where it came from
  └──────────┴───────────┘            │ fail, not undone ──► FAILED (holds no whole version; the next update recovers)
READY ──► CLEARING ──► CLEARED: no weights in memory, also before the first load

COMMITTING lasts from `enter` to `settle` or `revert`. `rollback` and `recover` go through it too.
"""

from __future__ import annotations

import threading
from enum import IntEnum, StrEnum

from weightcast.errors import UpdateInProgress, WrongState


class State(StrEnum):
    """What a live model is doing."""

    READY = "READY"
    STAGING = "STAGING"
    STAGED = "STAGED"
    COMMITTING = "COMMITTING"
    CLEARING = "CLEARING"
    CLEARED = "CLEARED"
    FAILED = "FAILED"


class LegacyStatus(IntEnum):
    """The status integers of the legacy protocol, and FAILED, which it lacked."""

    NORMAL = 0
    UPDATING = 1
    CLEARING = -1
    CLEARED = -2
    FAILED = 2


RESTING = frozenset({State.READY, State.CLEARED, State.FAILED})
_WRITING = frozenset({State.COMMITTING, State.CLEARING})

_NEXT: dict[State, frozenset[State]] = {
    State.READY: frozenset({State.STAGING, State.COMMITTING, State.CLEARING}),
    State.CLEARED: frozenset({State.STAGING, State.COMMITTING, State.CLEARING}),
    State.FAILED: frozenset({State.STAGING, State.COMMITTING, State.CLEARING}),
    State.STAGING: RESTING | {State.STAGED},
    State.STAGED: RESTING | {State.COMMITTING},
    State.COMMITTING: RESTING,
    State.CLEARING: frozenset({State.CLEARED, State.FAILED}),
}


class Lifecycle:
    """The present state. `begin` claims the model for one operation; everybody else is refused until it rests again."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._resting = state
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # held by who reads live memory beside the model
        self.hurry = False  # the reader is waited for

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    @property
    def resting(self) -> State:
        """The last resting state: what a failed operation returns to, and what is being served meanwhile."""
        return self._resting

    @property
    def legacy(self) -> LegacyStatus:
        """The present state as the legacy protocol says it. Staging beside a served version is still NORMAL."""
        if self._state in (State.STAGING, State.STAGED):
            return _LEGACY[self._resting] if self._resting is not State.CLEARED else LegacyStatus.UPDATING
        return _LEGACY[self._state]

    def begin(self, operation: str, to: State) -> None:
        """Leave a resting state. Raises `UpdateInProgress` if another operation has not finished."""
        with self._lock:
            if self._state not in RESTING:
                raise UpdateInProgress(self._state)
            self._move(operation, to)

    def move(self, operation: str, to: State) -> None:
        """Go on to the next state of the operation that is running."""
        with self._lock:
            self._move(operation, to)

    def _move(self, operation: str, to: State) -> None:
        if to not in _NEXT[self._state]:
            raise WrongState(operation, self._state, [state for state, after in _NEXT.items() if to in after])
        if to in _WRITING:
            self.hurry = True
            with self._reading:
                self._state, self.hurry = to, False
        self._state = to
        if to in RESTING:
            self._resting = to

    def begin_reading(self) -> bool:
        """Claim live memory for reading, which keeps commits and clears waiting until `end_reading`. False if one is
        under way or waits. The reader must look at `hurry` and leave at once when it is set.
        """
        if self.hurry or not self._reading.acquire(blocking=False):
            return False
        if self._state in _WRITING or self._resting is not State.READY:
            self._reading.release()
            return False
        return True

    def end_reading(self) -> None:
        """Let commits and clears go on."""
        self._reading.release()


_LEGACY = {
    State.READY: LegacyStatus.NORMAL,
    State.COMMITTING: LegacyStatus.UPDATING,
    State.CLEARING: LegacyStatus.CLEARING,
    State.CLEARED: LegacyStatus.CLEARED,
    State.FAILED: LegacyStatus.FAILED,
}
