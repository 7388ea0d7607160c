"""Depots that serve over NIXL, in this process and in others, and what a receiver got from them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from weightcast import Store
from weightcast.clock import Deadline
from weightcast.depot.leases import Leases
from weightcast.depot.nixl_export import NixlExport
from weightcast.depot.nixl_holds import Holds
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.tensors.digest import bytes_digest
from weightcast.wire.manifest import Manifest

# Not importorskip: how NIXL is imported is part of what is tested.
needs_nixl = pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed")
MIB = 1 << 20


def soon(seconds: float = 30.0) -> Deadline:
    """Time enough for anything here."""
    return Deadline.after(seconds)


def large(seed: int) -> dict[str, np.ndarray]:
    """Twelve MiB in tensors that take many reads of one MiB."""
    rng = np.random.default_rng(seed)
    return {f"layer.{index}": rng.integers(0, 255, (4, MIB // 2), dtype=np.uint8) for index in range(6)}


def memories(manifest: Manifest) -> dict[str, np.ndarray]:
    """Room for all that is moved of a version."""
    return {name: np.zeros(entry.nbytes, np.uint8) for name, entry in manifest.transfers().items()}


def wrong(manifest: Manifest, found: Mapping[str, np.ndarray]) -> list[str]:
    """The names whose bytes are not what the manifest says."""
    return [name for name, entry in manifest.transfers().items() if bytes_digest(found[name].data) != entry.digest]


@dataclass
class Served:
    """A depot in this process."""

    url: str
    leases: Leases


@contextmanager
def served(store: Store, *, token: str | None = None, holds: Holds | None = None) -> Iterator[Served]:
    """A depot over a store, in threads of this process."""
    leases = Leases(holds=Holds(seconds=5.0, grace_s=0.2) if holds is None else holds)
    with StoredShelf(store.path) as shelf:
        export = NixlExport(shelf, leases)
        with Depot(shelf, token=token, routes=export.routes()) as depot:
            yield Served(depot.url, leases)
        export.close()
    leases.agents.close()


class DepotProcess:
    """A depot in a process of its own, that can be stopped and killed."""

    def __init__(self, start: Callable[..., subprocess.Popen[str]], path: Path, listen: str = "127.0.0.1:0") -> None:
        self.child = start("nixl_peer", path, listen)
        self.url = self.child.stdout.readline().strip()
        assert self.url.startswith("http"), self.child.stderr.read()

    @property
    def listen(self) -> str:
        """Where it listens."""
        return self.url.partition("://")[2]
