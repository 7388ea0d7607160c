"""Run by the tests: one tensor-parallel rank that agrees with others by gloo. agreeing_rank RANK RANKS DIRECTORY TIMEOUT_S

For each line of its input, a version, it updates and says how that went. DIRECTORY has the store, and the file by which
the ranks meet. For a version with "!" in front it stops for good after staging, before it agrees.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from weightcast import Box, Held, LiveModel, Placement, Shards, Store
from weightcast.errors import WeightcastError
from weightcast.tensors.boxes import box_of
from weightcast.tensors.spec import TensorSpec


def main() -> None:
    rank, ranks = map(int, sys.argv[1:3])
    store = Store(Path(sys.argv[3]) / "store")
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}/meet", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=float(sys.argv[4])),
    )  # fmt: skip
    stopping = False

    def all_reduce(numbers: np.ndarray) -> np.ndarray:
        if stopping:
            print(json.dumps({"stops": True}), flush=True)
            time.sleep(600)
        total = torch.from_numpy(numbers)
        dist.all_reduce(total)
        return total.numpy()

    held, sources = [], {}
    for entry in store.manifest("step_1").tensors:
        sources[entry.name] = entry.shape
        dim = 1 if entry.name == "down" else 0
        box = Box.whole(entry.shape) if entry.name == "norm" else Box.shard(entry.shape, dim=dim, rank=rank, ranks=ranks)
        spec = TensorSpec(entry.name, entry.dtype, box.shape)
        held.append(Held(spec, (Placement(entry.name, box, (0,) * len(box.shape)),)))
    model = {one.spec.name: np.zeros(one.spec.shape, one.spec.dtype.numpy) for one in held}
    live = LiveModel(model, rank=rank, source=store, layout=Shards(tuple(held), sources), all_reduce=all_reduce)
    for line in sys.stdin:
        version, stopping = line.strip().removeprefix("!"), line.startswith("!")
        try:
            said = {"mode": live.update(version).mode}
        except WeightcastError as error:
            said = {"error": error.code, "message": str(error)}
        whole = store.load(live.version) if live.version else {}
        same = all(
            box_of(whole[one.spec.name], one.placements[0].box).tobytes() == model[one.spec.name].tobytes() for one in held
        )
        print(json.dumps({**said, "version": live.version, "same": same}), flush=True)


if __name__ == "__main__":
    main()
