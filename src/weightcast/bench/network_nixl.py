"""`python -m weightcast.bench.network_nixl trainer|receiver`: the same bytes by one bare READ of NIXL, one descriptor.

Neither end has a thread that makes progress: one of NIXL's own keeps a core busy also while there is nothing to do. The
trainer polls while it is read from, the receiver while it reads, which is the fastest way there is on few cores.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from typing import Any, Literal

from weightcast.bench.ipc_children import Message, serve
from weightcast.bench.ipc_tensors import digest_of
from weightcast.bench.network_meeting import OnePiece, find, leave
from weightcast.clock import Deadline
from weightcast.errors import SourceFailed
from weightcast.tensors.flat import Bytes
from weightcast.transports.nixl.library import load_nixl

_DONE = b"done"


class End:
    """An agent with one registered piece of memory."""

    def __init__(self, role: Literal["trainer", "receiver"]) -> None:
        self._role = role

    def begin(self, directory: str, nbytes: int, seed: int, timeout_s: float) -> Message:
        """Make the memory and the agent; the receiver also gets to know the other one."""
        package = load_nixl().__name__.rpartition(".")[0]
        nixl: Any = import_module(f"{package}._api")  # as whoever writes a bare READ would use it
        reads, self._timeout_s = self._role == "receiver", timeout_s
        self._piece = OnePiece(nbytes, None if reads else seed)
        self._agent: Any = nixl.nixl_agent(self._role, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._agent.create_backend("UCX", {})
        memory = self._piece.memory
        self._agent.register_memory([(*_at(memory), "")], "DRAM")
        here = self._agent.get_xfer_descs([_at(memory)], "DRAM")
        if not reads:
            leave(directory, "metadata", self._agent.get_agent_metadata())
            leave(directory, "descriptors", self._agent.get_serialized_descs(here))
            return {}
        deadline = Deadline.after(timeout_s)
        peer = self._agent.add_remote_agent(find(directory, "metadata", deadline))
        there = self._agent.deserialize_descs(find(directory, "descriptors", deadline))
        self._read = self._agent.initialize_xfer("READ", here, there, peer, _DONE)
        return {}

    def change(self, number: int) -> Message:
        """Make it another version, at the trainer."""
        self._piece.change(number)
        return {}

    def move(self) -> Message:
        """Read everything, or be read from, and tell between which moments."""
        began_s = time.monotonic()
        until = began_s + self._timeout_s
        if self._role == "trainer":
            while not self._agent.get_new_notifs():
                _check(until)
            return {"began_s": began_s}
        state = self._agent.transfer(self._read)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._read)
            _check(until)
        ended_s = time.monotonic()
        if state != "DONE":
            raise SourceFailed(f"NIXL ended a READ with {state}.")
        self._agent.get_new_notifs()  # sends what is left to be sent: the other end waits for it
        return {"began_s": began_s, "ended_s": ended_s}

    def digest(self) -> Message:
        """Of all tensors."""
        return {"digest": digest_of(self._piece.tensors)}


def _at(memory: Bytes) -> tuple[int, int, int]:
    return memory.ctypes.data, memory.nbytes, 0


def _check(until: float) -> None:
    if time.monotonic() > until:
        raise SourceFailed("a READ of NIXL took longer than a round may.")


def main() -> None:
    """Answer the bench until it closes the input."""
    end = End("trainer" if sys.argv[1] == "trainer" else "receiver")
    serve({"begin": end.begin, "change": end.change, "move": end.move, "digest": end.digest})


if __name__ == "__main__":
    main()
