"""A relay in a process of its own: a store that mirrors depots, and a depot over it. It prints its URL."""

from __future__ import annotations

import logging
import sys

from weightcast.depot.mirror import Mirror
from weightcast.depot.server import Depot


def main(store: str, *urls: str) -> None:
    logging.basicConfig(level=logging.INFO)
    with Mirror(store, urls) as mirror, Depot(mirror) as depot:
        print(depot.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
