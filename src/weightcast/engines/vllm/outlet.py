"""Where a trainer puts its versions for vLLM servers: shared memory, its own HTTP server, or a store."""

from __future__ import annotations

import ipaddress
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote

from weightcast import logs
from weightcast.errors import InvalidInput, StoreNotFound, WeightcastError
from weightcast.store.store import Store
from weightcast.transports.http.access import read_token
from weightcast.wire.decoding import split_url
from weightcast.wire.manifest import check_version_id

if TYPE_CHECKING:
    import torch

    from weightcast.publish.depot_publisher import DepotPublisher
    from weightcast.publish.publisher import Publisher

log = logs.get(__name__)

_MEMORY = Path("/dev/shm")  # noqa: S108 - the name in it is random, and made for one user

Tensors = Iterator[tuple[str, "torch.Tensor"]]


class Outlet(Protocol):
    """A place for versions. `url` is what a server opens."""

    url: str

    def publish(self, tensors: Tensors, *, metadata: Mapping[str, str], lasting: bool) -> str:
        """Publish all tensors as the next version and give its id. Tensors that are not `lasting` are good only until the
        next one is asked for.
        """

    def tidy(self) -> None:
        """Remove what need not be kept."""

    def close(self) -> None:
        """Stop. Safe twice."""


class StoreOutlet:
    """A store: versions are on the medium, and stay."""

    def __init__(self, path: Path, *, prefix: str, keep: int, delta: bool) -> None:
        self._store, self._prefix, self._keep, self._delta = Store(path), prefix, keep, delta
        self.url = path.absolute().as_uri()
        self._number = self._last()

    def _last(self) -> int:
        """The highest number in use: a trainer that was started again goes on from there."""
        with suppress(StoreNotFound):
            numbers = [re.fullmatch(rf"{re.escape(self._prefix)}(\d+)", one.version) for one in self._store.listings()]
            return max((int(number[1]) for number in numbers if number), default=0)
        return 0

    def publish(self, tensors: Tensors, *, metadata: Mapping[str, str], lasting: bool) -> str:  # noqa: ARG002 - written as they come
        """Write a version."""
        self._number += 1
        version = f"{self._prefix}{self._number}"
        self._store.publish(version, tensors, "auto" if self._delta else "full", step=self._number, metadata=metadata)
        return version

    def tidy(self) -> None:
        """Keep the last versions and what they are built on."""
        try:
            self._store.gc(keep_last=self._keep)
        except WeightcastError as error:  # the servers have the version, and the next one tidies up again
            log.warning("gc failed", store=self._store.path, error=error)

    def close(self) -> None:
        """There is nothing to stop."""


class MemoryOutlet:
    """A publisher that holds the last versions in memory."""

    def __init__(self, publisher: Publisher | DepotPublisher, *, url: str, prefix: str, timeout_s: float) -> None:
        self._publisher, self._prefix, self._timeout_s = publisher, prefix, timeout_s
        self.url = url
        self._number = 0
        self._copies: dict[str, torch.Tensor] = {}

    def publish(self, tensors: Tensors, *, metadata: Mapping[str, str], lasting: bool) -> str:
        """Copy a version into the publisher's memory."""
        self._number += 1
        version, held = f"{self._prefix}{self._number}", {}
        for name, tensor in tensors:
            if name in held:
                raise InvalidInput(f"the source yields {name} twice.")
            held[name] = tensor if lasting else self._copied(name, tensor)
        self._publisher.publish(version, held, step=self._number, metadata=metadata, timeout=self._timeout_s)
        return version

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in memory that is used again for the next version."""
        copy = self._copies.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = self._copies[name] = tensor.new_empty(tensor.shape, device="cpu")
        return copy.copy_(tensor)

    def tidy(self) -> None:
        """The publisher does so by itself."""

    def close(self) -> None:
        """Let go of all versions."""
        self._publisher.close()
        self._copies.clear()


def open_outlet(
    place: str,
    *,
    listen: str,
    source: str | None,
    keep: int,
    delta: bool,
    prefix: str,
    token_file: str | None,
    timeout_s: float,
) -> Outlet:
    """Open a place: "ipc", `ipc:///path`, "http", `file:///path` or a directory. `source` is what servers will be told."""
    check_version_id(f"{prefix}0")
    if keep < 1:
        raise InvalidInput(f"at least one version must be kept, not {keep}.")
    if token_file is not None and place != "http":
        raise InvalidInput(f"a token_file is for versions that are published by http, not {place!r}.")
    if place == "ipc" or place.startswith("ipc://"):
        from weightcast.publish.publisher import Publisher  # noqa: PLC0415 - ZeroMQ is an extra

        memory = Publisher(_own_directory() if place == "ipc" else place, slabs=keep)
        return MemoryOutlet(memory, url=memory.url, prefix=prefix, timeout_s=timeout_s)
    if place == "http":
        return _open_http(listen, source, keep=keep, prefix=prefix, token_file=token_file, timeout_s=timeout_s)
    parts = split_url(place)
    if parts.scheme not in ("", "file") or (parts.scheme and (parts.netloc not in ("", "localhost") or not parts.path)):
        raise InvalidInput(f'{place!r} is no place to publish: "ipc", "http", a directory or file:///path.')
    path = Path(unquote(parts.path)) if parts.scheme else Path(place)
    return StoreOutlet(path, prefix=prefix, keep=keep, delta=delta)


def _open_http(
    listen: str, source: str | None, *, keep: int, prefix: str, token_file: str | None, timeout_s: float
) -> MemoryOutlet:
    from weightcast.publish.depot_publisher import DepotPublisher  # noqa: PLC0415 - others need no server

    host = listen.rpartition(":")[0].strip("[]")
    with suppress(ValueError):  # a name
        if ipaddress.ip_address(host).is_unspecified and source is None:
            raise InvalidInput(f"listening on {listen} does not tell where servers find it: set source, too.")
    token = None if token_file is None else read_token(Path(token_file))
    depot = DepotPublisher(listen, slots=keep, token=token)
    return MemoryOutlet(depot, url=depot.url, prefix=prefix, timeout_s=timeout_s)


def _own_directory() -> Path:
    """A directory in memory that is not there yet; the publisher makes it for this user alone, and removes it."""
    return (_MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())) / f"weightcast-{secrets.token_hex(8)}"
