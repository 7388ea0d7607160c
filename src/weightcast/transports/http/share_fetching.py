"""Boxes fetched from several publishers at once, each of which holds some. One that fails is done without, if it can be."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import msgspec
import numpy as np

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import Conflict, Corrupt, DigestMismatch, NotFound, SourceFailed
from weightcast.tensors.box_plan import Fetch, HeldBox, Wanted, chunks, moved, plan
from weightcast.tensors.boxes import Box, box_of
from weightcast.tensors.digest import Algorithm, Hasher, bytes_digest
from weightcast.tensors.flat import Array, Bytes, flat_bytes
from weightcast.transports.http.client import DepotClient, Response, version_path
from weightcast.wire.decoding import decode, is_count
from weightcast.wire.depot import DIGESTS_HEADER, BoxOf, BoxQuery
from weightcast.wire.manifest import Manifest, TensorEntry

log = logs.get(__name__)

STREAMS = 8
BATCH_NBYTES = 32 << 20  # asked for at once: what is fetched again if a connection breaks
_BATCH_BOXES = 1024
_STREAMS_PER_PUBLISHER = 2
_TRIES = 2  # of a publisher that alone holds something
_BLOCK_NBYTES = 1 << 20
_LOOK_S = 0.1
_JOIN_S = 5.0


@dataclass(frozen=True)
class Publisher:
    """One of the publishers that share a version, and the digest by which it knows its share."""

    rank: int
    client: DepotClient
    root_digest: str

    def __str__(self) -> str:
        return f"trainer rank {self.rank} at {self.client.url}"


@dataclass(frozen=True)
class Group:
    """A version and all its publishers, by their ranks."""

    manifest: Manifest
    publishers: Mapping[int, Publisher]

    def held(self, names: set[str]) -> dict[str, list[HeldBox]]:
        """Who holds which boxes of these tensors."""
        return {
            name: [HeldBox(Box(one.start, one.shape), one.ranks) for one in self.manifest.boxes.get(name, ())]
            for name in names
        }


@dataclass
class _Target:
    """A box that is wanted, the memory it is wanted in, and how many fetches it still needs."""

    entry: TensorEntry
    box: Box
    memory: Bytes
    left: int = 0
    digest: str = ""  # of all of it, if it came in one piece

    @property
    def array(self) -> Array:
        """The memory as the box, in integers of the width of its elements: they are copied fastest."""
        return self.memory.view(f"u{self.entry.dtype.itemsize}").reshape(self.box.shape)


@dataclass
class _Batch:
    """What is asked for at once."""

    rank: int
    fetches: list[Fetch] = field(default_factory=list)
    nbytes: int = 0


class Fetching:
    """One transfer: fills memories with boxes of a version. `run` may be called once."""

    def __init__(
        self,
        group: Group,
        wanted: Sequence[tuple[BoxOf, Bytes]],
        *,
        deadline: Deadline,
        streams: int,
        stall_s: float,
        count: Callable[[int], None],
    ) -> None:
        self._group, self._deadline, self._stall_s, self._count = group, deadline, stall_s, count
        self._algorithm: Algorithm = group.manifest.algorithm or "xxh3-128"
        entries = group.manifest.by_name()
        self._targets = [_Target(entries[asked.tensor], asked.box, memory) for asked, memory in wanted]
        self._stop = threading.Event()
        self._watch = Deadline.after(deadline.remaining(), cancelled=self._stop)
        self._changed = threading.Condition()
        self._waiting: dict[int, deque[_Batch]] = defaultdict(deque)
        self._flying: dict[int, int] = defaultdict(int)
        self._failures: dict[int, int] = defaultdict(int)
        self._told: queue.Queue[tuple[int, str] | BaseException] = queue.Queue()
        self._streams = streams
        self._digests = {
            (name, box.start, box.shape): box.digest for name, boxes in group.manifest.boxes.items() for box in boxes
        }

    def run(self) -> Generator[tuple[int, str], None, None]:
        """The index of each box that is there, and the digest of its bytes. Closing it cancels the rest."""
        self._plan()
        done = 0
        for index, target in enumerate(self._targets):
            if target.left == 0:
                done += 1
                yield index, bytes_digest(b"", self._algorithm)
        batches = sum(map(len, self._waiting.values()))
        threads = [
            threading.Thread(target=logs.carried(self._work), name="fetch shares", daemon=True)
            for _ in range(min(self._streams, batches, _STREAMS_PER_PUBLISHER * len(self._waiting)))
        ]
        for thread in threads:
            thread.start()
        try:
            while done < len(self._targets):
                yield self._next()
                done += 1
        finally:
            self._stop.set()
            with self._changed:
                self._changed.notify_all()
            ends = Deadline.after(_JOIN_S)
            for thread in threads:
                thread.join(timeout=ends.remaining())
            if any(thread.is_alive() for thread in threads):
                log.warning(
                    "thread left",
                    what=f"fetching {self._group.manifest.version}",
                    why="it is stuck in a call that does not return",
                )

    def _next(self) -> tuple[int, str]:
        while True:
            self._deadline.check(f"fetching {self._group.manifest.version}")
            try:
                told = self._told.get(timeout=min(_LOOK_S, self._deadline.remaining()))
            except queue.Empty:
                continue
            if isinstance(told, BaseException):
                self._deadline.check(f"fetching {self._group.manifest.version}")
                raise told
            return told

    # -- who is asked for what ----------------------------------------------------------------------------------------

    def _plan(self) -> None:
        wanted = [Wanted(one.entry.name, one.box, one.entry.dtype.itemsize) for one in self._targets]
        fetches, _ = plan(wanted, self._group.held({one.tensor for one in wanted}))
        for fetch in fetches:
            self._targets[fetch.wanted].left += 1
            self._assign(fetch, fetch.holders[0])
        short = [one.entry.name for one in self._targets if prod(one.box.shape) and not one.left]
        if short:
            raise SourceFailed(f"nobody holds what is wanted of {', '.join(sorted(set(short)))}.")

    def _assign(self, fetch: Fetch, rank: int) -> None:
        nbytes = prod(fetch.box.shape) * self._targets[fetch.wanted].entry.dtype.itemsize
        batches = self._waiting[rank]
        if not batches or batches[-1].nbytes + nbytes > BATCH_NBYTES or len(batches[-1].fetches) >= _BATCH_BOXES:
            batches.append(_Batch(rank))
        batches[-1].fetches.append(fetch)
        batches[-1].nbytes += nbytes

    def _take(self) -> _Batch | None:
        """The next batch, of the publisher that does least at the moment; None if there will be no more."""
        with self._changed:
            while not self._stop.is_set():
                free = [rank for rank, batches in self._waiting.items() if batches]
                ready = [rank for rank in free if self._flying[rank] < _STREAMS_PER_PUBLISHER]
                if ready:
                    rank = min(ready, key=lambda one: (self._flying[one], -len(self._waiting[one])))
                    self._flying[rank] += 1
                    return self._waiting[rank].popleft()
                if not free and not any(self._flying.values()):
                    return None
                self._changed.wait(timeout=_LOOK_S)
        return None

    # -- fetching -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        bounce = np.empty(_BLOCK_NBYTES, dtype=np.uint8)
        while (batch := self._take()) is not None:
            error: BaseException | None = None
            try:
                digests = self._fetch(batch, bounce)
                self._finish(batch, digests)
            except (SourceFailed, NotFound, Conflict, Corrupt) as failed:
                error = self._without(batch, failed)
            except BaseException as failed:  # noqa: BLE001 - it is raised again by whoever waits
                error = failed
            with self._changed:
                self._flying[batch.rank] -= 1
                self._changed.notify_all()
            if error is not None:
                self._told.put(error)
                return

    def _fetch(self, batch: _Batch, bounce: Bytes) -> list[str]:
        """Receive the boxes of a batch; gives their digests, which are those that the publisher sent with them."""
        publisher = self._group.publishers[batch.rank]
        version = self._group.manifest.version
        asked = tuple(BoxOf(self._targets[fetch.wanted].entry.name, fetch.box) for fetch in batch.fetches)
        with publisher.client.stream(
            "POST", version_path(version, "boxes"), BoxQuery(publisher.root_digest, asked),
            deadline=self._watch, patience_s=self._stall_s,
        ) as response:  # fmt: skip
            tail = response.headers.get(DIGESTS_HEADER.lower(), "")
            if not is_count(tail) or response.nbytes != batch.nbytes + int(tail):
                raise SourceFailed(
                    f"{publisher} was asked for {batch.nbytes} bytes of boxes and answers with {response.nbytes}, "
                    f"{tail[:40] or 'none'} of them digests."
                )
            self._count(response.nbytes)
            found = [self._receive(response, fetch, bounce) for fetch in batch.fetches]
            try:
                told = decode(response.read(), list[str])
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise SourceFailed(f"{publisher} sent no digests behind its boxes: {error}.") from error
        if len(told) != len(found):
            raise SourceFailed(f"{publisher} sent {len(told)} digests for {len(found)} boxes.")
        self._compare(batch, found, told)
        return found

    def _receive(self, response: Response, fetch: Fetch, bounce: Bytes) -> str:
        """Put a box where it belongs, straight if it lies there in one piece; gives the digest of what came."""
        target = self._targets[fetch.wanted]
        place = box_of(target.array, moved(fetch.box, target.box.start))
        hasher = Hasher(self._algorithm)
        if place.flags.c_contiguous:
            memory = flat_bytes(place)
            for start in range(0, len(memory), _BLOCK_NBYTES):
                block = memory[start : start + _BLOCK_NBYTES]
                response.readinto(block.data)
                hasher.update(block.data)
            return hasher.digest()
        for part in chunks(Box.whole(place.shape), place.itemsize, len(bounce)):
            block = bounce[: prod(part.shape) * place.itemsize]
            response.readinto(block.data)
            hasher.update(block.data)
            box_of(place, part)[...] = block.view(place.dtype).reshape(part.shape)
        return hasher.digest()

    def _compare(self, batch: _Batch, found: Sequence[str], told: Sequence[str]) -> None:
        wrong = []
        for fetch, here, there in zip(batch.fetches, found, told, strict=True):
            name = self._targets[fetch.wanted].entry.name
            published = self._digests[name, fetch.box.start, fetch.box.shape] if fetch.whole else there
            wanted = there if here != there else published
            if here != wanted:
                wrong.append((f"{name} {list(fetch.box.start)} + {list(fetch.box.shape)}", wanted, here))
        if wrong:
            publisher = self._group.publishers[batch.rank]
            raise DigestMismatch(f"version {self._group.manifest.version} as received from {publisher}", wrong)

    def _finish(self, batch: _Batch, digests: Sequence[str]) -> None:
        for fetch, digest in zip(batch.fetches, digests, strict=True):
            target = self._targets[fetch.wanted]
            with self._changed:
                target.left -= 1
                complete = target.left == 0
            if complete:
                whole = fetch.box == target.box
                self._told.put((fetch.wanted, digest if whole else bytes_digest(target.memory.data, self._algorithm)))

    # -- a publisher that fails ---------------------------------------------------------------------------------------

    def _without(self, batch: _Batch, error: Exception) -> Exception | None:
        """Have what others hold too fetched from them, and try again for the rest; gives an error if that is in vain."""
        if self._stop.is_set():
            return None
        with self._changed:
            rank = batch.rank
            self._failures[rank] += 1
            waiting, self._waiting[rank] = [batch, *self._waiting[rank]], deque()
            kept = []
            for fetch in (fetch for one in waiting for fetch in one.fetches):
                others = [who for who in fetch.holders if self._failures[who] == 0]
                if others:
                    self._assign(fetch, min(others, key=lambda who: sum(one.nbytes for one in self._waiting[who])))
                else:
                    kept.append(fetch)
            for fetch in kept:
                self._assign(fetch, rank)
        log.warning("publisher failed", version=self._group.manifest.version, url=self._group.publishers[rank], error=error)
        if not kept or self._failures[rank] < _TRIES:
            return None
        if isinstance(error, Corrupt):
            return error
        names = sorted({self._targets[fetch.wanted].entry.name for fetch in kept})
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return SourceFailed(f"{self._group.publishers[rank]} failed, and nobody else holds its boxes of {listed}: {error}")
