"""From a route to a commit that only has to be carried out: fetch, decode, verify, prepare, all beside the running model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import InvalidInput, SourceFailed
from weightcast.transports.base import Provider, Receiver
from weightcast.wire.manifest import Manifest, TensorEntry
from weightcast.worker.buffers import Buffers
from weightcast.worker.commits.delta import DeltaCommit, DeltaSwapCommit, Spare
from weightcast.worker.commits.inplace import Stream, StreamedCommit
from weightcast.worker.commits.staged import CopyCommit, StagedCommit, SwapCommit, Tick, silent
from weightcast.worker.deltas import DeltaChain, fetched_chain
from weightcast.worker.fit import FitRules, Plan, check_ties, plan_update
from weightcast.worker.result import CommitMode, Timeline, WholeMode
from weightcast.worker.route import NO_DELTA, Route, insist_on_deltas, plan_route
from weightcast.worker.sealing import summed
from weightcast.worker.serving import Served
from weightcast.worker.staging import Staging, provided
from weightcast.worker.targets.capture import CapturedPart

log = logs.get(__name__)


@dataclass(frozen=True)
class Prepared:
    """A commit that is ready to be applied."""

    manifest: Manifest
    plan: Plan
    commit: StagedCommit
    mode: CommitMode
    nbytes: int


@dataclass(frozen=True)
class Stager:
    """Stages one update. `checksum` False takes payloads on trust; that they are complete and fit is always checked.

    Memory for tensors comes from `buffers`, so that it is warm. `threads` copy out of shared memory. `whole_by` is how a
    version that was fetched whole is committed where `delta` was asked for.
    """

    receiver: Receiver
    parts: Sequence[CapturedPart]
    rules: FitRules
    checksum: bool
    deadline: Deadline
    buffers: Buffers
    threads: int = 1
    tick: Tick = silent
    timeline: Timeline = field(default_factory=Timeline)
    whole_by: WholeMode = "copy"

    def stage(
        self,
        manifest: Manifest,
        mode: CommitMode,
        *,
        served: Served | None,
        whole: bool,
        take_spare: Callable[[], Spare | None],
        drop_spare: Callable[[], None] = silent,
    ) -> Prepared:
        """Fetch and verify everything that leads to a version. Nothing live is touched.

        `whole` tells whether the model holds anything worth going back to. `take_spare` is called if spare buffers are
        going to be used up, `drop_spare` if memory for a whole version is needed.
        """
        plan = plan_update(manifest, self.parts, self.rules, swap="swap" in (mode, self.whole_by))
        route = self._route(manifest, served)
        held = served.manifest if served is not None else None
        if route.full is None and served is not None:
            prepared = self._from_held(route, plan, mode, served, take_spare)
            if prepared is not None:
                return prepared
            why = "the model does not hold all of the base"
            insist_on_deltas(self.receiver, manifest, held, why)
            log.info("delta not used", version=manifest.version, why=why)
            route = plan_route(self.receiver, manifest, held=None, deadline=self.deadline)
        else:
            insist_on_deltas(self.receiver, manifest, held, NO_DELTA)
            if mode == "inplace":
                return self._streamed(route, plan, served, whole=whole)
        drop_spare()
        return self._from_full(route, plan, mode)

    def _route(self, manifest: Manifest, served: Served | None) -> Route:
        """The way to a version from what the model provably holds, or from a full version."""
        usable = served is not None and served.proved and all(item.slot.resident for item in served.plan.landings)
        held = served.manifest if usable and served is not None else None
        return plan_route(self.receiver, manifest, held=held, deadline=self.deadline)

    def _fetch(self, deltas: Sequence[Manifest]) -> DeltaChain:
        return fetched_chain(self.receiver, deltas, checksum=self.checksum, deadline=self.deadline)

    def _from_held(
        self, route: Route, plan: Plan, mode: CommitMode, served: Served, take_spare: Callable[[], Spare | None]
    ) -> Prepared | None:
        """A commit of the deltas alone; None if they cannot be decoded along what the model holds."""
        deltas = self._fetch(route.deltas)
        if not deltas.fits(served.plan, served.manifest):
            return None
        delta = deltas.along(served.plan, served.manifest)
        self.deadline.check(f"decoding the deltas to {route.manifest.version}")
        self.timeline.enter("verify")  # preparing it compares the sums that it leads to with the manifest's
        commit: StagedCommit
        if mode == "swap":
            commit = DeltaSwapCommit(
                plan, route.manifest, delta,
                base=served.manifest, checksum=self.checksum, spare=take_spare(), buffers=self.buffers, tick=self.tick,
            )  # fmt: skip
        else:
            commit = DeltaCommit(plan, route.manifest, delta, base=served.manifest, checksum=self.checksum, tick=self.tick)
        commit.prepare(self.deadline)
        done: CommitMode = "swap" if mode == "swap" else "delta"
        manifest, plan = commit.sealed or (route.manifest, plan)
        return Prepared(manifest, plan, commit, done, deltas.nbytes)

    def _from_full(self, route: Route, plan: Plan, mode: CommitMode) -> Prepared:
        manifest, full = route.manifest, route.full or route.manifest
        staging, nbytes = self._filled(full, full.transfers() if route.deltas else plan.entries)
        deltas = self._fetch(route.deltas)
        self.timeline.enter("verify")
        given = isinstance(self.receiver, Provider) and not full.sealed
        verified = staging.verify(full, checksum=self.checksum and not given, deadline=self.deadline)
        if not full.sealed:  # a stream: the digests of its tensors are known now; what was given is summed only here
            manifest = full = summed(full, verified.digests) if given else staging.seal(full, self.deadline)
            plan = plan_update(full, self.parts, self.rules, swap="swap" in (mode, self.whole_by))
        if deltas:
            deltas.move(staging.arrays, route.manifest.version, self.deadline)
            wanted = Staging(plan.entries, {name: staging.arrays[name] for name in plan.entries})
            verified = wanted.verify(route.manifest, checksum=self.checksum, deadline=self.deadline)
        check_ties(manifest.version, plan, lambda landing: verified.arrays[landing.entry.name])
        self.timeline.enter("stage")
        done: CommitMode = "swap" if mode == "swap" else self.whole_by
        if mode == "delta" and done == "copy":
            log.info(
                "delta not used",
                version=full.version,
                mode=done,
                asked=mode,
                why=NO_DELTA,
            )
        commit = (SwapCommit if done == "swap" else CopyCommit)(plan, verified, self.buffers, tick=self.tick)
        commit.prepare(self.deadline)
        return Prepared(manifest, plan, commit, done, nbytes + deltas.nbytes)

    def _filled(self, full: Manifest, entries: Mapping[str, TensorEntry]) -> tuple[Staging, int]:
        """Memory with these tensors of a full version in it, and how many bytes were fetched for it."""
        if isinstance(self.receiver, Provider):
            return provided(entries, self.receiver.arrays(full), self.receiver.url), 0
        ours = {slot.spec.nbytes for part in self.parts for slot in part.slots}
        known = all(entry.nbytes in ours for entry in entries.values())  # other sizes would only pile up in the buffers
        staging = Staging(entries, buffers=self.buffers if known else None)
        staging.fill(self.receiver, full, self.deadline, threads=self.threads)
        return staging, staging.nbytes

    def _streamed(self, route: Route, plan: Plan, served: Served | None, *, whole: bool) -> Prepared:
        """A commit that will fetch the full version when it is applied. Only the deltas are fetched now."""
        self.buffers.clear()  # whoever commits in place is short of memory
        stream = self._stream(route, plan)
        self.deadline.check(f"finding the way to {route.manifest.version}")
        back = (lambda: self._stream_back(served)) if served is not None else None
        commit = StreamedCommit(plan, stream, whole=whole, back=back)
        return Prepared(route.manifest, plan, commit, "inplace", stream.nbytes)

    def _stream(self, route: Route, plan: Plan) -> Stream:
        full = route.full or route.manifest
        replan = partial(plan_update, parts=self.parts, rules=self.rules, swap=False)
        base_plan = replan(full) if route.deltas else plan
        deltas = self._fetch(route.deltas)
        if not deltas.fits(base_plan, full):
            raise InvalidInput(
                f"version {route.manifest.version} is a delta, and the model ignores tensors of its base, so it cannot be "
                "decoded in place. Commit by copy, or publish deltas with packing 'gaps'."
            )
        return Stream(
            self.receiver, full, base_plan, route.manifest, plan, deltas, self.checksum, self.deadline, replan, self.tick
        )  # fmt: skip

    def _stream_back(self, served: Served) -> Stream:
        """The stream of a version that was served, with as much time as this update had."""
        deadline = Deadline.after(self.deadline.seconds)
        manifest = self.receiver.manifest(served.manifest.version, deadline=deadline)
        if manifest.root_digest != served.manifest.root_digest:
            raise SourceFailed(f"{self.receiver.url} has other bytes under the name {manifest.version}")
        route = plan_route(self.receiver, manifest, held=None, deadline=deadline)
        stager = replace(self, checksum=manifest.algorithm is not None, deadline=deadline)
        return stager._stream(route, served.plan)
