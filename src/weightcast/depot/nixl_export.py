"""What a depot answers to receivers that read with NIXL: where the bytes of a version lie, and whether they still do."""

from __future__ import annotations

import mmap
import threading
from contextlib import ExitStack

from weightcast.clock import Deadline
from weightcast.depot.exchange import FileRange, Reply, Request, Route
from weightcast.depot.holding import Holding, Shelf
from weightcast.depot.leases import Leases
from weightcast.depot.nixl_holds import Memory
from weightcast.errors import Conflict, SourceFailed
from weightcast.store.files import refusals
from weightcast.tensors.flat import Buffer
from weightcast.transports.nixl.agent import device_at, region_of_bytes
from weightcast.transports.nixl.agents import Agents
from weightcast.wire.depot import PREFIX
from weightcast.wire.nixl import Grant, GrantQuery, Renewal

_ROUTES = {
    "open": ("POST", f"{PREFIX}/versions/{{version}}/nixl"),
    "join": ("POST", f"{PREFIX}/versions/{{version}}/nixl/lease"),
    "renew": ("POST", f"{PREFIX}/nixl/grants/{{grant}}"),
    "confirm": ("DELETE", f"{PREFIX}/nixl/grants/{{grant}}"),
}


class NixlExport:
    """Lets receivers read the versions of a shelf from the memory of this process, and what a trainer lends.

    The memory of a version is registered when the first receiver wants to read it, and the version is held for as long as
    any may. Nothing is loaded, no agent is made and no port is opened before that. NIXL then listens on the device that has
    the address `host`, where the depot listens.
    """

    def __init__(self, shelf: Shelf, leases: Leases | None = None, *, host: str = "127.0.0.1") -> None:
        self._shelf = shelf
        self._leases = Leases(Agents(nic=device_at(host))) if leases is None else leases
        self._holds = self._leases.holds
        self._lock = threading.Lock()
        self._exported: dict[tuple[str, str], Memory] = {}

    def routes(self) -> list[Route]:
        """All of them."""
        handlers = {"open": self.open, "join": self.join, "renew": self.renew, "confirm": self.confirm}
        return [Route(method, pattern, handlers[name]) for name, (method, pattern) in _ROUTES.items()]

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
                memories = _memories(holding, query, deadline)
                keep.callback(memories.clear)
                regions = {file: tuple(map(region_of_bytes, memory)) for file, memory in memories.items()}
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

    @classmethod
    def refusals(cls) -> list[Route]:
        """The routes of a depot whose NIXL is off: each says how to switch it on. Nothing is opened."""

        def refuse(_request: Request, _stack: ExitStack) -> Reply:
            raise Conflict(
                "this depot does not serve nixl://, which opens another port. Start it with `weightcast depot --nixl on` (a "
                "trainer: DepotPublisher with nixl=True), or open http:// instead."
            )

        return [Route(method, pattern, refuse) for method, pattern in _ROUTES.values()]

    def close(self) -> None:
        """End all leases. Memory that is being read stays until its readers are done. Safe twice."""
        self._leases.close()


def _memories(holding: Holding, query: GrantQuery, deadline: Deadline) -> dict[str, list[Buffer]]:
    """The memory of the parts of a version, or of the payload of a delta. Files are mapped.

    A mapped file that another process truncates ends this one when NIXL reads it. Nothing of ours truncates a file.
    """
    manifest = holding.manifest
    if manifest.root_digest != query.root_digest:
        raise SourceFailed(
            f"version {manifest.version} has root digest {manifest.root_digest} here, and {query.root_digest} was asked "
            "for. Nothing was changed."
        )
    small = {file.file for file in manifest.files}
    return {
        file: [
            memoryview(_mapped(block))[block.start : block.stop] if isinstance(block, FileRange) else block
            for block in holding.sendable(file, 0, nbytes, deadline=deadline)
        ]
        for file, nbytes in holding.files.items()
        if file not in small
    }


def _mapped(block: FileRange) -> mmap.mmap:
    with refusals("map", block.file.path):
        return mmap.mmap(block.file.fd, block.stop, access=mmap.ACCESS_READ)
