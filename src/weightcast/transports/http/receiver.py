"""`http://` and `https://`: the receiving end of one or several depots."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from time import monotonic

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, InvalidInput, SourceFailed, UpdateCancelled, WeightcastError
from weightcast.tensors.flat import Bytes, Piece, Pieces
from weightcast.transports.base import UNSEEN, Landed, Range, Witness
from weightcast.transports.boxes import box_landings, box_pieces
from weightcast.transports.http import asking
from weightcast.transports.http.access import Access
from weightcast.transports.http.client import CONNECTIONS, STALL_S, DepotClient, OtherBytes
from weightcast.transports.http.depots import Depot, Depots, Order, combined
from weightcast.transports.http.fetching import Fetch, Origin
from weightcast.transports.http.ranges import InOrder, Segment, Stretch, landing_stretches, places, stretches
from weightcast.transports.prefetch import DEPTH, ring
from weightcast.transports.range_states import RangeStates
from weightcast.wire.depot import Ack, Newest
from weightcast.wire.manifest import Manifest

log = logs.get(__name__)

BUCKET_NBYTES = 64 << 20
ANSWER_TIMEOUT_S = 10.0


@dataclass
class _Bucket:
    """Memory that is being filled, or read; `left` bytes of it have not been consumed."""

    memory: memoryview
    left: int


class HttpReceiver(RangeStates):
    """Fetches versions from depots that have the same ones, from all at once. What one does not send comes from another.

    Connections are opened when they are needed and kept until `close`. Memory: `prefetch` + 2 buckets for `pieces`, and
    nothing for `landings`. `spread` limits how many depots are used at once (0: all), the first that work in the order of
    `urls`, or of how fast they answer; a slow one is given less. A depot that is silent for `stall_s` has failed.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        access: Access | None = None,
        connections: int = CONNECTIONS,
        prefetch: int = DEPTH,
        bucket_nbytes: int = BUCKET_NBYTES,
        stall_s: float = STALL_S,
        spread: int = 0,
        order: Order = "listed",
    ) -> None:
        if not urls:
            raise InvalidInput("a receiver needs the URL of a depot.")
        kept = connections + 1  # one more for questions
        self._clients = [DepotClient(url, access=access, connections=kept, stall_s=stall_s) for url in dict.fromkeys(urls)]
        self._depots = Depots(self._clients, spread=spread, order=order)
        self._connections, self._stall_s = connections, stall_s
        self._prefetch, self._bucket_nbytes = prefetch, bucket_nbytes
        self._newest: Newest | None = None  # as it was last told
        self._origins: list[Origin] = []  # of what was fetched last
        self._doubted: list[Origin] = []  # of what came wrong, of the version with this root digest
        self._root = ""
        self.url = _joined([client.url for client in self._clients])

    # -- what there is ------------------------------------------------------------------------------------------------

    def newest(self) -> str:
        """The version that was published last, of all depots that answer."""
        return self.wait_newer(None, deadline=Deadline.after(ANSWER_TIMEOUT_S), at_once=True)

    def wait_newer(self, after: str | None, *, deadline: Deadline, at_once: bool = False) -> str:
        """The newest version once it is another than `after`; depots answer as soon as they have one.

        With `at_once` the answer is whatever it is now.
        """
        if at_once:
            what = f"asking {self.url} for its newest version"
            self._newest = asking.newest_of(self._clients, deadline=deadline, what=what)
        else:
            last, what = self._newest, f"waiting for a newer version than {after} from {self.url}"
            several = len(self._clients) > 1 and last is not None and last.version == after
            known = last if several and last is not None else after or ""
            self._newest = asking.wait_newer(self._clients, known, deadline=deadline, what=what)
        return self._newest.version

    def manifest(self, version: str, *, deadline: Deadline) -> Manifest:
        """What the version is, from the first depot that can tell. If it is the newest, others of its name are not used."""
        newest, causes = self._newest, []
        for depot in self._depots.in_order():
            url, begun = depot.client.url, monotonic()
            try:
                manifest = depot.client.manifest(version, deadline=deadline)
            except (DeadlineExceeded, UpdateCancelled):
                raise
            except WeightcastError as error:
                causes.append((url, error))
                if isinstance(error, SourceFailed):
                    self._depots.fail(depot, error, begun)
                continue
            if newest is None or newest.version != version or newest.root_digest == manifest.root_digest:
                return manifest
            other = f"it has version {version} as {manifest.root_digest}, and the newest is {newest.root_digest}"
            log.warning("manifest not used", url=url, error=other)
            causes.append((url, OtherBytes(f"{url} is not used: {other}.")))
        raise combined(f"asking for version {version}", causes)

    # -- bytes --------------------------------------------------------------------------------------------------------

    def pieces(self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None) -> Pieces:
        """The bytes as they come, each tensor's in order, through buckets that are used again and again."""
        if manifest.shares and manifest.kind == "full":
            size, depth = self._bucket_nbytes, self._prefetch
            yield from box_pieces(self, manifest, names, bucket_nbytes=size, prefetch=depth, deadline=deadline)
            return
        plan = deque(_buckets(manifest, names, self._bucket_nbytes))
        count = min(self._prefetch + 2, len(plan))
        free = ring(min(self._bucket_nbytes, max(map(_size, plan), default=0)), count - 2) if plan else []
        filling: dict[Stretch, _Bucket] = {}
        order = InOrder()
        with self._fetch(manifest, deadline) as fetch:

            def refill() -> None:
                while free and plan:
                    memory, wanted = free.pop(), plan.popleft()
                    bucket = _Bucket(memory, _size(wanted))
                    made = stretches(_placed(wanted, memory))
                    filling.update(dict.fromkeys(made, bucket))
                    fetch.want(made)

            refill()
            fetch.start()
            for arrived in fetch.arrivals():
                for one in order.add(arrived):
                    yield Piece(one.tensor, one.offset, one.data)
                    bucket = filling[one.stretch]
                    bucket.left -= len(one.data)
                    if bucket.left == 0:
                        filling = {stretch: other for stretch, other in filling.items() if other is not bucket}
                        free.append(bucket.memory)
                        refill()

    def landings(
        self, manifest: Manifest, memories: Mapping[str, Bytes], *, deadline: Deadline, witness: Witness = UNSEEN
    ) -> Generator[Landed, None, None]:
        """Fill each memory, several ranges at a time. The bytes of each tensor are told in order, a few MiB at a time."""
        if manifest.shares and manifest.kind == "full":
            yield from box_landings(self, manifest, memories, deadline=deadline, witness=witness)
            return
        views = {name: memory.data for name, memory in memories.items()}
        order = InOrder()
        with self._fetch(manifest, deadline, witness) as fetch:
            fetch.want(landing_stretches(manifest, views))
            del views
            fetch.start()
            for arrived in fetch.arrivals():
                for one in order.add(arrived):
                    yield Landed(one.tensor, one.offset, len(one.data))

    def ranges(self, manifest: Manifest, wanted: Sequence[Range], *, deadline: Deadline) -> Generator[int, None, None]:
        """Fill each memory, several ranges at a time; tells the index of each that is there. Nothing is verified."""
        yield from (index for index, one in enumerate(wanted) if not len(one.memory))
        order = sorted((index for index, one in enumerate(wanted) if len(one.memory)), key=lambda index: wanted[index][:2])
        left = {str(index): len(wanted[index].memory) for index in order}
        made = stretches(
            (wanted[index].file, Segment(wanted[index].start, str(index), 0, wanted[index].memory.data)) for index in order
        )
        avoid = {one.depot for one in self._doubted for stretch in made if one.meets(stretch)}
        with self._fetch(manifest, deadline, avoid=avoid) as fetch:
            fetch.want(made)
            self._origins = fetch.origins
            del made
            fetch.start()
            for arrived in fetch.arrivals():
                left[arrived.tensor] -= len(arrived.data)
                if left[arrived.tensor] == 0:
                    yield int(arrived.tensor)

    def doubt(self, file: str, start: int, stop: int) -> None:
        """Bytes of the last `ranges` came wrong: who sent them is passed over if they are asked for again."""
        self._doubted += [one for one in self._origins if one.file == file and one.start < stop and start < one.stop]

    @contextmanager
    def _fetch(
        self, manifest: Manifest, deadline: Deadline, witness: Witness = UNSEEN, avoid: Collection[Depot] = ()
    ) -> Iterator[Fetch]:
        if manifest.root_digest != self._root:
            self._root, self._doubted = manifest.root_digest, []
        fetch = Fetch(
            self._depots, manifest, connections=self._connections, stall_s=self._stall_s, deadline=deadline,
            witness=witness, avoid=avoid,
        )  # fmt: skip
        with closing(fetch):
            yield fetch

    # -- acknowledging ------------------------------------------------------------------------------------------------

    def acknowledge(self, manifest: Manifest, receiver: str, *, deadline: Deadline) -> None:
        """Tell all depots which version a receiver serves; those that cannot be told are logged."""
        ack = Ack(receiver, manifest.version, manifest.root_digest)
        what = f"telling {self.url} that {receiver} serves {manifest.version}"
        try:
            told = asking.ask_all(
                self._clients, lambda client, until: client.acknowledge(ack, deadline=until), deadline=deadline, what=what
            )
        except DeadlineExceeded as error:
            log.warning("acknowledgement failed", version=manifest.version, error=error)
            return
        for client, answer in told:
            if answer is not None:
                log.warning("acknowledgement failed", version=manifest.version, url=client.url, error=answer)

    def close(self) -> None:
        """Hang up. It connects again if it is used again."""
        self._origins, self._doubted = [], []
        for client in self._clients:
            client.close()


@dataclass(frozen=True)
class _Part:
    """Bytes of a tensor that fit into a bucket."""

    file: str
    at: int
    tensor: str
    offset: int
    nbytes: int


def _buckets(manifest: Manifest, names: Collection[str] | None, most: int) -> Iterator[list[_Part]]:
    """What goes into each bucket, in the order of the files; large tensors are cut."""
    bucket: list[_Part] = []
    room = most
    for file, entry in places(manifest, names):
        offset = 0
        while offset < entry.nbytes:
            nbytes = min(room, entry.nbytes - offset)
            bucket.append(_Part(file, entry.offset + offset, entry.name, offset, nbytes))
            offset, room = offset + nbytes, room - nbytes
            if room == 0:
                yield bucket
                bucket, room = [], most
    if bucket:
        yield bucket


def _size(bucket: Sequence[_Part]) -> int:
    return sum(part.nbytes for part in bucket)


def _placed(bucket: Sequence[_Part], memory: memoryview) -> Iterator[tuple[str, Segment]]:
    start = 0
    for part in bucket:
        yield part.file, Segment(part.at, part.tensor, part.offset, memory[start : start + part.nbytes])
        start += part.nbytes


def _joined(urls: Sequence[str]) -> str:
    """One URL for all depots, as a source is written, if they differ only in their hosts."""
    split = [url.split("/", 3) for url in urls]
    if len({(parts[0], *parts[3:]) for parts in split}) > 1:
        return ", ".join(urls)
    hosts = ",".join(parts[2] for parts in split)
    return "/".join([split[0][0], "", hosts, *split[0][3:]])
