"""The engine of the demo: `weightcast serve` as a process of its own, which is ended whatever happens.

The process is `python -m weightcast.demo.engine_process DIRECTORY serve …`. Its standard input is a pipe that the demo holds
open. When the demo ends, also by SIGKILL, the kernel closes the pipe: the engine drains, ends and removes DIRECTORY.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from weightcast.clock import Deadline
from weightcast.demo.engine_client import EngineClient
from weightcast.errors import ReplicaFailed, WeightcastError

START_S = 120.0
_MODEL = "policy"
_DRAIN_S = 1
_STOP_S = 20.0
_LOOK_S = 0.02


class EngineProcess:
    """A server and its ranks. What they log goes to `log_path`; `client` speaks to it once `wait_started` has returned.

    It is in a session of its own: a Ctrl-C in the terminal reaches the demo alone, which then ends it. `scratch` is the
    temporary directory of the demo, which the engine removes if the demo cannot.
    """

    def __init__(self, model_dir: Path, *, ranks: int, source: str, max_batch: int, scratch: Path, log_path: Path) -> None:
        self.log_path = log_path
        self._port_file = scratch / "port"
        command = [
            sys.executable, "-m", __name__, str(scratch), "serve", str(model_dir), "--served-model-name", _MODEL,
            "--ranks", str(ranks), "--port", "0", "--port-file", str(self._port_file), "--source", source,
            "--max-batch", str(max_batch), "--drain-timeout", str(_DRAIN_S),
        ]  # fmt: skip
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        self._client: EngineClient | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def client(self) -> EngineClient:
        """What speaks to it."""
        if self._client is None:
            raise ReplicaFailed(f"the engine has not told its port yet: see {self.log_path}.")
        return self._client

    def wait_started(self, deadline: Deadline) -> EngineClient:
        """Wait until the ranks have loaded the model."""
        while not (self._port_file.exists() and (port := self._port_file.read_text().strip())):
            self._check("starting the engine", deadline)
        self._client = EngineClient(f"http://127.0.0.1:{port}", model=_MODEL)
        self.wait_healthy(deadline)
        return self._client

    def wait_healthy(self, deadline: Deadline, *, restarts: int = 0) -> str:
        """Wait until requests are answered by ranks that were started again so often; gives the version that is served."""
        while True:
            health = self.client.health()
            if health.ok and health.version is not None and health.restarts >= restarts:
                return health.version
            if health.state == "FAILED":
                raise ReplicaFailed(f"the engine has FAILED: {health.reason}. See {self.log_path}.")
            self._check("waiting for the engine's ranks", deadline)

    def kill_rank(self, rank: int) -> int:
        """SIGKILL, by the pid that the engine tells; gives that pid. No handler and no `finally` of the rank runs."""
        pid = self.client.stats()[rank].pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def is_busy(self) -> bool:
        """Whether any rank is at answers now."""
        try:
            return any(rank.running for rank in self.client.stats())
        except WeightcastError:
            return False

    def _check(self, what: str, deadline: Deadline) -> None:
        status = self._process.poll()
        if status is not None:
            raise ReplicaFailed(f"the engine ended with status {status} while {what}. See {self.log_path}.")
        deadline.check(f"{what} (its log: {self.log_path})")
        time.sleep(_LOOK_S)

    def close(self) -> None:
        """End it and its ranks. Safe twice."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(_STOP_S)
        if self._process.stdin is not None:
            self._process.stdin.close()


def _serve(scratch: Path, arguments: list[str]) -> None:
    """Run the command until it ends, or until the demo does."""
    demo_ended = threading.Event()

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)  # nothing is ever written: this returns when the other end is closed
        demo_ended.set()
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # until the server has a handler of its own
    threading.Thread(target=watch, name="watch-demo", daemon=True).start()
    sys.argv = ["weightcast", *arguments]
    try:
        runpy.run_module("weightcast", run_name="__main__")
    finally:
        if demo_ended.is_set():
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2:])
