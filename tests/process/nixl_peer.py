"""A depot that serves a store over NIXL too, as a process of its own: prints its URL, ends with its standard input."""

from __future__ import annotations

import sys

from weightcast.depot.leases import Leases
from weightcast.depot.nixl_export import NixlExport
from weightcast.depot.nixl_holds import Holds
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf


def main() -> None:
    """Serve the store in the first argument at the address in the second."""
    path, listen = sys.argv[1:]
    leases = Leases(holds=Holds(seconds=60.0, grace_s=1.0))
    with StoredShelf(path) as shelf:
        export = NixlExport(shelf, leases)
        with Depot(shelf, listen, routes=export.routes()) as depot:
            print(depot.url, flush=True)
            sys.stdin.read()
        export.close()


if __name__ == "__main__":
    main()
