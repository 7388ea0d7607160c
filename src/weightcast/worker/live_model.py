"""LiveModel: a model in memory that takes new versions whole or not at all."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

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
from weightcast.worker.choose import choose_version
from weightcast.worker.commits.inplace import InplaceCommit
from weightcast.worker.commits.staged import CopyCommit, StagedCommit, SwapCommit
from weightcast.worker.fit import FitRules, Group, plan_update
from weightcast.worker.result import CommitMode, UpdateResult
from weightcast.worker.serving import Served, StagedUpdate, Stopwatch
from weightcast.worker.staging import Staging
from weightcast.worker.states import LegacyStatus, Lifecycle, State
from weightcast.worker.targets.base import Slot
from weightcast.worker.targets.capture import capture_parts

log = logging.getLogger(__name__)

TIMEOUT_S = 180.0

_STAGED_COMMITS: dict[CommitMode, type[StagedCommit]] = {"copy": CopyCommit, "swap": SwapCommit}


class LiveModel:
    """A torch module, a list of modules (main and draft) or a mapping of arrays that is updated while it is used.

    A failed update leaves every bit as it was (`copy`, `swap`), or restores the version that was served, or says FAILED
    (`inplace`): then the model holds no whole version, and the next update from any source recovers it. Parameters must not
    be changed from outside while an update is staged. One update runs at a time; a second one is refused.

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

        `verify_checksum=False` skips comparing payload digests; names, shapes, dtypes, groups and completeness are always
        checked. A version that is already served is a success, and nothing moves.
        """
        if commit not in (*_STAGED_COMMITS, "inplace"):
            raise InvalidInput(f"unknown commit mode {commit!r}: choose copy, swap or inplace.")
        deadline, started = Deadline.after(timeout), time.monotonic()
        with self._chosen(source, version, verify_checksum=verify_checksum, deadline=deadline) as (receiver, manifest):
            if self._serves(manifest):
                return self._result(manifest, receiver.url, "none", 0, 0, total_s=time.monotonic() - started)
            if commit == "inplace":
                return self._stream(receiver, manifest, verify_checksum, deadline, started)
            staged = self._stage(receiver, manifest, commit, verify_checksum, deadline, started)
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
        if commit not in _STAGED_COMMITS:
            raise InvalidInput(f"commit mode {commit!r} cannot be staged: choose copy or swap.")
        deadline, started = Deadline.after(timeout), time.monotonic()
        with self._chosen(source, version, verify_checksum=verify_checksum, deadline=deadline) as (receiver, manifest):
            return self._stage(receiver, manifest, commit, verify_checksum, deadline, started)

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
        self._served = Served(staged.manifest, staged.plan, proved=staged.checksum)
        self._lifecycle.move("commit", State.READY)
        return self._result(
            staged.manifest, staged.source, staged.mode, len(staged.plan.entries), staged.plan.nbytes,
            stage_s=staged.stage_s, verify_s=verify_s, commit_s=commit_s, total_s=time.monotonic() - staged.started,
        )  # fmt: skip

    def abandon(self, staged: StagedUpdate) -> None:
        """Drop a staged version. The model goes on as if it had never been fetched."""
        self._check_current(staged)
        self._staged = None
        self._lifecycle.move("abandon", self._lifecycle.resting)

    def clear(self) -> None:
        """Free the memory of all parameters and prove it: raises `ClearIncomplete` naming those that others still hold.

        The model keeps its shape and takes any version afterwards. Clearing a cleared model is fine.
        """
        self._lifecycle.begin("clear", State.CLEARING)
        self._served = None
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
    ) -> Iterator[tuple[Receiver, Manifest]]:
        """An open receiver and the version to take from it. A receiver that the caller passed stays open: it is theirs."""
        given = self._source if source is None else source
        if given is None:
            raise InvalidInput("no source: pass source=… to the call or to LiveModel.")
        receiver = open_receiver(given, rank=self.rank)
        try:
            serving = self._serving()
            chosen = choose_version(receiver, version, serving=serving, verify_checksum=verify_checksum, deadline=deadline)
            yield receiver, chosen
        finally:
            if receiver is not given:
                receiver.close()

    def _serving(self) -> Manifest | None:
        return self._served.manifest if self._served else None

    def _serves(self, manifest: Manifest) -> bool:
        if self._served is None or not self._served.proved or self.state is not State.READY:
            return False
        held = self._served.manifest
        return (held.version, held.root_digest) == (manifest.version, manifest.root_digest)

    def _stage(
        self, receiver: Receiver, manifest: Manifest, mode: CommitMode, checksum: bool, deadline: Deadline, started: float
    ) -> StagedUpdate:
        self._lifecycle.begin("stage", State.STAGING)
        watch = Stopwatch()
        try:
            plan = plan_update(manifest, self._parts, self._rules, swap=mode == "swap")
            staging = Staging(plan.entries)
            staging.fill(receiver, manifest, deadline)
            stage_s = watch.lap()
            verified = staging.verify(manifest, checksum=checksum)
            verify_s = watch.lap()
            commit = _STAGED_COMMITS[mode](plan, verified)
            commit.prepare()
            stage_s += watch.lap()
        except BaseException as error:
            self._lifecycle.move("stage", self._lifecycle.resting)
            _rename_foreign(error, manifest.version)
            raise
        self._staged = StagedUpdate(
            manifest, plan, mode, checksum, receiver.url, commit, deadline, started, stage_s, verify_s
        )
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
            self._served = None
            self._lifecycle.move("undo", State.FAILED)
            raise CommitFailed(
                f"committing {wanted} failed ({cause}) and could not be undone ({type(second).__name__}: {second}). "
                "The model holds no whole version and must not be used; update it again from any source."
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

    def _stream(
        self, receiver: Receiver, manifest: Manifest, checksum: bool, deadline: Deadline, started: float
    ) -> UpdateResult:
        plan = plan_update(manifest, self._parts, self._rules, swap=False)
        self._lifecycle.begin("update", State.COMMITTING)
        watch = Stopwatch()
        inplace = InplaceCommit(plan, receiver, manifest)
        try:
            inplace.apply(checksum=checksum, deadline=deadline)
            self._post_load()
        except BaseException as error:
            self._restore(inplace, receiver, manifest, error, timeout=deadline.seconds)
            raise
        commit_s = watch.lap()
        self._served = Served(manifest, plan, proved=checksum)
        self._lifecycle.move("update", State.READY)
        return self._result(
            manifest, receiver.url, "inplace", len(plan.entries), plan.nbytes,
            commit_s=commit_s, total_s=time.monotonic() - started,
        )  # fmt: skip

    def _restore(
        self, inplace: InplaceCommit, receiver: Receiver, manifest: Manifest, error: BaseException, *, timeout: float
    ) -> None:
        """After a failed stream: bring back what was served or say FAILED, and raise. Returns if nothing was touched."""
        resting = self._lifecycle.resting
        inplace.release_adopted()
        if not inplace.touched or resting is not State.READY:
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
        checksum = manifest.algorithm is not None
        InplaceCommit(served.plan, receiver, manifest).apply(checksum=checksum, deadline=deadline)
        self._post_load()

    def _result(
        self,
        manifest: Manifest,
        source: str,
        mode: CommitMode | Literal["none"],
        tensors: int,
        nbytes: int,
        *,
        stage_s: float = 0.0,
        verify_s: float = 0.0,
        commit_s: float = 0.0,
        total_s: float,
    ) -> UpdateResult:
        log.info(
            "update version=%s rank=%d mode=%s tensors=%d nbytes=%d stage_s=%.3f verify_s=%.3f commit_s=%.3f via=%s",
            manifest.version, self.rank, mode, tensors, nbytes, stage_s, verify_s, commit_s, source,
        )  # fmt: skip
        return UpdateResult(
            version=manifest.version, rank=self.rank, source=source, mode=mode, tensors=tensors, bytes=nbytes,
            stage_s=stage_s, verify_s=verify_s, commit_s=commit_s, total_s=total_s,
        )  # fmt: skip


def _rename_foreign(error: BaseException, version: str) -> None:
    """Raise `UpdateFailed` for an error that is not ours and broke an update before it touched the model."""
    if isinstance(error, Exception) and not isinstance(error, WeightcastError):
        raise UpdateFailed(f"updating to {version} failed and changed nothing: {type(error).__name__}: {error}") from error
