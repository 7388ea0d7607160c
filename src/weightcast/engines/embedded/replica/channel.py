"""The front end's socket: one ROUTER to which all ranks are connected, read from the event loop without a task.

A plain socket and its file descriptor: `zmq.asyncio` makes a future and several callbacks per message, and the front end
shares its cores with the model. ZeroMQ signals a change on that descriptor once, so everything that is there is read each
time, and again after sending, which may have taken the signal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from weightcast import logs
from weightcast.engines.embedded.messages import (
    FromRank,
    ToRank,
    beat_identity,
    front_end_address,
    job_identity,
    rank_identity,
)
from weightcast.errors import MissingExtra, ReplicaFailed

try:
    import zmq
except ImportError as error:
    raise MissingExtra("pyzmq", "serve", "a replica of the embedded engine") from error

log = logs.get(__name__)

_QUEUE = 10_000  # messages per rank and direction
_MESSAGE_NBYTES = 1 << 28
_AT_ONCE = 64  # messages read before others of the loop have their turn


class Channel:
    """Carries messages. `on_message(rank, message)` is called for each; `on_fault(rank, problem)` for what is none.

    Both are called from the event loop. An exception from `on_message` goes to `on_crash`.
    """

    def __init__(
        self,
        run_dir: Path,
        ranks: int,
        *,
        on_message: Callable[[int, FromRank], None],
        on_fault: Callable[[int, str], None],
        on_crash: Callable[[Exception], None],
    ) -> None:
        self._on_message, self._on_fault, self._on_crash = on_message, on_fault, on_crash
        self._ranks = {name(rank): rank for rank in range(ranks) for name in (rank_identity, beat_identity, job_identity)}
        self._names = [rank_identity(rank) for rank in range(ranks)]
        self._decode = msgspec.msgpack.Decoder(FromRank).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._loop = asyncio.get_running_loop()
        self._later: asyncio.Handle | None = None
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = self._listen(front_end_address(run_dir))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ReplicaFailed(f"the front end cannot listen on {front_end_address(run_dir)}: {error}.") from error
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._read)

    def _listen(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        options = {
            zmq.LINGER: 0, zmq.SNDHWM: _QUEUE, zmq.RCVHWM: _QUEUE, zmq.MAXMSGSIZE: _MESSAGE_NBYTES, zmq.ROUTER_MANDATORY: 1,
        }  # fmt: skip
        for option, value in options.items():
            socket.setsockopt(option, value)
        socket.bind(address)
        return socket

    def send(self, rank: int, message: ToRank) -> None:
        """Hand a message over. Raises `ReplicaFailed` if the rank is not connected or its queue is full; never waits."""
        if self._closed:
            raise ReplicaFailed(f"rank {rank} is gone.")
        try:
            self._socket.send_multipart((self._names[rank], self._encode(message)), zmq.NOBLOCK)
        except zmq.Again:
            raise ReplicaFailed(f"rank {rank} takes no messages: {_QUEUE} wait for it.") from None
        except zmq.ZMQError as error:
            raise ReplicaFailed(f"rank {rank} cannot be reached: {error}.") from error
        self._read_later()

    def close(self) -> None:
        """Close the socket; what was not sent is dropped. Safe twice."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        if self._later is not None:
            self._later.cancel()
        self._socket.close()
        self._context.term()

    def _read_later(self) -> None:
        if self._later is None:
            self._later = self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._later = None
        for _ in range(_AT_ONCE):
            if self._closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                self._on_crash(error)
                return
            self._take(frames)
        self._read_later()

    def _take(self, frames: list[bytes]) -> None:
        rank = self._ranks.get(frames[0])
        if rank is None:
            log.warning("message dropped", sender=repr(frames[0][:80]), why="it is none of our ranks")
            return
        if len(frames) != 2:
            self._on_fault(rank, f"sent a message of {len(frames) - 1} frames instead of 1")
            return
        try:
            message = self._decode(frames[1])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._on_fault(rank, f"sent {len(frames[1])} bytes that are no message: {error}")
            return
        try:
            self._on_message(rank, message)
        except Exception as error:  # noqa: BLE001 - a bug of ours must end this start, not be lost in the event loop
            self._on_crash(error)
