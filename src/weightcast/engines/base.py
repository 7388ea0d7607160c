"""What drives an engine: the protocol that the server speaks, and the words in which updates and weights are told.

The embedded engine's `Replica` is one implementation. Everything is called from one event loop.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from weightcast.wire.manifest import Manifest
from weightcast.worker.result import CommitMode, Timeline, legacy_costs

PauseMode = Literal["abort", "wait", "keep"]
Tag = Literal["weight", "kv_cache"]
TransferMode = Literal["auto", "snapshot", "ipc", "http", "rdma", "gdr"]
Phase = Literal["waiting", "staging", "staged", "committing", "proving", "done", "failed", "cancelled"]

TAGS: tuple[Tag, ...] = ("weight", "kv_cache")
UPDATE_TIMEOUT_S = 180.0


class UpdateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an update should do.

    `version` None is the newest of the source, `source` None the engine's default one. `commit` "auto" takes what the
    change allows at the least cost: a scatter for a delta, else a copy. `clear_cache` decides what requests that are kept
    over the commit go on with: keys and values computed anew under the new weights, or the old ones. `release_cache` frees
    all caches around the commit, for its memory. `follow` marks the updates of `--follow`: they pin nothing.
    """

    version: str | None = None
    source: str | None = None
    transfer_mode: TransferMode = "auto"
    verify_checksum: bool = True
    timeout_s: float = UPDATE_TIMEOUT_S
    commit: CommitMode | Literal["auto"] = "auto"
    pause: PauseMode = "keep"
    clear_cache: bool = True
    release_cache: bool = False
    follow: bool = False


class Failure(msgspec.Struct, frozen=True):
    """An error as it is reported: its code and its message."""

    code: str
    message: str


class UpdateStatus(msgspec.Struct, kw_only=True):
    """An update at one moment. `nbytes` of `total` were staged, over all ranks; `total` is 0 until it is known.

    `result` has one entry per rank once it is done: the fields of `UpdateResult.as_dict()` and, beside them, `pause_s`, how
    long this rank did not compute (a part of `commit_s`), and with `release_cache` also `cache_clear_cost` and
    `cache_rebuild_cost`. The times of the phases are those of `timeline`, the same in every entry: a phase lasts until its
    slowest rank is done. `began` and `ended` are Unix time.
    """

    id: str
    request: UpdateRequest
    version: str = ""
    source: str = ""
    phase: Phase = "waiting"
    nbytes: int = 0
    total: int = 0
    error: Failure | None = None
    result: list[dict[str, Any]] | None = None
    began: float = msgspec.field(default_factory=time.time)
    ended: float | None = None
    timeline: Timeline = msgspec.field(default_factory=Timeline)

    def end(self, phase: Phase) -> None:
        """The update is over: from now on its times do not change."""
        self.timeline.end()
        times = self.timeline.as_dict()
        self.phase, self.ended = phase, self.began + times["total_s"]
        self.result = self.result and [one | times | legacy_costs(times) for one in self.result]

    @property
    def percent(self) -> float:
        """How much of the staging is done."""
        if self.phase in ("staged", "committing", "proving", "done"):
            return 100.0
        return 100.0 * self.nbytes / self.total if self.total else 0.0


class RankWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds. `state` is that of its live model; `shard_digest` is over its own slices, once proved.

    `scrub_period_s` is how long the last pass of the scrubber over all live weights took, `scrubbed` the Unix time at which
    it ended without a finding: damage to weights that no commit changed is found within a period. 0: there was none yet.
    """

    rank: int
    version: str
    state: str
    shard_digest: str
    nbytes: int
    scrub_period_s: float = 0.0
    scrubbed: float = 0.0


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A version that an operator chose and that following must not replace.

    `away_from` is the newest version of the default source that was known when the operator decided. Its `sequence`,
    `created_s` and `root_digest` tell whether another version is newer. `since` is Unix time.
    """

    version: str
    away_from: str
    why: Literal["rollback", "explicit"]
    since: float
    sequence: int = 0
    created_s: float = 0.0
    root_digest: str = ""

    def ends_with(self, manifest: Manifest) -> bool:
        """Whether a version is newer than what the operator moved away from: published after it.

        The order is that of the store. Where a trainer that was started again counts anew, its clock decides. A source that
        keeps no order (snapshots, checkpoints) holds one version: another than both is newer.
        """
        known = (self.away_from, self.root_digest)
        if manifest.version == self.version or (manifest.version, manifest.root_digest) == known:
            return False
        if not (manifest.sequence or manifest.created_s or self.sequence or self.created_s):
            return manifest.version != self.away_from
        return manifest.sequence > self.sequence or manifest.created_s > self.created_s


class WeightsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica serves. `root_digest` is empty unless every rank has proved its part. `since` is Unix time.

    `previous` is the version that a rollback would go back to, if it is still held. `asleep` are the tags without memory.
    `pin` is the version that an operator chose, while `--follow` must not replace it.
    """

    state: str
    legacy_status: int
    reason: str
    version: str
    root_digest: str
    source: str
    sequence: int
    since: float
    previous: str | None
    paused: bool
    asleep: tuple[str, ...]
    update: str | None
    ranks: tuple[RankWeights, ...]
    pin: Pin | None = None


class Aborted(msgspec.Struct, frozen=True):
    """A request that was ended on demand."""

    request_id: str
    output_token_count: int


class AbortReport(msgspec.Struct, frozen=True):
    """What became of a call to abort requests."""

    aborted: list[Aborted]
    not_found: list[str]


class LiveWeights(Protocol):
    """The part of an engine that changes its weights. Every call raises `NotReady`, `WrongState` or `UpdateInProgress`
    where the table in `engines/states.py` does not allow it.
    """

    @property
    def weights(self) -> WeightsStatus:
        """What is served now, at once: `ranks` and `previous` are as they were told last."""

    async def look_at_weights(self) -> WeightsStatus:
        """The same, after asking every rank what it holds. Raises `NotReady` where there are none to ask."""

    @property
    def is_paused(self) -> bool:
        """Whether requests are kept waiting until `resume`."""

    def begin_update(self, request: UpdateRequest) -> UpdateStatus:
        """Start an update and return at once. Only one runs at a time: a second is `UpdateInProgress`."""

    async def finish_update(self, update_id: str) -> UpdateStatus:
        """Wait for the end of an update. Raises what it failed with."""

    def update_status(self, update_id: str) -> UpdateStatus:
        """How an update is doing, also some time after its end. Raises `NotFound`."""

    async def cancel_update(self, update_id: str) -> UpdateStatus:
        """Cancel an update that is staging; returns when it has ended. One that commits or has ended is `WrongState`."""

    async def verify(self, *, timeout_s: float) -> list[dict[str, Any]]:
        """Sum all live weights anew. One entry per rank; a mismatch turns the replica FAILED and raises."""

    async def rollback(self, *, timeout_s: float) -> WeightsStatus:
        """Go back to the previous version, and pin it. Raises `NotFound` if it is not held any more."""

    async def resume_following(self, *, timeout_s: float) -> WeightsStatus:
        """Remove the pin, so that `--follow` takes the newest version again. Fine without a pin."""

    def begin_recovery(self, request: UpdateRequest) -> UpdateStatus:
        """Like `begin_update`, for a replica that holds no whole version: without a version, to the last committed one."""

    async def digest(self, names: Collection[str], algorithm: str, *, timeout_s: float) -> list[dict[str, Any]]:
        """Digests of the raw bytes that each rank holds of these tensors. Changes nothing. One entry per rank."""

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False, timeout_s: float) -> None:
        """Stop computing. "abort" ends what runs, with what it has; "wait" lets it end first and raises `DeadlineExceeded`,
        unpaused, if that takes too long; "keep" freezes it. New requests wait. Pausing what is paused is fine.
        """

    async def resume(self, *, timeout_s: float) -> None:
        """Go on. `WrongState` while weights or caches are not resident. Resuming what runs is fine."""

    async def abort_requests(self, ids: Sequence[str] | None, *, timeout_s: float) -> AbortReport:
        """End requests (None: all) with what they have. An id also stands for the several answers to one request."""

    async def sleep(self, tags: Collection[Tag], mode: PauseMode, *, timeout_s: float) -> list[dict[str, Any]]:
        """Pause and free memory. Each tag by itself; one that is asleep already is fine. One entry per rank."""

    async def wake(self, tags: Collection[Tag], *, timeout_s: float) -> list[dict[str, Any]]:
        """Bring memory back, weights at the last committed version. Resumes what `sleep` paused, once all is resident."""

    async def check_version(self, wanted: Mapping[str, str]) -> None:
        """Raise `VersionNotServed` unless the served version is the `exact` or at least the `min` one that is wanted."""
