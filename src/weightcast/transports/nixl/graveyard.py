"""Where memory stays that a read may still write to, though nobody waits for that read any more."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weightcast import logs
from weightcast.tensors.flat import Bytes
from weightcast.transports.nixl.agent import Agent, State
from weightcast.transports.nixl.leaving import outlive, release_outliving

log = logs.get(__name__)

_END_S = 0.2  # reads from a peer that died end by themselves about this soon
_LOOK_S = 0.001
_KEEP_S = 0.02


class Moving(Protocol):
    """What an agent does and cannot be stopped in: a read, or connecting to a peer."""

    def poll(self) -> State:
        """Look whether it has ended."""


@dataclass(eq=False)
class _Grave:
    agent: Agent
    transfers: list[Moving]
    memories: list[Bytes]

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.memories)

    def ended(self) -> bool:
        """Whether nothing can be written any more. Takes out what has ended."""
        self.transfers = [transfer for transfer in self.transfers if transfer.poll() == "moving"]
        return not self.transfers


class Graveyard:
    """Agents with reads that were given up, and the memory of those reads.

    A read cannot be stopped: NIXL says that it let go of one, and its bytes land later. What lies here is therefore neither
    freed nor used again before all reads of its agent have ended, if need be for the life of the process, and not even when
    Python takes itself down at exit. The agent lies here too: closing it could abort the depot that it reads from.

    A thread looks at what lies here until nothing does: reads of agents that are polled would never end without it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graves: list[_Grave] = []
        self._keeper: threading.Thread | None = None

    def __len__(self) -> int:
        """How many agents lie here now."""
        self.sweep()
        return len(self._graves)

    @property
    def nbytes(self) -> int:
        """How much memory lies here now."""
        self.sweep()
        with self._lock:
            return sum(grave.nbytes for grave in self._graves)

    def give_up(self, agent: Agent, transfers: Sequence[Moving], memories: Sequence[Bytes], why: object) -> None:
        """Close an agent that nobody may use any more; if reads of it are moving, keep it and their memory."""
        grave = _Grave(agent, list(transfers), list(memories))
        until = time.monotonic() + _END_S
        while not grave.ended():
            if time.monotonic() >= until:
                self._bury(grave, why)
                return
            time.sleep(_LOOK_S)
        agent.close()

    def _bury(self, grave: _Grave, why: object) -> None:
        outlive(grave)
        with self._lock:
            self._graves.append(grave)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="nixl graveyard", daemon=True)
                self._keeper.start()
        log.warning(
            "memory kept",
            nbytes=grave.nbytes,
            reads=len(grave.transfers),
            graves=len(self._graves),
            why="given-up NIXL reads may still write to it",
            error=str(why),
        )

    def _keep(self) -> None:
        while True:
            time.sleep(_KEEP_S)
            self.sweep()
            with self._lock:
                if not self._graves:
                    self._keeper = None
                    return

    def sweep(self) -> None:
        """Let go of what has ended meanwhile."""
        with self._lock:
            if not self._graves:
                return
            ended = [grave for grave in self._graves if grave.agent.usable and grave.ended()]
            self._graves = [grave for grave in self._graves if grave not in ended]
        for grave in ended:
            grave.agent.close()  # before its memory goes
            log.info("memory let go", nbytes=grave.nbytes, why="its given-up NIXL reads have ended")
            grave.memories.clear()
            release_outliving(grave)


GRAVEYARD = Graveyard()  # of this process


def _forget_after_fork() -> None:
    """A child has its own copy of the memory, and no thread that writes to it; the locks may be held by nobody."""
    GRAVEYARD.__init__()  # type: ignore[misc]  # the one object that everybody has


os.register_at_fork(after_in_child=_forget_after_fork)
