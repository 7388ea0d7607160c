"""One trainer rank that writes versions into a store until it is ended. Run as: share_writer STORE RANK RANKS FIRST

It prints each version when it is published. The weights follow from the number of the version. A version that fails
is tried again, so that the other ranks can be killed and started again.
"""

from __future__ import annotations

import sys

import numpy as np

from weightcast import DeltaPolicy, Shard, ShareWriter
from weightcast.errors import DeadlineExceeded, GatherFailed, VersionExists

ROWS, COLUMNS = 96, 4096


def weights(number: int) -> dict[str, np.ndarray]:
    """The whole model at a version: a few elements change from each version to the next."""
    random = np.random.default_rng(1)
    arrays = {"a": random.standard_normal((ROWS, COLUMNS)).astype(np.float32), "b": random.standard_normal(64)}
    for step in range(number):
        for array in arrays.values():
            flat = array.reshape(-1)
            flat[np.random.default_rng(step).integers(0, flat.size, 50)] = step
    return arrays


def main() -> None:
    rank, ranks, number = map(int, sys.argv[2:5])
    writer = ShareWriter(sys.argv[1], rank=rank, ranks=ranks, threads=1, deltas=DeltaPolicy(full_every=4))
    while True:
        arrays = weights(number)
        first, last = rank * ROWS // ranks, (rank + 1) * ROWS // ranks
        shares = arrays | {"a": Shard(arrays["a"][first:last], (ROWS, COLUMNS), (first, 0))}
        try:
            print(number, writer.publish(f"step_{number}", shares, timeout=2).kind, flush=True)
        except (GatherFailed, DeadlineExceeded):
            continue
        except VersionExists:  # rank 0 was killed between the manifest and its answer, or this one was
            pass
        number += 1


if __name__ == "__main__":
    main()
