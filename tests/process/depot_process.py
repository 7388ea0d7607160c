"""A depot over a store in a process of its own. It prints its URL, and ends when its input does."""

from __future__ import annotations

import sys

from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf


def main(store: str) -> None:
    with StoredShelf(store) as shelf, Depot(shelf) as depot:
        print(depot.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
