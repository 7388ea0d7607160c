"""`DepotPublisher`: a trainer rank that is its own depot, so that engines on other hosts fetch weights from its memory."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.depot.exchange import Reply, Request, Route
from weightcast.depot.leases import Lease, Leases
from weightcast.depot.nixl_export import NixlExport
from weightcast.depot.server import Depot, listening_host
from weightcast.errors import Conflict, InvalidInput, VersionExists, WrongState
from weightcast.publish.changes import check_policy
from weightcast.publish.drafting import Draft, Filled, Release, drafted
from weightcast.publish.filling import fill
from weightcast.publish.lending import LentHolding, hashed, part_pieces
from weightcast.publish.memory_shelf import MemoryHolding, MemoryShelf, current_reader
from weightcast.publish.publication import Publication
from weightcast.publish.shares import given
from weightcast.store.acks import Acks
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.version_file import step_of
from weightcast.store.writer import HasStateDict, PublishAs
from weightcast.tensors.digest import DEFAULT, Algorithm
from weightcast.transports.ipc.host_memory import HostDevice
from weightcast.transports.nixl.agent import device_at
from weightcast.transports.nixl.agents import Agents
from weightcast.wire.depot import PREFIX, Ack
from weightcast.wire.manifest import check_version_id, summed_names
from weightcast.wire.shares import encode_share

if TYPE_CHECKING:
    import ssl

log = logs.get(__name__)

TIMEOUT_S = 120.0
HOLD_S = 60.0
DELTAS = DeltaPolicy()


class DepotPublisher:
    """Serves the versions that it is given over HTTP, from memory of its own.

        with DepotPublisher("0.0.0.0:8300", token=token) as publisher:
            for step in range(1000):
                train()
                publisher.publish(f"step_{step}", model.state_dict())

    Receivers open `http://trainer:8300`, as they would any depot. It listens on the loopback unless `listen` says
    otherwise: 0.0.0.0 is all addresses. Each of several trainer `ranks` has a publisher of its
    own, and publishes what it holds of a version under the same id: whole tensors, `DTensor`s as FSDP keeps them, or
    `Shard`s. A version is there when all of them have published it; receivers are given all their URLs, in any order.

    `publish` keeps the last `slots` versions, each in memory of its size. The memory of the oldest is used again as soon as
    every update that read it is acknowledged. One that still reads has `hold_s` seconds, and is then cut off. `threads` copy
    and hash. With a `token`, receivers must show it; with `tls`, they must speak TLS. With `nixl`, receivers that open
    `nixl://` read the memory themselves, through a port of UCX at the same address, and the trainer can `lend` them its
    tensors. Beside a version lie its changes since the one before, where they are few. `deltas` says when, and has one
    packing, not "both"; with None they are not looked for. What several ranks share is a delta only if all of them hold the
    version before.

    One thread at a time may publish. Nothing of this is needed in children of a fork.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:8300",
        *,
        rank: int = 0,
        ranks: int = 1,
        slots: int = 2,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        threads: int = 2,
        hold_s: float = HOLD_S,
        nixl: bool = False,
        deltas: DeltaPolicy | None = DELTAS,
    ) -> None:
        if not 0 <= rank < ranks:
            raise InvalidInput(f"rank {rank} of {ranks} does not exist: ranks count from 0.")
        if slots < 1 or threads < 1 or not hold_s >= 0:
            raise InvalidInput(f"slots={slots}, threads={threads} and hold_s={hold_s} must be positive.")
        self._rank, self._ranks, self._threads = rank, ranks, threads
        self._publishing = threading.Lock()
        self._sequence = 0
        self._deltas = check_policy(deltas)
        self._last: Filled | None = None  # the version before, while its memory has it
        self._told = _Told()
        self._shelf = MemoryShelf(slots=slots, hold_s=hold_s, where=f"the memory of trainer rank {rank}")
        self._leases = Leases(Agents(nic=device_at(listening_host(listen)))) if nixl else None
        routes = [Route("GET", f"{PREFIX}/versions/{{version}}/share", _Shares(self._shelf).answer)]
        routes += NixlExport.refusals() if self._leases is None else NixlExport(self._shelf, self._leases).routes()
        acks = _NotingAcks(self._told, self._shelf)
        self._depot = Depot(self._shelf, listen, token=token, tls=tls, acks=acks, routes=routes)
        self.url = self._depot.url
        self._end = weakref.finalize(self, _close, self._depot, self._shelf, self._leases, os.getpid())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def versions(self) -> list[str]:
        """The versions that are held, the newest last."""
        return self._shelf.versions()

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
        """Copy a version into memory of the publisher's and make it the newest. When this returns, the tensors may change.

        It waits for receivers that still read the version whose memory this one takes: the last but one. If it fails, that
        version is gone and the newest is as before. What it gives back tells which receivers serve the version.
        `dtype`, `keep_dtype`, `strip_wrappers` and `finite` are those of `Store.publish`; all ranks must give the same.
        """
        form = PublishAs.of(dtype, keep_dtype, strip_wrappers=strip_wrappers)
        deadline, began = Deadline.after(timeout), time.monotonic()
        with self._turn(version):
            draft = self._drafted(version, tensors, algorithm, form)
            slot = self._shelf.take(draft.memory_nbytes, deadline)
            try:
                digests = fill(
                    HostDevice(), slot.memory, draft.targets(), draft.tensors(),
                    algorithm=algorithm if self._ranks == 1 else None, threads=self._threads, deadline=deadline,
                    boxes=draft.boxes(), finite=finite,
                )  # fmt: skip
                changes, before = None, self._last if self._last is not None and self._last.held.readable else None
                if before is not None and self._deltas is not None:
                    changes = draft.changes_since(before, slot.memory.bytes, digests, self._deltas)
                release = self._release(version, step, metadata)
                held = draft.sealed(slot.memory.bytes, digests, release, self._threads, changes)
                publication = Publication(held.manifest, time.monotonic() - began, self._told.changed)
                self._told.expect(publication)
                self._shelf.put(slot, held)
                self._last = Filled(draft, slot.memory.bytes, digests, held)
            except BaseException:
                self._shelf.give_back(slot)
                raise
        log.info(
            "published",
            version=version,
            kind="full",
            rank=self._rank,
            tensors=len(draft.own),
            nbytes=draft.nbytes,
            delta_nbytes=held.manifest.payload_nbytes,
            ms=logs.ms(publication.copy_s),
            url=self.url,
        )
        return publication

    def lend(
        self,
        version: str,
        tensors: Mapping[str, object],
        seconds: float,
        *,
        step: int | None = None,
        metadata: Mapping[str, str] | None = None,
        algorithm: Algorithm = DEFAULT,
        timeout: float = TIMEOUT_S,
    ) -> Lease:
        """Let receivers read tensors where they lie, as a version, without a copy. They are only hashed before.

        They must be contiguous, and must not change before the lease has ended: by its `end`, or after so many seconds. It
        can be waited for that receivers have read them.
        """
        if self._leases is None or self._ranks > 1:
            raise InvalidInput(
                f"{version} cannot be lent: make the publisher with nixl=True."
                if self._leases is None
                else f"{version} cannot be lent: what {self._ranks} ranks share has to be published."
            )
        deadline = Deadline.after(timeout)
        with self._turn(version):
            draft = self._drafted(version, tensors, algorithm, PublishAs())
            digests = hashed(
                draft.tensors(), algorithm=algorithm, threads=self._threads, deadline=deadline,
                summed_as=summed_names(draft.tied),
            )  # fmt: skip
            headers = draft.headers()
            pieces = [
                part_pieces(part, header, draft.tensors(), algorithm)
                for part, header in zip(draft.parts, headers, strict=True)
            ]
            files = draft.files(digests, self._release(version, step, metadata), headers, pieces)
            lease = self._leases.lend(version, files.manifest, draft.tensors(), seconds)
            self._shelf.lend(LentHolding(files, draft, lease))
        return lease

    def _turn(self, version: str) -> AbstractContextManager[None]:
        check_version_id(version)
        if not self._end.alive:
            raise WrongState(f"publish {version}", "closed", ["open"])
        return self._one_at_a_time(version)

    @contextmanager
    def _one_at_a_time(self, version: str) -> Iterator[None]:
        if not self._publishing.acquire(blocking=False):
            raise WrongState(f"publish {version}", "publishing", ["idle"])
        try:
            if version in self.versions:
                raise VersionExists(f"version {version} is already held at {self.url}, and a version never changes.")
            yield
        finally:
            self._publishing.release()

    def _drafted(
        self, version: str, tensors: Mapping[str, object] | HasStateDict, algorithm: Algorithm, form: PublishAs
    ) -> Draft:
        named = form.named(tensors, version)
        if not isinstance(named, Mapping):
            raise InvalidInput("publish needs a mapping of tensors that are alive together.")
        own, tied = given(named, ranks=self._ranks, form=form)
        return drafted(version, own, tied, rank=self._rank, ranks=self._ranks, algorithm=algorithm)

    def _release(self, version: str, step: int | None, metadata: Mapping[str, str] | None) -> Release:
        if not isinstance(step, int | None) or not all(
            isinstance(text, str) for one in (metadata or {}).items() for text in one
        ):
            raise InvalidInput(f"the step of {version} must be an integer, and its metadata map texts to texts.")
        self._sequence += 1
        number = step_of(version, default=self._sequence) if step is None else step
        return Release(self._sequence, number, dict(metadata or {}))

    def close(self) -> None:
        """Stop serving and free the memory. Receivers that are in the middle of a version are cut off. Safe twice."""
        self._end()


class _Shares:
    """Tells what this rank holds of a version."""

    def __init__(self, shelf: MemoryShelf) -> None:
        self._shelf = shelf

    def answer(self, request: Request, stack: ExitStack) -> Reply:
        held = stack.enter_context(self._shelf.holding(request.path["version"]))
        if not isinstance(held, MemoryHolding):
            raise Conflict(f"version {held.manifest.version} is lent, and not shared. Read its manifest.")
        data = encode_share(held.share)
        return Reply(200, (data,), len(data), {"Content-Type": "application/json"})


class _Told:
    """Publications, and the receivers that said they serve them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._publications: dict[str, weakref.ref[Publication]] = {}

    def expect(self, publication: Publication) -> None:
        with self.changed:
            self._publications = {name: ref for name, ref in self._publications.items() if ref() is not None}
            self._publications[publication.version] = weakref.ref(publication)

    def note(self, ack: Ack) -> None:
        with self.changed:
            ref = self._publications.get(ack.version)
            publication = ref() if ref is not None else None
            if publication is not None and ack.receiver not in publication.taken:
                publication.taken.append(ack.receiver)
                self.changed.notify_all()


class _NotingAcks(Acks):
    """Acknowledgements in memory. They count for publications, and free the memory that an update has read."""

    def __init__(self, told: _Told, shelf: MemoryShelf) -> None:
        super().__init__(None)
        self._told, self._shelf = told, shelf

    def note(self, ack: Ack, client: str = "") -> None:
        """A receiver serves a version now. The update that brought it there has its id in the headers of the request."""
        super().note(ack, client)
        self._told.note(ack)
        self._shelf.finished(current_reader())


def _close(depot: Depot, shelf: MemoryShelf, leases: Leases | None, owner: int) -> None:
    if os.getpid() != owner:  # in a child of a fork everything belongs to the parent
        return
    depot.close()
    if leases is not None:
        leases.close()
        leases.holds.close()
    shelf.close()
