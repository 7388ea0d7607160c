"""A relay in the fault trials: a depot that fills itself from another while receivers read from it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from weightcast.clock import Deadline
from weightcast.errors import WeightcastError
from weightcast.transports.http.access import Access
from weightcast.transports.http.client import DepotClient

from .fault_hosts import TOKEN, DepotChild, Hosts
from .fault_versions import NEWEST
from .fault_wire import Wire

RATE = 5e6  # bytes per second: filling it takes about a second, so that it can be struck meanwhile
OFFERED_S = 2.0
RESUMED_S = 40.0


class Relay:
    """One that is empty at the beginning of each trial."""

    def __init__(self, hosts: Hosts, directory: Path, port: int, token_file: Path, upstream: Wire) -> None:
        self._store = directory / "relay"
        self.upstream = upstream
        self.depot = DepotChild(
            hosts, port, directory / "relay.log", "weightcast", "depot", "--store", self._store, "--listen", "{listen}",
            "--mirror", f"http://{upstream.host}", "--token-file", token_file,
        )  # fmt: skip

    def begin(self, arm: Callable[[], None]) -> None:
        """Start one with nothing in it, let the fault begin, and wait a little until it offers something."""
        self.depot.end()
        shutil.rmtree(self._store, ignore_errors=True)
        self.depot.start()
        arm()
        self._offers(OFFERED_S)

    def resumed(self, *, lied_to: bool) -> bool:
        """Whether it offers the newest version again, now that all is well.

        What was wrong at every upstream it does not ask for again, so one that was lied to may have to be started anew.
        """
        if lied_to and not self._offers(OFFERED_S):
            self.depot.end()
            self.depot.start()
        return self._offers(RESUMED_S)

    def _offers(self, within_s: float) -> bool:
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            with closing(DepotClient(f"http://{self.depot.host}", access=Access(TOKEN), stall_s=0.5)) as client:
                try:
                    newest = client.newest(deadline=Deadline.after(1.0))
                except WeightcastError:
                    newest = None
            if newest is not None and newest.version == NEWEST:
                return True
            time.sleep(0.05)
        return False

    def end(self) -> None:
        """Until the next trial that needs one."""
        self.depot.end()
        shutil.rmtree(self._store, ignore_errors=True)
