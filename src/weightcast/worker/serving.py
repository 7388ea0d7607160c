"""What a live model remembers: the version it serves, the one that waits to be committed, and the ways back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from weightcast.clock import Deadline
from weightcast.tensors.flat import Array
from weightcast.wire.manifest import Manifest
from weightcast.worker.commits.delta import Spare
from weightcast.worker.commits.staged import StagedCommit, silent
from weightcast.worker.fit import Plan
from weightcast.worker.result import CommitMode, Timeline
from weightcast.worker.shard_sums import BoxSum
from weightcast.worker.states import State


@dataclass(frozen=True)
class Served:
    """What the model holds: set by a commit, dropped when the weights are no longer whole.

    `proved` is false where the caller declined the checksum: then the version's name is all that is known of the bytes.
    `full` is the version as it was published, where the model holds boxes of its tensors and `manifest` is about those.
    `sums` are what these boxes add to its sums, where ranks agree by them.
    """

    manifest: Manifest
    plan: Plan
    proved: bool
    full: Manifest | None = None
    sums: tuple[BoxSum, ...] = ()


@dataclass
class StagedUpdate:
    """A version that is staged and verified and waits for `commit` (or `enter`) or `abandon`.

    `release` closes the source where the commit still needs it: it is called once, when the update has ended.
    `acknowledge` tells the source that the version is served. `full` and `sums` are as in `Served`.
    """

    manifest: Manifest
    plan: Plan
    mode: CommitMode
    checksum: bool
    source: str
    commit: StagedCommit
    nbytes: int
    deadline: Deadline
    timeline: Timeline
    release: Callable[[], None]
    acknowledge: Callable[[], None] = silent
    full: Manifest | None = None
    sums: tuple[BoxSum, ...] = ()

    @property
    def version(self) -> str:
        """The version that it leads to."""
        return self.manifest.version

    @property
    def stage_s(self) -> float:
        """Seconds that staging took."""
        return self.timeline.seconds("stage")

    @property
    def verify_s(self) -> float:
        """Seconds that verifying what was staged took."""
        return self.timeline.seconds("verify")

    def incoming(self) -> dict[str, Array]:
        """The tensors of the version as they lie beside the model, by name, to be read only. For a commit by swap."""
        return self.commit.incoming()

    def take_seal(self) -> None:
        """After the commit was applied: know what it was a commit of, where that could only be told by applying it."""
        self.manifest, self.plan = self.commit.sealed or (self.manifest, self.plan)

    def end(self) -> None:
        """Let go of everything that it holds."""
        self.commit.forget()
        self.release()


@dataclass
class Entered:
    """A commit that was applied and does not count yet.

    `former` and `spare` are what it took the place of: their memory is freed when this ends, and not while an engine pauses.
    """

    staged: StagedUpdate
    former: Former | None
    spare: Spare | None
    post_load_ran: bool = False
    proved: bool = False

    def end_former(self) -> None:
        """Let go of what was there before."""
        former, self.former, self.spare = self.former, None, None
        if former is not None:
            former.commit.forget()


@dataclass(frozen=True)
class Former:
    """The version that was served before, and the commit whose undoing leads back to it."""

    served: Served
    commit: StagedCommit


@dataclass(frozen=True)
class Torn:
    """A way back that failed: enough to try it again. `served` is what it leads to, `earlier` one that failed before it.

    `alone` is false if it needs the source, and so may take long.
    """

    go_back: Callable[[], None]
    served: Served | None
    resting: State
    alone: bool
    end: Callable[[], None]
    earlier: Torn | None = None


@dataclass
class Stopwatch:
    """Seconds since it was made or last read."""

    _last: float = field(default_factory=time.monotonic)

    def lap(self) -> float:
        """Read it and start again."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        return seconds
