"""What a replica is started with. Made once at the edge, checked there, and handed to every rank as JSON."""

from __future__ import annotations

import logging
from typing import Literal

import msgspec

from weightcast.errors import InvalidInput

Device = Literal["cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Experts = Literal["sharded", "replicated"]
Graphs = Literal["off", "compile", "cuda"]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine runs. The same for all ranks of a replica.

    `dtype` "auto" is the checkpoint's own. `blocks` is the number of KV blocks of `block_size` tokens; None takes as many
    as fit `cache_nbytes` over all ranks together. `max_length` bounds prompt and answer together; None is the model's own
    limit. `experts`: "sharded" gives each rank a part of them, "replicated" gives all to each.

    `source` is where updates come from unless they say otherwise. `state_dir` keeps the committed version and the pin beyond
    this process. `draft_names` are patterns of a version's tensors that
    feed the draft model; without any, updates leave it as it is. `graphs`: how steps are captured (`ranks/graphs.py`).
    `scrub_share` of one core is what each rank takes to compare its live weights with what was committed; 0 does not.
    """

    model_dir: str
    draft_dir: str | None = None
    draft_names: tuple[str, ...] = ()
    source: str | None = None
    state_dir: str | None = None
    graphs: Graphs = "off"
    ranks: int = 1
    device: Device = "cpu"
    dtype: Dtype = "auto"
    experts: Experts = "sharded"
    block_size: int = 16
    blocks: int | None = None
    cache_nbytes: int = 256 << 20
    max_length: int | None = None
    max_batch: int = 64
    max_step_tokens: int = 512
    prefix_cache: bool = True
    draft_tokens: int = 3
    threads: int | None = None
    heartbeat_s: float = 2.0
    start_timeout_s: float = 120.0
    collective_timeout_s: float = 60.0
    scrub_share: float = 0.02

    def __post_init__(self) -> None:
        counts = {
            "ranks": self.ranks, "block_size": self.block_size, "cache_nbytes": self.cache_nbytes,
            "max_batch": self.max_batch, "max_step_tokens": self.max_step_tokens, "draft_tokens": self.draft_tokens,
            "blocks": self.blocks, "max_length": self.max_length, "threads": self.threads,
        }  # fmt: skip
        times = {
            "heartbeat_s": self.heartbeat_s,
            "start_timeout_s": self.start_timeout_s,
            "collective_timeout_s": self.collective_timeout_s,
        }
        wrong = [f"{name}={value}" for name, value in (counts | times).items() if value is not None and not value > 0]
        if self.max_step_tokens < self.max_batch:
            wrong.append(f"max_step_tokens={self.max_step_tokens} < max_batch={self.max_batch}")
        if not 0 <= self.scrub_share <= 1:
            wrong.append(f"scrub_share={self.scrub_share}")
        if self.draft_names and self.draft_dir is None:
            wrong.append(f"draft_names={list(self.draft_names)} without a draft model")
        if wrong:
            raise InvalidInput(f"settings of the engine that cannot work: {', '.join(wrong)}.")


class RankSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank is started with, read from its standard input.

    `run_dir` is private to this start of the replica: it holds the sockets and the rendezvous of the ranks.
    """

    engine: EngineSettings
    rank: int
    run_dir: str
    parent_pid: int
    log_level: int = logging.WARNING
    log_json: bool = False
