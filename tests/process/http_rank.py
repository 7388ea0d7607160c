"""Run by the tests: one rank of a replica, which holds slices of a model and follows the versions of depots.

    python -m process.http_rank URL RANK RANKS

It is told versions, one a line, and tells how it came to each: the digests of its parameters, and the bytes received.
"""

from __future__ import annotations

import json
import signal
import sys

import numpy as np

from .children import TESTS

sys.path.insert(0, str(TESTS / "unit"))

from shard_models import cut_version, shards_of

from weightcast import LiveModel
from weightcast.tensors.digest import array_digest
from weightcast.transports.registry import open_receiver
from weightcast.worker.buffers import Buffers
from weightcast.worker.shards import HeldVersion


def main() -> None:
    """Follow."""
    signal.alarm(100)  # whoever waits for a line of this process waits no longer than this
    url, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    shards, buffers, held = shards_of(rank, ranks), Buffers(), None
    model = {one.spec.name: np.ones(one.spec.shape, one.spec.dtype.numpy) for one in shards.held}
    live = LiveModel(model)
    receiver = open_receiver(url, rank=rank)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        version = cut_version(receiver, line.strip(), shards, held=held, mode="copy", buffers=buffers)
        result = live.update(source=version)
        held = HeldVersion(version.full, live.served_manifest, version.url)
        digests = {name: array_digest(array) for name, array in model.items()}
        told = {"version": live.version, "mode": result.mode, "nbytes": version.nbytes, "digests": digests}
        print(json.dumps(told), flush=True)
    receiver.close()


if __name__ == "__main__":
    main()
