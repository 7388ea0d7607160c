"""One copy of a version in checkpoint coordinates. Deltas are written into it; a whole version is staged beside it."""

from __future__ import annotations

import math
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.delta.edit import TensorEdit
from weightcast.delta.memory import HostMemory
from weightcast.engines.host.shared import whole_lines
from weightcast.errors import (
    BaseVersionMismatch,
    CommitFailed,
    DeadlineExceeded,
    UpdateCancelled,
    WeightcastError,
    WrongState,
)
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec
from weightcast.transports.base import AcknowledgingReceiver, Receiver
from weightcast.transports.kept import KeptReceiver
from weightcast.wire.manifest import Manifest, TensorEntry
from weightcast.worker.buffers import Buffers
from weightcast.worker.commits.staged import silent
from weightcast.worker.live_model import LiveModel
from weightcast.worker.route import choose_version
from weightcast.worker.serving import StagedUpdate

log = logs.get(__name__)

_ACKNOWLEDGE_S = 2.0
_SLICE_S = 0.1  # between two looks at whether somebody said stop
_LETTING_GO_S = 0.5  # for ranks that have committed to say so

Fits = Callable[[Manifest], None]
MakeBuffers = Callable[[int], Buffers]


@dataclass(frozen=True)
class Wanted:
    """What to stage: a version (None: the newest of the source), and where from. The same in more time is the same."""

    source: str
    version: str | None = None
    verify_checksum: bool = True
    timeout: float = field(default=180.0, compare=False)


@dataclass(eq=False)
class StagedVersion:
    """A version that lies verified in memory. `arrays` must only be read, and only until it is committed or abandoned.

    `former` are the tensors of the version that was committed before, empty if there is none. Where the version was
    written over them, each one that changed is made again when it is asked for. `memory` is the same for versions that are
    written over one another. `nbytes` is what was fetched for it.
    """

    manifest: Manifest
    arrays: Mapping[str, Array]
    former: Mapping[str, Array] = field(default_factory=dict)
    former_manifest: Manifest | None = None
    memory: object = field(default_factory=object)
    nbytes: int = 0


class HostVersions(Protocol):
    """Where a rank gets staged versions from: its own memory, or that of another process on its host."""

    def stage(self, wanted: Wanted, *, fits: Fits, deadline: Deadline) -> StagedVersion:
        """Fetch and verify a version, or raise; nothing that counts is changed. `fits` refuses a manifest before any byte of
        it is fetched. The same version may be asked for again.
        """

    def commit(self, staged: StagedVersion) -> None:
        """It is what the engine serves now: the next delta starts on it. Raises `WrongState` if something else was staged
        since: then nothing is changed, and the next delta starts further back.
        """

    def abandon(self, staged: StagedVersion) -> None:
        """It is not going to be served."""

    def close(self) -> None:
        """Release connections and memory."""


@dataclass(frozen=True)
class _Known:
    """What a version is known by: its manifest as the source offered it, and as it is when all digests are known.

    `proved` is false if nobody asked for its digests to be compared.
    """

    offered: Manifest
    manifest: Manifest
    proved: bool

    def answers(self, manifest: Manifest, wanted: Wanted) -> bool:
        """Whether it is the version that a source offers, in the way it is wanted. Without digests nobody can tell."""
        if not manifest.root_digest or (wanted.verify_checksum and not self.proved):
            return False
        roots = (self.offered.root_digest, self.manifest.root_digest)
        return manifest.version == self.manifest.version and manifest.root_digest in roots


class _Shape:
    """Memory for versions with the same names, shapes and dtypes: `arrays` is the one that counts, moved by `live`.

    `memory` stands for the memory that `arrays` lie in.
    """

    def __init__(self, specs: frozenset[TensorSpec], make_buffers: MakeBuffers, name: str) -> None:
        self.specs = specs
        self.known: _Known | None = None
        self.arrays: dict[str, Array] = {spec.name: np.empty(spec.shape, spec.dtype.numpy) for spec in specs}
        buffers = make_buffers(sum(whole_lines(spec.nbytes) for spec in specs))
        self.live = LiveModel(self.arrays, buffers=buffers, keep_previous=False, whole_by="swap", name=name)
        self.live.clear()  # it takes over the memory that a version is staged in
        self.memory = object()

    def write(self, update: StagedUpdate) -> FormerArrays:
        """Write the changes of a delta into `arrays`, read them back, and give what was there. A failure is undone."""
        edits = list(update.commit.changes())
        self.live.enter(update)
        try:
            self.live.prove()
        except BaseException:
            self.live.revert()
            raise
        return FormerArrays(dict(self.arrays), lambda: edits)


class FormerArrays(Mapping[str, Array]):
    """The tensors of a version that another one was written over: what changed is a copy with the old values in it.

    `find_edits` is called when the first of them is asked for.
    """

    def __init__(self, arrays: Mapping[str, Array], find_edits: Callable[[], Iterable[TensorEdit]]) -> None:
        self._arrays, self._find_edits = arrays, find_edits
        self._edits: dict[str, TensorEdit] | None = None

    @property
    def edits(self) -> Mapping[str, TensorEdit]:
        """The old and the new values, by the name of the tensor."""
        if self._edits is None:
            self._edits = {edit.spec.name: edit for edit in self._find_edits()}
        return self._edits

    def __getitem__(self, name: str) -> Array:
        array, edit = self._arrays[name], self.edits.get(name)
        if edit is None:
            return array
        copy = array.copy()
        HostMemory(edit.spec, copy).write(edit.indices, edit.before)
        return copy

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


@dataclass(frozen=True, eq=False)
class _Next:
    """What is staged. Without an `update` it is the version that counts already. `tell` is the source, if it wants to know
    what becomes of it.
    """

    version: StagedVersion
    known: _Known
    shape: _Shape
    update: StagedUpdate | None = None
    tell: str | None = None

    @property
    def written(self) -> bool:
        """Whether it lies in the memory of the version that counts."""
        return self.version.memory is self.shape.memory


def _own_buffers(_: int) -> Buffers:
    return Buffers()


class HostCopy:
    """The copy, in this process. Any thread may call; a version is staged once, for however many ask for it.

    A delta is worked out and proved against the version that counts, and written into its memory. If it is given up, the old
    values are written back before anything else is staged. Memory that somebody reads is never written: a delta goes into
    a copy of it then, and if old values would have to be written there, the next version is fetched whole.

    Memory: the committed version, and beside it the next one if that is whole, in what `make_buffers` gives for versions of
    so many bytes. `seed` is a source with the version that the engine was started with, for a delta whose base no source
    has. `name` is what depots know the engine by. `commit` and `abandon` never wait for a version that is being staged.
    """

    def __init__(self, *, name: str, make_buffers: MakeBuffers = _own_buffers, seed: str | None = None) -> None:
        self._name, self._seed, self._make_buffers = name, seed, make_buffers
        self._receivers = KeptReceiver()
        self._staging = threading.Lock()  # one at a time, for as long as it takes
        self._lock = threading.Lock()  # for what follows
        self._shape: _Shape | None = None
        self._next: _Next | None = None
        self._written_over: Mapping[str, Array] | None = None  # the version that counts, where a given up one was written
        self._read: weakref.WeakSet[StagedVersion] = weakref.WeakSet()
        self._leases: dict[object, object] = {}
        self._closed = 0
        self._telling: threading.Thread | None = None

    @property
    def held(self) -> Manifest | None:
        """What was committed last."""
        known = self._held
        return known.manifest if known is not None else None

    @property
    def _held(self) -> _Known | None:
        shape = self._shape
        return shape.known if shape is not None else None

    # -- staging ---------------------------------------------------------------------------------------------------

    def stage(self, wanted: Wanted, *, fits: Fits, deadline: Deadline, lease: object | None = None) -> StagedVersion:
        """See `HostVersions`. Only one version is staged at a time: one that was not committed is dropped for the next.

        With a `lease` it is read by somebody else, whatever is committed or abandoned here, until `release`.
        """
        ask = partial(
            choose_version, version=wanted.version, verify_checksum=wanted.verify_checksum, deadline=deadline
        )  # fmt: skip
        with self._turn(f"waiting to stage version {wanted.version} from {wanted.source}", deadline):
            closed = self._closed
            use, manifest = self._receivers.open(wanted.source, rank=0, ask=ask)
            with use as receiver:
                fits(manifest)
                try:
                    found = self._found(manifest, wanted, deadline)
                    staged = found or self._fetched(manifest, wanted, receiver, deadline, closed)
                except BaseException as error:
                    _let_go(error)
                    raise
            with self._lock:
                self._read.add(staged)
                if lease is not None:
                    self._leases[lease] = staged.memory
            return staged

    def release(self, lease: object) -> None:
        """Whoever has this lease reads nothing any more. Safe without one."""
        with self._lock:
            self._leases.pop(lease, None)

    @contextmanager
    def _turn(self, what: str, deadline: Deadline) -> Iterator[None]:
        while not self._staging.acquire(timeout=_SLICE_S):
            deadline.check(what)
        try:
            yield
        finally:
            self._staging.release()

    def _found(self, manifest: Manifest, wanted: Wanted, deadline: Deadline) -> StagedVersion | None:
        """What is here already. Otherwise nothing is staged any more, and memory holds the version that counts."""
        with self._lock:
            if self._next is not None and self._next.known.answers(manifest, wanted):
                return self._next.version
            self._drop()
        self._restore(deadline)
        with self._lock:
            shape, known = self._shape, self._held
            if shape is None or known is None or self._written_over or not known.answers(manifest, wanted):
                return None
            arrays = dict(shape.arrays)
            version = StagedVersion(known.manifest, arrays, arrays, known.manifest, shape.memory)
            self._next = _Next(version, known, shape)
            return version

    def _restore(self, deadline: Deadline) -> None:
        """Write the version that counts over the one that was given up. If somebody reads that, it stays for now."""
        shape = self._shape
        if self._written_over is None or shape is None or self._is_read(shape.memory, deadline):
            return
        with self._lock:
            self._written_over = None
        try:
            shape.live.revert()
        except CommitFailed as error:
            log.warning("host copy torn", error=error)
            with self._lock:
                self._shape = None

    def _is_read(self, memory: object, deadline: Deadline) -> bool:
        """Whether somebody reads it. Other ranks are given a moment: they let go when they commit."""
        moment = Deadline.after(min(_LETTING_GO_S, deadline.remaining()))
        while True:
            with self._lock:
                if any(one.memory is memory for one in self._read):
                    return True
                if memory not in self._leases.values():
                    return False
            if not moment.remaining():
                return True
            deadline.check("waiting for other ranks to let go of the host copy")
            time.sleep(_LETTING_GO_S / 50)

    def _fetched(
        self, manifest: Manifest, wanted: Wanted, receiver: Receiver, deadline: Deadline, closed: int
    ) -> StagedVersion:
        shape = self._shaped_as(manifest, closed)
        stage = partial(
            shape.live.stage, manifest.version, source=receiver, verify_checksum=wanted.verify_checksum, deadline=deadline,
            commit="swap" if self._is_read(shape.memory, deadline) else "delta",
        )  # fmt: skip
        update = self._seeded(shape, stage, deadline)
        before = shape.write(update) if update.mode == "delta" else None
        with self._lock:
            if self._closed != closed:
                raise UpdateCancelled(f"the host copy was closed while version {manifest.version} was staged.")
            if before is not None:
                served = shape.known.manifest if shape.known is not None else None
                version = StagedVersion(update.manifest, dict(shape.arrays), before, served, shape.memory, update.nbytes)
            else:
                version = StagedVersion(update.manifest, update.incoming(), self._former(), self.held, nbytes=update.nbytes)
            known = _Known(manifest, update.manifest, wanted.verify_checksum)
            tell = wanted.source if isinstance(receiver, AcknowledgingReceiver) else None
            self._next = _Next(version, known, shape, update, tell)
            return version

    def _former(self) -> Mapping[str, Array]:
        """The tensors of the version that counts."""
        if self._written_over is not None:
            return self._written_over
        return dict(self._shape.arrays) if self._shape is not None and self._held is not None else {}

    def _shaped_as(self, manifest: Manifest, closed: int) -> _Shape:
        """Memory for the version. If it has other tensors than what counts, or somebody reads what was written over that,
        all of it stays as it is until this version is committed.
        """
        specs = frozenset(entry.spec for entry in manifest.tensors)
        with self._lock:
            if self._shape is not None and self._shape.specs == specs and not self._written_over:
                return self._shape
            if self._held is None:
                self._shape = None  # before more is taken
        made = _Shape(specs, self._make_buffers, self._name)
        with self._lock:
            if self._held is None and self._closed == closed:
                self._shape = made
        return made

    def _seeded(self, shape: _Shape, stage: Callable[[], StagedUpdate], deadline: Deadline) -> StagedUpdate:
        """Stage; if that fails for want of a base, take what the engine was started with as the base and try again."""
        try:
            return stage()
        except BaseVersionMismatch as error:
            if self._seed is None or shape.known is not None:
                raise
            try:
                seeded = shape.live.stage(source=self._seed, commit="swap", deadline=deadline)
            except (DeadlineExceeded, UpdateCancelled):
                raise
            except WeightcastError as missing:
                log.warning("seed failed", seed=self._seed, error=missing)
                raise error from missing
        shape.live.commit(seeded)
        shape.known = _Known(seeded.manifest, seeded.manifest, proved=True)
        log.info("seed staged", seed=self._seed, version=seeded.version)
        return stage()

    # -- what becomes of it ----------------------------------------------------------------------------------------

    def commit(self, staged: StagedVersion) -> None:
        """See `HostVersions`. Nothing is copied; memory that is not needed any more waits for the next version."""
        with self._lock:
            self._read.discard(staged)
            done, known = self._next, self._held
            if done is None or done.version is not staged:
                if known is not None and _same(known.manifest, staged.manifest):
                    return  # by another thread
                state = f"with {done.version.manifest.version} staged" if done is not None else "with nothing staged"
                raise WrongState(f"commit {staged.manifest.version} to the host copy", state, ["that of its staging"])
            self._next = None
            if done.update is None:
                return
            done.update.acknowledge = silent  # the engine may be pausing: this must not wait for a network
            if done.written:
                done.shape.live.settle()
            else:
                done.update.deadline = Deadline.after(math.inf)  # that for staging may be over long since
                done.shape.live.commit(done.update)
                done.shape.live.drop_spare()  # somebody may read it, and deltas are written into `arrays`
            done.shape.known, done.shape.memory = done.known, staged.memory
            self._shape, self._written_over = done.shape, None
            if done.tell is not None:
                self._tell(done.tell, done.known.manifest)

    def abandon(self, staged: StagedVersion) -> None:
        """See `HostVersions`. One that was dropped already is fine."""
        with self._lock:
            self._read.discard(staged)
            if self._next is not None and self._next.version is staged:
                self._drop()

    def close(self) -> None:
        """Let go of all memory and connections. What is being staged is dropped when it is there."""
        with self._lock:
            self._drop()
            self._shape = self._written_over = None
            self._closed += 1
            telling, self._telling = self._telling, None
        if telling is not None:
            telling.join(2 * _ACKNOWLEDGE_S)
        self._receivers.close()

    def _drop(self) -> None:
        dropped, self._next = self._next, None
        if dropped is None or dropped.update is None:
            return
        if not dropped.written:
            dropped.shape.live.abandon(dropped.update)
        elif dropped.shape is self._shape:
            self._written_over = dropped.version.former

    def _tell(self, source: str, manifest: Manifest) -> None:
        """Tell a source in the background what is served, after what it was told before."""
        self._telling = threading.Thread(
            target=logs.carried(self._acknowledge),
            args=(source, manifest, self._telling),
            name="weightcast-acknowledge",
            daemon=True,
        )
        self._telling.start()

    def _acknowledge(self, source: str, manifest: Manifest, before: threading.Thread | None) -> None:
        if before is not None:
            before.join(2 * _ACKNOWLEDGE_S)

        def tell(receiver: Receiver) -> None:
            if isinstance(receiver, AcknowledgingReceiver):
                receiver.acknowledge(manifest, self._name, deadline=Deadline.after(_ACKNOWLEDGE_S))

        try:
            use, _ = self._receivers.open(source, rank=0, ask=tell)
        except WeightcastError as error:
            log.warning("acknowledgement failed", version=manifest.version, source=source, error=error)
        else:
            with use:
                return


def _same(a: Manifest, b: Manifest) -> bool:
    return a.version == b.version and a.root_digest == b.root_digest


def _let_go(error: BaseException) -> None:
    """Whoever keeps an error keeps the frames that it came through, and with them a version's worth of memory."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__


def changed_names(before: Manifest | None, after: Manifest) -> set[str]:
    """The names, tied ones too, whose bytes differ between two versions, told by their sums or digests; all if there
    is nothing to compare.
    """
    if before is None:
        return set(after.by_name())
    known = before.by_name()
    return {name for name, entry in after.by_name().items() if not _equal(known.get(name), entry)}


def _equal(before: TensorEntry | None, after: TensorEntry) -> bool:
    if before is None or before.sum_spec != after.sum_spec:
        return False
    return bool((after.sum and after.sum == before.sum) or (after.digest and after.digest == before.digest))
