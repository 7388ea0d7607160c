"""What a live model remembers: the version it serves, and the one that waits to be committed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from weightcast.clock import Deadline
from weightcast.wire.manifest import Manifest
from weightcast.worker.commits.staged import StagedCommit
from weightcast.worker.fit import Plan
from weightcast.worker.result import CommitMode
from weightcast.worker.states import State


@dataclass(frozen=True)
class Served:
    """What the model holds: set by a commit, dropped when the weights are no longer whole.

    `proved` is false where the caller declined the checksum: then the version's name is all that is known of the bytes.
    """

    manifest: Manifest
    plan: Plan
    proved: bool


@dataclass
class StagedUpdate:
    """A version that is staged and verified and waits for `commit` or `abandon`."""

    manifest: Manifest
    plan: Plan
    mode: CommitMode
    checksum: bool
    source: str
    commit: StagedCommit
    nbytes: int
    deadline: Deadline
    started: float
    stage_s: float
    verify_s: float


@dataclass(frozen=True)
class Torn:
    """A commit that failed and whose undoing failed too: enough to try again. `served` is what undoing leads back to."""

    commit: StagedCommit
    served: Served | None
    resting: State
    post_load_ran: bool


@dataclass
class Stopwatch:
    """Seconds since it was made or last read."""

    _last: float = field(default_factory=time.monotonic)

    def lap(self) -> float:
        """Read it and start again."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        return seconds
