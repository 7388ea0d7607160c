"""Run by the fault trials: a depot that serves a store over NIXL too. It prints its URL, and ends when its input does.

python -m process.fault_depot STORE HOST:PORT TOKEN_FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

from weightcast.depot.leases import Leases
from weightcast.depot.nixl_export import NixlExport
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.transports.http.access import read_token


def main() -> None:
    """Serve."""
    path, listen, token_file = sys.argv[1:]
    leases = Leases()
    with StoredShelf(path) as shelf:
        export = NixlExport(shelf, leases)
        with Depot(shelf, listen, token=read_token(Path(token_file)), routes=export.routes()) as depot:
            print(depot.url, flush=True)
            sys.stdin.read()
        export.close()


if __name__ == "__main__":
    main()
