"""Depots that answer questions, in the process of the test, and clients of them."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from weightcast.clock import Deadline
from weightcast.depot.questions import Questions
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.errors import NotFound
from weightcast.tensors.boxes import Box
from weightcast.transports.http.client import DepotClient
from weightcast.wire.depot import BoxOf


def soon():
    """Time enough for every test."""
    return Deadline.after(60)


@dataclass
class Served:
    """A depot over a store, and somebody who asks it."""

    client: DepotClient
    questions: Questions
    depot: Depot

    def manifest(self, version):
        return self.client.manifest(version, deadline=soon())


@contextmanager
def depot_over(path, acks=None, **more):
    """A real depot that serves a store and answers questions."""
    with ExitStack() as stack:
        shelf = stack.enter_context(StoredShelf(path))
        questions = Questions(shelf, path, **more)
        depot = stack.enter_context(Depot(questions.shelf, routes=questions.routes(), acks=acks))
        client = DepotClient(depot.url, stall_s=10)
        stack.callback(client.close)
        yield Served(client, questions, depot)


def cut_out(array, box):
    """The bytes of a box, without any of the code that is tested."""
    where = tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))
    return np.array(array[(*where, ...)], copy=True, order="C").tobytes()


def memories_for(tensors, boxes):
    """Boxes and memory for each, as a receiver asks for them."""
    return [(BoxOf(name, box), np.zeros(len(cut_out(tensors[name], box)), np.uint8)) for name, box in boxes]


def random_box(rng, shape):
    """A box of a tensor, often without elements."""
    start = [int(rng.integers(0, size + 1)) for size in shape]
    return Box(tuple(start), tuple(int(rng.integers(0, size - at + 1)) for size, at in zip(shape, start, strict=True)))


class SharesShelf:
    """A shelf of one version of which it has a box of each tensor, as one of several publishers does."""

    def __init__(self, manifest, shares):
        self._manifest, self._shares = manifest, shares

    @contextmanager
    def holding(self, _version):
        yield SimpleNamespace(
            manifest=self._manifest, in_files=False, tensor=self._tensor, files={}, views=None, encoded=b""
        )

    def _tensor(self, name):
        if name not in self._shares:
            raise NotFound(f"nothing of {name} is here")
        return self._shares[name]

    def offers(self):
        return []

    def newest(self):
        return None


@contextmanager
def depot_of_shares(manifest, shares):
    """A real depot of a publisher that holds boxes of tensors."""
    with ExitStack() as stack:
        questions = Questions(SharesShelf(manifest, shares), None)
        depot = stack.enter_context(Depot(questions.shelf, routes=questions.routes()))
        client = DepotClient(depot.url, stall_s=10)
        stack.callback(client.close)
        yield Served(client, questions, depot)
