"""`vllm serve` as a real process, and what a client asks it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
from processes import STOP_S, OwnProcess

START_S = 300
WAIT_S = 60
NAME = "tiny"


class VllmServer(OwnProcess):
    """A server that starts now; `wait_ready` waits until it answers, and so does entering it as a context.

        with VllmServer(model_a) as server:
            server.post("/start_weight_update")

    `backend` is the weight transfer backend, or None for a server without one. `tp` is the number of tensor parallel ranks.
    Further arguments go to `vllm serve` as they are. The port is chosen by the system.
    """

    def __init__(
        self,
        model_folder: Path,
        *arguments: object,
        backend: str | None = "weightcast",
        tp: int = 1,
        dtype: str = "float32",
        env: Mapping[str, str] | None = None,
    ) -> None:
        command: list[object] = [
            Path(sys.executable).with_name("vllm"), "serve", model_folder, "--served-model-name", NAME,
            "--host", "127.0.0.1", "--port", 0, "--dtype", dtype, "--max-model-len", 2048, "--max-num-seqs", 8,
            "--enforce-eager",
        ]  # fmt: skip
        if backend is not None:
            command += ["--weight-transfer-config", json.dumps({"backend": backend})]
        if tp > 1:
            command += ["--tensor-parallel-size", tp]
        super().__init__([*command, *arguments], {**omp_binding(tp), **(env or {})})
        self._url: str | None = None

    @property
    def url(self) -> str:
        assert self._url is not None, "ask for the URL after wait_ready()"
        return self._url

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Wait until /health says 200; if the server ends instead, fail with the end of its log."""
        self.wait_for(self._answers, "an answer of /health", timeout_s)
        self.look()

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError, psutil.NoSuchProcess):
            for one in psutil.Process(self.process.pid).net_connections("tcp4"):
                url = f"http://127.0.0.1:{one.laddr.port}"
                if one.status == psutil.CONN_LISTEN and httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    self._url = url
                    return True
        return False

    def said(self, nchars: int = 6000) -> str:
        """The end of its log without the long list of its routes."""
        lines = super().said(1 << 20).splitlines(keepends=True)
        return "".join(line for line in lines if "Route: " not in line)[-nchars:]

    def post(self, path: str, json: object = None, timeout: float = WAIT_S) -> httpx.Response:
        """The answer, whatever its status is."""
        return httpx.post(f"{self.url}{path}", json=json, timeout=timeout)

    def get(self, path: str, timeout: float = WAIT_S) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=timeout)

    def tokens(self, prompt: Sequence[int] | str, n: int, timeout: float = WAIT_S) -> list[int]:
        """The `n` tokens of a greedy completion, past any end of text."""
        options = {"max_tokens": n, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = self.post("/v1/completions", {"model": NAME, "prompt": prompt, **options}, timeout)
        assert answer.status_code == 200, f"{answer.status_code} {answer.text}\nThe server said:\n{self.said()}"
        return answer.json()["choices"][0]["token_ids"]

    def call(self, method: str, *args: object, timeout: float = WAIT_S, **kwargs: object) -> list[Any]:
        """Call a method of every worker; their results, which are strings, in the order of the ranks."""
        question = {"method": method, "args": list(args), "kwargs": kwargs, "timeout": timeout}
        answer = self.post("/collective_rpc", question, timeout + WAIT_S)
        assert answer.status_code == 200, f"{answer.status_code} {answer.text}\nThe server said:\n{self.said()}"
        return answer.json()["results"]

    def engine_core(self) -> psutil.Process:
        """The process that schedules; with one rank it also is the worker."""
        return next(one for one in self.processes() if "EngineCore" in one.name())

    def workers(self) -> list[psutil.Process]:
        """The processes that hold the weights, in the order of the ranks."""
        found = [one for one in self.processes() if "Worker" in one.name()]
        return sorted(found, key=psutil.Process.name) or [self.engine_core()]

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = STOP_S) -> None:
        """End it, and fail if it leaves a process or, in /dev/shm, anything but what vLLM itself is known to leave."""
        left = self.end(number, timeout_s)
        assert not left, f"the server left behind: {left}. It said:\n{self.said()}"

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.stop()
            return
        self.kill()
        error.add_note(f"The server said last:\n{self.said()}")


def omp_binding(tp: int) -> dict[str, str]:
    """One core for each rank: where a machine has no memory node for each, vLLM wants to be told."""
    if tp == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(tp))}
