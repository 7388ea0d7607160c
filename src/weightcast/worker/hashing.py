"""Hashing bytes as they are copied, while they are still in the cache, so that nothing has to be read again to prove it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

from weightcast.tensors.flat import BLOCK_NBYTES, Buffer, Bytes, byte_blocks
from weightcast.tensors.sums import Sum, tensor_hasher
from weightcast.transports.base import Follow, Landed, Witness
from weightcast.wire.manifest import TensorEntry

COPY_NBYTES = 256 << 10  # copied and then hashed: source and copy stay in a core's own cache
# From some size on, memcpy writes past the caches, in half the time: that is worth more than hashing from the cache.
_LARGE_NBYTES = 32 << 20

Check = Callable[[], None]


class RunningDigest:
    """The digest of a tensor whose bytes come in any order. Those that come in order are hashed as they come.

    It is of the kind that the entry of the tensor has: a digest of its bytes, or its sum.
    """

    def __init__(self, entry: TensorEntry) -> None:
        self._hasher = tensor_hasher(entry.sum_spec, entry.proof or str(Sum()))
        self._seen = 0

    def add(self, offset: int, data: Buffer) -> bool:
        """Hash bytes that come next; False if they do not: then they must be there when it is finished."""
        if offset != self._seen:
            return False
        self._hasher.update(data)
        self._seen += len(data)
        return True

    @property
    def follow(self) -> Follow:
        """What hashes bytes that come next, without any detour. They are counted by `followed`."""
        return self._hasher.update

    def followed(self, nbytes: int) -> None:
        """So many bytes were hashed by `follow`."""
        self._seen += nbytes

    def finish(self, memory: Bytes | None, check: Check) -> str:
        """The digest, when everything has come. What was not hashed yet is read from `memory`, which holds all of it."""
        if memory is not None:
            for block in byte_blocks(memory[self._seen :], nbytes=BLOCK_NBYTES):
                check()
                self._hasher.update(block.data)
            self._seen = len(memory)
        return self._hasher.digest()


class LandedDigest:
    """The digest of a tensor whose bytes are written to `memory` by somebody else, in any order. What has come without a gap
    is hashed at once, so that little is left to do when the last of it is there. Any thread may call.
    """

    def __init__(self, memory: Bytes, running: RunningDigest) -> None:
        self._memory, self._running = memory, running
        self._waiting: dict[int, int] = {}  # where stretches that came out of order start, and how long they are
        self._seen = 0
        self._hashing = False
        self._lock = threading.Lock()

    def follow(self, offset: int) -> Follow | None:
        """What to hash bytes with that come now, from `offset` on; until `add`, it is the caller alone who hashes. None if
        it is not their turn.
        """
        with self._lock:
            if self._hashing or offset != self._seen:
                return None
            self._hashing = True
            return self._running.follow

    def add(self, offset: int, nbytes: int, *, followed: bool = False) -> None:
        """Bytes are there. If another thread is hashing, these are left to it."""
        with self._lock:
            if followed:
                self._running.followed(nbytes)
                self._seen += nbytes
            elif nbytes:
                self._waiting[offset] = nbytes
            if self._hashing and not followed:
                return
            self._hashing = True
        while nbytes := self._next():
            self._running.add(self._seen, self._memory[self._seen : self._seen + nbytes].data)
            self._seen += nbytes

    def _next(self) -> int:
        with self._lock:
            nbytes = self._waiting.pop(self._seen, 0)
            self._hashing = nbytes > 0
            return nbytes


class LandedDigests(Witness):
    """The digests of all tensors that land: the witness of a landing."""

    def __init__(self, digests: Mapping[str, LandedDigest]) -> None:
        self._digests = digests

    def follow(self, name: str, offset: int) -> Follow | None:
        """What to hash bytes with as they come."""
        return self._digests[name].follow(offset)

    def landed(self, landed: Landed, *, followed: bool = False) -> None:
        """Bytes are there."""
        self._digests[landed.name].add(landed.offset, landed.nbytes, followed=followed)


def copy_hashed(data: Bytes, memory: Bytes, offset: int, running: RunningDigest, check: Check) -> None:
    """Copy bytes to `offset` of a memory, and hash what lies there afterwards. `check` is called every few milliseconds."""
    step = COPY_NBYTES
    if len(data) >= _LARGE_NBYTES:
        step = math.ceil(len(data) / math.ceil(len(data) / (2 * _LARGE_NBYTES)))  # equal parts of 32 to 64 MiB
    for start in range(0, len(data), step):
        check()
        block = data[start : start + step]
        copied = memory[offset + start : offset + start + len(block)]
        copied[:] = block
        running.add(offset + start, copied.data)


def copy_all(
    sources: Mapping[str, Bytes],
    memories: Mapping[str, Bytes],
    running: Mapping[str, RunningDigest],
    check: Check,
    threads: int,
) -> None:
    """Copy every tensor to the memory of its name, by several threads, the largest first, and hash the copies.

    `check` is called again and again and may raise: then all threads stop, and the first error is raised here. No thread
    touches any of the memory after this has ended.
    """
    names: SimpleQueue[str] = SimpleQueue()
    for name in sorted(sources, key=lambda name: -len(sources[name])):
        names.put(name)
    stop = threading.Event()

    def look() -> None:
        if stop.is_set():
            raise _Stopped
        check()

    def copy_some() -> None:
        try:
            while True:
                name = names.get_nowait()
                copy_hashed(sources[name], memories[name], 0, running[name], look)
        except (_Stopped, Empty):  # another thread failed, or took the last one
            return
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="copy") as pool:
        try:
            for done in [pool.submit(copy_some) for _ in range(threads)]:
                done.result()
        except BaseException:
            stop.set()
            raise


class _Stopped(Exception):
    """A thread was told to stop."""
