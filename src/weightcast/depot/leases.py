"""Leases: a trainer lends its own tensors to receivers that read them with NIXL, without a copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.depot.nixl_holds import Holds, Memory
from weightcast.errors import Conflict, DeadlineExceeded, InvalidInput, NotFound, SourceFailed, UnsupportedTensor
from weightcast.tensors.bridges import spec_of
from weightcast.transports.nixl.agent import region_of
from weightcast.transports.nixl.agents import Agents
from weightcast.wire.manifest import Manifest
from weightcast.wire.nixl import Grant, Region

log = logs.get(__name__)


class Lease:
    """Tensors that are lent. They must not be changed before this has ended: by `end`, or because its time is over.

    A receiver has the version when it has confirmed. One that has not when the lease ends is refused when it tries to, and
    throws away what it read: so nobody ends up with bytes from before and after a change.
    """

    def __init__(self, manifest: Manifest, memory: Memory, holds: Holds, seconds: float) -> None:
        self.manifest, self.seconds = manifest, seconds
        self._memory, self._holds = memory, holds
        self._changed = threading.Condition()
        self._confirmed = 0
        self._ended = False
        self.until_s = time.monotonic() + seconds
        holds.own(memory, seconds=seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    @property
    def active(self) -> bool:
        """Whether receivers can still take it. As long as they can, the tensors must stay as they are."""
        return not self._ended and time.monotonic() < self.until_s

    @property
    def confirmed(self) -> int:
        """How many receivers have read all of it."""
        return self._confirmed

    def grant(self) -> Grant:
        """Let one more receiver read. Raises `NotFound` if the lease has ended."""
        granted = None if self._ended else self._holds.grant(self._memory, latest_s=self.until_s, told=self._note)
        if granted is None:
            raise NotFound(f"the lease of version {self.manifest.version} has ended. Take the version from another source.")
        return granted

    def _note(self) -> None:
        with self._changed:
            self._confirmed += 1
            self._changed.notify_all()

    def wait(self, *, receivers: int = 1, deadline: Deadline | None = None) -> None:
        """Wait until so many receivers have read all of it. Raises `DeadlineExceeded` if they do not in time (default: that
        of the lease), or if the time of the lease is over before.
        """
        deadline = Deadline.after(self.seconds) if deadline is None else deadline
        what = f"lending {self.manifest.version} to {receivers} receiver(s)"
        with self._changed:
            while self._confirmed < receivers:
                left_s = self.until_s - time.monotonic()
                if self._ended or left_s <= 0:
                    raise DeadlineExceeded(f"{what} ({self._confirmed} have read it, and the lease has ended)", self.seconds)
                deadline.check(f"{what} ({self._confirmed} have read it)")
                self._changed.wait(timeout=min(left_s, deadline.remaining(), 0.1))

    def end(self) -> int:
        """Take the tensors back: they may be changed when this returns. Tells how many receivers were cut off. Safe twice.

        The memory is still kept referred to for a few seconds if any were: they may have asked for bytes of it.
        """
        with self._changed:
            ended, self._ended = self._ended, True
            self._changed.notify_all()
        if ended:
            return 0
        lost = self._holds.revoke(self._memory, "the trainer took its tensors back")
        log.info("lease ended", version=self.manifest.version, confirmed=self._confirmed, cut_off=lost)
        return lost


class Leases:
    """What a trainer lends at the moment. `agents` gives the NIXL agent that its memory is registered with."""

    def __init__(self, agents: Agents | None = None, *, holds: Holds | None = None) -> None:
        self.agents = Agents() if agents is None else agents
        self.holds = Holds() if holds is None else holds
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}

    def lend(self, version: str, manifest: Manifest, tensors: Mapping[str, object], seconds: float) -> Lease:
        """Lend tensors where they lie, as the version that `manifest` describes, for so many seconds.

        The manifest is sealed: its digests were taken from these very tensors, and they have not been changed since. Raises
        `InvalidInput` with all tensors that are not what it says, or that do not lie in one stretch.
        """
        if not 0 < seconds < float("inf"):
            raise InvalidInput(f"a lease must last for some seconds, not {seconds}.")
        if version != manifest.version or manifest.kind != "full" or not (manifest.sealed and manifest.algorithm):
            raise InvalidInput(f"{version} cannot be lent: it needs the sealed manifest of a full version of that name.")
        wrong: list[str] = []
        regions = dict(_regions(manifest, tensors, wrong))
        if wrong:
            raise InvalidInput(f"{version} cannot be lent:" + "".join(f"\n  {one}" for one in wrong))
        with self._lock:
            self._leases = {name: lease for name, lease in self._leases.items() if lease.active}
            if version in self._leases:
                raise Conflict(f"version {version} is already lent: end that lease first.")
            memory = Memory(self.agents.get(), regions, f"version {version}, lent by its trainer,")
            memory.keep.callback(dict(tensors).clear)  # refers to the tensors until it is called
            lease = self._leases[version] = Lease(manifest, memory, self.holds, seconds)
        log.info("version lent", version=version, nbytes=memory.nbytes, lease_s=seconds)
        return lease

    def grant(self, version: str, root_digest: str) -> Grant:
        """Let a receiver read a version that is lent."""
        with self._lock:
            lease = self._leases.get(version)
        if lease is None or not lease.active:
            raise NotFound(f"version {version} is not lent at the moment. Take it from another source, or by mode=rdma.")
        if lease.manifest.root_digest != root_digest:
            raise SourceFailed(
                f"version {version} is lent with root digest {lease.manifest.root_digest}, and {root_digest} was asked for."
            )
        return lease.grant()

    def close(self) -> None:
        """End all leases, and look after no holds any more. Safe twice."""
        with self._lock:
            leases, self._leases = self._leases, {}
        for lease in leases.values():
            lease.end()
        self.holds.close()


def _regions(
    manifest: Manifest, tensors: Mapping[str, object], wrong: list[str]
) -> Iterator[tuple[str, tuple[Region, ...]]]:
    for entry in manifest.tensors:
        if entry.name not in tensors:
            wrong.append(f"{entry.name}: it is not among the tensors")
            continue
        try:
            spec = spec_of(entry.name, tensors[entry.name])
            if spec != entry.spec:
                wrong.append(f"{entry.name}: it is {spec.describe()}, and {entry.spec.describe()} in the manifest")
            elif entry.nbytes:
                yield entry.name, (region_of(entry.name, tensors[entry.name]),)
        except UnsupportedTensor as error:
            wrong.append(str(error))
