"""`python -m weightcast.bench.network_mooncake trainer|receiver`: the same bytes by Mooncake's transfer engine over TCP."""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import Any, Literal

from weightcast.bench.ipc_children import Message, serve
from weightcast.bench.ipc_tensors import digest_of
from weightcast.bench.network_meeting import OnePiece, find, leave
from weightcast.clock import Deadline
from weightcast.errors import SourceFailed


class End:
    """An engine with one registered piece of memory. The trainer writes: that is faster than reading."""

    def __init__(self, role: Literal["trainer", "receiver"]) -> None:
        self._sends = role == "trainer"

    def begin(self, directory: str, nbytes: int, seed: int, timeout_s: float) -> Message:
        """Make the memory and the engine; the trainer also gets to know where to write to."""
        self._piece = OnePiece(nbytes, seed if self._sends else None)
        self._engine: Any = import_module("mooncake.engine").TransferEngine()
        self._done("initialize", self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        memory = self._piece.memory
        self._done("register_memory", self._engine.register_memory(memory.ctypes.data, memory.nbytes))
        if self._sends:
            self._there = json.loads(find(directory, "place", Deadline.after(timeout_s)))
        else:
            place = {"host": f"127.0.0.1:{self._engine.get_rpc_port()}", "pointer": memory.ctypes.data}
            leave(directory, "place", json.dumps(place).encode())
        return {}

    @staticmethod
    def _done(what: str, status: int) -> None:
        if status != 0:
            raise SourceFailed(f"{what} of Mooncake returned {status}.")

    def change(self, number: int) -> Message:
        """Make it another version, at the trainer."""
        self._piece.change(number)
        return {}

    def move(self) -> Message:
        """Write everything, and tell between which moments. The receiver is told when that is done."""
        began_s = time.monotonic()
        if self._sends:
            memory = self._piece.memory
            there = self._there["host"], memory.ctypes.data, self._there["pointer"], memory.nbytes
            self._done("transfer_sync_write", self._engine.transfer_sync_write(*there))
        return {"began_s": began_s, "ended_s": time.monotonic()}

    def digest(self) -> Message:
        """Of all tensors."""
        return {"digest": digest_of(self._piece.tensors)}


def main() -> None:
    """Answer the bench until it closes the input."""
    end = End("trainer" if sys.argv[1] == "trainer" else "receiver")
    serve({"begin": end.begin, "change": end.change, "move": end.move, "digest": end.digest})


if __name__ == "__main__":
    main()
