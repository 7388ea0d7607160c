"""What benches leave behind, told apart from what those of other tests, which run at the same time, are still using."""

import time
from pathlib import Path

_PATIENCE_S = 60.0


def bench_dirs() -> set[str]:
    """The directories that benches are using, or have left."""
    return {str(path) for parent in (Path("/dev/shm"), Path("/tmp")) for path in parent.glob("wc-bench-*")}


def left_since(before: set[str]) -> set[str]:
    """The directories that were made since, and stay. Those of others go when they end."""
    made, until = bench_dirs() - before, time.monotonic() + _PATIENCE_S
    while made & bench_dirs() and time.monotonic() < until:
        time.sleep(0.05)
    return made & bench_dirs()
