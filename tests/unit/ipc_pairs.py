"""What the tests of `ipc://` in one process share: weights with odd tensors, and reading them with every byte proved."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from weightcast.clock import Deadline
from weightcast.tensors.digest import algorithm_of, bytes_digest
from weightcast.tensors.flat import empty, flat_bytes
from weightcast.tensors.sums import range_sum
from weightcast.transports.ipc.receiver import IpcReceiver
from weightcast.wire.manifest import Manifest, TensorEntry

TIMEOUT_S = 20.0
BUCKET_NBYTES = 1 << 16

Arrays = dict[str, np.ndarray]


def weights(seed: int, *, count: int = 4, side: int = 96) -> Arrays:
    """Tensors of every odd kind, among them some that are larger than a bucket."""
    rng = np.random.default_rng(seed)
    return {
        **{f"layer.{number}": rng.standard_normal((side, 2 * side)).astype(np.float32) for number in range(count)},
        "strided": rng.standard_normal((side, 2 * side)).astype(np.float32)[::2, 1::3],
        "transposed": rng.standard_normal((side, 2 * side)).astype(np.float32).T,
        "empty": np.empty((0, 3), np.float32),
        "scalar": np.float32(seed),
        "odd": rng.integers(-128, 127, 777, dtype=np.int8),
        "last": rng.integers(0, 255, 1, dtype=np.uint8),
    }


def within(seconds: float = TIMEOUT_S) -> Deadline:
    return Deadline.after(seconds)


def in_bytes(arrays: Arrays) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(array).tobytes() for name, array in arrays.items()}


def copied(receiver: IpcReceiver, manifest: Manifest, **options: Any) -> dict[str, bytes]:
    """A held version as it lies in memory."""
    with receiver.mapped(manifest, deadline=within(), **options) as arrays:
        return {name: array.tobytes() for name, array in arrays.items()}


def held(receiver: IpcReceiver, version: str | None = None) -> dict[str, bytes]:
    """A held version, by name, with its digests checked."""
    manifest = receiver.manifest(version or receiver.newest(), deadline=within())
    assert receiver.holds(manifest)
    found = copied(receiver, manifest)
    check(manifest, found)
    return found


def streamed(
    receiver: IpcReceiver, version: str, *, timeout: float = TIMEOUT_S, at_piece: Callable[[int], None] = lambda _: None
) -> dict[str, bytes]:
    """A version that is streamed, once it is: with its digests checked, piece by piece and at the end."""
    deadline = within(timeout)
    while receiver.wait_newer(None, deadline=deadline) != version:
        time.sleep(0.002)
    manifest = receiver.manifest(version, deadline=deadline)
    assert not manifest.sealed
    assert not receiver.holds(manifest)
    arrays = {entry.name: empty(entry.spec) for entry in manifest.tensors}
    digests: dict[str, str] = {}
    for number, piece in enumerate(receiver.pieces(manifest, deadline=deadline)):
        at_piece(number)
        flat_bytes(arrays[piece.tensor])[piece.offset : piece.offset + len(piece.data)] = np.frombuffer(piece.data, np.uint8)
        if piece.digest:
            assert piece.tensor not in digests
            digests[piece.tensor] = piece.digest
    sealed = receiver.manifest(version, deadline=deadline)
    assert sealed.sealed
    assert digests == {entry.name: entry.sum for entry in sealed.tensors if entry.nbytes}
    found = in_bytes(arrays)
    check(sealed, found)
    return found


def check(manifest: Manifest, found: dict[str, bytes]) -> None:
    """Every tensor has the sum of its entry, and the digest of its bytes where the entry has one."""
    wrong = [entry.name for entry in manifest.tensors if not proved(entry, found[entry.name])]
    assert not wrong, f"bytes of {wrong} are not those of {manifest.version}"


def proved(entry: TensorEntry, data: bytes) -> bool:
    if entry.digest and entry.digest != bytes_digest(data, algorithm_of(entry.digest)):
        return False
    return entry.sum == str(range_sum(entry.sum_spec, 0, data))


class Running(threading.Thread):
    """A call in a thread of its own; `result` waits for it and raises what it raised."""

    def __init__(self, call: Callable[..., Any], *args: Any, **options: Any) -> None:
        super().__init__(daemon=True, name=f"test {call}")
        self._call = lambda: call(*args, **options)
        self._error: BaseException | None = None
        self._value: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error

    def result(self, timeout: float = TIMEOUT_S) -> Any:
        self.join(timeout)
        assert not self.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._value


def until(fact: Callable[[], object], timeout: float = TIMEOUT_S) -> None:
    """Wait for a fact."""
    end = time.monotonic() + timeout
    while not fact():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


def mappings(pid: int | str = "self") -> list[int]:
    """The inodes of the shared memory that a process has mapped, one for each mapping."""
    if pid == "self":
        gc.collect()  # errors of earlier tests may hold what they were reading
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [int(line.split()[4]) for line in lines if "/memfd:weightcast" in line]


def descriptors(pid: int | str = "self") -> list[str]:
    """What a process has open: sockets, memory, pipes."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(re.sub(r"\d+", "", str(entry.readlink())))
        except FileNotFoundError:
            continue
    return sorted(found)
