"""`nixl://`: the receiving end of depots whose memory is read by NIXL. Everything but the bytes goes over their HTTP."""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit

import numpy as np

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import InvalidInput, SourceFailed, WeightcastError
from weightcast.tensors.flat import Bytes, Piece, Pieces
from weightcast.transports.base import UNSEEN, Landed, Witness
from weightcast.transports.http.access import Access
from weightcast.transports.http.client import DepotClient, version_path
from weightcast.transports.nixl.agent import Agent, Registration, device_at, region_of
from weightcast.transports.nixl.agents import Agents
from weightcast.transports.nixl.graveyard import GRAVEYARD
from weightcast.transports.nixl.plan import Stretch, batches, stretches
from weightcast.transports.nixl.session import Session
from weightcast.transports.nixl.watch import Watch
from weightcast.wire.depot import Ack
from weightcast.wire.manifest import Manifest
from weightcast.wire.nixl import Grant, GrantQuery, Region

log = logs.get(__name__)

Mode = Literal["rdma", "gdr"]

PREFETCH = 2
BUCKET_NBYTES = 64 << 20
STALL_S = 10.0
ANSWER_S = 10.0
# What one read of a landing is cut to, and what is under way at once, if buckets are not smaller: so much that the depot has
# to send while bytes are hashed, and so little that they are hashed soon after they came.
READ_NBYTES, AHEAD_NBYTES = 4 << 20, 32 << 20
_WAIT_S = 30.0
_REGISTER = 3  # how many times the usual patience a depot has to register memory


class NixlReceiver:
    """Reads versions from the memory of a depot: of what it holds (`rdma`), or of what a trainer lends (`gdr`).

    `url` is the HTTP URL of the depot. `prefetch` reads wait while one is consumed. Memory of `pieces`: `prefetch` + 2
    buckets of `bucket_nbytes`, kept from one call to the next; `landings` needs none. A depot that answers nothing, or from
    which nothing comes for `stall_s`, has failed. `nic` is the network device to use, by default whichever UCX finds best;
    that of the loopback for a depot there, so that nothing here listens to other hosts.

    After an error with reads under way, their memory is kept by `graveyard.GRAVEYARD` until they have ended, and the next
    call begins with an agent and buckets of its own. One thread at a time may receive.
    """

    def __init__(
        self,
        url: str,
        *,
        access: Access | None = None,
        mode: Mode = "rdma",
        prefetch: int = PREFETCH,
        bucket_nbytes: int = BUCKET_NBYTES,
        stall_s: float = STALL_S,
        nic: str = "",
    ) -> None:
        if mode not in ("rdma", "gdr"):
            raise InvalidInput(f"mode {mode!r} is not a way to read: choose rdma or gdr.")
        if prefetch < 1 or bucket_nbytes < 1 or not 0 < stall_s < float("inf"):
            raise InvalidInput(f"prefetch={prefetch}, bucket_nbytes={bucket_nbytes} and stall_s={stall_s} must be positive.")
        self._client = DepotClient(url, access=access, stall_s=stall_s)
        self.url = "nixl://" + self._client.url.partition("://")[2]
        self._mode, self._prefetch, self._bucket_nbytes, self._stall_s = mode, prefetch, bucket_nbytes, stall_s
        self._agents = Agents(nic=nic or _loopback(self._client.url), polled=True)
        self._peer: tuple[Agent, str, bytes] | None = None  # the depot, as the agent was told of it
        self._ring: tuple[Agent, list[Bytes], Registration] | None = None
        self._session: Session | None = None
        self._busy = threading.Lock()

    # -- what there is ------------------------------------------------------------------------------------------------

    def newest(self) -> str:
        """The version that the depot would take."""
        newest = self._client.newest(deadline=Deadline.after(ANSWER_S))
        if newest is None:
            raise SourceFailed(f"{self._client.url} does not say which version is the newest.")
        return newest.version

    def wait_newer(self, after: str | None, *, deadline: Deadline, at_once: bool = False) -> str:
        """The newest version once it is another than `after`. With `at_once` the answer is whatever it is now."""
        if at_once:
            return self.newest()
        while True:
            wait_s = min(deadline.remaining(), _WAIT_S)
            newest = self._client.newest(deadline=deadline, after=after or "", wait_s=wait_s)
            if newest is not None and newest.version != after:
                return newest.version
            deadline.check(f"waiting for a newer version than {after} from {self.url}")

    def manifest(self, version: str, *, deadline: Deadline) -> Manifest:
        """The sealed manifest of a version."""
        return self._client.manifest(version, deadline=deadline)

    def acknowledge(self, manifest: Manifest, receiver: str, *, deadline: Deadline) -> None:
        """Tell that `receiver` serves a version now. A depot that cannot be reached is only logged."""
        try:
            self._client.acknowledge(Ack(receiver, manifest.version, manifest.root_digest), deadline=deadline)
        except WeightcastError as error:
            log.warning("acknowledgement failed", version=manifest.version, url=self.url, error=error)

    # -- bytes --------------------------------------------------------------------------------------------------------

    def landings(
        self, manifest: Manifest, memories: Mapping[str, Bytes], *, deadline: Deadline, witness: Witness = UNSEEN
    ) -> Generator[Landed, None, None]:
        """Read straight into the memories. It ends well only if the depot confirms that it was there to the end."""
        targets = _checked(manifest, memories)
        with self._opened(manifest, deadline) as (session, grant):
            session.use(list(memories.values()), list(targets.values()))
            parts = self._stretches(manifest, grant, memories, self._read_nbytes)
            for landed in self._landed(session, parts, targets):
                witness.landed(landed)
                yield landed

    @property
    def _read_nbytes(self) -> int:
        """What is read at once into memory of the caller's."""
        return min(READ_NBYTES, self._bucket_nbytes)

    def _landed(self, session: Session, parts: Iterator[Stretch], targets: Mapping[str, Region]) -> Iterator[Landed]:
        """Read stretches into the targets of their names, some at a time."""
        most = min(AHEAD_NBYTES, self._prefetch * self._bucket_nbytes) // self._read_nbytes
        for batch in batches(parts, self._read_nbytes):
            session.read(batch, [_target(targets[part.name], part) for part in batch])
            if session.moving > most:
                yield from _told(session)
        while session.moving:
            yield from _told(session)

    def pieces(self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None) -> Pieces:
        """The bytes through a ring of buckets, in the order in which they lie."""
        wanted = manifest.transfers().keys() if names is None else manifest.transfers().keys() & set(names)
        with self._opened(manifest, deadline) as (session, grant):
            ring = self._buckets(session.agent)
            session.use(ring)
            plan = batches(self._stretches(manifest, grant, wanted, self._bucket_nbytes), self._bucket_nbytes)
            waiting: list[tuple[int, Sequence[Stretch]]] = []
            come: set[int] = set()
            for number, batch in enumerate(plan):
                if number >= len(ring) - 1:  # all but the one that is lent out are under way or wait
                    yield from _emptied(session, ring, waiting, come)
                bucket = region_of("bucket", ring[number % len(ring)])
                session.read(batch, list(_packed(bucket, batch)))
                waiting.append((number, batch))
            while waiting:
                yield from _emptied(session, ring, waiting, come)

    def _stretches(self, manifest: Manifest, grant: Grant, names: Collection[str], limit: int) -> Iterator[Stretch]:
        return stretches(manifest, grant, names, leased=self._mode == "gdr", limit=limit)

    @contextmanager
    def _opened(self, manifest: Manifest, deadline: Deadline) -> Iterator[tuple[Session, Grant]]:
        """Leave to read a version. Without an error, the depot is asked at the end whether all was right."""
        if not self._busy.acquire(blocking=False):
            raise InvalidInput(f"{self.url} is being received from already: one at a time.")
        try:
            GRAVEYARD.sweep()
            what = f"reading {manifest.version} from {self.url}"
            agent = self._agents.get()
            path = version_path(manifest.version, "nixl", *(["lease"] if self._mode == "gdr" else []))
            patience_s = _REGISTER * self._stall_s
            query = GrantQuery(manifest.root_digest)
            grant = self._client.ask("POST", path, query, Grant, deadline=deadline, patience_s=patience_s)
            watch = Watch(self._client, grant, stall_s=self._stall_s)
            session = Session(agent, grant.agent, watch, deadline=deadline, stall_s=self._stall_s, what=what)
            self._session = session
            try:
                self._meet(session, grant)
                yield session, grant
                session.finish()
            except BaseException as error:
                self._forget(agent)
                session.give_up(error)
                raise
        finally:
            self._session = None
            self._busy.release()

    def _meet(self, session: Session, grant: Grant) -> None:
        """Have the agent know the depot, and nothing of memory that the depot has taken back."""
        known, agent = self._peer, session.agent
        if known is not None and known[0] is agent:
            if known[1:] == (grant.agent, grant.metadata):
                return
            agent.forget_peer(known[1])
        self._peer = None
        name = session.meet(grant.metadata)
        if name != grant.agent:
            raise SourceFailed(f"{self._client.url} tells of agent {grant.agent}, and gives the address of {name}.")
        self._peer = agent, name, grant.metadata

    def _buckets(self, agent: Agent) -> list[Bytes]:
        if self._ring is None or self._ring[0] is not agent:
            buckets = [np.empty(self._bucket_nbytes, dtype=np.uint8) for _ in range(self._prefetch + 2)]
            self._ring = agent, buckets, agent.register([region_of("bucket", bucket) for bucket in buckets])
        return self._ring[1]

    def _forget(self, agent: Agent) -> None:
        """Begin anew with the next call: another agent, and other buckets."""
        self._agents.drop(agent)
        self._peer = self._ring = None

    def close(self) -> None:
        """Disconnect. Reads that are under way are given up. It connects again if it is used again."""
        session = self._session
        if session is not None:
            self._forget(session.agent)
            session.give_up("the receiver was closed")
        self._peer = self._ring = None
        self._agents.close()
        self._client.close()


def _loopback(url: str) -> str:
    """The device of the loopback if the depot is there, else none."""
    host = urlsplit(url).hostname or ""
    try:
        return device_at("127.0.0.1") if host == "localhost" or ip_address(host).is_loopback else ""
    except ValueError:  # a name
        return ""


def _checked(manifest: Manifest, memories: Mapping[str, Bytes]) -> dict[str, Region]:
    """Where the memories lie. Raises `InvalidInput` with all that cannot be read into."""
    transfers = manifest.transfers()
    wrong, regions = [], {}
    for name, memory in memories.items():
        entry = transfers.get(name)
        if entry is None:
            wrong.append(f"{name}: the version has no such tensor")
        elif memory.nbytes != entry.nbytes or not _writable(memory):
            wrong.append(f"{name}: {entry.nbytes} bytes cannot be written to a memory of {memory.nbytes}")
        else:
            regions[name] = region_of(name, memory)
    if wrong:
        raise InvalidInput(f"version {manifest.version} cannot be received:" + "".join(f"\n  {one}" for one in wrong))
    return regions


def _writable(memory: object) -> bool:
    return bool(getattr(getattr(memory, "flags", None), "writeable", True))


def _target(memory: Region, part: Stretch) -> Region:
    return Region(memory.address + part.offset, part.nbytes, memory.device)


def _packed(bucket: Region, batch: Sequence[Stretch]) -> Iterator[Region]:
    """Places in a bucket, one after the other."""
    at = 0
    for part in batch:
        yield Region(bucket.address + at, part.nbytes, bucket.device)
        at += part.nbytes


def _told(session: Session) -> Iterator[Landed]:
    for batch in session.ended():
        yield from (Landed(part.name, part.offset, part.nbytes) for part in batch)


def _emptied(
    session: Session, ring: Sequence[Bytes], waiting: list[tuple[int, Sequence[Stretch]]], come: set[int]
) -> Pieces:
    """Wait for the bucket that is next, and give out what is in it."""
    number, batch = waiting[0]
    while id(batch) not in come:
        come.update(id(one) for one in session.ended())
    come.discard(id(batch))
    del waiting[0]
    data, at = ring[number % len(ring)].data, 0
    for part in batch:
        yield Piece(part.name, part.offset, data[at : at + part.nbytes])
        at += part.nbytes
