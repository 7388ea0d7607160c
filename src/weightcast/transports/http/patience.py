"""How long to wait for the other end of a connection."""

from __future__ import annotations

import select
import socket
from time import monotonic

from weightcast.clock import Deadline
from weightcast.errors import SourceFailed

TICK_S = 0.1  # how late anything that blocks notices that it should stop


class Patience:
    """Ends with the caller's deadline, when the caller cancels, and when nothing has moved for `stall_s`."""

    def __init__(self, url: str, what: str, *, deadline: Deadline, stall_s: float) -> None:
        self.url, self.what = url, what
        self._deadline, self._stall_s = deadline, stall_s
        self._since = monotonic()

    def moved(self) -> None:
        """Something came or went: the other end is alive."""
        self._since = monotonic()

    def check(self) -> None:
        """Raise `DeadlineExceeded`, `UpdateCancelled`, or `SourceFailed` if the other end is silent for too long."""
        self._deadline.check(f"{self.what} at {self.url}")
        if monotonic() - self._since >= self._stall_s:
            raise SourceFailed(f"{self.url} was silent for {self._stall_s:g} s while {self.what}.")


def wait_ready(sock: socket.socket, event: int, patience: Patience) -> None:
    """Wait until a socket that does not block can be read from or written to."""
    poll = select.poll()
    poll.register(sock, event)
    while not poll.poll(TICK_S * 1000):
        patience.check()
