"""The four ways from the trainer to the engine, behind one seam: publish a version, and tell the engine where it is.

`file`, `http` and `nixl` keep versions in a store: the first is full, the next ones are deltas on the one before, and, by
the store's own policy, one in twenty is full again. The engine reads the store itself, or asks a depot in the trainer's
process. `ipc` holds whole versions in shared memory, each with its changes since the one before. All policies assume a link
of 100 Mbit/s: within one host a full version of this small model, of which up to a fifth changes, is as cheap as a delta.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from weightcast.store.store import DeltaPolicy, Store
from weightcast.wire.manifest import Manifest

if TYPE_CHECKING:
    import torch

    from weightcast.publish.publisher import Publisher

Transport = Literal["ipc", "http", "nixl", "file"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
DEFAULT: Transport = "http"

Tensors = Mapping[str, "torch.Tensor"]

_LINK_NBYTES_PER_S = 12.5e6


@dataclass(frozen=True)
class Published:
    """A version that the engine can have now. `nbytes` are those of its payload: all tensors, or the packed delta."""

    version: str
    kind: Literal["full", "delta"]
    nbytes: int
    full_nbytes: int
    seconds: float
    root_digest: str


class Source(Protocol):
    """The trainer's end of a transport."""

    @property
    def url(self) -> str:
        """Where the engine fetches versions."""

    def publish(self, version: str, tensors: Tensors) -> Published:
        """Make a version the newest. When this returns, the tensors may change."""


class _FromStore:
    """A store of full versions and deltas, whoever reads it."""

    def __init__(self, store: Store, url: str) -> None:
        self._store, self.url = store, url

    def publish(self, version: str, tensors: Tensors) -> Published:
        began = time.monotonic()
        return _published(self._store.publish(version, tensors), began)


class _FromMemory:
    """A publisher that holds the last versions in shared memory."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher, self.url = publisher, publisher.url

    def publish(self, version: str, tensors: Tensors) -> Published:
        began = time.monotonic()
        return _published(self._publisher.publish(version, tensors).manifest, began)


@contextmanager
def open_source(transport: Transport, directory: Path) -> Iterator[Source]:
    """The trainer's end of a transport; it keeps what it needs in `directory`."""
    with ExitStack() as stack:
        if transport == "ipc":
            from weightcast.publish.publisher import Publisher  # noqa: PLC0415 - ZeroMQ is an extra

            deltas = DeltaPolicy(link_nbytes_per_s=_LINK_NBYTES_PER_S)
            yield _FromMemory(stack.enter_context(Publisher(f"ipc://{directory / 'shared'}", deltas=deltas)))
            return
        path = directory / "store"
        path.mkdir()
        store = Store(path, delta=DeltaPolicy(keep="memory", link_nbytes_per_s=_LINK_NBYTES_PER_S))
        if transport == "file":
            yield _FromStore(store, path.as_uri())
            return
        if transport == "nixl":
            from weightcast.transports.nixl.library import load_nixl  # noqa: PLC0415

            load_nixl()  # a missing extra is said now, and not by the first update
        url = stack.enter_context(_depot(path, nixl=transport == "nixl"))
        yield _FromStore(store, url.replace("http://", f"{transport}://"))


@contextmanager
def _depot(path: Path, *, nixl: bool) -> Iterator[str]:
    """What `weightcast depot --store`, with `--nixl on` if asked for, runs in this process."""
    from weightcast.depot.nixl_export import NixlExport  # noqa: PLC0415 - servers are slow to import
    from weightcast.depot.server import Depot  # noqa: PLC0415
    from weightcast.depot.stored import StoredShelf  # noqa: PLC0415

    with closing(StoredShelf(path)) as shelf, closing(NixlExport(shelf)) as export:
        routes = export.routes() if nixl else NixlExport.refusals()
        with Depot(shelf, "127.0.0.1:0", routes=routes) as depot:
            yield depot.url


def _published(manifest: Manifest, began: float) -> Published:
    full_nbytes = sum(entry.nbytes for entry in manifest.tensors)
    return Published(
        version=manifest.version,
        kind="delta" if manifest.payloads else "full",
        nbytes=manifest.payload_nbytes or full_nbytes,
        full_nbytes=full_nbytes,
        seconds=time.monotonic() - began,
        root_digest=manifest.root_digest,
    )
