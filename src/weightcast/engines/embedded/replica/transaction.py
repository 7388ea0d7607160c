"""The two phases over the ranks of a replica: all stage and vote, then all commit or none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.embedded.messages import Abandon, Commit, Committed, Feed, Revert, Settle, Stage, Vote
from weightcast.engines.embedded.replica.job_board import Progress
from weightcast.engines.embedded.replica.run import Run
from weightcast.engines.embedded.replica.votes import check_sums
from weightcast.errors import CommitFailed, DeadlineExceeded, ReplicaFailed, WeightcastError
from weightcast.wire.manifest import Manifest
from weightcast.worker.result import Timeline

log = logs.get(__name__)

COMMAND_S = 30.0  # for commands that ask for no work: they wait for the step that runs, and for earlier commands


@dataclass(frozen=True)
class Wanted:
    """What the ranks are to do, the same for all of them."""

    feeds: tuple[Feed, ...]
    version: str
    commit: str = "auto"
    verify_checksum: bool = True
    clear_cache: bool = True
    release_cache: bool = False
    afresh: bool = False


class Transaction:
    """One update over one start of the ranks. Call `stage`, then `commit`; `abandon` in between takes it back.

    `timeline` records the phases. Afterwards it is in the phase "wait" or "settle".
    """

    def __init__(self, run: Run, update: str, wanted: Wanted, deadline: Deadline, timeline: Timeline) -> None:
        self._run, self._update, self._wanted, self._deadline = run, update, wanted, deadline
        self.timeline = timeline

    async def stage(self, progress: Progress | None = None) -> list[Vote]:
        """Returns when every rank has voted yes. Raises, with everything abandoned, when one has not."""
        wanted = self._wanted
        action = Stage(
            update=self._update,
            feeds=wanted.feeds,
            commit=wanted.commit,  # type: ignore[arg-type]  # checked where the request was read
            verify_checksum=wanted.verify_checksum,
            timeout_s=self._deadline.remaining(),
            afresh=wanted.afresh,
        )
        self.timeline.enter("stage")
        try:
            job = await self._run.commands.begin(action, self._deadline.remaining())
            results = await self._run.board.wait(job, f"staging {wanted.version}", self._deadline, progress)
            votes = [msgspec.convert(vote, Vote) for vote in results]
            self.timeline.enter("wait")
            self.timeline.attribute(max(vote.verify_s for vote in votes), of="stage", to="verify")
            return votes
        except BaseException:
            await self.abandon()
            raise

    def check_sums(self, manifests: Sequence[Manifest], votes: Sequence[Vote]) -> None:
        """Raise `DigestMismatch` unless what the ranks staged adds up to the versions of these manifests."""
        check_sums(self._run.layouts, self._wanted.feeds, manifests, votes, proved=self._wanted.verify_checksum)

    async def abandon(self) -> None:
        """Have all ranks drop what they staged. Ranks that are lost have dropped it already."""
        if not self._run.failed.done():
            try:
                await self._run.commands.execute(Abandon(update=self._update), COMMAND_S)
            except DeadlineExceeded as error:
                self._run.give_up(f"does not abandon an update: {error}")

    async def commit(self, decided: Callable[[], None]) -> list[dict[str, Any]]:
        """Returns one result per rank when all serve the new version, proved. Raises when all are back at the old one, or
        some are torn: `DescribeWeights` tells.

        `decided` is called when all ranks have proved the new version and none has shown it to anybody: from there on it is
        the one that counts, and that ranks which are lost are brought back to. If it raises, all ranks go back.
        """
        wanted = self._wanted
        action = Commit(update=self._update, clear_cache=wanted.clear_cache, release_cache=wanted.release_cache)
        patience_s = COMMAND_S + (self._deadline.remaining() if wanted.commit == "inplace" else 0.0)
        self.timeline.enter("commit")
        try:
            job, answers = await self._run.commands.run(action, patience_s)
        except DeadlineExceeded as error:
            raise self._run.give_up(f"is stuck in a commit: {error}") from error
        committed = [msgspec.convert(answer, Committed) for answer in answers]
        self.timeline.enter("proof")
        try:
            await self._run.board.wait(job, f"proving {wanted.version}", Deadline.after(COMMAND_S))
            self._check_versions(committed)
            self.timeline.enter("settle")
            decided()
        except ReplicaFailed:
            raise
        except WeightcastError as error:
            raise await self._revert(error) from error
        try:
            results = await self._run.commands.execute(Settle(update=self._update), COMMAND_S)
        except ReplicaFailed:
            raise
        except WeightcastError as error:  # others have settled, and cannot go back
            raise self._run.give_up(f"could not settle {wanted.version}: {error}") from error
        return [
            result | msgspec.to_builtins(one) | {"release_cache": wanted.release_cache}
            for result, one in zip(results, committed, strict=True)
        ]

    def _check_versions(self, committed: list[Committed]) -> None:
        others = {rank: one.version for rank, one in enumerate(committed) if one.version != self._wanted.version}
        if others:
            raise CommitFailed(f"{self._wanted.version} was committed, and ranks report other versions: {others}.")

    async def _revert(self, cause: WeightcastError) -> CommitFailed:
        reason = f"version {self._wanted.version} was not committed, and its tokens were dropped: {cause}"
        try:
            await self._run.commands.execute(Revert(update=self._update, reason=reason), COMMAND_S)
        except DeadlineExceeded as error:
            raise self._run.give_up(f"does not go back: {error}") from error
        log.warning("update undone", version=self._wanted.version, error=cause)
        return CommitFailed(f"{reason} All ranks went back.")
