"""Write the store and the delta beside this script. They are of the last release before sums (manifests of format 1).

Run it with that release: PYTHONPATH=<checkout of commit 6d11bb9>/src python make_store.py
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from weightcast import DeltaPolicy, Store, delta
from weightcast.wire.manifest import FORMAT

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "unit"))

from older_states import states  # noqa: E402

WAYS = {  # step: mode, packing, algorithm
    "step_1": ("full", "gaps", "xxh3-128"),
    "step_2": ("delta", "gaps", "xxh3-128"),
    "step_3": ("delta", "classes", "xxh3-128"),
    "step_4": ("full", "gaps", "blake3"),
    "step_5": ("delta", "gaps", "blake3"),
}


def main() -> None:
    assert FORMAT == 1, "this is not the release that wrote format 1"
    for step, state in states().items():
        mode, packing, algorithm = WAYS[step]
        store = Store(HERE / "store", delta=DeltaPolicy(packing=packing, max_share=1))
        store.publish(step, state, mode, algorithm=algorithm, files={"config.json": b"{}"})
    (HERE / "store" / ".lock").unlink()
    old = [[0x3F80, 0x3FC0, 0x3E80, 0x4000], [0x3FA0, 0x3EC0, 0xBF80, 0x0000]]
    new = [[0x3F80, 0x3FC1, 0x3E80, 0x4000], [0x3F9F, 0x3EC0, 0x3F80, 0x0000]]
    base, end = (
        {"bias": np.zeros(2, np.float32), "w": np.array(lanes, np.uint16).view(ml_dtypes.bfloat16)} for lanes in (old, new)
    )
    (HERE / "example.delta").write_bytes(delta.encode(base, end))


if __name__ == "__main__":
    main()
