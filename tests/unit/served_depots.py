"""Depots over stores, in the process of the test, and clients of them."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from weightcast.clock import Deadline
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.transports.http.client import DepotClient


def soon():
    """Time enough for every test."""
    return Deadline.after(60)


@dataclass
class Served:
    """A depot over a store, and somebody who asks it."""

    client: DepotClient
    depot: Depot

    def manifest(self, version):
        return self.client.manifest(version, deadline=soon())


@contextmanager
def depot_over(path, acks=None):
    """A real depot that serves a store."""
    with ExitStack() as stack:
        shelf = stack.enter_context(StoredShelf(path))
        depot = stack.enter_context(Depot(shelf, acks=acks))
        client = DepotClient(depot.url, stall_s=10)
        stack.callback(client.close)
        yield Served(client, depot)
