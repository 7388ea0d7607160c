"""Run by the tests: one end of a stream, which prints how much memory it took at its peak beyond what was there before.

python -m process.ipc_memory END ROOT NBYTES BUCKET_NBYTES
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weightcast import LiveModel
from weightcast.clock import Deadline
from weightcast.publish.publisher import Publisher
from weightcast.tensors.sums import RunningSum
from weightcast.transports.ipc.receiver import IpcReceiver

from .memory_probe import Peak

SIDE = 2048  # of a float32 matrix of 16 MiB
TENSOR_NBYTES = 4 * SIDE * SIDE
TIMEOUT_S = 100.0


def names(nbytes: int) -> list[str]:
    return [f"layer.{number}" for number in range(nbytes // TENSOR_NBYTES)]


def made(buffer: np.ndarray, nbytes: int) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors, one after the other, out of one buffer."""
    for number, name in enumerate(names(nbytes)):
        buffer.fill(number)
        yield name, buffer


def trainer(root: Path, nbytes: int, bucket_nbytes: int) -> dict[str, int]:
    buffer = np.zeros((SIDE, SIDE), np.float32)
    like = {name: np.broadcast_to(np.zeros(1, np.float32), (SIDE, SIDE)) for name in names(nbytes)}  # 4 bytes each
    with Peak() as peak, Publisher(root, bucket_nbytes=bucket_nbytes) as publisher:
        publication = publisher.stream("step_1", made(buffer, nbytes), like=like, timeout=TIMEOUT_S)
        publication.wait(timeout=TIMEOUT_S)
    return {"trainer": peak.nbytes, "sent": publication.manifest.nbytes}


def hashing(root: Path, nbytes: int, bucket_nbytes: int) -> dict[str, int]:
    """Takes every piece into one buffer and hashes it there."""
    buffer, taken = np.zeros(bucket_nbytes, np.uint8), 0
    with Peak() as peak:
        deadline, receiver = Deadline.after(TIMEOUT_S), IpcReceiver(root)
        manifest = receiver.manifest(receiver.wait_newer(None, deadline=deadline), deadline=deadline)
        hashers = {entry.name: RunningSum(entry.sum_spec) for entry in manifest.tensors}
        for piece in receiver.pieces(manifest, deadline=deadline):
            buffer[: len(piece.data)] = np.frombuffer(piece.data, np.uint8)
            hashers[piece.tensor].update(buffer[: len(piece.data)].data)
            taken += len(piece.data)
            if piece.digest:
                assert hashers.pop(piece.tensor).digest() == piece.digest
        assert not hashers
        receiver.close()
    return {"receiver": peak.nbytes, "taken": taken}


def inplace(root: Path, nbytes: int, bucket_nbytes: int) -> dict[str, int]:
    """Streams into a live model whose memory is there already."""
    model = {name: np.full((SIDE, SIDE), -1, np.float32) for name in names(nbytes)}
    with Peak() as peak, LiveModel(model, source=f"ipc://{root}") as live:
        live.update(version="step_1", commit="inplace", timeout=TIMEOUT_S)
    assert all(model[name][0, 0] == model[name][-1, -1] == number for number, name in enumerate(model))
    return {"receiver": peak.nbytes, "taken": sum(array.nbytes for array in model.values())}


ENDS = {end.__name__: end for end in (trainer, hashing, inplace)}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("end", choices=ENDS)
    parser.add_argument("root", type=Path)
    parser.add_argument("nbytes", type=int)
    parser.add_argument("bucket_nbytes", type=int)
    arguments = parser.parse_args()
    print(json.dumps(ENDS[arguments.end](arguments.root, arguments.nbytes, arguments.bucket_nbytes)))


if __name__ == "__main__":
    main()
