"""What every rank has, whether it leads or follows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from weightcast.engines.embedded.messages import (
    Abandon,
    Action,
    Commit,
    DescribeWeights,
    Digest,
    RankStats,
    Rebuild,
    Release,
    Revert,
    Rollback,
    Settle,
    Shutdown,
    Stage,
    Verify,
)
from weightcast.engines.embedded.ranks.group import RankGroup
from weightcast.engines.embedded.ranks.inbox import Inbox
from weightcast.engines.embedded.ranks.jobs import Jobs
from weightcast.engines.embedded.ranks.live import LiveWeights
from weightcast.engines.embedded.ranks.runner import Runner
from weightcast.engines.embedded.ranks.step import StepChannel
from weightcast.engines.embedded.ranks.vitals import Vitals
from weightcast.engines.embedded.settings import RankSettings

_STATM = Path("/proc/self/statm")
_LEADER_COUNTERS = (
    "running", "waiting", "preempted", "blocks_free", "blocks_cached", "prefix_hits", "prefix_queries", "drafted",
    "accepted",
)  # fmt: skip


class Rank:
    """The models, the peers and the counters of this process."""

    def __init__(self, settings: RankSettings, group: RankGroup, vitals: Vitals, jobs: Jobs) -> None:
        self.settings, self.group, self.vitals = settings, group, vitals
        self.runner = Runner(settings.engine, group)
        self.live = LiveWeights(self.runner, group, vitals, jobs)
        self.channel = StepChannel(group, settings.engine.device)
        self.steps = 0
        self.leaving = False

    @property
    def resident(self) -> bool:
        """Whether there is all that a step needs: weights, whole, and caches."""
        return self.live.whole and self.runner.has_caches

    def execute(self, command: int, inbox: Inbox, perform: Callable[[int, Action], Any]) -> None:
        """Run a command that all ranks run now, and acknowledge it."""
        self.vitals.tick()
        self.leaving = isinstance(inbox.execute(command, partial(perform, command)), Shutdown)

    def perform(self, number: int, action: Action) -> Any:  # noqa: PLR0911 - a table, one line for each
        """What a command does on every rank, whether it leads or follows."""
        live = self.live
        match action:
            case Stage():
                live.stage(number, action)
            case Abandon():
                live.abandon(action.update)
            case Commit():
                return live.commit(number, action)
            case Settle():
                return live.settle(action.update)
            case Revert():
                live.revert(action.update, action.reason)
            case Rollback():
                live.rollback()
            case Verify():
                live.verify(number)
            case Digest():
                live.digest(number, action)
            case DescribeWeights():
                return live.describe() | {"caches": self.runner.has_caches}
            case Release():
                return self._release(action.tags)
            case Rebuild():
                return live.rebuilt_caches()
            case _:
                return None  # the rest is rank 0's alone
        return None

    def _release(self, tags: Collection[str]) -> dict[str, float]:
        """Weights and caches, each by itself; what is free already takes no time."""
        seconds = dict.fromkeys(tags, 0.0)
        if "kv_cache" in tags:
            began = time.monotonic()
            self.runner.release_caches()
            seconds["kv_cache"] = time.monotonic() - began
        if "weight" in tags:
            seconds["weight"] = self.live.release()
        return seconds

    def describe(self, counters: Mapping[str, int], *, commands: int) -> RankStats:
        """This rank's counters; `counters` are those that only rank 0 has."""
        return RankStats(
            rank=self.settings.rank,
            pid=os.getpid(),
            version=self.live.version,
            steps=self.steps,
            commands=commands,
            collectives=self.group.collectives,
            groups_made=self.group.groups_made,
            rss_nbytes=int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            blocks=self.runner.blocks,
            **{name: counters.get(name, 0) for name in _LEADER_COUNTERS},
        )
