"""A version that several publishers share, received as one: every byte that is wanted, from somebody who holds it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import NamedTuple, Self, TypeVar
from urllib.parse import SplitResult, urlsplit

from msgspec.structs import replace

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import Conflict, InvalidInput, NotFound, SourceFailed, VersionNotSet, WeightcastError
from weightcast.tensors.flat import Bytes, Pieces
from weightcast.transports.base import UNSEEN, FilesFailed, Landed, Range, RangeReceiver, Witness
from weightcast.transports.boxes import box_landings, box_pieces
from weightcast.transports.http.access import Access
from weightcast.transports.http.client import CONNECTIONS, STALL_S, DepotClient, Response, version_path
from weightcast.transports.http.options import parse_options
from weightcast.transports.http.receiver import HttpReceiver
from weightcast.transports.prefetch import DEPTH
from weightcast.wire.decoding import split_url
from weightcast.wire.depot import Ack, Catalogue, Newest, Offer
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


Reader = Callable[[str], RangeReceiver]


@dataclass(frozen=True)
class Group:
    """A version, and for each of its files the publisher that serves it and the root digest of that one's share."""

    manifest: Manifest
    owners: Mapping[str, tuple[int, str]]

    def owner(self, file: str) -> tuple[int, str]:
        """Who serves a file. Raises `SourceFailed` if no one does any more."""
        if file not in self.owners:
            raise SourceFailed(
                f"version {self.manifest.version} was published again without {file} since its manifest was read. Read its "
                "manifest again."
            )
        return self.owners[file]


class _Ended(NamedTuple):
    """All has come from a publisher, or no more will."""

    owner: int
    error: BaseException | None


class SharesClient:
    """Asks the publishers of all trainer ranks, as a `DepotClient` asks one depot. Any thread may call.

    A version is there once all ranks have published it.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        access: Access | None = None,
        connections: int = CONNECTIONS,
        stall_s: float = STALL_S,
        streams: int = STREAMS,
    ) -> None:
        if not urls or len(set(urls)) != len(urls):
            raise InvalidInput(f"the URLs of all publishers are needed, each once, not {', '.join(urls) or 'none'}.")
        self.clients = [DepotClient(url, access=access, connections=connections, stall_s=stall_s) for url in urls]
        self.url = _joined([client.url for client in self.clients])
        self._streams = streams
        self._lock = threading.Lock()
        self._groups: dict[tuple[str, str], Group] = {}

    def catalogue(self, *, deadline: Deadline) -> Catalogue:
        """The versions that all ranks have published."""
        told = self.ask_all(lambda client: client.catalogue(deadline=deadline))
        manifests = []
        for version in _common(told):
            with suppress(NotFound):  # it has just gone
                manifests.append(self.manifest(version, deadline=deadline))
        offers = (
            Offer(
                version=one.version,
                sequence=one.sequence,
                step=one.step,
                kind=one.kind,
                root_digest=one.root_digest,
                nbytes=one.nbytes,
            )
            for one in sorted(manifests, key=lambda one: one.sequence)
        )
        return Catalogue(_newest_of_all(told), tuple(offers))

    def newest(self, *, deadline: Deadline, after: str = "", wait_s: float = 0.0) -> Newest | None:
        """The version that all ranks have published last; None if it is still `after` when `wait_s` are over."""
        version = self.newest_version(deadline=deadline, after=after, wait_s=wait_s)
        if version is None:
            return None
        manifest = self.manifest(version, deadline=deadline)
        return Newest(version, manifest.sequence, manifest.root_digest)

    def newest_version(self, *, deadline: Deadline, after: str = "", wait_s: float = 0.0) -> str | None:
        """The id of that version."""
        until = monotonic() + wait_s
        while True:
            found = _newest_of_all(self.ask_all(lambda client: client.catalogue(deadline=deadline)))
            if found and found != after:
                return found
            for client in self.clients:
                left = min(until - monotonic(), deadline.remaining())
                if left <= 0:
                    return None
                with suppress(VersionNotSet):
                    client.newest(deadline=deadline, after=after, wait_s=min(_WAIT_S, left))
            sleep(max(0.0, min(_LAG_S, until - monotonic())))  # some trainer rank is behind

    def manifest(self, version: str, *, deadline: Deadline) -> Manifest:
        """What the version is, as follows from what all publishers hold."""
        return self._grouped(version, deadline).manifest

    @contextmanager
    def opened_range(
        self, manifest: Manifest, file: str, start: int, stop: int, *, deadline: Deadline
    ) -> Iterator[Response]:
        """The answer with a range of a file, from the publisher that has it."""
        client = self.clients[self.group(manifest, deadline).owner(file)[0]]
        with client.opened_range(manifest, file, start, stop, deadline=deadline) as response:
            yield response

    def _grouped(self, version: str, deadline: Deadline) -> Group:
        shares = self.ask_all(lambda client: self._share(client, version, deadline))
        wrong = {share.ranks for share in shares} - {len(self.clients)}
        if wrong:
            raise InvalidInput(
                f"version {version} is shared by {', '.join(map(str, sorted(wrong)))} publishers, and {len(self.clients)} "
                f"URL(s) are given: {self.url}. Give those of all, each once."
            )
        manifest = merged(shares)
        owners = {
            file: (number, share.root_digest)
            for number, share in enumerate(shares)
            for file in (share_file(share.rank), *(payload.file for payload in share.payloads))
        }
        group = Group(manifest, owners)
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

    def group(self, manifest: Manifest, deadline: Deadline) -> Group:
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

    def ask_all(self, ask: Callable[[DepotClient], _Answer]) -> list[_Answer]:
        """The answers of all publishers, in the order of the URLs."""
        with ThreadPoolExecutor(min(self._streams, len(self.clients)), thread_name_prefix="ask shares") as threads:
            return list(threads.map(logs.carried(ask), self.clients))

    def close(self) -> None:
        """Hang up everywhere. It connects again if it is used again."""
        for client in self.clients:
            client.close()


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
        reader: Reader | None = None,
    ) -> None:
        """`streams` publishers are received from at once; `pieces` keeps up to `prefetch` + 2 buckets in memory.

        `reader` makes what reads the files of the publisher at a URL, by default over HTTP.
        """
        if streams < 1 or prefetch < 1 or bucket_nbytes < MIN_BUCKET_NBYTES:
            raise InvalidInput(
                f"streams={streams} and prefetch={prefetch} must be positive, and bucket_nbytes={bucket_nbytes} at least "
                f"{MIN_BUCKET_NBYTES}."
            )
        self._client = SharesClient(urls, access=access, stall_s=stall_s, streams=streams)
        self._readers = [
            HttpReceiver([url], access=access, stall_s=stall_s) if reader is None else reader(url) for url in urls
        ]
        self.url = _joined([one.url for one in self._readers])
        self.received_nbytes = 0
        self._streams, self._prefetch, self._bucket_nbytes = streams, prefetch, bucket_nbytes

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
        known, wait_s = ("", 0.0) if at_once else (after or "", deadline.remaining())
        found = self._client.newest_version(deadline=deadline, after=known, wait_s=wait_s)
        if found is not None:
            return found
        if not at_once:
            deadline.check(f"waiting for a newer version than {after} from {self.url}")
        raise VersionNotSet(f"nothing has been published by every trainer rank at {self.url} yet.")

    def manifest(self, version: str, *, deadline: Deadline) -> Manifest:
        """What the version is, as follows from what all publishers hold."""
        return self._client.manifest(version, deadline=deadline)

    # -- bytes --------------------------------------------------------------------------------------------------------

    def ranges(self, manifest: Manifest, wanted: Sequence[Range], *, deadline: Deadline) -> Generator[int, None, None]:
        """Fill each memory, from all publishers at the same time; tells the index of each that is there. Nothing is
        verified. If publishers fail, `FilesFailed` says so when all that others have is there.
        """
        group = self._client.group(manifest, deadline)
        parts: dict[int, list[int]] = defaultdict(list)  # by publisher
        for index in sorted(range(len(wanted)), key=lambda index: wanted[index][:2]):
            parts[group.owner(wanted[index].file)[0]].append(index)
        told: SimpleQueue[int | _Ended] = SimpleQueue()
        stop = threading.Event()
        until = Deadline.after(deadline.remaining(), cancelled=stop)

        def fetch(owner: int, indices: Sequence[int]) -> None:
            error: BaseException | None = None
            try:
                mine = [wanted[index] for index in indices]
                share = replace(manifest, root_digest=group.owner(mine[0].file)[1])  # as its publisher knows the version
                with closing(self._readers[owner].ranges(share, mine, deadline=until)) as come:
                    for number in come:
                        told.put(indices[number])
            except BaseException as caught:  # noqa: BLE001 - it is raised again in the waiting thread
                error = caught
            told.put(_Ended(owner, error))

        failed: dict[int, WeightcastError] = {}
        what = f"fetching {manifest.version} from {self.url}"
        with ThreadPoolExecutor(min(self._streams, max(1, len(parts))), thread_name_prefix="fetch shares") as threads:
            try:
                for owner, indices in parts.items():
                    threads.submit(logs.carried(fetch), owner, indices)
                left = len(parts)
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
                        failed[one.owner] = one.error
                    elif one.error is not None:
                        deadline.check(what)
                        raise one.error
            finally:
                stop.set()
        if failed:
            files = {wanted[index].file: owner for owner in failed for index in parts[owner]}
            causes = "; ".join(f"{file} at {self._readers[owner].url}: {failed[owner]}" for file, owner in files.items())
            raise FilesFailed(f"{what} failed: {causes}", files)

    def landings(
        self, manifest: Manifest, memories: Mapping[str, Bytes], *, deadline: Deadline, witness: Witness = UNSEEN
    ) -> Generator[Landed, None, None]:
        """Fill each memory with the tensor of that name. Tells of a tensor when all of it is there, proved."""
        return box_landings(self, manifest, memories, deadline=deadline, witness=witness)

    def pieces(self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None) -> Pieces:
        """Every byte of the version (or of the named tensors) once, a bucket at a time."""
        return box_pieces(
            self, manifest, names, bucket_nbytes=self._bucket_nbytes, prefetch=self._prefetch, deadline=deadline
        )

    # -- acknowledging ------------------------------------------------------------------------------------------------

    def acknowledge(self, manifest: Manifest, receiver: str, *, deadline: Deadline) -> None:
        """Tell all publishers that `receiver` serves a version now."""
        ack = Ack(receiver, manifest.version, manifest.root_digest)

        def tell(client: DepotClient) -> None:
            try:
                client.acknowledge(ack, deadline=deadline)
            except WeightcastError as error:
                log.warning("acknowledgement failed", version=manifest.version, url=client.url, error=error)

        self._client.ask_all(tell)

    def close(self) -> None:
        """Hang up everywhere. Safe twice, and safe after a failure."""
        self._client.close()
        for reader in self._readers:
            reader.close()


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest.version, manifest.root_digest  # the same weights may be published twice


def _joined(urls: Sequence[str]) -> str:
    """One URL for all publishers, as a source is written, if they differ only in their hosts."""
    split = [urlsplit(url) for url in urls]
    if len({(one.scheme, one.path) for one in split}) > 1:
        return ", ".join(urls)
    return SCHEME_PREFIX + split[0]._replace(netloc=",".join(one.netloc for one in split)).geturl()


def _common(catalogues: Sequence[Catalogue]) -> dict[str, int]:
    """The versions that everybody has, and their numbers in the order of publication."""
    offers = [{offer.version: offer.sequence for offer in one.versions if offer.complete} for one in catalogues]
    return {version: max(one[version] for one in offers) for version in set.intersection(*map(set, offers))}


def _newest_of_all(catalogues: Sequence[Catalogue]) -> str | None:
    """The version that came last of those that everybody has."""
    common = _common(catalogues)
    return max(common, key=lambda version: (common[version], version), default=None)


def open_client(url: str, *, access: Access | None, connections: int, stall_s: float) -> DepotClient | SharesClient:
    """The client for the URL of a depot, or for `shares+http://host:port,host:port`."""
    if not url.startswith(SCHEME_PREFIX):
        return DepotClient(url, access=access, connections=connections, stall_s=stall_s)
    urls = parse_options(split_url(url.removeprefix(SCHEME_PREFIX)), {}).urls
    return SharesClient(urls, access=access, connections=connections, stall_s=stall_s)
