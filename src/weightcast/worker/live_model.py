"""LiveModel: a model in memory that takes new versions whole or not at all."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from weightcast.clock import Deadline
from weightcast.errors import (
    ClearIncomplete,
    CommitFailed,
    InvalidInput,
    SourceFailed,
    UpdateFailed,
    WeightcastError,
    WrongState,
)
from weightcast.tensors.digest import DEFAULT, array_digest, root_digest
from weightcast.tensors.spec import TensorSpec
from weightcast.transports.base import Receiver
from weightcast.transports.registry import Source, open_receiver
from weightcast.wire.manifest import Manifest
from weightcast.worker.commits.delta import DeltaSwapCommit, Spare
from weightcast.worker.fit import FitRules, Group, plan_update
from weightcast.worker.result import CommitMode, UpdateResult, finished
from weightcast.worker.route import Route, choose_version, plan_route
from weightcast.worker.serving import Served, StagedUpdate, Stopwatch, Torn
from weightcast.worker.stager import Stager
from weightcast.worker.states import LegacyStatus, Lifecycle, State
from weightcast.worker.streamed import StreamedUpdate
from weightcast.worker.targets.base import Slot
from weightcast.worker.targets.capture import capture_parts

log = logging.getLogger(__name__)

TIMEOUT_S = 180.0

_STAGED: tuple[CommitMode, ...] = ("copy", "swap", "delta")


class LiveModel:
    """A torch module, a list of modules (main and draft) or a mapping of arrays that is updated while it is used.

    A failed update leaves every bit as it was (`copy`, `swap`, `delta`), or restores the version that was served, or says
    FAILED (`inplace`): then the model holds no whole version, and the next update from any source recovers it. A version
    that is a delta is followed to what the model holds, else to the nearest full version. Parameters must not be changed
    from outside while an update is staged, nor between updates by deltas. One update runs at a time; a second is refused.

    `source` is where updates come from unless they say otherwise. `device` is where parameters on the meta device get their
    memory. `groups`, `ignore` and `fixed` are described at `FitRules`. `post_load` runs once after each commit, before the
    new version counts as served, for what an engine derives from its weights.
    """

    def __init__(
        self,
        model: object,
        *,
        rank: int = 0,
        ranks: int = 1,
        source: Source | None = None,
        device: str = "cpu",
        groups: Sequence[Group] = (),
        ignore: Sequence[str] = (),
        fixed: Sequence[str] = (),
        post_load: Callable[[], None] | None = None,
    ) -> None:
        if not 0 <= rank < ranks:
            raise InvalidInput(f"rank {rank} of {ranks} does not exist: ranks count from 0.")
        self.rank, self.ranks = rank, ranks
        self._parts = capture_parts(model, device)
        self._rules = FitRules(groups=groups, ignore=ignore, fixed=fixed)
        self._source = source
        self._post_load = post_load or (lambda: None)
        self._served: Served | None = None
        self._staged: StagedUpdate | None = None
        self._spare: Spare | None = None
        self._torn: Torn | None = None
        self._lifecycle = Lifecycle(State.READY if all(slot.resident for slot in self._slots()) else State.CLEARED)

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """What the model is doing."""
        return self._lifecycle.state

    @property
    def legacy_status(self) -> LegacyStatus:
        """The state as the integer of the legacy protocol."""
        return self._lifecycle.legacy

    @property
    def version(self) -> str | None:
        """The version whose weights are in memory, whole; None if they came from elsewhere, were cleared or are torn."""
        return self._served.manifest.version if self._served else None

    def root_digest(self) -> str:
        """The root digest of the live bytes, computed now. After an update it equals the manifest's.

        Tensors of the version that were ignored are not part of it. A model that never took a version is digested under
        its own parameter names.
        """
        if self._lifecycle.resting is not State.READY or self.state is State.COMMITTING:
            raise WrongState("take the root digest", self.state, [State.READY])
        if self._served is None:
            return root_digest((slot.spec, array_digest(slot.live())) for slot in self._slots())
        algorithm = self._served.manifest.algorithm or DEFAULT
        digests: dict[TensorSpec, str] = {}
        for landing in self._served.plan.landings:
            digest = array_digest(landing.slot.live(), algorithm)
            for entry in (landing.entry, *landing.same):
                if digest != entry.digest or entry.spec not in digests:  # of several slots, the one that is wrong counts
                    digests[entry.spec] = digest
        return root_digest(digests.items(), algorithm)

    # -- updating ------------------------------------------------------------------------------------------------

    def update(
        self,
        version: str | None = None,
        *,
        source: Source | None = None,
        commit: CommitMode = "copy",
        verify_checksum: bool = True,
        timeout: float = TIMEOUT_S,
    ) -> UpdateResult:
        """Bring the model to a version (default: the newest of the source) and wait until it is served.

        A delta on what the model holds is scattered into it, whichever of `copy`, `inplace` and `delta` was asked for; with
        `swap` it moves the spare buffers. `verify_checksum=False` skips comparing payload digests; names, shapes, dtypes,
        groups and completeness are always checked. A version that is already served is a success, and nothing moves.
        """
        if commit not in (*_STAGED, "inplace"):
            raise InvalidInput(f"unknown commit mode {commit!r}: choose copy, swap, inplace or delta.")
        deadline, started = Deadline.after(timeout), time.monotonic()
        with self._chosen(source, version, verify_checksum=verify_checksum, deadline=deadline) as (stager, manifest):
            if self._serves(manifest):
                return finished(manifest.version, self.rank, stager.receiver.url, "none", 0, 0, started=started)
            if commit == "inplace":
                route = stager.route(manifest, self._served)
                if route.full is not None:
                    return self._stream(stager, route, started)
            staged = self._stage(stager, manifest, commit, started)
        return self.commit(staged)

    def stage(
        self,
        version: str | None = None,
        *,
        source: Source | None = None,
        commit: CommitMode = "copy",
        verify_checksum: bool = True,
        timeout: float = TIMEOUT_S,
    ) -> StagedUpdate:
        """The first half of `update`: fetch and verify beside the running model. Follow with `commit` or `abandon`."""
        if commit not in _STAGED:
            raise InvalidInput(f"commit mode {commit!r} cannot be staged: choose copy, swap or delta.")
        deadline, started = Deadline.after(timeout), time.monotonic()
        with self._chosen(source, version, verify_checksum=verify_checksum, deadline=deadline) as (stager, manifest):
            return self._stage(stager, manifest, commit, started)

    def commit(self, staged: StagedUpdate) -> UpdateResult:
        """The second half: make a staged version live, or put everything back and raise `CommitFailed`."""
        self._check_current(staged)
        try:
            staged.deadline.check(f"staging version {staged.manifest.version}")
        except BaseException:
            self.abandon(staged)
            raise
        self._lifecycle.move("commit", State.COMMITTING)
        self._staged = None
        watch, post_load_ran = Stopwatch(), False
        try:
            staged.commit.apply()
            commit_s = watch.lap()
            staged.commit.prove()
            verify_s = staged.verify_s + watch.lap()
            post_load_ran = True
            self._post_load()
            commit_s += watch.lap()
        except BaseException as error:
            self._undo(staged, error, post_load_ran=post_load_ran)
            raise
        self._served, self._torn = Served(staged.manifest, staged.plan, proved=staged.checksum), None
        self._spare = staged.commit.next_spare() if isinstance(staged.commit, DeltaSwapCommit) else None
        self._lifecycle.move("commit", State.READY)
        return finished(
            staged.manifest.version, self.rank, staged.source, staged.mode, len(staged.plan.entries), staged.nbytes,
            stage_s=staged.stage_s, verify_s=verify_s, commit_s=commit_s, started=staged.started,
        )  # fmt: skip

    def abandon(self, staged: StagedUpdate) -> None:
        """Drop a staged version. The model goes on as if it had never been fetched."""
        self._check_current(staged)
        self._staged = None
        self._lifecycle.move("abandon", self._lifecycle.resting)

    def recover(self) -> bool:
        """After a commit that failed and could not be undone: try again to undo it. True if the model is whole again.

        What was there before is kept until this or another update succeeds, and writing it is idempotent, so it may be
        tried as often as it takes. Every update tries it first.
        """
        torn = self._torn
        if torn is None:
            return self._lifecycle.resting is not State.FAILED
        self._lifecycle.begin("recover", State.COMMITTING)
        try:
            torn.commit.undo()
            if torn.post_load_ran:
                self._post_load()
        except BaseException as error:
            self._lifecycle.move("recover", State.FAILED)
            if not isinstance(error, Exception):
                raise
            log.warning("recover rank=%d: what was served before cannot be put back yet: %s", self.rank, error)
            return False  # the next try, or an update to a full version, mends it
        self._torn, self._served = None, torn.served
        self._lifecycle.move("recover", torn.resting)
        return True

    def clear(self) -> None:
        """Free the memory of all parameters and prove it: raises `ClearIncomplete` naming those that others still hold.

        The model keeps its shape and takes any version afterwards. Clearing a cleared model is fine.
        """
        self._lifecycle.begin("clear", State.CLEARING)
        self._served = self._spare = self._torn = None
        watched = [(slot, slot.watch()) for slot in self._slots() if slot.resident]
        try:
            for slot, _ in watched:
                slot.install(None)
        except BaseException:
            self._lifecycle.move("clear", State.FAILED)
            raise
        self._lifecycle.move("clear", State.CLEARED)
        if not all(freed() for _, freed in watched):
            gc.collect()  # reference cycles through modules keep memory a little longer
        held = [slot.spec.name for slot, freed in watched if slot.spec.nbytes and not freed()]
        if held:
            raise ClearIncomplete(held)
        log.info("clear rank=%d tensors=%d", self.rank, len(watched))

    # -- the steps of an update ----------------------------------------------------------------------------------

    def _slots(self) -> list[Slot]:
        return [slot for part in self._parts for slot in part.slots]

    @contextmanager
    def _chosen(
        self, source: Source | None, version: str | None, *, verify_checksum: bool, deadline: Deadline
    ) -> Iterator[tuple[Stager, Manifest]]:
        """A stager with an open receiver, and the version to take. A receiver that the caller passed stays open."""
        if self._torn is not None:
            self.recover()
        given = self._source if source is None else source
        if given is None:
            raise InvalidInput("no source: pass source=… to the call or to LiveModel.")
        receiver = open_receiver(given, rank=self.rank)
        try:
            manifest = choose_version(receiver, version, verify_checksum=verify_checksum, deadline=deadline)
            yield Stager(receiver, self._parts, self._rules, verify_checksum, deadline), manifest
        finally:
            if receiver is not given:
                receiver.close()

    def _serves(self, manifest: Manifest) -> bool:
        if self._served is None or not self._served.proved or self.state is not State.READY:
            return False
        held = self._served.manifest
        return (held.version, held.root_digest) == (manifest.version, manifest.root_digest)

    def _stage(self, stager: Stager, manifest: Manifest, mode: CommitMode, started: float) -> StagedUpdate:
        self._lifecycle.begin("stage", State.STAGING)
        spare, self._spare = self._spare, None  # it is used up now: back only if the commit succeeds
        try:
            ready = stager.stage(manifest, mode, served=self._served, spare=spare)
        except BaseException as error:
            self._lifecycle.move("stage", self._lifecycle.resting)
            _rename_foreign(error, manifest.version)
            raise
        self._staged = StagedUpdate(
            manifest, ready.plan, ready.mode, stager.checksum, stager.receiver.url, ready.commit, ready.nbytes,
            stager.deadline, started, ready.stage_s, ready.verify_s,
        )  # fmt: skip
        self._lifecycle.move("stage", State.STAGED)
        return self._staged

    def _check_current(self, staged: StagedUpdate) -> None:
        if staged is not self._staged:
            raise InvalidInput(f"this update to {staged.manifest.version} was already committed or abandoned.")

    def _undo(self, staged: StagedUpdate, error: BaseException, *, post_load_ran: bool) -> None:
        wanted, cause = staged.manifest.version, f"{type(error).__name__}: {error}"
        try:
            staged.commit.undo()
            if post_load_ran:  # what was derived from the new weights must be derived from the old ones again
                self._post_load()
        except BaseException as second:  # noqa: BLE001 - whatever it was, the model is torn now, and that is raised
            self._torn = Torn(staged.commit, self._served, self._lifecycle.resting, post_load_ran)
            self._served = None
            self._lifecycle.move("undo", State.FAILED)
            raise CommitFailed(
                f"committing {wanted} failed ({cause}) and could not be undone ({type(second).__name__}: {second}). "
                "The model holds no whole version and must not be used; update it again from any source, or call recover()."
            ) from error
        self._lifecycle.move("undo", self._lifecycle.resting)
        if isinstance(error, Exception):
            raise CommitFailed(
                f"committing {wanted} failed and was undone: {cause}. The model holds {self._holds()} as before."
            ) from error

    def _holds(self) -> str:
        if self._lifecycle.resting is State.READY:
            return self.version or "the weights it was made with"
        return "no weights" if self._lifecycle.resting is State.CLEARED else "no whole version"

    def _stream(self, stager: Stager, route: Route, started: float) -> UpdateResult:
        manifest = route.manifest
        plan = plan_update(manifest, self._parts, self._rules, swap=False)
        self._lifecycle.begin("update", State.COMMITTING)
        self._spare = None
        watch = Stopwatch()
        streamed = StreamedUpdate(stager, route, plan)
        try:
            streamed.apply()
            self._post_load()
        except BaseException as error:
            self._restore(streamed, stager.receiver, manifest, error, timeout=stager.deadline.seconds)
            raise
        commit_s = watch.lap()
        self._served, self._torn = Served(manifest, plan, proved=stager.checksum), None
        self._lifecycle.move("update", State.READY)
        return finished(
            manifest.version, self.rank, stager.receiver.url, "inplace", len(plan.entries), streamed.nbytes,
            commit_s=commit_s, started=started,
        )  # fmt: skip

    def _restore(
        self, streamed: StreamedUpdate, receiver: Receiver, manifest: Manifest, error: BaseException, *, timeout: float
    ) -> None:
        """After a failed stream: bring back what was served or say FAILED, and raise. Returns if nothing was touched."""
        resting = self._lifecycle.resting
        streamed.release_adopted()
        if not streamed.touched or resting is not State.READY:
            self._lifecycle.move("restore", resting)
            _rename_foreign(error, manifest.version)
            return
        cause = f"streaming {manifest.version} into the live model failed in the middle ({type(error).__name__}: {error})"
        served, self._served = self._served, None
        try:
            if served is None:
                raise SourceFailed("the model did not come from a version, so there is none to go back to")
            self._restream(receiver, served, Deadline.after(timeout))
        except BaseException as second:  # noqa: BLE001 - whatever it was, the model is torn now, and that is raised
            self._lifecycle.move("restore", State.FAILED)
            raise CommitFailed(
                f"{cause}, and what was served before could not be restored ({type(second).__name__}: {second}). The model "
                "holds no whole version and must not be used; update it again from any source."
            ) from error
        self._served = served
        self._lifecycle.move("restore", State.READY)
        raise CommitFailed(f"{cause}. Version {served.manifest.version} was restored from {receiver.url}.") from error

    def _restream(self, receiver: Receiver, served: Served, deadline: Deadline) -> None:
        manifest = receiver.manifest(served.manifest.version, deadline=deadline)
        if manifest.root_digest != served.manifest.root_digest:
            raise SourceFailed(f"{receiver.url} has other bytes under the name {manifest.version}")
        route = plan_route(receiver, manifest, held=None, deadline=deadline)
        stager = Stager(receiver, self._parts, self._rules, manifest.algorithm is not None, deadline)
        StreamedUpdate(stager, route, served.plan).apply()
        self._post_load()


def _rename_foreign(error: BaseException, version: str) -> None:
    """Raise `UpdateFailed` for an error that is not ours and broke an update before it touched the model."""
    if isinstance(error, Exception) and not isinstance(error, WeightcastError):
        raise UpdateFailed(f"updating to {version} failed and changed nothing: {type(error).__name__}: {error}") from error
