"""LiveModel: a model in memory that takes new versions whole or not at all."""

from __future__ import annotations

import gc
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Self, get_args

from msgspec.structs import replace

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import ClearIncomplete, DigestMismatch, InvalidInput, WeightcastError, WrongState
from weightcast.tensors.digest import DEFAULT, algorithm_of, array_digest
from weightcast.tensors.flat import Array
from weightcast.tensors.sums import Sum, root_of_sums
from weightcast.transports.base import AcknowledgingReceiver, Receiver
from weightcast.transports.kept import KeptReceiver, Use
from weightcast.transports.registry import Source
from weightcast.wire.manifest import Manifest, TensorEntry, compute_root
from weightcast.worker.agreement import Agreement, AllReduce
from weightcast.worker.buffers import Buffers
from weightcast.worker.commits.staged import silent
from weightcast.worker.fit import FitRules, Group
from weightcast.worker.holding import Holding, name_foreign
from weightcast.worker.result import CommitMode, Timeline, UpdateResult, WholeMode, finished
from weightcast.worker.route import choose_version
from weightcast.worker.scrub import ScrubReport
from weightcast.worker.serving import StagedUpdate
from weightcast.worker.shard_layout import Shards
from weightcast.worker.shard_sums import BoxSum
from weightcast.worker.shard_target import BoxTarget
from weightcast.worker.shard_version import ShardVersion
from weightcast.worker.stager import Stager
from weightcast.worker.states import LegacyStatus, State
from weightcast.worker.targets.base import Slot, live_proof
from weightcast.worker.targets.capture import CapturedPart, capture_parts

log = logs.get(__name__)

TIMEOUT_S = 180.0
_ACKNOWLEDGE_S = 2.0
_THREADS = 2  # copy at the speed of the memory: more would only take cores from whoever serves


class LiveModel:
    """A torch module, a list of modules (main and draft) or a mapping of arrays that is updated while it is used.

    A failed update leaves every bit as it was (`copy`, `swap`, `delta`), or restores the version that was served, or says
    FAILED (`inplace`): then the model holds no whole version, and the next update from any source recovers it. A version
    that is a delta is followed to what the model holds, else to the nearest full version. Parameters must not be changed
    from outside while an update is staged, nor between updates by deltas. One update runs at a time; a second is refused.

    Of a module that FSDP2 shards, or other DTensors, each rank has a `LiveModel` of its own, which takes the boxes that the
    rank holds. `layout` says the same of a model with tensor parallelism of its own: which boxes of a version's tensors its
    parameters are made of (`Shards`). Such a model is committed by `copy`, `inplace` or `delta`, with `layout` also by
    `swap`; its `served_manifest` and `root_digest` are those of its own parameters.

    `all_reduce` lets the ranks of such a model update together or not at all: it gets an array of int64, adds it up over all
    ranks and returns it, or raises if a rank does not come in time. Then all ranks must call `update`, or `stage` and
    `commit`, at the same time. What they staged must add up to the version before any of them commits, and a commit that
    fails on one rank is taken back on all. `enter`, `prove` and `settle` agree on nothing. Without it ranks do not know of
    each other, and each proves the bytes that it fetches.

    `rank` is who this is: sources that hold a file for each rank (`snapshot://`, `legacy-ipc://`) give that rank's, and
    results, logs and errors name it. `strip_wrappers` compares names without what `torch.compile`, activation checkpointing,
    FSDP1 and DDP put into them, in the model and in versions.

    `source` is where updates come from unless they say otherwise. `device` is where parameters on the meta device get their
    memory. `groups`, `ignore` and `fixed` are described at `FitRules`. `post_load` runs once after each commit, before the
    new version counts as served, for what an engine derives from its weights. `tick` is called after every slot and every
    streamed piece of a commit, of its proof and of its undoing, by the thread that does it, to show that a long one lives;
    it must not raise. `keep_previous` False frees what `rollback` needs when a version counts: up to the size of the model.
    `whole_by` is how a version that was fetched whole is committed where `delta` was asked for.

    Memory that a version was staged in, or that was swapped out, is used again for the next update once nothing refers to
    it any more; so at rest there is as much of it as an update needs. `clear`, and a commit in place, let go of it.
    `buffers` is where it waits, to share it with whoever makes the versions. `threads` copy versions out of shared memory.
    A connection to such a source is kept for the next update: `close`, or leaving the context, ends it. `name` is what a
    depot knows this model by, which it tells what it serves.
    """

    def __init__(
        self,
        model: object,
        *,
        rank: int = 0,
        source: Source | None = None,
        device: str = "cpu",
        layout: Shards | None = None,
        all_reduce: AllReduce | None = None,
        strip_wrappers: bool = False,
        groups: Sequence[Group] = (),
        ignore: Sequence[str] = (),
        fixed: Sequence[str] = (),
        post_load: Callable[[], None] | None = None,
        tick: Callable[[], None] | None = None,
        keep_previous: bool = True,
        whole_by: WholeMode = "copy",
        threads: int | None = None,
        buffers: Buffers | None = None,
        name: str | None = None,
    ) -> None:
        if rank < 0:
            raise InvalidInput(f"rank {rank} does not exist: ranks count from 0.")
        if threads is not None and threads < 1:
            raise InvalidInput(f"{threads} threads cannot copy anything: give 1 or more.")
        self.rank = rank
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._threads = threads or min(_THREADS, os.cpu_count() or 1)
        self._buffers = Buffers() if buffers is None else buffers
        self._kept = KeptReceiver()
        self._parts = capture_parts(model, device, strip_wrappers=strip_wrappers)
        self._rules = FitRules(groups=groups, ignore=ignore, fixed=fixed, strip_wrappers=strip_wrappers)
        self._boxes = BoxTarget.of(self._parts, self._rules, layout)
        self._agreement = Agreement(all_reduce) if all_reduce is not None else None
        if self._agreement is not None and self._boxes is None:
            raise InvalidInput("all_reduce is for ranks that hold a model between them: give a layout, or a sharded module.")
        self._source = source
        self._tick = tick or silent
        self._whole_by: WholeMode = whole_by
        state = State.READY if all(slot.resident for slot in self._slots()) else State.CLEARED

        self._holding = Holding(
            state,
            rank=rank,
            post_load=partial(_after_write, self._parts, post_load),
            tick=self._tick,
            keep_previous=keep_previous,
        )

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """What the model is doing."""
        return self._holding.lifecycle.state

    @property
    def legacy_status(self) -> LegacyStatus:
        """The state as the integer of the legacy protocol."""
        return self._holding.lifecycle.legacy

    @property
    def version(self) -> str | None:
        """The version whose weights are in memory, whole; None if they came from elsewhere, were cleared or are torn."""
        manifest = self.served_manifest
        return manifest.version if manifest is not None else None

    @property
    def served_manifest(self) -> Manifest | None:
        """The manifest of `version`. An entered commit does not count before it is settled."""
        served = self._holding.served
        return served.manifest if served is not None else None

    @property
    def previous(self) -> str | None:
        """The version that `rollback` would lead to; None if it is not held any more."""
        return self._holding.previous

    def root_digest(self) -> str:
        """The root digest of the live bytes, computed now. After an update it equals the manifest's.

        Tensors of the version that were ignored are not part of it. A model that never took a version is digested under
        its own parameter names.
        """
        if self._holding.lifecycle.resting is not State.READY or self.state is State.COMMITTING:
            raise WrongState("take the root digest", self.state, [State.READY])
        served = self._holding.served
        if served is None:
            return root_of_sums((slot.spec, live_proof(slot, slot.spec, str(Sum()), self._tick)) for slot in self._slots())
        found: dict[str, TensorEntry] = {}
        for landing in served.plan.landings:
            for entry in (landing.entry, *landing.same):
                live = _live_entry(entry, landing.slot, self._tick)
                if live != entry or entry.name not in found:  # of several slots, the one that is wrong counts
                    found[entry.name] = live
            self._tick()
        return compute_root(tuple(found.values()), served.manifest.algorithm or DEFAULT)

    # -- updating in one step ------------------------------------------------------------------------------------

    @logs.updating()
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
        _check_mode(commit)
        deadline, timeline = Deadline.after(timeout), Timeline()
        chosen = self._chosen(source, version, timeline, verify_checksum=verify_checksum, deadline=deadline)
        with self._together(), chosen as (stager, manifest, use):
            if self._holding.serves(manifest):
                self._agree_on_served(manifest)
                if isinstance(stager.receiver, AcknowledgingReceiver):  # or a publisher waits for this reader
                    stager.receiver.acknowledge(manifest, self.name, deadline=Deadline.after(_ACKNOWLEDGE_S))
                return finished(manifest.version, self.rank, stager.receiver.url, "none", 0, 0, timeline)
            staged = self._stage(stager, manifest, commit, use)
        return self.commit(staged)

    # -- updating in steps: stage, then commit or abandon ----------------------------------------------------------

    @logs.updating()
    def stage(
        self,
        version: str | None = None,
        *,
        source: Source | None = None,
        commit: CommitMode = "copy",
        verify_checksum: bool = True,
        timeout: float = TIMEOUT_S,
        deadline: Deadline | None = None,
    ) -> StagedUpdate:
        """Fetch and verify beside the running model. Follow with `commit`, `enter` or `abandon`.

        With `inplace` only what it takes is checked: the bytes are streamed by `enter`, and the source stays open until the
        update has ended. `deadline` goes before `timeout`, and may be one that can be cancelled.
        """
        _check_mode(commit)
        deadline, timeline = deadline or Deadline.after(timeout), Timeline()
        chosen = self._chosen(source, version, timeline, verify_checksum=verify_checksum, deadline=deadline)
        with self._together(), chosen as (stager, manifest, use):
            return self._stage(stager, manifest, commit, use)

    def commit(self, staged: StagedUpdate) -> UpdateResult:
        """Make a staged version live, or put everything back and raise `CommitFailed`: `enter`, `prove` and `settle`."""
        if self._agreement is None:
            return self._holding.commit(staged)
        with self._agreement.round():
            return self._holding.commit(staged, partial(self._agreement.agree, f"committing {staged.version}"))

    def abandon(self, staged: StagedUpdate) -> None:
        """Drop a staged version. The model goes on as if it had never been fetched."""
        self._holding.abandon(staged)

    # -- a commit in steps, for ranks that commit together: enter, prove, then settle or revert ----------------------

    def enter(self, staged: StagedUpdate) -> None:
        """Write a staged version into the model and run `post_load`: what an engine pauses for. It does not count yet.

        If this fails, everything is put back and `CommitFailed` raised, or the model is FAILED. `previous` lapses.
        """
        self._holding.enter(staged)

    def prove(self) -> None:
        """Compare the live bytes of what was entered with what they must be; `DigestMismatch` asks for `revert`.

        It only reads, so it may run in another thread while the model is used.
        """
        self._holding.prove()

    def settle(self) -> UpdateResult:
        """Let the entered and proved version count: from now on it is the one that is served."""
        return self._holding.settle()

    def revert(self) -> None:
        """Take back what was entered: the version from before, every bit of it, and `post_load` again.

        If that fails the model is FAILED, and `CommitFailed` is raised. Not while `prove` still runs.
        """
        self._holding.revert()

    # -- going back ------------------------------------------------------------------------------------------------

    def rollback(self) -> str:
        """Go back to the version before the last commit, prove it against its digests, serve it, and return its name.

        What that needs is held since a `copy`, `swap` or `delta` commit, until the next one is entered, a swap by delta is
        staged, or the model is cleared. `NotFound` if it is not. If it fails the model is FAILED: `CommitFailed`.
        """
        return self._holding.rollback()

    def recover(self) -> bool:
        """After a commit that failed and could not be undone: try again to undo it. True if the model is whole again.

        What was there before is kept until this or another update succeeds, and writing it is idempotent, so it may be
        tried as often as it takes. Every update tries it first, except where it would need the source of an `inplace` one.
        """
        return self._holding.recover()

    def clear(self) -> None:
        """Free the memory of all parameters and prove it: raises `ClearIncomplete` naming those that others still hold.

        The model keeps its shape and takes any version afterwards. Clearing a cleared model is fine.
        """
        if any(part.boxes for part in self._parts):
            raise InvalidInput(
                "the memory of distributed parameters belongs to what distributes them: it cannot be cleared."
            )
        lifecycle = self._holding.lifecycle
        lifecycle.begin("clear", State.CLEARING)
        self._buffers.clear()  # and what comes back from now on is freed
        self._holding.forget()
        watched = [(slot, slot.watch()) for slot in self._slots() if slot.resident]
        try:
            for slot, _ in watched:
                slot.install(None)
        except BaseException:
            lifecycle.move("clear", State.FAILED)
            raise
        lifecycle.move("clear", State.CLEARED)
        self._kept.close()
        if not all(freed() for _, freed in watched):
            gc.collect()  # reference cycles through modules keep memory a little longer
        held = [slot.spec.name for slot, freed in watched if slot.spec.nbytes and not freed()]
        if held:
            raise ClearIncomplete(held)
        log.info("weights cleared", rank=self.rank, tensors=len(watched))

    def drop_spare(self) -> None:
        """Let go of the memory that a swap took out of the model, unless `rollback` needs it: the next swap by delta would
        write there, and somebody may still read it. Not while an update is staged.
        """
        self._holding.drop_spare()

    # -- scrubbing ---------------------------------------------------------------------------------------------------

    def scrub(self, share: float, damaged: Callable[[DigestMismatch], None]) -> None:
        """Compare live memory with what was committed all the time, in a thread that takes at most this share of one core.

        It finds foreign writes and bit rot. `damaged` is called with what was found, once for each version, by that thread.
        """
        if not 0 < share <= 1:
            raise InvalidInput(f"a scrubber cannot take {share:g} of a core: give a share above 0 and up to 1.")
        self._holding.scrubber.start(share, damaged)

    @property
    def scrubbed(self) -> ScrubReport:
        """How long the last pass of the scrubber took, and when it ended."""
        return self._holding.scrubber.report

    def close(self) -> None:
        """End the scrubber and the connection to a source that was kept for the next update. The model stays as it is."""
        self._holding.scrubber.stop()
        self._kept.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- steps ---------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Array]:
        """The live weights by every name of theirs, to be read: views where they are in host memory, else copies."""
        return {name: slot.live() for slot in self._slots() for name in slot.names}

    def _slots(self) -> list[Slot]:
        return [slot for part in self._parts for slot in part.slots]

    @contextmanager
    def _chosen(
        self, source: Source | None, version: str | None, timeline: Timeline, *, verify_checksum: bool, deadline: Deadline
    ) -> Iterator[tuple[Stager, Manifest, Use]]:
        """A stager with an open receiver, the version to take, and the use of the receiver, which ends with the context.

        A receiver that the caller passed stays open.
        """
        self._holding.recover(alone=True)
        given = self._source if source is None else source
        if given is None:
            raise InvalidInput("no source: pass source=… to the call or to LiveModel.")
        ask = partial(choose_version, version=version, verify_checksum=verify_checksum, deadline=deadline)
        use, manifest = self._kept.open(given, rank=self.rank, ask=ask)
        with use as receiver:
            stager = Stager(
                receiver, self._parts, self._rules, verify_checksum, deadline, self._buffers, self._threads, self._tick,
                timeline, self._whole_by,
            )  # fmt: skip
            yield stager, manifest, use

    def _stage(self, stager: Stager, manifest: Manifest, mode: CommitMode, use: Use) -> StagedUpdate:
        holding = self._holding
        holding.lifecycle.begin("stage", State.STAGING)
        version: ShardVersion | None = None
        own = stager
        stager.timeline.enter("stage")
        try:
            if self._boxes is not None:
                version = self._boxes.cut(stager, manifest, holding.served, mode)
                own, manifest, mode = self._boxes.staging(stager, version, mode)
            ready = own.stage(
                manifest,
                mode,
                served=holding.served,
                whole=holding.lifecycle.resting is State.READY,
                take_spare=holding.take_spare,
                drop_spare=holding.drop_spare,
            )
        except BaseException as error:
            if version is not None:
                version.close()
            holding.lifecycle.move("stage", holding.lifecycle.resting)
            name_foreign(error, manifest.version)
            raise
        release = silent if ready.commit.undoes_alone else use.outlast()
        full = None if version is None else version.full
        tell = (
            partial(logs.carried(self._acknowledge), use.source, full or ready.manifest)
            if isinstance(use.receiver, AcknowledgingReceiver)
            else silent
        )
        staged = StagedUpdate(
            ready.manifest, ready.plan, ready.mode, stager.checksum, stager.receiver.url, ready.commit,
            ready.nbytes if version is None else version.nbytes,
            stager.deadline, stager.timeline,
            release if version is None else partial(_end_cut, version, release), tell, full,
        )  # fmt: skip
        stager.timeline.enter("wait")
        holding.hold(staged)
        if self._agreement is not None and version is not None:
            try:
                staged.sums = version.sums(ready.commit, stager.deadline)
                self._agree(version.full, staged.sums, proved=stager.checksum)
            except BaseException:
                holding.abandon(staged)
                raise
        return staged

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What all ranks do at the same time, if they agree on updates: none of them waits for one that has failed."""
        with self._agreement.round() if self._agreement is not None else nullcontext():
            yield

    def _agree(self, full: Manifest, sums: Sequence[BoxSum], *, proved: bool, moves: bool = True) -> bool:
        """All ranks hold or have staged the same version, and add up to it. Gives whether any rank will commit."""
        agreement, boxes = self._agreement, self._boxes
        if agreement is None or boxes is None:
            return moves
        by_tensor = boxes.tensor_sums(full, sums)
        agreed = agreement.agree(f"staging {full.version}", state=full.root_digest, moves=moves, proved=proved)
        agreement.check_sums(full, by_tensor, proved=agreed.proved)
        return agreed.moves

    def _agree_on_served(self, manifest: Manifest) -> None:
        """A rank that serves the version already takes part in what the other ranks agree on."""
        agreement, served = self._agreement, self._holding.served
        if agreement is None or served is None:
            return
        if self._agree(served.full or manifest, served.sums, proved=served.proved, moves=False):
            agreement.agree(f"committing {manifest.version}")

    def _acknowledge(self, source: Source, manifest: Manifest) -> None:
        """Tell the source that a version is served, so that it keeps what the next delta is made on."""
        deadline = Deadline.after(_ACKNOWLEDGE_S)

        def tell(receiver: Receiver) -> None:
            if isinstance(receiver, AcknowledgingReceiver):
                receiver.acknowledge(manifest, self.name, deadline=deadline)

        try:
            use, _ = self._kept.open(source, rank=self.rank, ask=tell)
        except WeightcastError as error:
            log.warning("acknowledgement failed", version=manifest.version, rank=self.rank, source=source, error=error)
        else:
            with use:
                return


def _after_write(parts: Sequence[CapturedPart], post_load: Callable[[], None] | None) -> None:
    for part in parts:
        part.reshard()
    if post_load is not None:
        post_load()


def _end_cut(version: ShardVersion, release: Callable[[], None]) -> None:
    version.close()
    release()


def _live_entry(entry: TensorEntry, slot: Slot, tick: Callable[[], None]) -> TensorEntry:
    """A tensor with the sum of its live elements, or, in format 1, the digest of its live bytes."""
    if entry.sum or not entry.digest:
        return replace(entry, sum=live_proof(slot, entry.sum_spec, str(Sum()), tick))
    return replace(entry, digest=array_digest(slot.live(), algorithm_of(entry.digest)))


def _check_mode(mode: str) -> None:
    if mode not in get_args(CommitMode):
        raise InvalidInput(f"unknown commit mode {mode!r}: choose copy, swap, inplace or delta.")
