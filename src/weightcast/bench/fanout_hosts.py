"""The hosts of the fan-out bench: a publisher, and hosts that each have a relay and a receiver, one behind the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from weightcast.bench.fanout_network import Network
from weightcast.bench.ipc_children import Child
from weightcast.clock import Deadline
from weightcast.depot.mirror_upstreams import upstreams_for
from weightcast.errors import UpdateFailed

START_S = 120.0
PORT = 7070
STALL_S = 2.0
_HOST = "weightcast.bench.fanout_host"
_LISTEN = f"0.0.0.0:{PORT}"  # in a network of its own
_LOOK_S = 0.05


@dataclass(frozen=True)
class Round:
    """One version on its way to some hosts: seconds from when it was published until each host served it, in their order.

    `sent_nbytes` went over the publisher's link, `nbytes` are the files of the version.
    """

    seconds: tuple[float, ...]
    noticed_s: tuple[float, ...]
    sent_nbytes: int
    nbytes: int

    @property
    def last_s(self) -> float:
        """Until the last host had it."""
        return max(self.seconds)


class Hosts:
    """All processes. A context manager: it starts them, and leaves none behind. Host 0 of the network is the publisher."""

    def __init__(self, network: Network, directory: Path, *, nbytes: int, seed: int, timeout_s: float) -> None:
        self._network, self._directory = network, directory
        self._nbytes, self._seed, self._timeout_s = nbytes, seed, timeout_s
        self._urls = [f"http://{network.address(index)}:{PORT}" for index in range(network.hosts)]
        self._number = 0
        self._following: set[int] = set()
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        count = self._network.hosts
        with self._opened as opened:
            self._publisher = opened.enter_context(self._child(0, "publisher"))
            self._relays = [opened.enter_context(self._child(index, "relay")) for index in range(1, count)]
            self._receivers = [opened.enter_context(self._child(index, "receiver")) for index in range(1, count)]
            deadline = Deadline.after(START_S)
            store = str(self._directory / "publisher")
            self._publisher.tell("publisher", store=store, listen=_LISTEN, nbytes=self._nbytes, seed=self._seed)
            for receiver in self._receivers:
                receiver.tell("receiver", url=f"http://127.0.0.1:{PORT}", nbytes=self._nbytes)
            for child in (self._publisher, *self._receivers):
                child.hear(deadline)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.__exit__(kind, error, trace)

    def _child(self, index: int, role: str) -> Child:
        return Child(_HOST, role, under=self._network.under(index))

    def follow(self, count: int) -> None:
        """Let the first so many hosts mirror, each the one before it, and no others; wait until they have what there is."""
        deadline, hosts = Deadline.after(START_S + self._timeout_s), self._urls[1:]
        new = [index for index in range(count) if index not in self._following]
        for index in new:
            urls, store = upstreams_for(index, hosts, self._urls[0]), str(self._directory / f"host-{index}")
            self._relays[index].ask("follow", deadline, store=store, listen=_LISTEN, urls=urls, stall_s=STALL_S)
        for index in new if self._number else ():
            self._relays[index].ask("settle", deadline, version=self._version, timeout_s=self._timeout_s)
        for index in [index for index in self._following if index >= count]:
            self._relays[index].ask("rest", deadline)
        self._following = set(range(count))

    @property
    def _version(self) -> str:
        return f"step_{self._number}"

    def round(self, count: int, *, kill: int | None = None) -> Round:
        """Publish a version to the first so many hosts. The relay of host `kill` is killed when half of it was sent."""
        self.follow(count)
        taking = [index for index in range(count) if index != kill]
        deadline = Deadline.after(self._timeout_s)
        sent = self._network.sent_nbytes(0)
        self._number += 1
        for index in taking:
            self._receivers[index].tell("update", version=self._version, timeout_s=self._timeout_s)
        told = self._publisher.ask("publish", deadline, version=self._version)
        if kill is not None:
            self._kill(kill, sent + told["nbytes"] // 2, deadline)
        answers = [self._receivers[index].hear(deadline) for index in taking]
        if {answer["version"] for answer in answers} != {self._version}:
            raise UpdateFailed(
                f"{self._version} was published, and hosts serve {[answer['version'] for answer in answers]}."
            )
        return Round(
            tuple(answer["committed_s"] - told["published_s"] for answer in answers),
            tuple(answer["noticed_s"] - told["published_s"] for answer in answers),
            self._network.sent_nbytes(0) - sent,
            told["nbytes"],
        )

    def _kill(self, index: int, when_sent: int, deadline: Deadline) -> None:
        """Kill the relay of a host once the publisher has sent so much."""
        while self._network.sent_nbytes(0) < when_sent:
            deadline.check("sending half of a version")
            time.sleep(_LOOK_S)
        self._relays[index].end(at_once=True)
        self._following.discard(index)

    def check(self, hosts: Sequence[int]) -> None:
        """Prove that hosts have the publisher's bytes."""
        deadline = Deadline.after(self._timeout_s)
        expected = self._publisher.ask("digest", deadline)["digest"]
        found = {index: self._receivers[index].ask("digest", deadline)["digest"] for index in hosts}
        wrong = {index: digest for index, digest in found.items() if digest != expected}
        if wrong:
            raise UpdateFailed(f"hosts hold other bytes than {expected}, the publisher's: {wrong}.")
