"""`Publisher`: what a training loop calls to make its weights available to the engines of the same host."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote

import msgspec
import numpy as np
from msgspec.structs import replace

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import AnyPath, InvalidInput, NotFound, UnsupportedTensor, VersionExists, WeightcastError, WrongState
from weightcast.publish.changes import Compared, check_policy, most_payload_nbytes, packed_changes
from weightcast.publish.clerk import Clerk
from weightcast.publish.desk import Desk
from weightcast.publish.filling import aligned, fill
from weightcast.publish.publication import Publication
from weightcast.publish.shelf import Slab
from weightcast.publish.streaming import BUCKETS, LiveStream
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.layout import payload_name
from weightcast.store.version_file import step_of
from weightcast.store.writer import HasStateDict, PublishAs, survey
from weightcast.tensors.boxes import Box
from weightcast.tensors.bridges import is_distributed, local_box, spec_of
from weightcast.tensors.digest import DEFAULT, Algorithm
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import Digests, Sum
from weightcast.transports.ipc.device import Memory
from weightcast.transports.ipc.devices import device_called
from weightcast.transports.ipc.host_memory import HostMemory
from weightcast.transports.ipc.legacy import legacy_path, write_legacy
from weightcast.transports.ipc.place import Claim, Place
from weightcast.wire.decoding import decode, split_url
from weightcast.wire.manifest import BaseRef, Manifest, TensorEntry, check_version_id, compute_root, entry_of, summed_names

if TYPE_CHECKING:
    from weightcast.tensors.bridges.gathering import Gathering

log = logs.get(__name__)

TIMEOUT_S = 120.0
HOLD_S = 60.0
STALL_S = 10.0
BUCKET_NBYTES = 64 << 20
MIN_BUCKET_NBYTES = 1 << 12
DELTAS = DeltaPolicy()
_DELTA_SHARE, _DELTA_NBYTES = 16, 256 << 10  # of a version's memory, and beside: room for the changes since the one before


class Publisher:
    """Holds versions in shared memory, or streams them through it, for receivers that open `ipc://` and its directory.

        with Publisher("ipc:///dev/shm/run") as publisher:
            for step in range(1000):
                train()
                publisher.publish(f"step_{step}", model.state_dict())

    The directory is made for this process alone; a second publisher in it is refused with `Conflict`. Each of several
    trainer `ranks` has a publisher of its own there and publishes the tensors that it has: a version is there when all of
    them have published it, and its tensors are those of all of them, each from one rank.

    `publish` keeps the last `slabs` versions, each in memory of the version's size. A receiver that holds one for more than
    `hold_s` seconds when its memory is needed again, or takes more than `stall_s` for a bucket, is dropped. `threads` copy
    and hash. `device` is where the memory is: "host", or "cuda:0" for tensors on that GPU. `token` is what receivers must
    know; without it there is a random one, which processes of this user find in the directory. Beside a version in host
    memory lie its changes since the one before, where they are few: receivers that hold that one read nothing else. `deltas`
    says when, and has one packing, not "both". With None they are not looked for.

    One thread at a time may publish. Nothing of this is needed in children of a fork.
    """

    def __init__(
        self,
        url: AnyPath,
        *,
        rank: int = 0,
        ranks: int = 1,
        slabs: int = 2,
        threads: int = 2,
        bucket_nbytes: int = BUCKET_NBYTES,
        hold_s: float = HOLD_S,
        stall_s: float = STALL_S,
        token: str | None = None,
        device: str = "host",
        deltas: DeltaPolicy | None = DELTAS,
    ) -> None:
        if not 0 <= rank < ranks:
            raise InvalidInput(f"rank {rank} of {ranks} does not exist: ranks count from 0.")
        if slabs < 1 or threads < 1 or bucket_nbytes < MIN_BUCKET_NBYTES or not (hold_s >= 0 and stall_s > 0):
            raise InvalidInput(
                f"slabs={slabs}, threads={threads}, bucket_nbytes={bucket_nbytes}, hold_s={hold_s} and stall_s={stall_s} "
                f"must be positive, and a bucket have at least {MIN_BUCKET_NBYTES} bytes."
            )
        root = _directory(url)
        self.url = f"ipc://{root.absolute()}"
        self._device = device_called(device)
        self._threads, self._stall_s, self._bucket_nbytes = threads, stall_s, aligned(bucket_nbytes)
        self._changed = threading.Condition()
        self._publishing = threading.Lock()
        self._sequence = 0
        self._rank, self._ranks, self._deltas = rank, ranks, check_policy(deltas)
        self._next_slab: threading.Thread | None = None
        self._clerk = Clerk(self._device, self._changed, slabs=slabs, hold_s=hold_s)
        self._place = Place.of_rank(root, rank)
        claim = Claim(self._place, token=token)
        try:
            self._desk = Desk(claim, rank=rank, ranks=ranks, clerk=self._clerk, changed=self._changed)
        except BaseException:
            claim.leave()
            raise
        self._clerk.desk = self._desk
        self._end = weakref.finalize(self, _close, self._clerk, self._desk, claim, self._changed, os.getpid())
        try:
            claim.open()
        except BaseException:
            self._end()
            raise
        log.info("publisher started", url=self.url, rank=rank, ranks=ranks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def receivers(self) -> int:
        """How many receivers are connected."""
        with self._changed:
            return len(self._desk.sessions)

    @property
    def versions(self) -> list[str]:
        """The versions that are held, the newest last."""
        with self._changed:
            return [slab.manifest.version for slab in self._clerk.shelf.held if slab.manifest]

    # -- held ---------------------------------------------------------------------------------------------------------

    def publish(
        self,
        version: str,
        tensors: Mapping[str, object] | HasStateDict,
        *,
        dtype: str | None = None,
        keep_dtype: Sequence[str] = (),
        strip_wrappers: bool = False,
        finite: bool = False,
        step: int | None = None,
        metadata: Mapping[str, str] | None = None,
        algorithm: Algorithm = DEFAULT,
        timeout: float = TIMEOUT_S,
    ) -> Publication:
        """Copy a version into shared memory and make it the newest. When this returns, the tensors may change.

        It waits for receivers that still read the version whose memory this one takes: the last but one. If it fails, that
        version is gone and the newest is as before. `dtype`, `keep_dtype`, `strip_wrappers` and `finite` are those of
        `Store.publish`.

        DTensors that are sharded over processes (FSDP2) are gathered one after the other, and each rank holds some of them.
        Then every rank of their mesh must have a publisher here, with its `rank` of as many `ranks`, and publish together.
        """
        form = PublishAs.of(dtype, keep_dtype, strip_wrappers=strip_wrappers)
        named = form.named(tensors, version)
        if not isinstance(named, Mapping):
            raise InvalidInput("publish needs a mapping of tensors that are alive together; stream() takes an iterator.")
        deadline, began = Deadline.after(timeout), time.monotonic()
        with self._turn(version):
            gathering = self._gathering(version, named)
            by_bytes = algorithm if algorithm != DEFAULT else None  # within one host, sums are proof enough
            copy = partial(fill, self._device, algorithm=by_bytes, threads=self._threads, deadline=deadline, finite=finite)
            if gathering is None:
                whole = dict(form.converted(named))
                specs, tied = survey(whole)
                entries, nbytes = _laid_out(specs.values(), tied)
                slab = self._take_slab(version, self._room(nbytes), deadline)
                digests = copy(slab.memory, entries, whole)
            else:
                specs, tied, order = self._own_share(gathering, form)
                entries, nbytes = _laid_out(specs.values(), tied)
                slab = gathering.together(lambda: self._take_slab(version, self._room(nbytes), deadline))
                digests = self._gathered(gathering, form, order, {entry.name: entry for entry in entries}, slab, copy)
            entries = tuple(replace(entry, **digests[entry.name]._asdict()) for entry in entries)
            manifest = self._manifest(version, entries, tied, step, metadata, algorithm)
            manifest = self._with_changes(replace(manifest, root_digest=compute_root(entries, algorithm)), slab)
            publication = Publication(manifest, time.monotonic() - began, self._changed)
            with self._changed:
                self._clerk.shelf.put(slab, manifest, publication)
                self._clerk.announce(version)
            self._provide(self._room(nbytes))
        log.info(
            "published",
            version=version,
            kind="full",
            tensors=len(entries),
            nbytes=manifest.nbytes,
            delta_nbytes=manifest.payload_nbytes,
            ms=logs.ms(publication.copy_s),
            url=self.url,
        )
        return publication

    def _with_changes(self, manifest: Manifest, slab: Slab) -> Manifest:
        """A version that was copied to a slab, with the changes since the one before beside it, if that one is here."""
        with self._changed:
            held = self._clerk.shelf.held
        base, before = (held[-1].manifest, held[-1].memory) if held else (None, None)
        policy = self._deltas
        if policy is None or base is None or not isinstance(before, HostMemory) or not isinstance(slab.memory, HostMemory):
            return manifest
        places = {entry.name: entry for entry in base.tensors}
        same = [(entry.sum_spec, entry.spec) for entry in manifest.tensors]
        if base.tied != manifest.tied or same != [(entry.sum_spec, entry.spec) for entry in base.tensors]:
            return manifest
        compared = [
            Compared(
                entry.spec, entry.sum_spec, Box.whole(entry.shape),
                _array(before, places[entry.name]), _array(slab.memory, entry), places[entry.name].sum, entry.sum,
            )
            for entry in manifest.tensors
        ]  # fmt: skip
        offset = aligned(max((entry.offset + entry.nbytes for entry in manifest.tensors), default=0))
        most = min(slab.memory.nbytes - offset, most_payload_nbytes(policy, manifest.nbytes, self._ranks))
        packed = packed_changes(manifest.version, compared, policy, most_nbytes=most)
        if packed is None:
            return manifest
        slab.memory.bytes[offset : offset + len(packed.data)] = np.frombuffer(packed.data, dtype=np.uint8)
        payload = packed.entry(payload_name(self._rank + 1), manifest.algorithm or DEFAULT, part=self._rank, offset=offset)
        sums = {entry.summed_as or entry.name: entry.sum for entry in base.tensors} if self._ranks > 1 else {}
        ref = BaseRef(version=base.version, root_digest=base.root_digest, sums=sums)
        return replace(manifest, base=ref, payloads=(payload,))

    def write_legacy(self, directory: AnyPath, device_id: str) -> Path:
        """Say in the legacy metadata file `ipc_metas_<device_id>` of a directory where the newest held version lies.

        It is good until the version after the next is published. Gives its path.
        """
        with self._changed:
            held = self._clerk.shelf.held
            if not held or held[-1].manifest is None:
                raise NotFound(f"nothing is held at {self.url} that {directory} could tell of: publish a version first.")
            manifest, handle = held[-1].manifest, held[-1].handle
        path = legacy_path(Path(directory), device_id)
        write_legacy(path, manifest, place=self._place.path, handle=handle)
        return path

    def _room(self, nbytes: int) -> int:
        return _with_room(nbytes) if self._deltas is not None and self._device.kind == "memfd" else nbytes

    def _take_slab(self, version: str, nbytes: int, deadline: Deadline) -> Slab:
        if self._next_slab is not None:
            self._next_slab.join(timeout=deadline.remaining())
        deadline.check(f"waiting for memory for {version}")
        return self._clerk.shelf.take(nbytes, deadline)

    def _gathering(self, version: str, tensors: Mapping[str, object]) -> Gathering | None:
        """What gathers tensors that are sharded; None if there are none."""
        if not any(map(is_distributed, tensors.values())):
            return None
        from weightcast.tensors.bridges.gathering import gathering_of  # noqa: PLC0415 - torch is an extra

        found = gathering_of(version, tensors)
        if found is not None and (found.rank, found.ranks) != (self._rank, self._ranks):
            raise InvalidInput(
                f"{version} has tensors that are sharded over {found.ranks} ranks, of which this is rank {found.rank}, and "
                f"this is the publisher of rank {self._rank} of {self._ranks}. Make a Publisher({self.url!r}, "
                f"rank={found.rank}, ranks={found.ranks}) on this rank, and so on every other, and publish on all of them."
            )
        return found

    def _own_share(
        self, gathering: Gathering, form: PublishAs
    ) -> tuple[dict[str, TensorSpec], dict[str, str], Sequence[str]]:
        """The tensors and tied names that this rank holds for all, and the order in which all tensors are gathered.

        The first rank finds the ties: others may have no element of a tensor, and so no memory to recognise it by.
        """
        gathering.agree_on_tensors()
        whole = dict(form.converted(gathering.lazy()))
        tied = decode(gathering.share(msgspec.json.encode(survey(whole)[1])), dict[str, str])
        specs = {name: spec_of(name, tensor) for name, tensor in whole.items() if name not in tied}
        if len(specs) < self._ranks:
            raise InvalidInput(f"{len(specs)} tensor(s) cannot be shared out to {self._ranks} ranks: publish to a Store.")
        loads = [0] * self._ranks
        owners: dict[str, int] = {}
        for name in sorted(specs, key=lambda name: -specs[name].nbytes):
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += max(1, specs[name].nbytes)
        own = {name: spec for name, spec in specs.items() if owners[name] == self._rank}
        return own, {name: holder for name, holder in tied.items() if holder in own}, list(specs)

    def _gathered(
        self,
        gathering: Gathering,
        form: PublishAs,
        order: Sequence[str],
        entries: Mapping[str, TensorEntry],
        slab: Slab,
        copy: Callable[[Memory, Sequence[TensorEntry], Mapping[str, object]], dict[str, Digests]],
    ) -> dict[str, Digests]:
        """Copy what this rank holds for all. All ranks gather all tensors, also after one of them has failed."""
        digests: dict[str, Digests] = {}
        failed: Exception | None = None
        for name in order:
            tensor = gathering.tensor(name)
            if failed is None and name in entries:
                try:
                    digests |= copy(slab.memory, [entries[name]], {name: form.tensor(name, tensor)})
                except Exception as error:  # noqa: BLE001 - raised below, when no rank waits for this one
                    failed = error
        gathering.agree(failed)
        return digests

    def _provide(self, nbytes: int) -> None:
        """Have the next slab made while the trainer goes on."""
        if self._next_slab is None:
            shelf = self._clerk.shelf
            thread = threading.Thread(target=_provided, args=(shelf.provide, nbytes), name="next slab", daemon=True)
            thread.start()
            self._next_slab = thread

    # -- live ---------------------------------------------------------------------------------------------------------

    def stream(
        self,
        version: str,
        tensors: Mapping[str, object] | Iterable[tuple[str, object]],
        *,
        like: Mapping[str, object] | None = None,
        receivers: int = 1,
        step: int | None = None,
        metadata: Mapping[str, str] | None = None,
        algorithm: Algorithm = DEFAULT,
        timeout: float = TIMEOUT_S,
    ) -> Publication:
        """Send a version once, through two buckets, to `receivers` that open it now. Returns when the tensors may change.

        An iterator may make each tensor as it is asked for (gather it from other ranks, say) and reuse its memory; `like`
        then says what comes: a mapping of tensors of the same names, dtypes and shapes, which may be on the meta device.
        Receivers that fall behind are dropped; if none is left, `ReceiversLost` is raised.
        """
        if isinstance(tensors, Mapping):
            for name, tensor in tensors.items():
                distributed = local_box(name, tensor)
                if distributed is not None and distributed[1] != Box.whole(distributed[0]):
                    raise UnsupportedTensor(
                        f"tensor {name!r} is sharded over processes: stream an iterator of tensor.full_tensor(), with these "
                        "tensors as like=, on every rank that has a part of them; or publish()."
                    )
            like, tensors = tensors, tensors.items()
        if like is None:
            raise InvalidInput("an iterator does not say what will come: pass like=, a mapping of the same names.")
        if receivers < 1:
            raise InvalidInput(f"a stream needs at least one receiver, not {receivers}.")
        deadline, began = Deadline.after(timeout), time.monotonic()
        with self._turn(version):
            before = self._clerk.newest
            stream = self._announced(version, like, step, metadata, algorithm)
            try:
                stream.gather(receivers, deadline)
                stream.run(tensors, deadline)
            except BaseException as error:
                stream.fail(f"the trainer could not go on ({type(error).__name__}: {error})")
                with self._changed:
                    self._clerk.withdraw(stream, before)
                raise
        stream.publication.copy_s = time.monotonic() - began
        log.info(
            "published",
            version=version,
            kind="stream",
            tensors=len(stream.manifest.tensors),
            nbytes=stream.manifest.nbytes,
            receivers=receivers,
            ms=logs.ms(stream.publication.copy_s),
            url=self.url,
        )
        return stream.publication

    def _announced(
        self,
        version: str,
        like: Mapping[str, object],
        step: int | None,
        metadata: Mapping[str, str] | None,
        algorithm: Algorithm,
    ) -> LiveStream:
        """A stream that receivers can join. Waits for the one before, whose buckets it takes."""
        specs, tied = survey(like)
        entries = tuple(
            replace(entry, offset=0, sum="" if entry.nbytes else str(Sum())) for entry in _laid_out(specs.values(), tied)[0]
        )
        if self._clerk.stream is not None:
            self._clerk.stream.finish()
        memory, handle = self._clerk.buckets or self._clerk.take_buckets(
            self._device.allocate(BUCKETS * self._bucket_nbytes)
        )
        manifest = self._manifest(version, entries, tied, step, metadata, algorithm)
        stream = LiveStream(
            manifest, memory, handle, self._device, self._desk, self._changed, self._stall_s,
            Publication(manifest, 0.0, self._changed),
        )  # fmt: skip
        with self._changed:
            self._clerk.begin(stream)
        return stream

    # -- both ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End what is under way, free the memory, and remove the directory. Safe twice.

        Receivers of a stream that was sent to its end have `stall_s` for the last buckets. Those that read a held version
        are told that it has ended for them.
        """
        if self._next_slab is not None:
            self._next_slab.join()
        stream = self._clerk.stream
        if stream is not None and stream.ended:
            stream.finish()
        if self._end.alive:
            self._end()
            log.info("publisher closed", url=self.url)

    def _turn(self, version: str) -> _Turn:
        check_version_id(version)
        if not self._end.alive:
            raise WrongState(f"publish {version}", "closed", ["open"])
        if version in self.versions:
            raise VersionExists(f"version {version} is already held at {self.url}, and a version never changes.")
        return _Turn(self._publishing, version)

    def _manifest(
        self,
        version: str,
        entries: tuple[TensorEntry, ...],
        tied: Mapping[str, str],
        step: int | None,
        metadata: Mapping[str, str] | None,
        algorithm: Algorithm,
    ) -> Manifest:
        """A version without a root digest."""
        if not entries:
            raise InvalidInput(f"version {version} has no tensors: there is nothing to publish.")
        self._sequence += 1
        return Manifest(
            version=version,
            sequence=self._sequence,
            step=step_of(version, default=self._sequence) if step is None else step,
            kind="full",
            created_s=time.time(),
            algorithm=algorithm,
            root_digest="",
            parts=(),
            tensors=entries,
            tied=dict(tied),
            metadata=dict(metadata or {}),
        )


class _Turn:
    """One publication at a time; a second thread is refused and not kept waiting."""

    def __init__(self, lock: threading.Lock, version: str) -> None:
        self._lock, self._version = lock, version

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise WrongState(f"publish {self._version}", "publishing", ["idle"])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()


def _directory(url: AnyPath) -> Path:
    if isinstance(url, str) and "://" in url:
        parts = split_url(url)
        if parts.scheme != "ipc" or parts.netloc not in ("", "localhost") or not parts.path or parts.query:
            raise InvalidInput(f"{url!r} must name a directory on this host: ipc:///dev/shm/run.")
        url = unquote(parts.path)
    if "\0" in str(url):
        raise InvalidInput(f"{str(url)[:200]!r} has a null byte, which no path can have.")
    return Path(url)


def _laid_out(specs: Iterable[TensorSpec], tied: Mapping[str, str]) -> tuple[tuple[TensorEntry, ...], int]:
    """Entries one after the other, and the size of all."""
    entries, at = [], 0
    summed_as = summed_names(tied)
    for spec in specs:
        at = aligned(at)
        entries.append(entry_of(spec, offset=at, summed_as=summed_as.get(spec.name, "")))
        at += spec.nbytes
    return tuple(entries), at


def _with_room(nbytes: int) -> int:
    """Memory for a version of so many bytes, and for the changes since the one before."""
    return aligned(nbytes) + nbytes // _DELTA_SHARE + _DELTA_NBYTES


def _array(memory: HostMemory, entry: TensorEntry) -> Array:
    return memory.bytes[entry.offset : entry.offset + entry.nbytes].view(entry.dtype.numpy).reshape(entry.shape)


def _provided(provide: Callable[[int], None], nbytes: int) -> None:
    try:
        provide(nbytes)
    except WeightcastError as error:  # the next publish tries again, and says so
        log.warning("allocation failed", nbytes=nbytes, error=error)


def _close(clerk: Clerk, desk: Desk, claim: Claim, changed: threading.Condition, owner: int) -> None:
    if os.getpid() != owner:  # in a child of a fork everything belongs to the parent
        return
    with changed:
        clerk.close("the publisher was closed")
    desk.close()
    claim.leave()
