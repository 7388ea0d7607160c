"""Copying tensors into shared memory: each block is hashed while it is still in the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from weightcast.clock import Deadline
from weightcast.tensors.digest import Algorithm, Hasher
from weightcast.transports.ipc.device import Device, Memory
from weightcast.wire.manifest import TensorEntry

ALIGNMENT = 64  # a cache line, and what vector instructions and frameworks like


def aligned(offset: int) -> int:
    """The next place where a tensor may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def fill(
    device: Device,
    memory: Memory,
    entries: Sequence[TensorEntry],
    tensors: Mapping[str, object],
    *,
    algorithm: Algorithm,
    threads: int,
    deadline: Deadline,
) -> dict[str, str]:
    """Copy every tensor to the place that its entry names; gives their digests. The tensors may change afterwards."""

    largest_first = deque(sorted(entries, key=lambda entry: entry.nbytes, reverse=True))
    digests: dict[str, str] = {}

    def work() -> None:
        while True:
            try:
                entry = largest_first.popleft()
            except IndexError:  # nothing is left to do
                return
            try:
                digests[entry.name] = _copied(device, memory, entry, tensors[entry.name], algorithm, deadline)
            except BaseException:
                largest_first.clear()  # nor for the others
                raise

    with ThreadPoolExecutor(max(1, min(threads, len(entries))), thread_name_prefix="publish") as pool:
        for done in [pool.submit(work) for _ in range(max(1, min(threads, len(entries))))]:
            done.result()
    device.synchronise()
    return digests


def _copied(
    device: Device, memory: Memory, entry: TensorEntry, tensor: object, algorithm: Algorithm, deadline: Deadline
) -> str:
    hasher, at = Hasher(algorithm), entry.offset
    for block in device.blocks(entry.name, tensor):
        device.copy(block, memory, at)
        hasher.update(device.read(memory, at, at + block.nbytes))
        at += block.nbytes
        deadline.check(f"copying {entry.name} into shared memory")
    return hasher.digest()
