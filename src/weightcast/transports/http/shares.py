"""A version that several publishers share, received as one: every byte that is wanted, from somebody who holds it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import prod
from queue import Empty, SimpleQueue
from time import sleep
from typing import NamedTuple, Self, TypeVar
from urllib.parse import SplitResult, urlsplit

import numpy as np

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import Conflict, InvalidInput, NotFound, SourceFailed, VersionNotSet, WeightcastError
from weightcast.tensors.box_plan import chunks
from weightcast.tensors.boxes import Box
from weightcast.tensors.flat import Bytes, Piece, Pieces
from weightcast.transports.base import UNSEEN, FilesFailed, Landed, Range, Witness
from weightcast.transports.boxes import MemoryTaker, fetch_boxes
from weightcast.transports.http.access import Access
from weightcast.transports.http.client import STALL_S, DepotClient, version_path
from weightcast.transports.http.options import parse_options
from weightcast.transports.http.receiver import HttpReceiver
from weightcast.transports.prefetch import DEPTH, prefetched, ring
from weightcast.wire.depot import Ack, Catalogue
from weightcast.wire.manifest import MAX_MANIFEST_NBYTES, Manifest
from weightcast.wire.shares import Share, decode_share, merged, share_file

log = logs.get(__name__)

SCHEME_PREFIX = "shares+"
OPTIONS = frozenset({"token_file", "ca_file", "prefetch", "bucket_nbytes", "stall_s"})
BUCKET_NBYTES = 64 << 20
MIN_BUCKET_NBYTES = 1 << 12
ANSWER_TIMEOUT_S = 30.0
STREAMS = 8
_LOOK_S = 0.1
_KEPT_GROUPS = 4
_WAIT_S = 10.0  # of a long poll; a publisher that is gone is noticed then
_LAG_S = 0.05  # between looks at trainer ranks that are behind the others

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Group:
    """A version and the publishers of its files."""

    manifest: Manifest
    readers: Mapping[str, HttpReceiver]


class _Ended(NamedTuple):
    """All has come of a file, or no more will."""

    file: str
    error: BaseException | None


class SharesReceiver:
    """Receives from the publishers of all trainer ranks, whose URLs are given in any order.

    A version is there once all ranks have published it. Each rank serves one file of it. Boxes that several ranks hold are
    fetched from all of them in equal parts, and from the others if one dies. `received_nbytes` counts the bytes of shares.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        access: Access | None = None,
        streams: int = STREAMS,
        prefetch: int = DEPTH,
        bucket_nbytes: int = BUCKET_NBYTES,
        stall_s: float = STALL_S,
    ) -> None:
        """`streams` publishers are received from at once; `pieces` keeps up to `prefetch` + 2 buckets in memory."""
        if not urls or len(set(urls)) != len(urls):
            raise InvalidInput(f"the URLs of all publishers are needed, each once, not {', '.join(urls) or 'none'}.")
        if streams < 1 or prefetch < 1 or bucket_nbytes < MIN_BUCKET_NBYTES:
            raise InvalidInput(
                f"streams={streams} and prefetch={prefetch} must be positive, and bucket_nbytes={bucket_nbytes} at least "
                f"{MIN_BUCKET_NBYTES}."
            )
        self._clients = [DepotClient(url, access=access, stall_s=stall_s) for url in urls]
        self._readers = {url: HttpReceiver([url], access=access, stall_s=stall_s) for url in urls}
        self.url = _joined([client.url for client in self._clients])
        self.received_nbytes = 0
        self._streams, self._prefetch, self._bucket_nbytes = streams, prefetch, bucket_nbytes
        self._lock = threading.Lock()
        self._groups: dict[tuple[str, str], Group] = {}

    @classmethod
    def open(cls, location: SplitResult, options: Mapping[str, str]) -> Self:
        """The receiver for `shares+http://host:port,host:port[?options]`, the hosts of all trainer ranks. Of the options of
        `http://` it knows those in `OPTIONS`.
        """
        plain = location._replace(scheme=location.scheme.removeprefix(SCHEME_PREFIX))
        urls, access, settings = parse_options(plain, options)
        return cls(urls, access=access, **settings)

    # -- versions -----------------------------------------------------------------------------------------------------

    def newest(self) -> str:
        """The last version that all ranks have published."""
        return self.wait_newer(None, deadline=Deadline.after(ANSWER_TIMEOUT_S), at_once=True)

    def wait_newer(self, after: str | None, *, deadline: Deadline, at_once: bool = False) -> str:
        """The newest version of all ranks once it is another than `after`. With `at_once`: whatever it is now."""
        what = f"waiting for a newer version than {after} from {self.url}"
        while True:
            newest = _newest_of_all(self._all(lambda client: client.catalogue(deadline=deadline)))
            if newest and (at_once or newest != after):
                return newest
            if at_once:
                raise VersionNotSet(f"nothing has been published by every trainer rank at {self.url} yet.")
            for client in self._clients:
                deadline.check(what)
                self._poll(client, after or "", deadline)
            sleep(min(_LAG_S, deadline.remaining()))  # some trainer rank is behind
            deadline.check(what)

    def _poll(self, client: DepotClient, after: str, deadline: Deadline) -> None:
        try:
            client.newest(deadline=deadline, after=after, wait_s=min(_WAIT_S, deadline.remaining()))
        except VersionNotSet:
            return

    def manifest(self, version: str, *, deadline: Deadline) -> Manifest:
        """What the version is, as follows from what all publishers hold."""
        return self._grouped(version, deadline).manifest

    def _grouped(self, version: str, deadline: Deadline) -> Group:
        shares = self._all(lambda client: self._share(client, version, deadline))
        wrong = {share.ranks for share in shares} - {len(self._clients)}
        if wrong:
            raise InvalidInput(
                f"version {version} is shared by {', '.join(map(str, sorted(wrong)))} publishers, and {len(self._clients)} "
                f"URL(s) are given: {self.url}. Give those of all, each once."
            )
        manifest = merged(shares)
        readers = zip(shares, self._readers.values(), strict=True)
        own = {file: reader for share, reader in readers for file in (share_file(share.rank), *_payloads(share))}
        group = Group(manifest, own)
        with self._lock:
            self._groups.pop(_key(manifest), None)
            self._groups[_key(manifest)] = group
            for key in list(self._groups)[:-_KEPT_GROUPS]:
                del self._groups[key]
        return group

    def _share(self, client: DepotClient, version: str, deadline: Deadline) -> Share:
        path = version_path(version, "share")
        with client.stream("GET", path, None, deadline=deadline) as response:
            share = decode_share(response.read(MAX_MANIFEST_NBYTES), f"{client.url}{path}")
        if share.version != version:
            raise SourceFailed(f"{client.url} was asked for {version} and describes {share.version}.")
        return share

    def _group(self, manifest: Manifest, deadline: Deadline) -> Group:
        """The publishers of just this version, whoever read its manifest."""
        with self._lock:
            group = self._groups.get(_key(manifest))
        group = group or self._grouped(manifest.version, deadline)
        if group.manifest.root_digest != manifest.root_digest:
            raise SourceFailed(
                f"version {manifest.version} has root digest {group.manifest.root_digest} at {self.url} now, and not "
                f"{manifest.root_digest}: it was published again. Read its manifest again."
            )
        return group

    # -- bytes --------------------------------------------------------------------------------------------------------

    def ranges(self, manifest: Manifest, wanted: Sequence[Range], *, deadline: Deadline) -> Generator[int, None, None]:
        """Fill each memory, from all publishers at the same time; tells the index of each that is there. Nothing is
        verified. If publishers fail, `FilesFailed` says so when all that others have is there.
        """
        readers = self._group(manifest, deadline).readers
        order = sorted(range(len(wanted)), key=lambda index: wanted[index][:2])
        files = {file: list(indices) for file, indices in groupby(order, key=lambda index: wanted[index].file)}
        told: SimpleQueue[int | _Ended] = SimpleQueue()
        stop = threading.Event()
        until = Deadline.after(deadline.remaining(), cancelled=stop)

        def fetch(file: str) -> None:
            error: BaseException | None = None
            try:
                mine = [wanted[index] for index in files[file]]
                with closing(readers[file].ranges(manifest, mine, deadline=until)) as come:
                    for number in come:
                        told.put(files[file][number])
            except BaseException as caught:  # noqa: BLE001 - it is raised again by whoever waits
                error = caught
            told.put(_Ended(file, error))

        failed: dict[str, WeightcastError] = {}
        what = f"fetching {manifest.version} from {self.url}"
        with ThreadPoolExecutor(min(self._streams, max(1, len(files))), thread_name_prefix="fetch shares") as threads:
            try:
                for file in files:
                    threads.submit(logs.carried(fetch), file)
                left = len(files)
                while left:
                    try:
                        one = told.get(timeout=min(_LOOK_S, deadline.remaining()))
                    except Empty:
                        deadline.check(what)
                        continue
                    if isinstance(one, int):
                        self.received_nbytes += len(wanted[one].memory)
                        yield one
                        continue
                    left -= 1
                    if isinstance(one.error, SourceFailed | NotFound | Conflict):
                        failed[one.file] = one.error
                    elif one.error is not None:
                        deadline.check(what)
                        raise one.error
            finally:
                stop.set()
        if failed:
            causes = "; ".join(f"{file} at {readers[file].url}: {error}" for file, error in failed.items())
            raise FilesFailed(f"{what} failed: {causes}", failed)

    def landings(
        self, manifest: Manifest, memories: Mapping[str, Bytes], *, deadline: Deadline, witness: Witness = UNSEEN
    ) -> Generator[Landed, None, None]:
        """Fill each memory with the tensor of that name. A tensor is told when all of it is there, proved."""
        entries = manifest.transfers()
        takers = [MemoryTaker(entries[name], Box.whole(entries[name].shape), memory) for name, memory in memories.items()]
        with closing(fetch_boxes(self, manifest, takers, proved=True, deadline=deadline)) as told:
            for index in told:
                landed = Landed(takers[index].tensor, 0, entries[takers[index].tensor].nbytes)
                if landed.nbytes:
                    witness.landed(landed)
                    yield landed

    def pieces(self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None) -> Pieces:
        """Every byte of the version (or of the named tensors) once, a bucket at a time."""
        chosen = [entry.name for entry in manifest.tensors if names is None or entry.name in names]
        what = f"receiving {manifest.version} from {self.url}"
        produce = partial(self._produce, manifest, chosen, deadline)
        return prefetched(produce, deadline=deadline, what=what, depth=self._prefetch)

    def _produce(self, manifest: Manifest, names: Sequence[str], deadline: Deadline) -> Pieces:
        buckets, entries = ring(self._bucket_nbytes, self._prefetch), manifest.by_name()
        for number, bucket in enumerate(_buckets(manifest, names, self._bucket_nbytes)):
            memory = np.frombuffer(buckets[number % len(buckets)], dtype=np.uint8)
            takers, starts, at = [], [], 0
            for name, box, start, nbytes in bucket:
                takers.append(MemoryTaker(entries[name], box, memory[at : at + nbytes]))
                starts.append(start)
                at += nbytes
            with closing(fetch_boxes(self, manifest, takers, proved=True, deadline=deadline)) as told:
                for index in told:
                    yield Piece(takers[index].tensor, starts[index], takers[index].bytes.data)

    # -- acknowledging ------------------------------------------------------------------------------------------------

    def acknowledge(self, manifest: Manifest, receiver: str, *, deadline: Deadline) -> None:
        """Tell all publishers that `receiver` serves a version now."""
        ack = Ack(receiver, manifest.version, manifest.root_digest)

        def tell(client: DepotClient) -> None:
            try:
                client.acknowledge(ack, deadline=deadline)
            except WeightcastError as error:
                log.warning("acknowledgement failed", version=manifest.version, url=client.url, error=error)

        self._all(tell)

    def close(self) -> None:
        """Hang up everywhere. Safe twice, and safe after a failure."""
        for client in self._clients:
            client.close()
        for reader in self._readers.values():
            reader.close()

    def _all(self, ask: Callable[[DepotClient], _Answer]) -> list[_Answer]:
        """The answers of all publishers, in the order of the URLs."""
        with ThreadPoolExecutor(min(self._streams, len(self._clients)), thread_name_prefix="ask shares") as threads:
            return list(threads.map(logs.carried(ask), self._clients))


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest.version, manifest.root_digest  # the same weights may be published twice


def _payloads(share: Share) -> list[str]:
    return [payload.file for payload in share.payloads]


def _joined(urls: Sequence[str]) -> str:
    """One URL for all publishers, as a source is written, if they differ only in their hosts."""
    split = [urlsplit(url) for url in urls]
    if len({(one.scheme, one.path) for one in split}) > 1:
        return ", ".join(urls)
    return SCHEME_PREFIX + split[0]._replace(netloc=",".join(one.netloc for one in split)).geturl()


def _newest_of_all(catalogues: Sequence[Catalogue]) -> str | None:
    """The version that came last of those that everybody has."""
    offers = [{offer.version: offer for offer in one.versions if offer.complete} for one in catalogues]
    common = set.intersection(*(set(one) for one in offers))
    return max(common, key=lambda version: (max(one[version].sequence for one in offers), version), default=None)


def _buckets(manifest: Manifest, names: Sequence[str], nbytes: int) -> Iterator[list[tuple[str, Box, int, int]]]:
    """All bytes of tensors in boxes that lie in one piece, as many together as fit into a bucket; with their offsets."""
    entries = manifest.by_name()
    bucket: list[tuple[str, Box, int, int]] = []
    room = nbytes
    for name in names:
        at = 0
        for box in chunks(Box.whole(entries[name].shape), entries[name].dtype.itemsize, nbytes):
            size = prod(box.shape) * entries[name].dtype.itemsize
            if size == 0:
                continue
            if size > room:
                yield bucket
                bucket, room = [], nbytes
            bucket.append((name, box, at, size))
            at, room = at + size, room - size
    if bucket:
        yield bucket
