"""A depot over a store in the process of the test, and clients that speak to it as strangers do: http.client and sockets."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from weightcast import Store
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf

WAIT_S = 20
PART = "model-00001-of-00001.safetensors"
CERT, KEY = (Path(__file__).parent.parent / "data" / "tls" / name for name in ("cert.pem", "key.pem"))


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


def tensors(seed: int = 0, elements: int = 5000) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"a": rng.standard_normal((elements // 10, 10)).astype(np.float32), "b": np.arange(7, dtype=np.int16)}


def part_bytes(store: Store, version: str = "step_1") -> bytes:
    return (store.path / "versions" / version / PART).read_bytes()


def file_path(file: str = PART, version: str = "step_1") -> str:
    return f"/versions/{version}/{file}"


@contextlib.contextmanager
def serving(store: Store, **settings: Any) -> Iterator[Depot]:
    with StoredShelf(store.path) as shelf, Depot(shelf, **settings) as depot:
        yield depot


def ask(depot: Depot, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Answer:
    """One request on a connection of its own. Underscores in names of headers are hyphens."""
    connection = http.client.HTTPConnection("127.0.0.1", depot.port, timeout=WAIT_S)
    with contextlib.closing(connection):
        return ask_on(connection, path, method, body, **headers)


def ask_on(
    connection: http.client.HTTPConnection, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> Answer:
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def connected(depot: Depot) -> socket.socket:
    return socket.create_connection(("127.0.0.1", depot.port), timeout=WAIT_S)


def raw(depot: Depot, data: bytes, *, end: bool = True) -> bytes:
    """Send bytes, and read until the depot closes the connection."""
    with connected(depot) as sock:
        sock.sendall(data)
        if end:
            sock.shutdown(socket.SHUT_WR)
        return rest_of(sock)


def rest_of(sock: socket.socket) -> bytes:
    data = bytearray()
    while more := sock.recv(1 << 20):
        data += more
    return bytes(data)


def is_cut(sock: socket.socket) -> bool:
    """Whether the depot ends the connection without another word; waits for that."""
    try:
        return rest_of(sock) == b""
    except ConnectionResetError:
        return True


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:200]
    return int(answer[9:12])


def eventually(fact: Callable[[], object], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < end, f"{what} did not come about"
        time.sleep(0.01)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No thread and no open file more afterwards than before."""
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    assert not left, f"threads left behind: {left}"
    opened = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in set(os.listdir("/proc/self/fd")) - files if _is_open(fd)}
    assert not opened, f"files left open: {opened}"


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
