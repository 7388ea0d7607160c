"""`vllm serve` as a process of its own, and a stream of tokens from it whose gaps are measured."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO

from weightcast.clock import Deadline
from weightcast.config import ALLOW_SOURCE
from weightcast.errors import DeadlineExceeded, MissingExtra, ReplicaFailed

START_S = 300.0
STOP_S = 30.0
_SILENCE_S = 120.0
_MODEL = "bench"
_TOKENS = 16  # short requests: what is computed again after an update is a pause, too, and not the one that is meant
_SETTINGS = ("VLLM_SERVER_DEV_MODE=1", "VLLM_CPU_KVCACHE_SPACE=1", "HF_HUB_OFFLINE=1", "VLLM_LOGGING_LEVEL=WARNING")


def vllm_program() -> Path:
    """The program `vllm` of this environment. Raises `MissingExtra` without it."""
    program = Path(sys.executable).with_name("vllm")
    if not program.exists():
        raise MissingExtra("vllm", "vllm", "weightcast bench vllm")
    return program


@contextmanager
def vllm_served(model_dir: Path, scratch: Path) -> Iterator[int]:
    """A server with our backend that takes what is in `scratch`; gives its port when it is ready. Its log is there too."""
    program = vllm_program()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [
        "/usr/bin/env", *_SETTINGS, f"{ALLOW_SOURCE}=file://{scratch.absolute()}/*", str(program),
        "serve", str(model_dir), "--served-model-name", _MODEL,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "4",
        "--enforce-eager", "--skip-tokenizer-init", "--weight-transfer-config", json.dumps({"backend": "weightcast"}),
    ]  # fmt: skip
    with (scratch / "vllm.log").open("w+b") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)  # noqa: S603 - a bench
        try:
            _wait_ready(process, port, log)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    deadline = Deadline.after(START_S)
    while process.poll() is None:
        deadline.check("starting vllm serve")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        except OSError:
            time.sleep(0.2)
        finally:
            connection.close()
    log.seek(0)
    raise ReplicaFailed(f"vllm serve ended with {process.returncode}:\n{log.read()[-4000:].decode(errors='replace')}")


class TokenStream:
    """Asks for tokens without end, one request after another, and remembers when each came."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._over, self._go, self._resting = threading.Event(), threading.Event(), threading.Event()
        self._go.set()
        self._thread = threading.Thread(target=self._run, name="bench-stream", daemon=True)
        self.arrivals: list[float] = []
        self.error: Exception | None = None
        self._thread.start()

    def wait_for(self, tokens: int) -> None:
        """Until so many more tokens have come."""
        wanted, deadline = len(self.arrivals) + tokens, Deadline.after(_SILENCE_S)
        while len(self.arrivals) < wanted:
            deadline.check("waiting for tokens of vllm serve")
            if self.error is not None:
                raise ReplicaFailed(f"the stream of tokens broke: {self.error}") from self.error
            time.sleep(0.005)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No requests meanwhile: the engine has nothing to compute."""
        self._go.clear()
        try:
            if not self._resting.wait(_SILENCE_S):
                raise DeadlineExceeded("waiting for the end of a request", _SILENCE_S)
            yield
        finally:
            self._resting.clear()
            self._go.set()

    def longest_gap(self, since: float, until: float) -> float:
        """The longest time without a token between two moments, the gap that `until` falls into included."""
        times = list(self.arrivals)
        gaps = [after - before for before, after in pairwise(times) if after >= since and before <= until]
        return max(gaps, default=0.0)

    def close(self) -> None:
        """End the stream."""
        self._over.set()
        self._go.set()
        self._thread.join(_SILENCE_S)

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                if not self._go.is_set():
                    self._resting.set()
                    self._go.wait()
                self._ask()
        except (OSError, ValueError, http.client.HTTPException) as error:
            if not self._over.is_set():
                self.error = error

    def _ask(self) -> None:
        wanted = {"model": _MODEL, "prompt": [5, 6, 7, 8], "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
        wanted |= {"stream": True, "return_token_ids": True, "detokenize": False}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_SILENCE_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(wanted), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise ValueError(f"{answer.status} {answer.read()!r}")
            for line in answer:
                if self._over.is_set():
                    return
                if line.startswith(b"data: {"):
                    self.arrivals.append(time.monotonic())
        finally:
            connection.close()
