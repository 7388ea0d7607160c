"""What a live model holds, and how that changes: one commit at a time, each of which counts whole or is taken back."""

from __future__ import annotations

from collections.abc import Callable

from weightcast import logs
from weightcast.errors import CommitFailed, InvalidInput, NotFound, UpdateFailed, WeightcastError, WrongState
from weightcast.wire.manifest import Manifest
from weightcast.worker.commits.delta import DeltaSwapCommit, Spare
from weightcast.worker.commits.staged import Tick, prove_landings, silent
from weightcast.worker.result import UpdateResult, finished
from weightcast.worker.scrub import Scrubber
from weightcast.worker.serving import Entered, Former, Served, StagedUpdate, Torn
from weightcast.worker.states import RESTING, Lifecycle, State

log = logs.get(__name__)

_TORN = "The model holds no whole version and must not be used; update it again from any source, or call recover()."


class Holding:
    """The version that is served, the update that is staged or entered, and the ways back. `LiveModel` says what each call
    means; the states are those of `Lifecycle`.
    """

    def __init__(self, state: State, *, rank: int, post_load: Callable[[], None], tick: Tick, keep_previous: bool) -> None:
        self.lifecycle = Lifecycle(state)
        self.served: Served | None = None
        self._rank, self._post_load, self._tick, self._keep_previous = rank, post_load, tick, keep_previous
        self.scrubber = Scrubber(self)
        self._staged: StagedUpdate | None = None
        self._entered: Entered | None = None
        self._spare: Spare | None = None
        self._former: Former | None = None
        self._torn: Torn | None = None

    @property
    def previous(self) -> str | None:
        """The version that `rollback` would lead to."""
        former = self._former
        return former.served.manifest.version if former is not None else None

    def serves(self, manifest: Manifest) -> bool:
        """Whether a version is what the model provably holds."""
        if self.served is None or not self.served.proved or self.lifecycle.state is not State.READY or not manifest.sealed:
            return False
        held = self.served.full or self.served.manifest
        return (held.root_digest, held.version) == (manifest.root_digest, manifest.version)

    # -- staged --------------------------------------------------------------------------------------------------

    def take_spare(self) -> Spare | None:
        """The buffers for the next swap, to be used up. They are also the way back of the swap that left them, if any."""
        spare, self._spare = self._spare, None
        if spare is not None:
            self._drop_former()
        return spare

    def drop_spare(self) -> None:
        """Let go of the buffers for the next swap, unless they are a way back: the memory is needed, or still read."""
        if not self._keep_previous:
            self._spare = None

    def hold(self, staged: StagedUpdate) -> None:
        """Take in an update that has been staged."""
        self._staged = staged
        self.lifecycle.move("stage", State.STAGED)

    def abandon(self, staged: StagedUpdate) -> None:
        """Drop a staged update."""
        self._check_current(staged)
        self._staged = None
        self.lifecycle.move("abandon", self.lifecycle.resting)
        staged.end()

    # -- entered -------------------------------------------------------------------------------------------------

    def commit(self, staged: StagedUpdate, agree: Callable[[], object] = silent) -> UpdateResult:
        """All of it: enter, prove, settle. `agree` may raise before it is settled: then it is taken back."""
        self.enter(staged)
        entered = self._current("prove")
        try:
            self.prove()
            agree()
        except BaseException as error:
            self._take_back(entered, error)
            raise
        return self.settle()

    def enter(self, staged: StagedUpdate) -> None:
        """Apply a staged update, or take it back and raise."""
        self._check_current(staged)
        try:
            staged.deadline.check(f"staging version {staged.version}")
        except BaseException:
            self.abandon(staged)
            raise
        self.lifecycle.move("commit", State.COMMITTING)
        entered = Entered(staged, self._former, self._spare)
        self._staged = self._former = self._spare = None
        staged.timeline.enter("commit")
        try:
            staged.commit.apply()
            staged.take_seal()
            entered.post_load_ran = True
            self._post_load()
            staged.timeline.enter("wait")
            self._entered = entered
        except BaseException as error:
            self._take_back(entered, error)
            raise

    def prove(self) -> None:
        """Compare what was entered with what it must be. Only reads."""
        entered = self._current("prove")
        entered.staged.timeline.enter("proof")
        entered.staged.commit.prove()
        entered.staged.timeline.enter("wait")
        entered.proved = True

    def settle(self) -> UpdateResult:
        """From now on the entered version is the one that is served."""
        entered = self._current("settle")
        staged, before = entered.staged, self.served
        if not entered.proved:
            raise InvalidInput(f"version {staged.version} was entered and not proved: call prove() before settle().")
        staged.timeline.enter("settle")
        self._entered = None
        self.served = Served(staged.manifest, staged.plan, proved=staged.checksum, full=staged.full, sums=staged.sums)
        self.scrubber.follow(before, self.served, staged.commit.growth)
        self._spare = staged.commit.next_spare() if isinstance(staged.commit, DeltaSwapCommit) else None
        if self._keep_previous and before is not None and before.proved and staged.commit.keep_way_back():
            self._former = Former(before, staged.commit)
        self.lifecycle.move("commit", State.READY)
        if self._former is None:
            staged.commit.forget()
        staged.release()
        entered.end_former()
        self._drop_torn()
        staged.acknowledge()
        return finished(
            staged.version, self._rank, staged.source, staged.mode, len(staged.plan.entries), staged.nbytes, staged.timeline
        )  # fmt: skip

    def revert(self) -> None:
        """Take back what was entered."""
        entered = self._current("revert")
        self._entered = None
        try:
            self._go_back(entered)
        except BaseException as error:
            self._tear_entered(entered)
            raise CommitFailed(
                f"the commit of {entered.staged.version} could not be undone ({_named(error)}). {_TORN}"
            ) from error
        self._rest(entered)
        log.info("commit undone", version=entered.staged.version, rank=self._rank, holds=self._holds())

    # -- the ways back -------------------------------------------------------------------------------------------

    def rollback(self) -> str:
        """Take back the last commit that counted, and prove what that leads to."""
        if self._former is None and self.lifecycle.state in RESTING:
            raise NotFound("no earlier version is held to roll back to: update to it from a source instead.")
        self.lifecycle.begin("rollback", State.COMMITTING)
        former, left = self._former, self.served
        if former is None:  # somebody else was faster
            self.lifecycle.move("rollback", self.lifecycle.resting)
            raise NotFound("the earlier version is not held any more: update to it from a source instead.")
        self._former = self._spare = None
        served, commit = former.served, former.commit

        def go_back() -> None:
            commit.undo()
            self._post_load()
            where = f"version {served.manifest.version} after rolling back to it"
            prove_landings(where, served.plan.landings, self._tick)

        try:
            go_back()
        except BaseException as error:
            self._tear(Torn(go_back, served, self.lifecycle.resting, alone=True, end=commit.forget))
            if not isinstance(error, Exception):
                raise
            raise CommitFailed(f"rolling back to {served.manifest.version} failed ({_named(error)}). {_TORN}") from error
        self._spare = commit.spare_after_undo() if isinstance(commit, DeltaSwapCommit) else None
        self.served = served
        self.lifecycle.move("rollback", State.READY)
        commit.forget()
        log.info(
            "model rolled back",
            version=served.manifest.version,
            rank=self._rank,
            before=left.manifest.version if left else None,
        )
        return served.manifest.version

    def recover(self, *, alone: bool = False) -> bool:
        """Try again to go back where that failed. `alone` leaves out what would need a source."""
        if self._torn is None:
            return self.lifecycle.resting is not State.FAILED
        if alone and not self._torn.alone:
            return False
        self.lifecycle.begin("recover", State.COMMITTING)
        try:
            while self._torn is not None and (self._torn.alone or not alone):
                torn = self._torn
                torn.go_back()
                self._torn, self.served, resting = torn.earlier, torn.served, torn.resting
                torn.end()
        except BaseException as error:
            self.lifecycle.move("recover", State.FAILED)
            if not isinstance(error, Exception):
                raise
            log.warning("recovery failed", rank=self._rank, why="what was served before cannot be put back yet", error=error)
            return False  # the next try, or an update to a full version, mends it
        self.lifecycle.move("recover", resting)
        return resting is not State.FAILED

    def forget(self) -> None:
        """Let go of the version and of all ways back: the weights are going to be dropped."""
        self.served = self._spare = None
        self._drop_former()
        self._drop_torn()

    # -- steps ---------------------------------------------------------------------------------------------------

    def _check_current(self, staged: StagedUpdate) -> None:
        if staged is not self._staged:
            raise InvalidInput(f"this update to {staged.version} was already committed or abandoned.")

    def _current(self, operation: str) -> Entered:
        if self._entered is None:
            raise WrongState(operation, self.lifecycle.state, [f"{State.COMMITTING}, after enter()"])
        return self._entered

    def _take_back(self, entered: Entered, error: BaseException) -> None:
        """After an error: undo, and raise what became of it. Returns if `error` itself says it all."""
        commit, wanted = entered.staged.commit, entered.staged.version
        self._entered = None
        try:
            self._go_back(entered)
        except BaseException as second:  # noqa: BLE001 - whatever it was, the model is torn now, and that is raised
            self._tear_entered(entered)
            raise CommitFailed(
                f"committing {wanted} failed ({_named(error)}) and could not be undone ({_named(second)}). {_TORN}"
            ) from error
        self._rest(entered)
        if commit.harmless:
            name_foreign(error, wanted)
        elif isinstance(error, Exception):
            holds = f"The model holds {self._holds()} as before"
            if not commit.undoes_alone:
                holds = f"Version {self._holds()} was restored from {entered.staged.source}"
            raise CommitFailed(f"committing {wanted} failed and was undone: {_named(error)}. {holds}.") from error

    def _go_back(self, entered: Entered) -> None:
        commit = entered.staged.commit
        commit.undo()
        if entered.post_load_ran or not (commit.undoes_alone or commit.harmless):
            self._post_load()  # what was derived from other weights must be derived from the old ones again

    def _rest(self, entered: Entered) -> None:
        self.lifecycle.move("undo", self.lifecycle.resting)
        entered.staged.end()
        entered.end_former()

    def _tear_entered(self, entered: Entered) -> None:
        staged = entered.staged
        entered.end_former()
        self._tear(
            Torn(
                lambda: self._go_back(entered), self.served, self.lifecycle.resting,
                alone=staged.commit.undoes_alone, end=staged.end, earlier=self._torn,
            )
        )  # fmt: skip

    def _tear(self, torn: Torn) -> None:
        self._torn, self.served = torn, None
        self.lifecycle.move("undo", State.FAILED)

    def _drop_former(self) -> None:
        former, self._former = self._former, None
        if former is not None:
            former.commit.forget()

    def _drop_torn(self) -> None:
        while self._torn is not None:
            torn, self._torn = self._torn, self._torn.earlier
            torn.end()

    def _holds(self) -> str:
        if self.lifecycle.resting is State.READY:
            return self.served.manifest.version if self.served else "the weights it was made with"
        return "no weights" if self.lifecycle.resting is State.CLEARED else "no whole version"


def name_foreign(error: BaseException, version: str) -> None:
    """Raise `UpdateFailed` for an error that is not ours and broke an update before it touched the model."""
    if isinstance(error, Exception) and not isinstance(error, WeightcastError):
        raise UpdateFailed(f"updating to {version} failed and changed nothing: {_named(error)}") from error


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
