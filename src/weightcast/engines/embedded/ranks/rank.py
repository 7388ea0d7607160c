"""What every rank has, whether it leads or follows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from weightcast.engines.embedded.messages import Action, RankStats, Shutdown
from weightcast.engines.embedded.ranks.group import RankGroup
from weightcast.engines.embedded.ranks.inbox import Inbox
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

    def __init__(self, settings: RankSettings, group: RankGroup, runner: Runner, vitals: Vitals) -> None:
        self.settings, self.group, self.runner, self.vitals = settings, group, runner, vitals
        self.channel = StepChannel(group, settings.engine.device)
        self.steps = 0
        self.leaving = False

    def execute(self, command: int, inbox: Inbox, perform: Callable[[Action], RankStats | None]) -> None:
        """Run a command that all ranks run now, and acknowledge it."""
        self.vitals.tick()
        self.leaving = isinstance(inbox.execute(command, perform), Shutdown)

    def describe(self, counters: Mapping[str, int], *, commands: int) -> RankStats:
        """This rank's counters; `counters` are those that only rank 0 has."""
        return RankStats(
            rank=self.settings.rank,
            pid=os.getpid(),
            version=self.settings.version,
            steps=self.steps,
            commands=commands,
            collectives=self.group.collectives,
            groups_made=self.group.groups_made,
            rss_nbytes=int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            blocks=self.runner.blocks,
            **{name: counters.get(name, 0) for name in _LEADER_COUNTERS},
        )
