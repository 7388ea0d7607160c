"""What a depot answers to receivers that read with NIXL: where the bytes of a version lie, and whether they still do."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from weightcast.clock import Deadline
from weightcast.depot.exchange import Reply, Request, Route
from weightcast.depot.holding import Holding, Shelf
from weightcast.depot.leases import Leases
from weightcast.depot.nixl_holds import Memory
from weightcast.errors import SourceFailed
from weightcast.transports.nixl.agent import region_of_bytes
from weightcast.wire.depot import PREFIX
from weightcast.wire.nixl import Grant, GrantQuery, Region, Renewal


class NixlExport:
    """Lets receivers read the versions of a shelf from the memory of this process, and what a trainer lends.

    The memory of a version is registered when the first receiver wants to read it, and the version is held for as long as
    any may. Nothing is loaded and no agent is made before that.
    """

    def __init__(self, shelf: Shelf, leases: Leases | None = None) -> None:
        self._shelf = shelf
        self._leases = Leases() if leases is None else leases
        self._holds = self._leases.holds
        self._lock = threading.Lock()
        self._exported: dict[tuple[str, str], Memory] = {}

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("POST", f"{PREFIX}/versions/{{version}}/nixl", self.open),
            Route("POST", f"{PREFIX}/versions/{{version}}/nixl/lease", self.join),
            Route("POST", f"{PREFIX}/nixl/grants/{{grant}}", self.renew),
            Route("DELETE", f"{PREFIX}/nixl/grants/{{grant}}", self.confirm),
        ]

    def open(self, request: Request, _stack: ExitStack) -> Reply:
        """A receiver wants to read a version."""
        return Reply.message(self._granted(request.path["version"], request.read(GrantQuery), request.deadline))

    def join(self, request: Request, _stack: ExitStack) -> Reply:
        """A receiver wants to read a version that a trainer lends."""
        return Reply.message(self._leases.grant(request.path["version"], request.read(GrantQuery).root_digest))

    def renew(self, request: Request, _stack: ExitStack) -> Reply:
        """A receiver still reads, and wants to know whether anybody is there."""
        return Reply.message(self._holds.renew(request.path["grant"], request.read(Renewal).agent))

    def confirm(self, request: Request, _stack: ExitStack) -> Reply:
        """A receiver has read all it wants."""
        return Reply.message(self._holds.confirm(request.path["grant"]))

    def _granted(self, version: str, query: GrantQuery, deadline: Deadline) -> Grant:
        key = version, query.root_digest
        with self._lock:  # one version is registered at a time, so that none is registered twice
            self._exported = {name: memory for name, memory in self._exported.items() if memory.uses}
            memory = self._exported.get(key)
            granted = self._holds.grant(memory) if memory is not None else None
            if granted is not None:
                return granted
            with ExitStack() as keep:
                holding = keep.enter_context(self._shelf.holding(version))
                regions = _regions(holding, query, deadline)
                memory = Memory(self._leases.agents.get(), regions, f"version {version}")
                memory.keep = keep.pop_all()
            try:
                granted = self._holds.grant(memory, fresh=True)
            finally:
                if memory.uses == 0:
                    memory.free()
            assert granted is not None  # noqa: S101 - a fresh one is there
            self._exported[key] = memory
            return granted

    def close(self) -> None:
        """End all leases. Memory that is being read stays until its readers are done. Safe twice."""
        self._leases.close()


def _regions(holding: Holding, query: GrantQuery, deadline: Deadline) -> dict[str, tuple[Region, ...]]:
    """Where the parts of a version lie, or the payload of a delta."""
    manifest = holding.manifest
    if manifest.root_digest != query.root_digest:
        raise SourceFailed(
            f"version {manifest.version} has root digest {manifest.root_digest} here, and {query.root_digest} was asked "
            "for. Nothing was changed."
        )
    files = manifest.parts if manifest.payload is None else (manifest.payload,)
    return {
        entry.file: tuple(map(region_of_bytes, holding.views(entry.file, 0, entry.nbytes, deadline=deadline)))
        for entry in files
    }
