"""`python -m weightcast.bench.network_ours ROLE`: our own ends of a network, a depot and an engine's process.

A trainer publishes to memory of its own (`trainer`), or to a store in memory that a depot serves (`store`), or lends its
tensors where they lie (`lender`); what is timed starts when that call has returned: the version is there. The receiver waits
for it with a long poll, and what is timed ends when all of it is staged and every digest was compared.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, runtime_checkable

from weightcast.bench.ipc_children import Message, serve
from weightcast.bench.ipc_tensors import Model, blank_tensors
from weightcast.bench.network_meeting import find, leave
from weightcast.clock import Deadline
from weightcast.depot.leases import Lease
from weightcast.errors import InvalidInput
from weightcast.transports.base import Receiver
from weightcast.transports.registry import open_receiver
from weightcast.worker.live_model import LiveModel
from weightcast.worker.serving import StagedUpdate

_POLL_S = 0.002  # how often the store is looked at; a trainer that is its own depot tells at once
_LEASE_S = 600.0
_PUBLISHERS = ("trainer", "store", "lender")
_LINGER_S = 0.5  # for mappings of versions that have left the store, which is pruned before each round


@runtime_checkable
class WaitingReceiver(Receiver, Protocol):
    """A receiver that is told of new versions."""

    def wait_newer(self, after: str | None, *, deadline: Deadline) -> str:
        """The newest version once it is another than `after`."""


class Publisher:
    """The trainer. Whatever it opens is closed with `opened`."""

    def __init__(self, role: str, opened: ExitStack) -> None:
        self._role, self._opened = role, opened
        self._number = 0
        self._lease: Lease | None = None

    def begin(self, directory: str, nbytes: int, seed: int, timeout_s: float) -> Message:
        """Make the tensors, listen, and tell where."""
        self._timeout_s = timeout_s
        self._model = Model(nbytes, seed)
        url = self._serve_store(Path(directory) / "store") if self._role == "store" else self._serve_memory()
        leave(directory, "url", url.encode())
        return {}

    def _serve_store(self, path: Path) -> str:
        from weightcast.depot.nixl_export import NixlExport  # noqa: PLC0415 - only what is used is loaded
        from weightcast.depot.server import Depot  # noqa: PLC0415
        from weightcast.depot.stored import StoredShelf  # noqa: PLC0415
        from weightcast.store.store import Store  # noqa: PLC0415

        self._store = Store(path)
        shelf = self._opened.enter_context(StoredShelf(path, poll_s=_POLL_S, linger_s=_LINGER_S))
        export = NixlExport(shelf)
        self._opened.callback(export.close)
        return self._opened.enter_context(Depot(shelf, routes=export.routes())).url

    def _serve_memory(self) -> str:
        from weightcast.publish.depot_publisher import DepotPublisher  # noqa: PLC0415

        self._publisher = self._opened.enter_context(DepotPublisher("127.0.0.1:0", slots=1, nixl=True))
        return self._publisher.url

    def change(self, number: int) -> Message:
        """Make it another version, and make room for it."""
        if self._lease is not None:
            self._lease.end()
        self._model.change(number)
        if self._role == "store" and self._number:
            self._store.gc(keep_last=1)
        return {}

    def move(self) -> Message:
        """Publish or lend, and tell when that was done."""
        self._number += 1
        version = f"step_{self._number}"
        if self._role == "store":
            self._store.publish(version, self._model.tensors, "full")
        elif self._role == "lender":
            self._lease = self._publisher.lend(version, self._model.tensors, _LEASE_S, timeout=self._timeout_s)
        else:
            self._publisher.publish(version, self._model.tensors, timeout=self._timeout_s)
        return {"began_s": time.monotonic()}

    def digest(self) -> Message:
        """Of all tensors."""
        return {"digest": self._model.digest()}


class Engine:
    """A model that stages what is published, version after version, and drops it again."""

    def __init__(self, role: str, opened: ExitStack) -> None:
        self._scheme, self._options = ("nixl", "?mode=gdr") if role == "gdr" else (role, "")
        self._opened = opened
        self._after: str | None = None
        self._staged: StagedUpdate | None = None

    def begin(self, directory: str, nbytes: int, seed: int, timeout_s: float) -> Message:  # noqa: ARG002 - the trainer's
        """Make the model, every page of it touched, and the receiver."""
        self._timeout_s = timeout_s
        self._live = self._opened.enter_context(LiveModel(blank_tensors(nbytes), keep_previous=False))
        url = find(directory, "url", Deadline.after(timeout_s)).decode()
        receiver = open_receiver(f"{self._scheme}://{url.partition('://')[2]}{self._options}", rank=0)
        self._opened.callback(receiver.close)
        if not isinstance(receiver, WaitingReceiver):
            raise InvalidInput(f"{receiver.url} does not tell of new versions.")
        self._receiver = receiver
        return {}

    def move(self) -> Message:
        """Wait for the next version and stage it, and tell when it was noticed, and when it was staged and verified."""
        if self._staged is not None:
            self._live.abandon(self._staged)
            self._staged = None
        deadline = Deadline.after(self._timeout_s)
        version = self._receiver.wait_newer(self._after, deadline=deadline)
        noticed_s = time.monotonic()
        self._staged = staged = self._live.stage(version, source=self._receiver, commit="swap", deadline=deadline)
        ended_s = time.monotonic()
        self._after = version
        return {
            "noticed_s": noticed_s, "ended_s": ended_s, "stage_s": staged.stage_s, "verify_s": staged.verify_s,
        }  # fmt: skip

    def digest(self) -> Message:
        """Commit what was staged last, and take the digest of the live bytes."""
        if self._staged is not None:
            self._live.commit(self._staged)
            self._staged = None
        return {"digest": self._live.root_digest()}


def main() -> None:
    """Answer the bench until it closes the input."""
    role = sys.argv[1]
    with ExitStack() as opened:
        if role in _PUBLISHERS:
            publisher = Publisher(role, opened)
            serve(
                {
                    "begin": publisher.begin, "change": publisher.change, "move": publisher.move,
                    "digest": publisher.digest,
                }
            )  # fmt: skip
        else:
            engine = Engine(role, opened)
            serve({"begin": engine.begin, "move": engine.move, "digest": engine.digest})


if __name__ == "__main__":
    main()
