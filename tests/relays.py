"""Depots to mirror: real ones over real stores, whose bytes can be held back or changed on their way out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from weightcast import Store
from weightcast.clock import Deadline
from weightcast.depot.holding import Holding
from weightcast.depot.mirror import Mirror
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.errors import SourceFailed
from weightcast.tensors.digest import piece_digests
from weightcast.wire.depot import Newest, Offer
from weightcast.wire.manifest import Manifest, decode_manifest, encode_manifest

PIECE_NBYTES = 64 << 10
Change = Callable[[str, int, bytes], bytes]  # the file, where a range of it starts, and its bytes


def in_pieces(path: Path, nbytes: int = PIECE_NBYTES) -> None:
    """Have the files of a version that was published proved in smaller pieces."""
    manifest = decode_manifest((path / "manifest.json").read_bytes(), path)

    def cut(entry):
        return replace(entry, pieces=piece_digests((path / entry.file).read_bytes(), manifest.algorithm, nbytes))

    changed = replace(
        manifest,
        piece_nbytes=nbytes,
        parts=tuple(map(cut, manifest.parts)),
        files=tuple(map(cut, manifest.files)),
        payload=None if manifest.payload is None else cut(manifest.payload),
    )
    (path / "manifest.json").write_bytes(encode_manifest(changed))


class PiecewiseStore(Store):
    """A store whose versions have small pieces."""

    def publish(self, version: str, *args: object, **settings: object) -> Manifest:
        super().publish(version, *args, **settings)
        in_pieces(self.path / "versions" / version)
        return self.manifest(version)


class TamperedHolding:
    """A version whose bytes pass through `change` when they are sent."""

    def __init__(self, holding: Holding, shelf: TamperedShelf) -> None:
        self._holding, self._shelf = holding, shelf
        self.manifest = holding.manifest

    @property
    def encoded(self) -> bytes:
        return self._holding.encoded

    @property
    def files(self) -> Mapping[str, int]:
        return self._holding.files

    def views(self, file: str, start: int, stop: int, *, deadline: Deadline) -> list[memoryview]:
        self._shelf.wait(file, stop, deadline)
        data = b"".join(self._holding.views(file, start, stop, deadline=deadline))
        self._shelf.sent[file] = self._shelf.sent.get(file, 0) + len(data)
        return [memoryview(self._shelf.change(file, start, data))]

    def sendable(self, file: str, start: int, stop: int, *, deadline: Deadline) -> Iterator[memoryview]:
        for at in range(start, stop, PIECE_NBYTES):
            yield from self.views(file, at, min(at + PIECE_NBYTES, stop), deadline=deadline)


class TamperedShelf:
    """A store whose bytes are changed on their way out.

    Bytes of files behind those that `allow` names wait until it allows them. `sent` counts the bytes of each file.
    """

    def __init__(self, path: Path) -> None:
        self._shelf = StoredShelf(path)
        self.change: Change = lambda _file, _start, data: data
        self.sent: dict[str, int] = {}
        self._allowed: dict[str, int] | None = None
        self._changed = threading.Condition()

    def allow(self, allowed: dict[str, int] | None) -> None:
        with self._changed:
            self._allowed = allowed
            self._changed.notify_all()

    def wait(self, file: str, stop: int, deadline: Deadline) -> None:
        with self._changed:
            while self._allowed is not None and stop > self._allowed.get(file, 1 << 40):
                deadline.check("waiting to be allowed")
                self._changed.wait(0.02)

    def offers(self) -> list[Offer]:
        return self._shelf.offers()

    def newest(self) -> Newest | None:
        return self._shelf.newest()

    def wait_newer(self, after: str, *, deadline: Deadline) -> Newest | None:
        return self._shelf.wait_newer(after, deadline=deadline)

    @contextmanager
    def holding(self, version: str) -> Iterator[TamperedHolding]:
        with self._shelf.holding(version) as holding:
            yield TamperedHolding(holding, self)

    def close(self) -> None:
        self._shelf.close()


class Stand:
    """A publisher's store and any number of depots and relays in this process, all closed at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = PiecewiseStore(path / "publisher", lock_timeout=5)
        self._opened = ExitStack()
        self._count = 0

    def depot(self, shelf: object | None = None, **settings: object) -> Depot:
        """A depot over a shelf; by default one of its own over the publisher's store."""
        return self._opened.enter_context(Depot(self.tampered() if shelf is None else shelf, **settings))

    def tampered(self, path: Path | None = None) -> TamperedShelf:
        shelf = TamperedShelf(path or self.store.path)
        self._opened.callback(shelf.close)
        return shelf

    def mirror(self, *urls: str, path: Path | None = None, **settings: object) -> Mirror:
        """A relay that is quick to give up, with a store of its own."""
        self._count += 1
        quick = {"stall_s": 1.0, "give_up_s": 3.0, "poll_s": 0.5}
        return self._opened.enter_context(Mirror(path or self.path / f"relay-{self._count}", urls, **{**quick, **settings}))

    def close(self) -> None:
        self._opened.close()


def tensors(seed: int, *, count: int = 4, nbytes: int = 200_000) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {f"layer.{index}": random.integers(0, 255, nbytes + 7 * index, dtype=np.uint8) for index in range(count)}


def wait_for(fact: Callable[[], bool], what: Callable[[], object] = lambda: "", timeout: float = 20) -> None:
    """Wait until something is so; on failure say what was last seen."""
    until = time.monotonic() + timeout
    while not fact():
        assert time.monotonic() < until, f"not in {timeout} s: {what()}"
        time.sleep(0.005)


def complete(mirror: Mirror, version: str) -> bool:
    return any(offer.version == version and offer.complete for offer in mirror.offers())


def wait_complete(mirror: Mirror, version: str, timeout: float = 20) -> None:
    """Wait until a relay has sealed a version, and names it as its newest."""

    def there() -> bool:
        found = mirror.newest()
        return complete(mirror, version) and found is not None and found.version == version

    wait_for(there, lambda: (mirror.offers(), mirror.problems()), timeout)


def wait_problem(mirror: Mirror, what: str, timeout: float = 20) -> str:
    wait_for(lambda: what in mirror.problems(), lambda: (mirror.offers(), mirror.problems()), timeout)
    return mirror.problems()[what]


def check_same(source: Path, copy: Path, version: str) -> None:
    """Every file of a version is the same in two stores, and nothing else is there."""
    here, there = source / "versions" / version, copy / "versions" / version
    assert sorted(path.name for path in there.iterdir()) == sorted(path.name for path in here.iterdir())
    for path in here.iterdir():
        assert (there / path.name).read_bytes() == path.read_bytes(), path.name
    assert Store(copy).verify(version).problems == []


def read_through(holding: Holding, file: str, start: int, stop: int, seconds: float = 5.0) -> bytes:
    return b"".join(holding.views(file, start, stop, deadline=Deadline.after(seconds)))


def fails_with_source_failed(call: Callable[[], object], into: list[object]) -> threading.Thread:
    """Run something in a thread and keep how it ended."""

    def run() -> None:
        began = time.monotonic()
        try:
            into.append(call())
        except SourceFailed as error:
            into.append((error, time.monotonic() - began))

    thread = threading.Thread(target=run)
    thread.start()
    return thread
