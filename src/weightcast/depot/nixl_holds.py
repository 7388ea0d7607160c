"""Registered memory that receivers read with NIXL, and who may still read it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from uuid import uuid4

from weightcast import logs
from weightcast.errors import SourceFailed
from weightcast.transports.nixl.agent import Agent
from weightcast.wire.nixl import Grant, Region, Standing

log = logs.get(__name__)

SECONDS = 30.0
GRACE_S = 10.0
_TURN_S = 0.25


class Memory:
    """Memory that NIXL knows, and what keeps it from being freed. It goes when nobody uses it any more."""

    def __init__(self, agent: Agent, regions: Mapping[str, tuple[Region, ...]], what: str) -> None:
        self.agent, self.regions, self.what = agent, dict(regions), what
        self.keep = ExitStack()  # what keeps the memory from being freed; the caller fills it
        self._registration = agent.register([region for some in regions.values() for region in some])
        self.metadata = agent.metadata(self._registration)
        self.uses = 0
        log.debug("memory registered", what=what, nbytes=self.nbytes, agent=agent.name)

    @property
    def nbytes(self) -> int:
        """How much of it there is."""
        return sum(region.nbytes for some in self.regions.values() for region in some)

    def free(self) -> None:
        """Nobody uses it any more."""
        self.agent.deregister(self._registration)
        self.keep.close()
        log.debug("memory deregistered", what=self.what, agent=self.agent.name)


@dataclass(eq=False)
class _Hold:
    """Somebody uses a memory: until when that is good, and for how long after it the memory still has to stay."""

    memory: Memory
    until_s: float
    latest_s: float
    grace_s: float
    told: Callable[[], None] | None = None
    why_lost: str = "it was not renewed in time"


class Holds:
    """Who may read which memory, and for how much longer.

    A receiver confirms when it is done. One that does not come back in time has lost its hold, and is told so if it comes
    later. But it may have asked NIXL for bytes that were not sent yet, and a process that reads memory it does not have any
    more crashes. So memory stays for `grace_s` after that, and time in which this process did not run does not count.
    """

    def __init__(self, *, seconds: float = SECONDS, grace_s: float = GRACE_S) -> None:
        self._seconds, self._grace_s = seconds, grace_s
        self._lock = threading.Lock()
        self._holds: dict[str, _Hold] = {}
        self._keeper: threading.Thread | None = None
        self._closing = threading.Event()

    def __len__(self) -> int:
        """How many there are, those in their grace with them."""
        return len(self._holds)

    def own(self, memory: Memory, *, seconds: float = float("inf")) -> str:
        """Have a memory stay for so long, on behalf of whoever offers it."""
        until_s = time.monotonic() + seconds
        with self._lock:
            return self._add(_Hold(memory, until_s, until_s, grace_s=0.0))

    def grant(
        self,
        memory: Memory,
        *,
        fresh: bool = False,
        latest_s: float = float("inf"),
        told: Callable[[], None] | None = None,
    ) -> Grant | None:
        """Let a receiver read a memory; None if nobody uses it any more and it is not `fresh`, so that it is gone.

        No grant outlasts `latest_s`. `told` is called when the receiver confirms, while nobody can change anything.
        """
        with self._lock:
            now = time.monotonic()
            if self._closing.is_set():
                raise SourceFailed(f"{memory.what} cannot be read any more: the depot is being closed.")
            if (memory.uses == 0 and not fresh) or now >= latest_s:
                return None
            until_s = min(now + self._seconds, latest_s)
            number = self._add(_Hold(memory, until_s, latest_s, self._grace_s, told))
        return Grant(
            grant=number, agent=memory.agent.name, metadata=memory.metadata, seconds=until_s - now, regions=memory.regions
        )

    def _add(self, hold: _Hold) -> str:
        number = uuid4().hex
        self._holds[number] = hold
        hold.memory.uses += 1
        if self._keeper is None and not self._closing.is_set():
            self._keeper = threading.Thread(target=self._run, name="nixl holds", daemon=True)
            self._keeper.start()
        return number

    def renew(self, number: str, agent: str) -> Standing:
        """A receiver still reads, from that agent. Raises `SourceFailed` if it may not any more."""
        with self._lock:
            now, hold = time.monotonic(), self._valid(number)
            if hold.memory.agent.name != agent:
                raise SourceFailed(f"agent {agent} is not the one of this depot: it was started anew. Begin again.")
            hold.until_s = min(now + self._seconds, hold.latest_s)
            return Standing(hold.memory.agent.name, hold.until_s - now)

    def confirm(self, number: str) -> Standing:
        """A receiver reads no more. Raises `SourceFailed` if what it read may not be what it was said to be."""
        freed = None
        try:
            with self._lock:
                try:
                    hold = self._valid(number)
                    if hold.told is not None:
                        hold.told()
                finally:
                    freed = self._end(number) if number in self._holds else None
        finally:
            if freed is not None:
                freed.free()
        return Standing(hold.memory.agent.name, 0.0)

    def _valid(self, number: str) -> _Hold:
        hold = self._holds.get(number)
        if hold is None:
            raise SourceFailed("nothing is known of this grant: it ended, or the depot was started anew. Begin again.")
        if time.monotonic() >= hold.until_s:
            raise SourceFailed(f"{hold.memory.what} cannot be read any more by this grant: {hold.why_lost}. Begin again.")
        return hold

    def revoke(self, memory: Memory, why: str) -> int:
        """From now on no hold on a memory is good; it stays for a while all the same. Tells how many receivers lost it."""
        with self._lock:
            now, lost = time.monotonic(), 0
            freed = None
            for number, hold in list(self._holds.items()):
                if hold.memory is not memory:
                    continue
                if hold.grace_s <= 0:  # the owner's
                    freed = self._end(number) or freed
                elif hold.until_s > now:
                    hold.until_s, hold.latest_s, hold.why_lost = now, now, why
                    lost += 1
        if freed is not None:
            freed.free()
        return lost

    def _end(self, number: str) -> Memory | None:
        """Drop a hold; the memory if it was the last one. The caller holds the lock, and frees it without."""
        hold = self._holds.pop(number)
        hold.memory.uses -= 1
        return hold.memory if hold.memory.uses == 0 else None

    def _run(self) -> None:
        """Take turns until there are no holds, and let go of those that are over."""
        before_s = time.monotonic()
        while not self._closing.wait(_TURN_S):
            with self._lock:
                now = time.monotonic()
                # A turn that took longer was one in which the process was stopped, or had no time to answer anybody.
                passed_s, before_s = min(now - before_s, 2 * _TURN_S), now
                over = []
                for number, hold in self._holds.items():
                    if hold.until_s <= now:
                        hold.grace_s -= passed_s
                        if hold.grace_s <= 0:
                            over.append(number)
                freed = [self._end(number) for number in over]
                ending = not self._holds
                if ending:
                    self._keeper = None
            for memory in freed:
                if memory is not None:
                    memory.free()
            if ending:
                return

    def close(self) -> None:
        """Give no more grants, and end the thread. Memory that is still held stays: it may be asked for. Safe twice."""
        with self._lock:
            self._closing.set()
            keeper = self._keeper
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join(timeout=5.0)
