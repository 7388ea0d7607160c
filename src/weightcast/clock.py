"""Deadlines: made once at the edge and passed down, so that the parts of one call share one budget of time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from weightcast.errors import DeadlineExceeded, InvalidInput, UpdateCancelled


@dataclass(frozen=True)
class Deadline:
    """A moment after which work must stop. `seconds` is what the caller allowed, for messages.

    Work that is told to stop earlier, by the event `cancelled`, stops at its next check.
    """

    seconds: float
    _end: float = field(repr=False)
    _cancelled: threading.Event | None = field(default=None, repr=False)

    @classmethod
    def after(cls, seconds: float, *, cancelled: threading.Event | None = None) -> Deadline:
        """A deadline this many seconds from now. Zero has already passed; negative or NaN is refused."""
        if not seconds >= 0:
            raise InvalidInput(f"a timeout must be zero or more seconds, not {seconds}.")
        return cls(seconds=seconds, _end=time.monotonic() + seconds, _cancelled=cancelled)

    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end - time.monotonic())

    def check(self, what: str) -> None:
        """Raise `DeadlineExceeded` naming `what` if the moment has passed, `UpdateCancelled` if somebody said stop."""
        if self._cancelled is not None and self._cancelled.is_set():
            raise UpdateCancelled(f"{what} was cancelled. No weights were changed.")
        if time.monotonic() >= self._end:
            raise DeadlineExceeded(what, self.seconds)
