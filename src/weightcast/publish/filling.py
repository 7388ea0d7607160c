"""Copying tensors into shared memory: each block is hashed while it is still in the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from weightcast.clock import Deadline
from weightcast.tensors.boxes import Box
from weightcast.tensors.digest import Algorithm
from weightcast.tensors.lanes import check_finite
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import Digests, TensorHasher, box_offset, box_sum
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
    algorithm: Algorithm | None,
    threads: int,
    deadline: Deadline,
    boxes: Mapping[str, tuple[TensorSpec, Box]] | None = None,
    finite: bool = False,
) -> dict[str, Digests]:
    """Copy every tensor to the place that its entry names; gives their digests. The tensors may change afterwards.

    `boxes` are those of tensors that are not here whole; these have no digests of bytes. Without an algorithm there are only
    sums. With `finite`, `InvalidInput` is raised for a NaN or an infinity.
    """

    largest_first = deque(sorted(entries, key=lambda entry: entry.nbytes, reverse=True))
    digests: dict[str, Digests] = {}

    def work() -> None:
        while True:
            try:
                entry = largest_first.popleft()
            except IndexError:  # nothing is left to do
                return
            try:
                box = (boxes or {}).get(entry.name)
                digests[entry.name] = _copied(
                    device, memory, entry, tensors[entry.name], algorithm, deadline, box, finite=finite
                )
            except BaseException:
                largest_first.clear()  # nor for the others
                raise

    with ThreadPoolExecutor(max(1, min(threads, len(entries))), thread_name_prefix="publish") as pool:
        for done in [pool.submit(work) for _ in range(max(1, min(threads, len(entries))))]:
            done.result()
    device.synchronise()
    return digests


def _copied(
    device: Device,
    memory: Memory,
    entry: TensorEntry,
    tensor: object,
    algorithm: Algorithm | None,
    deadline: Deadline,
    box: tuple[TensorSpec, Box] | None,
    *,
    finite: bool,
) -> Digests:
    whole = Box.whole(entry.shape)
    spec, inside = (entry.sum_spec, whole) if box is None or box[1] == Box.whole(box[0].shape) else box
    start = box_offset(spec, inside)  # what a box adds depends on where it lies in its tensor
    hasher, at = None if start is None else TensorHasher(spec, algorithm, start), entry.offset
    for block in device.blocks(entry.name, tensor):
        device.copy(block, memory, at)
        copied = device.read(memory, at, at + block.nbytes)
        if finite:
            check_finite(entry.spec, np.frombuffer(copied, dtype=np.uint8))
        if hasher is not None:
            hasher.update(copied)
        at += block.nbytes
        deadline.check(f"copying {entry.name} into shared memory")
    if hasher is not None:
        return hasher.finish()
    there = np.frombuffer(device.read(memory, entry.offset, entry.offset + entry.nbytes), dtype=np.uint8)
    return Digests("", str(box_sum(spec, inside, there.view(entry.dtype.numpy).reshape(entry.shape))))
