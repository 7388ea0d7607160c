"""What a rank does beside serving: jobs in threads of their own, which report to the front end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from weightcast import logs
from weightcast.engines.embedded.messages import Report, front_end_address, job_identity
from weightcast.engines.embedded.settings import RankSettings
from weightcast.errors import VersionDoesNotFit, WeightcastError

log = logs.get(__name__)

Progress = Callable[[int, int], None]

_REPORT_EVERY_S = 0.05
_JOIN_S = 2.0
_NICE = 5  # serving comes first where cores are few


class Jobs:
    """Threads with one socket between them. A context manager."""

    def __init__(self, settings: RankSettings, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._rank = settings.rank
        self._lock = threading.Lock()  # a socket may change threads, but is used by one at a time
        self._encode = msgspec.msgpack.Encoder().encode
        self._threads: list[threading.Thread] = []
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, job_identity(settings.rank))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, int(settings.engine.collective_timeout_s * 1000))
        self._socket.connect(front_end_address(settings.run_dir))

    def start(self, number: int, work: Callable[[Progress], Any], *, polite: bool = False) -> None:
        """Run `work` for the command of this number. Its result or error goes into the last report.

        A `polite` job gives way to the main loop where both want the same core.
        """
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        run = logs.carried(self._run)
        thread = threading.Thread(target=run, args=(number, work, polite), name=f"job-{number}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, number: int, work: Callable[[Progress], Any], polite: bool) -> None:
        if polite:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        told = -1.0

        def progress(nbytes: int, total: int) -> None:
            nonlocal told
            now = time.monotonic()
            if now - told >= _REPORT_EVERY_S:
                told = now
                self._send(Report(rank=self._rank, job=number, nbytes=nbytes, total=total))

        report: Report
        try:
            report = Report(rank=self._rank, job=number, done=True, result=msgspec.to_builtins(work(progress)))
        except WeightcastError as error:  # the front end logs it, for all ranks
            log.debug("job failed", job=number, code=error.code, error=error)
            for problem in error.mismatches if isinstance(error, VersionDoesNotFit) else str(error).splitlines()[1:]:
                log.debug("problem found", job=number, problem=str(problem).strip())
            report = Report(rank=self._rank, job=number, done=True, error=(error.code, str(error)))
        except Exception as error:
            log.exception("job crashed", job=number)
            words = f"{type(error).__name__}: {error}"
            report = Report(rank=self._rank, job=number, done=True, error=("update_failed", words))
        self._send(report)

    def _send(self, report: Report) -> None:
        with self._lock:
            if self._socket.closed:
                return
            try:
                self._socket.send(self._encode(report))
            except zmq.Again:
                log.warning("report dropped", job=report.job, why="the front end takes none")

    def close(self) -> None:
        """Close the socket, after waiting a little for jobs that are ending. Safe twice."""
        for thread in self._threads:
            thread.join(timeout=_JOIN_S)
        with self._lock:
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
