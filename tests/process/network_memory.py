"""Run by the tests: receives a version from a depot, and prints how much memory that took at its peak beyond what was there.

python -m process.network_memory publish STORE NBYTES
python -m process.network_memory depot STORE
python -m process.network_memory (hashing | inplace) URL NBYTES BUCKET_NBYTES
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from weightcast import LiveModel, Store
from weightcast.clock import Deadline
from weightcast.tensors.digest import Hasher
from weightcast.transports.base import Receiver
from weightcast.transports.registry import open_receiver

from .memory_probe import Peak

SIDE = 2048  # of a float32 matrix of 16 MiB
TENSOR_NBYTES = 4 * SIDE * SIDE
PART_NBYTES = 256 << 20
PREFETCH = 2
TIMEOUT_S = 250.0
SMALL = "step_0"  # everything that is loaded when it is first used is there once this was received
LARGE = "step_1"


def names(nbytes: int) -> list[str]:
    return [f"layer.{number}" for number in range(nbytes // TENSOR_NBYTES)]


def made(nbytes: int) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors, one after the other, out of one buffer."""
    buffer = np.zeros((SIDE, SIDE), np.float32)
    for number, name in enumerate(names(nbytes)):
        buffer.fill(number)
        yield name, buffer


def publish(path: Path, nbytes: int) -> dict[str, int]:
    store = Store(path)
    store.publish(SMALL, {"one": np.ones(1000, np.float32)}, "full")
    return {"published": store.publish(LARGE, made(nbytes), "full", part_nbytes=PART_NBYTES).nbytes}


def depot(path: Path) -> None:
    """Serve a store over HTTP, and over NIXL if it is installed, until the input ends."""
    from importlib.util import find_spec

    from weightcast.depot.leases import Leases
    from weightcast.depot.nixl_export import NixlExport
    from weightcast.depot.server import Depot
    from weightcast.depot.stored import StoredShelf

    with StoredShelf(path) as shelf:
        export = NixlExport(shelf, Leases()) if find_spec("nixl_cu12") else None
        with Depot(shelf, routes=export.routes() if export else ()) as served:
            print(served.url, flush=True)
            sys.stdin.read()
        if export is not None:
            export.close()


def opened(url: str, bucket_nbytes: int) -> Receiver:
    """A receiver that has received something already."""
    receiver = open_receiver(f"{url}?prefetch={PREFETCH}&bucket_nbytes={bucket_nbytes}", rank=0)
    LiveModel({"one": np.zeros(1000, np.float32)}).update(SMALL, source=receiver, timeout=TIMEOUT_S)
    return receiver


def hashing(url: str, nbytes: int, bucket_nbytes: int) -> dict[str, int]:
    """Takes every piece into one buffer and hashes it there."""
    buffer, taken = np.ones(bucket_nbytes, np.uint8), 0
    with closing(opened(url, bucket_nbytes)) as receiver, Peak() as peak:
        deadline = Deadline.after(TIMEOUT_S)
        manifest = receiver.manifest(LARGE, deadline=deadline)
        digests = {entry.name: entry.digest for entry in manifest.tensors}
        hashers = {name: Hasher(manifest.algorithm) for name in digests}
        for piece in receiver.pieces(manifest, deadline=deadline):
            buffer[: len(piece.data)] = np.frombuffer(piece.data, np.uint8)
            hashers[piece.tensor].update(buffer[: len(piece.data)].data)
            taken += len(piece.data)
        assert all(hashers[name].digest() == digest for name, digest in digests.items())
    assert taken == nbytes
    return {"peak": peak.nbytes, "taken": taken}


def inplace(url: str, nbytes: int, bucket_nbytes: int) -> dict[str, int]:
    """Streams into a live model whose memory is there already."""
    model = {name: np.full((SIDE, SIDE), -1, np.float32) for name in names(nbytes)}
    live = LiveModel(model)
    with closing(opened(url, bucket_nbytes)) as receiver, Peak() as peak:
        result = live.update(LARGE, source=receiver, commit="inplace", timeout=TIMEOUT_S)
    assert all(model[name][0, 0] == model[name][-1, -1] == number for number, name in enumerate(model))
    return {"peak": peak.nbytes, "taken": result.bytes}


def main() -> None:
    """Do one thing, print what it took."""
    what, where, *numbers = sys.argv[1:]
    if what == "depot":
        depot(Path(where))
    elif what == "publish":
        print(json.dumps(publish(Path(where), int(numbers[0]))))
    else:
        measure = {"hashing": hashing, "inplace": inplace}[what]
        report = measure(where, *map(int, numbers))
        sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
