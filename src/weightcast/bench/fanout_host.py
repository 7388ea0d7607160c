"""`python -m weightcast.bench.fanout_host`: what runs on the hosts of the fan-out bench, each in a process of its own."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from weightcast.bench.ipc_children import Message, serve
from weightcast.bench.ipc_tensors import Model, blank_tensors
from weightcast.clock import Deadline
from weightcast.depot.mirror import Mirror
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.store.store import Store
from weightcast.transports.http.receiver import HttpReceiver
from weightcast.worker.live_model import LiveModel

_LOOK_S = 0.02


class Publisher:
    """A trainer with a store and a depot over it."""

    def __init__(self) -> None:
        self._opened = ExitStack()

    def publisher(self, store: str, listen: str, nbytes: int, seed: int) -> Message:
        """Make the tensors and serve the store, which is empty."""
        self._model, self._store, self._number = Model(nbytes, seed), Store(store), 0
        shelf = StoredShelf(Path(store))
        self._opened.callback(shelf.close)
        self._opened.enter_context(Depot(shelf, listen))
        return {"nbytes": self._model.nbytes}

    def publish(self, version: str) -> Message:
        """Publish a version that differs in every element, and tell when it was there. Earlier ones are removed before."""
        if self._number:
            self._store.gc(keep_last=1)
        self._model.change(self._number)
        self._number += 1
        manifest = self._store.publish(version, self._model.tensors, "full")
        published_s = time.monotonic()
        nbytes = sum(part.nbytes for part in manifest.parts) + sum(file.nbytes for file in manifest.files)
        return {"published_s": published_s, "nbytes": nbytes}

    def digest(self) -> Message:
        """That of the tensors."""
        return {"digest": self._model.digest()}


class Relay:
    """The depot of a host: it mirrors others while it is told to."""

    def __init__(self) -> None:
        self._opened = ExitStack()

    def follow(self, store: str, listen: str, urls: list[str], stall_s: float) -> Message:
        """Mirror depots, and serve what comes."""
        with ExitStack() as opened:
            self._mirror = opened.enter_context(Mirror(Path(store), urls, keep_last=1, stall_s=stall_s))
            opened.enter_context(Depot(self._mirror, listen))
            self._opened = opened.pop_all()
        return {}

    def settle(self, version: str, timeout_s: float) -> Message:
        """Wait until a version is here whole."""
        deadline = Deadline.after(timeout_s)
        while not any(offer.version == version and offer.complete for offer in self._mirror.offers()):
            deadline.check(f"mirroring {version}")
            time.sleep(_LOOK_S)
        return {}

    def rest(self) -> Message:
        """Mirror and serve no more."""
        self._opened.close()
        return {}


class Receiver:
    """An engine's process, reduced to a model that takes versions from the depot of its host."""

    def receiver(self, url: str, nbytes: int) -> Message:
        """Make the model."""
        self._source = HttpReceiver([url])
        self._live = LiveModel(blank_tensors(nbytes), keep_previous=False)
        return {}

    def update(self, version: str, timeout_s: float) -> Message:
        """Wait for a version, take it, every digest compared, and tell when it was served."""
        deadline, found = Deadline.after(timeout_s), None
        while found != version:
            found = self._source.wait_newer(found, deadline=deadline)
        noticed_s = time.monotonic()
        result = self._live.update(version, source=self._source, commit="swap", timeout=deadline.remaining())
        return {"version": result.version, "noticed_s": noticed_s, "committed_s": time.monotonic()}

    def digest(self) -> Message:
        """That of the live bytes, read again."""
        return {"digest": self._live.root_digest()}


ROLES = {"publisher": Publisher, "relay": Relay, "receiver": Receiver}


def main(role: str) -> None:
    """Answer the bench until it closes the input."""
    host = ROLES[role]()
    names = [name for name in vars(type(host)) if not name.startswith("_")]
    serve({name: getattr(host, name) for name in names})


if __name__ == "__main__":
    import sys

    main(sys.argv[1])
