"""Run by the tests: publishes one sample version.

    python -m process.publisher STORE VERSION [--pause]

With `--pause` it stops after the first tensor, while it holds the lock, until it is sent a line.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weightcast import Store

from .sample import PART_NBYTES, tensors


def main() -> None:
    """Parse, publish, tell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("version")
    parser.add_argument("--pause", action="store_true")
    arguments = parser.parse_args()
    signal.alarm(60)  # whoever waits for a line of this process waits no longer than this

    def paused() -> Iterator[tuple[str, np.ndarray]]:
        for number, item in enumerate(tensors(arguments.version).items()):
            yield item
            if number == 0 and arguments.pause:
                print("holds the lock", flush=True)
                sys.stdin.readline()

    print("begins", flush=True)
    Store(arguments.store, lock_timeout=25).publish(arguments.version, paused(), "full", part_nbytes=PART_NBYTES)
    print("published")


if __name__ == "__main__":
    main()
