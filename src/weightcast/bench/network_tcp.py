"""`python -m weightcast.bench.network_tcp trainer|receiver`: the same bytes over bare TCP: what a network can do here.

Large sends from one piece of memory, received into another that is warm; nothing is checked, no protocol is spoken.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from weightcast.bench.ipc_children import Message, serve
from weightcast.bench.ipc_tensors import digest_of
from weightcast.bench.network_meeting import OnePiece, find, leave
from weightcast.clock import Deadline
from weightcast.errors import SourceFailed

STREAMS = 2  # at most: there are two cores, and more were not faster
SEND_NBYTES = 4 << 20  # nothing else was faster; it is how much is received at once that matters


class End:
    """One end of the connections. How many of them are used, and how much is received at a time, is told by `shape`."""

    def __init__(self, role: Literal["trainer", "receiver"]) -> None:
        self._sends = role == "trainer"
        self._streams, self._chunk = 1, 256 << 10
        self._sockets: list[socket.socket] = []
        self._threads = ThreadPoolExecutor(STREAMS)

    def begin(self, directory: str, nbytes: int, seed: int, timeout_s: float) -> Message:
        """Make the memory and connect."""
        self._piece = OnePiece(nbytes, seed if self._sends else None)
        if self._sends:
            port = int(find(directory, "port", Deadline.after(timeout_s)))
            self._sockets = [socket.create_connection(("127.0.0.1", port), timeout_s) for _ in range(STREAMS)]
        else:
            with socket.create_server(("127.0.0.1", 0)) as listening:
                listening.settimeout(timeout_s)
                leave(directory, "port", str(listening.getsockname()[1]).encode())
                self._sockets = [listening.accept()[0] for _ in range(STREAMS)]
        for one in self._sockets:
            one.settimeout(timeout_s)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return {}

    def shape(self, streams: int, chunk: int) -> Message:
        """How the bytes are received from now on."""
        self._streams, self._chunk = streams, chunk
        return {}

    def change(self, number: int) -> Message:
        """Make it another version, at the trainer."""
        self._piece.change(number)
        return {}

    def move(self) -> Message:
        """Send or receive everything, and tell between which moments."""
        began_s = time.monotonic()
        whole = memoryview(self._piece.memory.data)
        share = -(-len(whole) // self._streams)
        parts = [whole[at : at + share] for at in range(0, len(whole), share)]
        one_way: Callable[[socket.socket, memoryview], None] = self._send if self._sends else self._receive
        if len(parts) == 1:
            one_way(self._sockets[0], parts[0])
        else:
            for done in [self._threads.submit(one_way, *pair) for pair in zip(self._sockets, parts, strict=False)]:
                done.result()
        return {"began_s": began_s, "ended_s": time.monotonic()}

    def _send(self, connection: socket.socket, data: memoryview) -> None:
        for at in range(0, len(data), SEND_NBYTES):
            connection.sendall(data[at : at + SEND_NBYTES])

    def _receive(self, connection: socket.socket, memory: memoryview) -> None:
        at = 0
        while at < len(memory):
            count = connection.recv_into(memory[at : at + self._chunk])
            if count == 0:
                raise SourceFailed("the sender has closed the connection.")
            at += count

    def digest(self) -> Message:
        """Of all tensors."""
        return {"digest": digest_of(self._piece.tensors)}

    def close(self) -> None:
        """End the connections."""
        for one in self._sockets:
            one.close()
        self._threads.shutdown()


def main() -> None:
    """Answer the bench until it closes the input."""
    end = End("trainer" if sys.argv[1] == "trainer" else "receiver")
    try:
        serve({"begin": end.begin, "shape": end.shape, "change": end.change, "move": end.move, "digest": end.digest})
    finally:
        end.close()


if __name__ == "__main__":
    main()
