"""From a route to a commit that only has to be carried out: fetch, decode, verify, prepare, all beside the running model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weightcast.clock import Deadline
from weightcast.delta import decode, move
from weightcast.transports.base import Receiver
from weightcast.wire.manifest import Manifest, TensorEntry
from weightcast.worker.commits.delta import DeltaCommit, DeltaSwapCommit, Spare, can_decode, decode_along
from weightcast.worker.commits.staged import CopyCommit, StagedCommit, SwapCommit
from weightcast.worker.fit import FitRules, Plan, plan_update
from weightcast.worker.result import CommitMode
from weightcast.worker.route import Route, plan_route
from weightcast.worker.serving import Served, Stopwatch
from weightcast.worker.staging import Staging, Verified
from weightcast.worker.targets.capture import CapturedPart

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A commit that is ready to be applied, and what it took to get there."""

    plan: Plan
    commit: StagedCommit
    mode: CommitMode
    nbytes: int
    stage_s: float
    verify_s: float


@dataclass(frozen=True)
class Stager:
    """Stages one update. `checksum` False takes payloads on trust; that they are complete and fit is always checked."""

    receiver: Receiver
    parts: Sequence[CapturedPart]
    rules: FitRules
    checksum: bool
    deadline: Deadline

    def stage(self, manifest: Manifest, mode: CommitMode, *, served: Served | None, spare: Spare | None) -> Prepared:
        """Fetch and verify everything that leads to a version. Nothing live is touched; `spare` may be used up."""
        plan = plan_update(manifest, self.parts, self.rules, swap=mode == "swap")
        route = self.route(manifest, served)
        if route.full is None and served is not None:
            prepared = self._from_held(route, plan, mode, served, spare)
            if prepared is not None:
                return prepared
            log.info("stage version=%s goes by a full version: the model does not hold all of the base", manifest.version)
            route = plan_route(self.receiver, manifest, held=None, deadline=self.deadline)
        return self._from_full(route, plan, mode)

    def route(self, manifest: Manifest, served: Served | None) -> Route:
        """The way to a version from what the model provably holds, or from a full version."""
        usable = served is not None and served.proved and all(item.slot.resident for item in served.plan.landings)
        held = served.manifest if usable and served is not None else None
        return plan_route(self.receiver, manifest, held=held, deadline=self.deadline)

    def payloads(self, deltas: Sequence[Manifest]) -> list[memoryview]:
        """The packed deltas, each whole and, unless declined, as published."""
        fetched = []
        for manifest in deltas:
            staging = Staging(manifest.transfers())
            staging.fill(self.receiver, manifest, self.deadline)
            verified = staging.verify(manifest, checksum=self.checksum)
            fetched += [array.data for array in verified.arrays.values()]
        return fetched

    def _from_held(self, route: Route, plan: Plan, mode: CommitMode, served: Served, spare: Spare | None) -> Prepared | None:
        """A commit of the deltas alone; None if they cannot be decoded along what the model holds."""
        watch = Stopwatch()
        payloads = self.payloads(route.deltas)
        if not can_decode(payloads, served.plan, served.manifest):
            return None
        delta = decode_along(payloads, served.plan, served.manifest)
        self.deadline.check(f"decoding the deltas to {route.manifest.version}")
        stage_s = watch.lap()
        commit: StagedCommit
        if mode == "swap":
            commit = DeltaSwapCommit(plan, route.manifest, delta, checksum=self.checksum, spare=spare)
        else:
            commit = DeltaCommit(plan, route.manifest, delta, checksum=self.checksum)
        commit.prepare()
        done: CommitMode = "swap" if mode == "swap" else "delta"
        return Prepared(plan, commit, done, sum(map(len, payloads)), stage_s, watch.lap())

    def _from_full(self, route: Route, plan: Plan, mode: CommitMode) -> Prepared:
        watch = Stopwatch()
        full = route.full or route.manifest
        staging = Staging(full.transfers() if route.deltas else plan.entries)
        staging.fill(self.receiver, full, self.deadline)
        payloads = self.payloads(route.deltas)
        stage_s = watch.lap()
        verified = staging.verify(full, checksum=self.checksum)
        if route.deltas:
            verified = self._moved(staging, payloads, plan.entries, route.manifest)
        verify_s = watch.lap()
        done: CommitMode = "swap" if mode == "swap" else "copy"
        if done != mode:
            log.info(
                "stage version=%s mode=%s asked=%s: there is no delta from what the model holds", full.version, done, mode
            )
        commit = (SwapCommit if done == "swap" else CopyCommit)(plan, verified)
        commit.prepare()
        nbytes = staging.nbytes + sum(map(len, payloads))
        return Prepared(plan, commit, done, nbytes, stage_s + watch.lap(), verify_s)

    def _moved(
        self, staging: Staging, payloads: Sequence[memoryview], entries: Mapping[str, TensorEntry], manifest: Manifest
    ) -> Verified:
        """Bring the staged base to the version that is wanted, and prove what came out."""
        for payload in payloads:
            move(staging.arrays, decode(payload, staging.arrays))
            self.deadline.check(f"decoding the deltas to {manifest.version}")
        wanted = Staging(entries, {name: staging.arrays[name] for name in entries})
        return wanted.verify(manifest, checksum=self.checksum)
