"""Reads of one version from one depot: those that are moving, and what happens to them when something goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from time import monotonic, sleep

from weightcast.clock import Deadline
from weightcast.errors import SourceFailed, WeightcastError
from weightcast.tensors.flat import Bytes
from weightcast.transports.nixl.agent import Agent, Registration, State, Transfer
from weightcast.transports.nixl.graveyard import GRAVEYARD, Moving
from weightcast.transports.nixl.plan import Stretch
from weightcast.transports.nixl.watch import Watch
from weightcast.wire.nixl import Region

_LOOK_S = 0.0001
_SOMETHING_S = 0.00002
_SPIN_S = 0.001  # before it sleeps: waking up takes longer than what it waits for
_CONNECT_LOOK_S = 0.02


class _Connecting:
    """An agent that connects to a peer, in a thread: NIXL returns when the kernel has given up, which can be minutes."""

    def __init__(self, agent: Agent, metadata: bytes) -> None:
        self._agent, self._metadata = agent, metadata
        self.peer = ""
        self.error: WeightcastError | None = None
        self._thread = threading.Thread(target=self._run, name="nixl connect", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.peer = self._agent.add_peer(self._metadata)
        except WeightcastError as error:
            self.error = error

    def wait(self, seconds: float) -> None:
        """Until it has ended, but no longer than this."""
        self._thread.join(seconds)

    def poll(self) -> State:
        """Whether it still tries."""
        return "moving" if self._thread.is_alive() else "done"


class Session:
    """Reads into memory that lives at least as long as they do.

    It ends by `finish`, or by `give_up`: then nothing of the agent, nor of any memory that a read may still write to, is
    used again.
    """

    def __init__(self, agent: Agent, peer: str, watch: Watch, *, deadline: Deadline, stall_s: float, what: str) -> None:
        self.agent, self._peer, self._watch = agent, peer, watch
        self._deadline, self._stall_s, self._what = deadline, stall_s, what
        self._memories: list[Bytes] = []
        self._registrations: list[Registration] = []
        self._moving: list[tuple[Transfer, Sequence[Stretch]]] = []
        self._connecting: _Connecting | None = None
        self._moved_s = monotonic()
        self.over = False

    def meet(self, metadata: bytes) -> str:
        """Have the agent connect to the depot; the name of its agent."""
        self._connecting = connecting = _Connecting(self.agent, metadata)
        since = monotonic()
        while connecting.poll() == "moving":
            connecting.wait(_CONNECT_LOOK_S)
            self.check()
            if monotonic() - since >= self._stall_s:
                raise SourceFailed(f"{self._what} failed: NIXL cannot connect to it within {self._stall_s:g} s.")
        self._connecting = None
        if connecting.error is not None:
            raise connecting.error
        return connecting.peer

    def use(self, memories: Sequence[Bytes], regions: Sequence[Region] | None = None) -> None:
        """Read into these. With `regions` they are registered until the end of this."""
        self._memories += memories
        if regions is not None:
            self._registrations.append(self.agent.register(regions))

    @property
    def moving(self) -> int:
        """How many reads are under way."""
        return len(self._moving)

    def read(self, batch: Sequence[Stretch], targets: Sequence[Region]) -> None:
        """Begin to read stretches, each into its target."""
        self.check()
        if not self._moving:
            self._moved_s = monotonic()
        transfer = self.agent.read(targets, [part.source for part in batch], self._peer)
        self._moving.append((transfer, batch))

    def ended(self) -> Iterator[Sequence[Stretch]]:
        """What has come, in the order in which it was asked for; waits until something has. Raises if nothing does, or a
        read has failed.
        """
        came: list[Sequence[Stretch]] = []
        busy_s = monotonic()
        while True:
            looked_s = monotonic()  # looking is what moves the bytes: if there are some, it takes its time
            while self._moving and (state := self._moving[0][0].poll()) != "moving":
                transfer, batch = self._moving[0]
                if state == "failed":
                    raise SourceFailed(f"{self._what} failed: {transfer.problem}. Nothing was changed.")
                came.append(batch)
                del self._moving[0]
            if came:
                self._moved_s = monotonic()
                self.check()
                yield from came
                self._moved_s = monotonic()  # what the caller did meanwhile was no stall
                return
            self.check()
            now = monotonic()
            if now - looked_s >= _SOMETHING_S:
                busy_s = now
            # NIXL keeps the interpreter to itself meanwhile: other threads, such as those of an engine, get their turn here.
            sleep(_LOOK_S if now - busy_s >= _SPIN_S else 0)

    def check(self) -> None:
        """Raise if time is up, if it was given up, if the depot is silent or nothing moves."""
        self._deadline.check(self._what)
        if self.over:
            raise SourceFailed(f"{self._what} was given up: the receiver was closed.")
        self._watch.check()
        if self._moving and monotonic() - self._moved_s >= self._stall_s:
            raise SourceFailed(
                f"{self._what} stands still: nothing came within {self._stall_s:g} s, and NIXL reports no error. Nothing "
                "was changed."
            )

    def finish(self) -> None:
        """All was read. Raises `SourceFailed` if the depot does not confirm that it was good."""
        self.check()
        self._watch.confirm(deadline=self._deadline)
        self.over = True
        for registration in self._registrations:
            self.agent.deregister(registration)

    def give_up(self, why: object) -> None:
        """Read nothing more, and let go of the agent for good. Safe twice."""
        if self.over:
            return
        self.over = True
        moving: list[Moving] = [transfer for transfer, _ in self._moving if transfer.poll() == "moving"]
        moving += [self._connecting] if self._connecting is not None else []
        GRAVEYARD.give_up(self.agent, moving, self._memories, why)
        if any(transfer.poll() == "moving" for transfer in moving):
            self._watch.stop()  # the depot must not free what it may still be asked for: it is not told
        else:
            self._watch.release()
