"""A replica that starts with nothing and takes the newest version from a depot. It prints the digest of what it serves."""

from __future__ import annotations

import json
import sys

import numpy as np

from weightcast import LiveModel


def main(url: str, count: int, nbytes: int) -> None:
    model = {f"layer.{index}": np.zeros(nbytes + 7 * index, dtype=np.uint8) for index in range(count)}
    live = LiveModel(model)
    result = live.update(source=url, timeout=60)
    print(json.dumps({"version": result.version, "root_digest": live.root_digest()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
