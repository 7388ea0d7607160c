"""Everything that passes between the front end and the ranks of a replica: msgpack over ZeroMQ, no pickle.

The front end binds one ROUTER socket (`front_end_address`). Every rank connects three DEALER sockets to it: `rank-<n>` for
the main loop, `beat-<n>` for the thread that says the rank is alive, `job-<n>` for what it does beside serving. Requests go
to rank 0 alone, which schedules; its outputs come back from there. Commands go to all ranks: rank 0 chooses the step between
which and the next all of them execute it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:  # this file is read by programs that import nothing else of ours
    from weightcast.wire.manifest import Manifest

FinishReason = Literal["stop", "length", "abort", "error"]

PROTOCOL = 4
BEATS = 8


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of an answer are chosen.

    Temperature 0 is greedy. `seed` decides every token together with its position, whatever else is in the batch.
    `stop_tokens` end the answer and are part of it. `logprobs` is the number of alternatives to report beside the chosen
    token's own log-probability; None reports nothing. They are those of the model, before temperature and filters.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    logprobs: int | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of a chosen token, and of the most likely ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """Which experts each token went to: int16 numbers, little-endian, of shape (tokens, MoE layers, experts per token)."""

    shape: tuple[int, int, int]
    data: bytes


# -- front end to ranks --------------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A new request, to rank 0. With `replay`, its first tokens go to these experts; it then shares no cached prefix.

    `request_id` is that of the HTTP request which it is part of, for the log.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    record_routing: bool = False
    replay: Routing | None = None
    request_id: str = ""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget a request, to rank 0. Unknown ids are fine: it may just have finished. No output follows."""

    id: str


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer with `RankStats`."""


class ClearCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget all cached prefixes; what running requests hold stays. Answer: nothing."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Acknowledge, then leave. Requests that still run get no output any more."""


# -- weights: every rank stages and votes by itself, and commits between the same two steps as all others ------------------


def version_name(name: str, patterns: Sequence[str]) -> str:
    """What a version calls a tensor of a model whose tensors there match one of these patterns."""
    if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns):
        return name
    return patterns[0].partition("*")[0] + name


class Feed(msgspec.Struct, frozen=True, kw_only=True):
    """Where one of a rank's models gets its tensors: a manifest (JSON, as the front end read it) and its source.

    `names` are patterns of the version's tensors that belong to this model; empty if all do that nobody else claims.
    `ignore` are those that belong to others.
    """

    part: Literal["main", "draft"]
    manifest: bytes
    source: str
    names: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def version_name(self, name: str) -> str:
        """What the version calls a tensor of the model."""
        return version_name(name, self.names)


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fetch and verify a version beside the serving model, as a job. Its last `Report` is this rank's vote.

    With `afresh` nothing is built on what the rank holds: it is not to be trusted.
    """

    update: str
    feeds: tuple[Feed, ...]
    commit: Literal["auto", "copy", "swap", "inplace", "delta"]
    verify_checksum: bool
    timeout_s: float
    afresh: bool = False


class Abandon(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop staging, or drop what was staged. Fine if there is nothing. Answer: nothing."""

    update: str


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make what was staged live, on all ranks or, if one fails, on none. Answer: `Committed`.

    What the model computes from here on is not told to anybody before `Settle`: the live bytes are proved first, as a job.
    """

    update: str
    clear_cache: bool
    release_cache: bool


class Settle(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every rank has proved its weights: the new version counts. Answer: the rank's result."""

    update: str


class Revert(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank could not prove its weights: all go back. What was computed since the commit is dropped, with its requests."""

    update: str
    reason: str


class Rollback(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Go back to the version before, if it is held. Answer: nothing."""


class Freeze(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute nothing until `Thaw`. With `recompute` running requests forget their keys and values. Answer: nothing."""

    recompute: bool = False


class Thaw(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Go on computing. Refused while weights or caches have no memory. Answer: nothing."""


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Free memory by tag. Answer: seconds by tag, 0 for what was free already."""

    tags: tuple[str, ...]


class Rebuild(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Allocate the caches again. Answer: seconds."""


class DescribeWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer with the `RankWeights` of `engines/base.py`, and `previous`: what a rollback would lead to."""


class Verify(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compare the digests of the live weights with those of the version, as a job."""


class Digest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Digests of what this rank holds of some tensors, as a job."""

    names: tuple[str, ...]
    algorithm: str


Job = Stage | Verify | Digest
Action = (
    Describe | ClearCache | Shutdown | Job | Abandon | Commit | Settle | Revert | Rollback | Freeze | Thaw | Release
    | Rebuild | DescribeWeights
)  # fmt: skip


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To all ranks. Ids count up from 1 within one start of the replica and are executed in that order, each once.

    A repeated id is not executed again: the same acknowledgement is sent. `request_id` and `update_id` are for the log.
    """

    id: int
    action: Action
    request_id: str = ""
    update_id: str = ""


ToRank = Submit | Cancel | Command


# -- ranks to front end --------------------------------------------------------------------------------------------------


class SourceBox(msgspec.Struct, frozen=True, array_like=True):
    """A box of one of the tensors that a model is made of, by the name that the model has for the tensor."""

    source: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


class PartLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank holds of one model: its boxes, in the order in which it votes, and the shapes of all tensors."""

    boxes: tuple[SourceBox, ...]
    sources: dict[str, tuple[int, ...]]


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank has met its peers and has its caches. It has no weights yet. `layouts` are by the name of the model."""

    rank: int
    pid: int
    protocol: int
    max_length: int
    blocks: int
    vocab_size: int
    moe: bool
    layouts: dict[str, PartLayout] = {}


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank cannot start or go on, and ends after this message."""

    rank: int
    code: str
    message: str


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent `BEATS` times per heartbeat period from the moment the process runs.

    `progress` counts layers, steps and messages handled. A rank that is `busy` and whose `progress` stands still hangs.
    `damaged` is a version whose live weights were found to be others than those that were committed, and what was found.
    """

    rank: int
    progress: int
    busy: bool
    damaged: tuple[str, str] | None = None


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a request, all made by weight version `version`. The last output of a request has `finish`.

    `reason` explains an abort or an error; `refused` tells an error that lies in the request from one of the engine.
    `cached_tokens` of the prompt came out of the prefix cache. `routing`, if asked
    for, comes with the last output and covers prompt and answer, but for the last token, which went through no layer.
    """

    id: str
    tokens: tuple[int, ...]
    version: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: FinishReason | None = None
    reason: str | None = None
    cached_tokens: int = 0
    routing: Routing | None = None
    refused: bool = False


class Outputs(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What one step made: at most one output per request."""

    outputs: tuple[Output, ...]


class Acknowledged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has executed a command. `error` is (code, message) if it failed there."""

    rank: int
    id: int
    result: Any = None
    error: tuple[str, str] | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How a job of this rank is doing. `job` is the id of the command that began it; `done` comes with the last report."""

    rank: int
    job: int
    nbytes: int = 0
    total: int = 0
    done: bool = False
    result: Any = None
    error: tuple[str, str] | None = None


class RankRead(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank read for one of its models, as the rank's own source describes it.

    `root_digest` is empty where the source has no digests. `rank` and `ranks` are those that the source records: None where
    it records none. `tensors` are digests of the bytes as they were read, of tensors that were not compared with a manifest.
    """

    version: str
    root_digest: str = ""
    rank: int | None = None
    ranks: int | None = None
    tensors: dict[str, str] = {}

    @classmethod
    def of(cls, manifest: Manifest, tensors: Mapping[str, str] | None = None) -> RankRead:
        """A version as a source describes it, with the digests of bytes that were read without being compared."""
        return cls(
            version=manifest.version,
            root_digest=manifest.root_digest or manifest.metadata.get("weightcast.root", ""),
            rank=manifest.recorded("weightcast.rank"),
            ranks=manifest.recorded("weightcast.ranks"),
            tensors=dict(tensors or {}),
        )

    def differences(self, expected: RankRead, *, rank: int, ranks: int) -> list[str]:
        """Why a rank must not serve this where `expected` is wanted; `rank` of `ranks` has read it."""
        pairs = [
            ("version", expected.version, self.version),
            ("root digest", expected.root_digest or "none", self.root_digest or "none"),
            ("rank", rank, rank if self.rank is None else self.rank),
            ("number of ranks", ranks, ranks if self.ranks is None else self.ranks),
        ]
        pairs += [
            (f"tensor {name}", expected.tensors[name], digest)
            for name, digest in self.tensors.items()
            if name in expected.tensors
        ]
        return [f"{what}: expected {wanted}, found {found}" for what, wanted, found in pairs if wanted != found]


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """A rank has staged a version: the result of `Stage`. `nbytes` were fetched; `reads` are in the order of the feeds.

    `sums` say what was staged: for each feed, in the order of the rank's layout, what each box adds to the two sums of its
    tensor, and how many elements that are; 64-bit numbers, little-endian. `verify_s` of the time it took went into comparing
    the digests of what was staged.
    """

    nbytes: int
    reads: tuple[RankRead, ...]
    sums: tuple[bytes, ...] = ()
    verify_s: float = 0.0


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's commit. `pause_s` is how long it could not compute."""

    version: str
    pause_s: float
    cache_clear_cost: float = 0.0
    cache_rebuild_cost: float = 0.0


class RankStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one rank since its start."""

    rank: int
    pid: int
    version: str
    steps: int
    commands: int
    collectives: int
    groups_made: int
    rss_nbytes: int
    running: int
    waiting: int
    blocks: int
    blocks_free: int
    blocks_cached: int
    prefix_hits: int
    prefix_queries: int
    drafted: int
    accepted: int
    preempted: int


FromRank = Ready | Failed | Heartbeat | Outputs | Acknowledged | Report


def front_end_address(run_dir: str | Path) -> str:
    """Where the front end listens."""
    return f"ipc://{run_dir}/front-end.sock"


def rank_identity(rank: int) -> bytes:
    """The routing id of a rank's main socket."""
    return b"rank-%d" % rank


def job_identity(rank: int) -> bytes:
    """The routing id of the socket on which a rank's jobs report."""
    return b"job-%d" % rank


def beat_identity(rank: int) -> bytes:
    """The routing id of a rank's heartbeat socket."""
    return b"beat-%d" % rank
