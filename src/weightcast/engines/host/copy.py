"""One copy of a version in checkpoint coordinates, which deltas move, and the next one beside it."""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.host.shared import whole_lines
from weightcast.errors import (
    BaseVersionMismatch,
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

    `former` are the tensors of the version that was committed before, empty if there is none.
    """

    manifest: Manifest
    arrays: Mapping[str, Array]
    former: Mapping[str, Array] = field(default_factory=dict)
    former_manifest: Manifest | None = None


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
    """Memory for versions with the same names, shapes and dtypes: `arrays` is the one that counts, moved by `live`."""

    def __init__(self, specs: frozenset[TensorSpec], make_buffers: MakeBuffers, name: str) -> None:
        self.specs = specs
        self.known: _Known | None = None
        self.arrays: dict[str, Array] = {spec.name: np.empty(spec.shape, spec.dtype.numpy) for spec in specs}
        buffers = make_buffers(sum(whole_lines(spec.nbytes) for spec in specs))
        self.live = LiveModel(self.arrays, buffers=buffers, keep_previous=False, name=name)
        self.live.clear()  # it takes over the memory that a version is staged in


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


def _own_buffers(_: int) -> Buffers:
    return Buffers()


class HostCopy:
    """The copy, in this process. Any thread may call; a version is staged once, for however many ask for it.

    Memory: the committed version and the next one, in what `make_buffers` gives for versions of so many bytes. `seed` is a
    source with the version that the engine was started with, for a delta whose base no source has. `name` is what depots
    know the engine by. `commit` and `abandon` never wait for a version that is being staged.
    """

    def __init__(self, *, name: str, make_buffers: MakeBuffers = _own_buffers, seed: str | None = None) -> None:
        self._name, self._seed, self._make_buffers = name, seed, make_buffers
        self._receivers = KeptReceiver()
        self._staging = threading.Lock()  # one at a time, for as long as it takes
        self._lock = threading.Lock()  # for what follows
        self._shape: _Shape | None = None
        self._next: _Next | None = None
        self._lent: dict[object, str] = {}
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

    def stage(self, wanted: Wanted, *, fits: Fits, deadline: Deadline) -> StagedVersion:
        """See `HostVersions`. Only one version is staged at a time: one that nobody committed is dropped for another."""
        ask = partial(
            choose_version, version=wanted.version, verify_checksum=wanted.verify_checksum, deadline=deadline
        )  # fmt: skip
        with self._turn(f"waiting to stage version {wanted.version} from {wanted.source}", deadline):
            closed = self._closed
            use, manifest = self._receivers.open(wanted.source, rank=0, ask=ask)
            with use as receiver:
                fits(manifest)
                found = self._found(manifest, wanted)
                if found is not None:
                    return found
                try:
                    return self._fetched(manifest, wanted, receiver, deadline, closed)
                except BaseException as error:
                    _let_go(error)
                    raise

    @contextmanager
    def _turn(self, what: str, deadline: Deadline) -> Iterator[None]:
        while not self._staging.acquire(timeout=_SLICE_S):
            deadline.check(what)
        try:
            yield
        finally:
            self._staging.release()

    def _found(self, manifest: Manifest, wanted: Wanted) -> StagedVersion | None:
        """What is here already. Otherwise nothing is staged any more."""
        with self._lock:
            if self._next is not None and self._next.known.answers(manifest, wanted):
                return self._next.version
            self._drop()
            shape, known = self._shape, self._held
            if shape is None or known is None or not known.answers(manifest, wanted):
                return None
            arrays = dict(shape.arrays)
            self._next = _Next(StagedVersion(known.manifest, arrays, arrays, known.manifest), known, shape)
            return self._next.version

    def _fetched(
        self, manifest: Manifest, wanted: Wanted, receiver: Receiver, deadline: Deadline, closed: int
    ) -> StagedVersion:
        shape = self._shaped_as(manifest, closed)
        stage = partial(
            shape.live.stage, manifest.version, source=receiver, commit="swap",
            verify_checksum=wanted.verify_checksum, deadline=deadline,
        )  # fmt: skip
        with self._lock:
            if set(self._lent.values()) - {self.held.root_digest if self.held is not None else ""}:
                shape.live.drop_spare()  # a delta would write there
        update = self._seeded(shape, stage, deadline)
        with self._lock:
            if self._closed != closed:
                shape.live.abandon(update)
                raise UpdateCancelled(f"the host copy was closed while version {manifest.version} was staged.")
            known, former = _Known(manifest, update.manifest, wanted.verify_checksum), self._held
            version = StagedVersion(
                update.manifest, update.incoming(),
                dict(self._shape.arrays) if self._shape is not None and former is not None else {},
                former.manifest if former is not None else None,
            )  # fmt: skip
            tell = wanted.source if isinstance(receiver, AcknowledgingReceiver) else None
            self._next = _Next(version, known, shape, update, tell)
            return version

    def _shaped_as(self, manifest: Manifest, closed: int) -> _Shape:
        """Memory for the version. If it has other tensors than what counts, that stays as it is until this is committed."""
        specs = frozenset(entry.spec for entry in manifest.tensors)
        with self._lock:
            if self._shape is not None and self._shape.specs == specs:
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

    @contextmanager
    def lent(self, manifest: Manifest) -> Iterator[None]:
        """While somebody reads a version that was staged here, whatever was committed since: its memory is left alone."""
        lease = object()
        with self._lock:
            self._lent[lease] = manifest.root_digest
        try:
            yield
        finally:
            with self._lock:
                del self._lent[lease]

    # -- what becomes of it ----------------------------------------------------------------------------------------

    def commit(self, staged: StagedVersion) -> None:
        """See `HostVersions`. Pointers are switched; the memory of the version before is used for the next one."""
        with self._lock:
            done, known = self._next, self._held
            if done is None or done.version is not staged:
                if known is not None and _same(known.manifest, staged.manifest):
                    return  # by another thread
                state = f"with {done.version.manifest.version} staged" if done is not None else "with nothing staged"
                raise WrongState(f"commit {staged.manifest.version} to the host copy", state, ["that of its staging"])
            self._next = None
            if done.update is None:
                return
            done.update.deadline = Deadline.after(math.inf)  # that for staging may be over long since
            done.update.acknowledge = silent  # the engine may be pausing: this must not wait for a network
            done.shape.live.commit(done.update)
            done.shape.known = done.known
            self._shape = done.shape
            if done.tell is not None:
                self._tell(done.tell, done.known.manifest)

    def abandon(self, staged: StagedVersion) -> None:
        """See `HostVersions`. One that was dropped already is fine."""
        with self._lock:
            if self._next is not None and self._next.version is staged:
                self._drop()

    def close(self) -> None:
        """Let go of all memory and connections. What is being staged is dropped when it is there."""
        with self._lock:
            self._drop()
            self._shape = None
            self._closed += 1
            telling, self._telling = self._telling, None
        if telling is not None:
            telling.join(2 * _ACKNOWLEDGE_S)
        self._receivers.close()

    def _drop(self) -> None:
        dropped, self._next = self._next, None
        if dropped is not None and dropped.update is not None:
            dropped.shape.live.abandon(dropped.update)

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
    """The names, tied ones too, whose bytes differ between two versions, told by their digests; all if there is nothing to
    compare.
    """
    if before is None:
        return set(after.by_name())
    known = before.by_name()
    return {name for name, entry in after.by_name().items() if not _equal(known.get(name), entry)}


def _equal(before: TensorEntry | None, after: TensorEntry) -> bool:
    if before is None or before.sum_spec != after.sum_spec:
        return False
    return bool((after.sum and after.sum == before.sum) or (after.digest and after.digest == before.digest))
