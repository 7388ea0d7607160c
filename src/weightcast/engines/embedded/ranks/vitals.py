"""How a rank shows that it lives: a count of what its main loop has done, and a thread that tells the front end."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq

from weightcast import logs
from weightcast.engines.embedded.messages import BEATS, Heartbeat, beat_identity, front_end_address
from weightcast.engines.embedded.replica.run_dir import remove_abandoned
from weightcast.engines.embedded.settings import RankSettings

log = logs.get(__name__)


class Vitals:
    """Written by the main loop, read by the heartbeat. `busy` means: `progress` must grow. `damaged`: see `Heartbeat`."""

    def __init__(self) -> None:
        self.progress = 0
        self.busy = False
        self.damaged: tuple[str, str] | None = None

    def tick(self) -> None:
        """The main loop got somewhere: a layer, a step, a message."""
        self.progress += 1


class Pulse:
    """A thread that sends heartbeats and ends the process when its parent is gone, with the directory that the parent left.
    A context manager.

    It has a socket of its own, so that a main loop that hangs cannot keep it from telling.
    """

    def __init__(self, settings: RankSettings, vitals: Vitals, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._settings, self._vitals, self._context = settings, vitals, context
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pulse-{settings.rank}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(timeout=self._settings.engine.heartbeat_s)

    def _run(self) -> None:
        rank, encoder = self._settings.rank, msgspec.msgpack.Encoder()
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.IDENTITY, beat_identity(rank))
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, BEATS)  # beats that nobody takes are worth nothing later
            socket.connect(front_end_address(self._settings.run_dir))
            taken = True
            while True:
                beat = Heartbeat(
                    rank=rank, progress=self._vitals.progress, busy=self._vitals.busy, damaged=self._vitals.damaged
                )
                try:
                    socket.send(encoder.encode(beat), zmq.NOBLOCK)
                    taken = True
                except zmq.Again:
                    if taken:
                        log.warning("heartbeats not taken")
                    taken = False
                if self._stop.wait(self._settings.engine.heartbeat_s / BEATS):
                    return
                if os.getppid() != self._settings.parent_pid:
                    log.error("front end lost", pid=self._settings.parent_pid)
                    remove_abandoned(Path(self._settings.run_dir))
                    os._exit(1)  # the main thread may hang in a collective and would never see an exception
