"""One tensor-parallel rank that takes its own slices. Run as: fsdp_receiver RANK RANKS STORE SOURCE

Prints what it received, counted at the sockets, and the parameters that differ from slices of the whole checkpoint.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from weightcast import LiveModel, Store
from weightcast.clock import Deadline
from weightcast.tensors.boxes import Box, Held, box_of
from weightcast.transports.base import RangeReceiver
from weightcast.transports.registry import open_receiver
from weightcast.wire.manifest import TensorEntry
from weightcast.worker.shards import Shards, cut

received: list[int] = []


def count_everything() -> None:
    """Count all bytes that any socket of this process receives, heads and all."""

    def counted(name: str, nbytes_of: Callable[[Any], int]) -> None:
        method = getattr(socket.socket, name)

        def call(*arguments: Any) -> Any:
            result = method(*arguments)
            received.append(nbytes_of(result))
            return result

        setattr(socket.socket, name, call)

    counted("recv", len)
    counted("recv_into", int)
    counted("recvmsg_into", itemgetter(0))


def slice_of(entry: TensorEntry, rank: int, ranks: int) -> Box:
    """Columns of `down`, rows of all other matrices, as even as it goes; norms and biases whole."""
    if len(entry.shape) == 1:
        return Box.whole(entry.shape)
    dim = 1 if ".down." in entry.name else 0
    first, last = (round(entry.shape[dim] * one / ranks) for one in (rank, rank + 1))
    start = tuple(first if axis == dim else 0 for axis in range(2))
    return Box(start, tuple(last - first if axis == dim else size for axis, size in enumerate(entry.shape)))


def followed(receiver: RangeReceiver, shards: Shards, store: Store, boxes: Mapping[str, Box]) -> dict[str, Any]:
    """Load the first version into a model of this rank, and take the next one on it."""
    live = {one.spec.name: np.zeros(one.spec.shape, one.spec.dtype.numpy) for one in shards.held}
    model = LiveModel(live, source=receiver, layout=shards)
    model.update("step_1")
    received.clear()
    result = model.update("step_2")
    came = sum(received)
    manifest = receiver.manifest("step_2", deadline=Deadline.after(60))
    whole = store.load("step_2")
    wrong = [name for name, box in boxes.items() if live[name].tobytes() != box_of(whole[name], box).tobytes()]
    same_root = manifest.root_digest == store.manifest("step_2").root_digest
    tables = sum(payload.nbytes - payload.table for payload in manifest.payloads)
    return {
        "mode": result.mode, "nbytes": result.bytes, "received": came, "payloads": manifest.payload_nbytes, "wrong": wrong,
        "tables": tables, "count": len(manifest.payloads), "same_root": same_root,
    }  # fmt: skip


def main() -> None:
    rank, ranks = map(int, sys.argv[1:3])
    count_everything()
    receiver = open_receiver(sys.argv[4], rank=rank)
    deadline = Deadline.after(100)
    manifest = receiver.manifest("step_1", deadline=deadline)
    boxes = {entry.name: slice_of(entry, rank, ranks) for entry in manifest.tensors}
    sources = {name: entry.shape for name, entry in manifest.by_name().items()}
    shards = Shards(tuple(Held.slice_of(entry.spec, boxes[entry.name]) for entry in manifest.tensors), sources)
    version = cut(
        receiver, manifest, shards, held=None, mode="copy", checksum=True, deadline=deadline, progress=lambda *_: None
    )
    shard = version.manifest(version.newest(), deadline=deadline)
    found = version.arrays(shard)
    receiver_nbytes = getattr(receiver, "received_nbytes", 0)
    received_nbytes = sum(received)
    whole = Store(Path(sys.argv[3])).load("step_1")
    wrong = [name for name, box in boxes.items() if found[name].tobytes() != box_of(whole[name], box).tobytes()]
    report = {"own": shard.nbytes, "received": received_nbytes, "counted": receiver_nbytes, "wrong": wrong}
    report["whole"] = sum(file.nbytes for file in manifest.shares)
    report["delta"] = followed(receiver, shards, Store(Path(sys.argv[3])), boxes)
    receiver.close()
    print(json.dumps(report | {"tied": manifest.tied, "names": sorted(sources)}))


if __name__ == "__main__":
    main()
