"""Depots in the process of the test with versions of a few megabytes, and what a receiver should make of them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import ml_dtypes
import numpy as np

from weightcast import Store
from weightcast.clock import Deadline
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.tensors.flat import Bytes, flat_bytes
from weightcast.wire.manifest import Manifest

SOON_S = 30.0
CERT, KEY = (Path(__file__).parent / "data" / "tls" / name for name in ("cert.pem", "key.pem"))


def soon(seconds: float = SOON_S) -> Deadline:
    return Deadline.after(seconds)


def version(seed: int = 0, *, mib: float = 6.0) -> dict[str, np.ndarray]:
    """Large, small, tiny, empty and scalar tensors, of about so many megabytes."""
    rng = np.random.default_rng(seed)

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    rows = max(1, int(mib * 2**20 / 3 / 4 / 1000))
    return {
        "embed": floats(rows, 1000),
        **{f"layer.{index:03}.norm": floats(7) for index in range(150)},
        "layer.weight": floats(rows, 1000).astype(ml_dtypes.bfloat16),
        "nothing": np.empty((0, 3), dtype=np.float32),
        "scalar": np.array(rng.integers(1 << 30), dtype=np.int64),
        "head": floats(rows, 1501),
    }


def publish(store: Store, name: str = "step_1", seed: int = 0, *, mib: float = 6.0, part_mib: float = 4.0) -> Manifest:
    store.publish(name, version(seed, mib=mib), "full", part_nbytes=int(part_mib * 2**20))
    return store.manifest(name)


@contextmanager
def depots(store: Store, count: int = 1, **settings: object) -> Iterator[list[Depot]]:
    with ExitStack() as stack:
        shelf = stack.enter_context(StoredShelf(store.path))
        yield [stack.enter_context(Depot(shelf, **settings)) for _ in range(count)]


def memories(manifest: Manifest) -> dict[str, Bytes]:
    """Memory for everything, with a pattern in it."""
    return {name: np.full(entry.nbytes, 0xA5, dtype=np.uint8) for name, entry in manifest.transfers().items()}


def expected(store: Store, manifest: Manifest) -> dict[str, bytes]:
    if manifest.payloads:
        file = manifest.payloads[0].file
        return {file: (store.path / "versions" / manifest.version / file).read_bytes()}
    loaded = store.load(manifest.version)
    return {entry.name: flat_bytes(loaded[entry.name]).tobytes() for entry in manifest.tensors}


def wrong(memory: dict[str, Bytes], right: dict[str, bytes]) -> list[str]:
    """The tensors whose memory differs from what it should hold."""
    return [name for name, data in right.items() if memory[name].tobytes() != data]


class Scripted:
    """A server that answers the requests that come, over whatever connection, with the next of its lines: bytes to send as
    they are; b"" hangs up, None says nothing. `requests` are the heads that came.
    """

    def __init__(self, *answers: bytes | None, keep: bool = True) -> None:
        self._answers, self._keep = list(answers), keep
        self.requests: list[str] = []
        self.accepted = 0
        self._closing = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(0.05)
        self._threads = [threading.Thread(target=self._listen, daemon=True)]
        self._threads[0].start()
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(5)
        self._listening.close()

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listening.accept()
            except TimeoutError:
                continue
            self.accepted += 1
            client.settimeout(0.05)
            self._threads.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
            self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            data = b""
            while not self._closing.is_set():
                try:
                    more = client.recv(1 << 16)
                except TimeoutError:
                    continue
                data += more
                if not more:
                    return
                if b"\r\n\r\n" not in data:
                    continue
                self.requests.append(data.decode("latin-1"))
                data = b""
                answer = self._answers.pop(0) if self._answers else None
                if answer == b"":
                    return
                if answer is not None:
                    client.sendall(answer)
                    if not self._keep:
                        return
