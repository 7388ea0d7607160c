"""The depots that a relay mirrors: in which order it asks them, and how each has behaved."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import AccessRefused, InvalidInput, NotFound, SourceFailed, WeightcastError
from weightcast.wire.depot import Catalogue, Newest
from weightcast.wire.manifest import Manifest

log = logs.get(__name__)

PROBE_S = 2.0  # for an upstream to say what it has
_REST_S = (0.25, 2.0)  # how long one that failed is left alone: at first, and at most
_COSTLY = 10  # the same for one whose failure took time, in multiples of that time: a host that hangs, not one that is down
_REFUSED_S = 30.0  # the same for one that wants another token
_LACK_S = (0.2, 5.0)  # how soon one that has not got a version is asked for it again: at first, and at last


def upstreams_for(index: int, hosts: Sequence[str], publisher: str, *, fanout: int = 1) -> list[str]:
    """The upstreams of the relay of host `index`, nearest first: the lists of all hosts make a tree below the publisher.

    `hosts` are the URLs of the hosts' depots, each of which mirrors the list that this returns for it. With a `fanout` of 1,
    the default, the tree is a chain: publisher → host 0 → host 1 → … Every link then carries a version once in each
    direction at its full speed, so the last host has it only one piece per hop later than the first, and the publisher
    sends it once however many hosts there are. With a larger fanout a host sends to several others over one link, which
    takes as many times as long; that pays only for small versions, where the number of hops counts.

    A host lists its whole line of ancestors up to the publisher. If its parent dies in the middle of a version it goes on
    with its grandparent, which is further ahead than itself; in a chain that one sent to nobody but the dead host, so no
    link carries more than before. Ancestors never list their descendants, so nobody waits in a circle, and if all of them
    are gone the publisher is asked, the one that must have the version.
    """
    if not 0 <= index < len(hosts) or fanout < 1:
        raise InvalidInput(f"there is no host {index} of {len(hosts)} in a tree with a fanout of {fanout}.")
    repeated = sorted({host for host in hosts if [*hosts, publisher].count(host) > 1})
    if repeated:
        raise InvalidInput(f"every depot can be in the tree once, and these are listed more often: {', '.join(repeated)}.")
    line = []
    while index >= fanout:
        index = index // fanout - 1
        line.append(hosts[index])
    return [*line, publisher]


class Incoming(Protocol):
    """The bytes of a range on their way."""

    def receive(self, views: Sequence[memoryview]) -> int:
        """Fill the first bytes of `views` with those that come next; how many came."""


class Source(Protocol):
    """What is asked of an upstream: see `DepotClient`."""

    url: str

    def catalogue(self, *, deadline: Deadline) -> Catalogue:
        """Everything that it has."""

    def newest(self, *, deadline: Deadline, after: str = "", wait_s: float = 0.0) -> Newest | None:
        """The version to take, once it is another than `after`."""

    def manifest(self, version: str, *, deadline: Deadline) -> Manifest:
        """What a version is."""

    def opened_range(
        self, manifest: Manifest, file: str, start: int, stop: int, *, deadline: Deadline
    ) -> AbstractContextManager[Incoming]:
        """A range of a file, to be received."""

    def close(self) -> None:
        """Hang up."""


class Upstream:
    """One depot that is mirrored. Any thread may call.

    One that fails rests for a while, longer each time. One that is there but sends nothing may itself wait for bytes: it is
    borne with for `patience_s`. One that has not got a version is told apart: it may have it in a moment.
    """

    def __init__(self, client: Source, *, patience_s: float) -> None:
        self.client, self.url = client, client.url
        self.seen: Newest | None = None  # what it said last
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._failures, self._rests_until, self._worn_until = 0, 0.0, 0.0
        self._lacking, self._lacks_until, self._lacked = "", 0.0, 0
        self._starving_since: float | None = None
        self.problem = ""

    @property
    def rests(self) -> bool:
        """Whether it failed a while ago, so that others are asked before it."""
        return time.monotonic() < self._rests_until

    @property
    def worn(self) -> bool:
        """Whether it failed just now, so that it is not asked even if there is no other."""
        return time.monotonic() < self._worn_until

    def lacks(self, root: str) -> bool:
        """Whether it said a moment ago that it has not got a version with this root digest."""
        return self._lacking == root and time.monotonic() < self._lacks_until

    def answered(self) -> None:
        """It did what it was asked for."""
        with self._lock:
            if self.problem:
                log.info("upstream back", url=self.url)
            self._failures, self._rests_until, self._worn_until = 0, 0.0, 0.0
            self.problem, self._starving_since = "", None
            self._lacking, self._lacked = "", 0

    def failed(self, error: WeightcastError, *, cost_s: float = 0.0) -> None:
        """It did not, and is not asked for a while: the longer, the more time it cost to find out."""
        with self._lock:
            if self.rests and self.problem:  # several connections to it broke at once
                return
            short_s = _REFUSED_S if isinstance(error, AccessRefused) else min(_REST_S[0] * 2**self._failures, _REST_S[1])
            rest_s, now = max(short_s, _COSTLY * cost_s), time.monotonic()
            self._failures = min(self._failures + 1, 16)
            self._rests_until, self._worn_until, self._starving_since = now + rest_s, now + short_s, None
            level = logging.DEBUG if self.problem else logging.WARNING
            log.at(level, "upstream failed", url=self.url, rests_s=round(rest_s, 1), error=error)
            self.problem = str(error)

    def blame(self, error: WeightcastError, manifest: Manifest, deadline: Deadline) -> None:
        """It did not give what it was asked for of a version: find out why, and what to expect of it."""
        if isinstance(error, AccessRefused):
            self.failed(error)
            return
        if not isinstance(error, NotFound):
            began, limit = time.monotonic(), Deadline.after(min(PROBE_S, deadline.remaining()))
            try:
                offers = self.client.catalogue(deadline=limit).versions
            except WeightcastError as silent:
                self.failed(silent, cost_s=time.monotonic() - began)
                return
            if any((offer.version, offer.root_digest) == (manifest.version, manifest.root_digest) for offer in offers):
                self._starves(error)
                return
        with self._lock:
            self._lacked = self._lacked + 1 if self._lacking == manifest.root_digest else 0
            self._lacking = manifest.root_digest
            self._lacks_until = time.monotonic() + min(_LACK_S[0] * 2 ** min(self._lacked, 16), _LACK_S[1])

    def _starves(self, error: WeightcastError) -> None:
        with self._lock:
            since = self._starving_since = self._starving_since or time.monotonic()
        if time.monotonic() - since > self._patience_s:
            self.failed(error)


class Upstreams:
    """All upstreams of a relay, the nearest first."""

    def __init__(self, clients: Sequence[Source], *, patience_s: float) -> None:
        if not clients:
            raise InvalidInput("a mirror needs at least one upstream: give the URL of a depot.")
        self.all = tuple(Upstream(client, patience_s=patience_s) for client in clients)

    def choose(self, manifest: Manifest, *, without: frozenset[int] = frozenset(), patient: bool = False) -> int | None:
        """The nearest one that a version can be asked of now. None: there is none, or not yet.

        While it is `patient`, one that is there and has not got the version yet is waited for: it hears of new versions a
        moment later than those further away, which should not send to all at once.
        """
        last_resort: int | None = None
        for index, upstream in enumerate(self.all):
            if index in without:
                continue
            if upstream.rests:
                last_resort = index if last_resort is None and not upstream.worn else last_resort
            elif not upstream.lacks(manifest.root_digest):
                return index
            elif patient:
                return None
        return last_resort

    def all_lack(self, manifest: Manifest) -> bool:
        """Whether all said a moment ago that they have not got a version."""
        return all(upstream.lacks(manifest.root_digest) for upstream in self.all)

    def problems(self) -> dict[str, str]:
        """What is wrong with those that something is wrong with, by their URLs."""
        return {upstream.url: upstream.problem for upstream in self.all if upstream.problem}

    def manifest(self, version: str, root: str, *, first: int, deadline: Deadline) -> Manifest:
        """The manifest of a version with this root digest, from whoever has it, `first` before the others."""
        errors = []
        order = sorted(range(len(self.all)), key=lambda index: (index != first, self.all[index].rests, index))
        for index in order:
            upstream = self.all[index]
            try:
                manifest = upstream.client.manifest(version, deadline=deadline)
            except WeightcastError as error:
                deadline.check(f"asking for the manifest of version {version}")
                if not isinstance(error, NotFound):
                    upstream.failed(error)
                errors.append(f"{upstream.url}: {error}")
                continue
            if manifest.version == version and manifest.root_digest == root:
                return manifest
            errors.append(f"{upstream.url} has version {version} with root digest {manifest.root_digest}, not {root}")
        raise SourceFailed(f"no upstream gave the manifest of version {version}: {'; '.join(errors)}")

    def close(self) -> None:
        """Hang up everywhere."""
        for upstream in self.all:
            upstream.client.close()
