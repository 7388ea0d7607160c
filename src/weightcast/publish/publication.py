"""A version that was made available: who took it, and who did not."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, ReceiversLost
from weightcast.wire.manifest import Manifest


@dataclass
class Publication:
    """What `publish` and `stream` give back once the trainer's tensors may change again. The rest goes on by itself.

    `taken` names the receivers that have the whole version, `dropped` those that died, gave up or took too long, and why.
    """

    manifest: Manifest
    copy_s: float
    _changed: threading.Condition = field(repr=False)
    taken: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    expected: int | None = None  # of a stream: those that were there when it began

    @property
    def version(self) -> str:
        """Its id."""
        return self.manifest.version

    def wait(self, receivers: int | None = None, *, timeout: float = 60.0) -> None:
        """Wait until so many receivers have taken it (default: one, or all of a stream).

        Raises `DeadlineExceeded`, or `ReceiversLost` if a stream cannot reach that many any more. That they have it does
        not mean that they have committed it: ask the engines for that.
        """
        wanted = receivers if receivers is not None else self.expected if self.expected is not None else 1
        deadline = Deadline.after(timeout)
        with self._changed:
            while len(self.taken) < wanted:
                if self.expected is not None and self.expected - len(self.dropped) < wanted:
                    raise ReceiversLost(self.version, self.dropped)
                if deadline.remaining() == 0:
                    what = f"waiting for {wanted} receiver(s) to take {self.version} ({len(self.taken)} did)"
                    raise DeadlineExceeded(what, timeout)
                self._changed.wait(timeout=min(deadline.remaining(), 1.0))
