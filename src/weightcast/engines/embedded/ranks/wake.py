"""How rank 0 wakes its peers: while the engine is idle they wait on a socket, not in a collective."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from weightcast.engines.embedded.settings import RankSettings


def _address(run_dir: str, rank: int) -> str:
    return f"ipc://{Path(run_dir) / f'wake-{rank}.sock'}"


class WakeSender:
    """Rank 0's end. A context manager."""

    def __init__(self, settings: RankSettings, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._sockets = [self._connect(settings.run_dir, rank) for rank in range(1, settings.engine.ranks)]

    def _connect(self, run_dir: str, rank: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(_address(run_dir, rank))
        return socket

    def wake(self) -> None:
        """All peers go and receive steps until one of them says PARK."""
        for socket in self._sockets:
            socket.send(b"")

    def close(self) -> None:
        """Close the sockets. Safe twice."""
        for socket in self._sockets:
            socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class WakeReceiver:
    """The end of another rank. A context manager."""

    def __init__(self, settings: RankSettings, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_address(settings.run_dir, settings.rank))

    def woken(self) -> bool:
        """Whether rank 0 called. Each call is told once."""
        try:
            self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Close the socket. Safe twice."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
