"""A server of our own as a user starts it, and requests to it over HTTP."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from weightcast.clock import Deadline
from weightcast.errors import ReplicaFailed

START_S = 120.0
ANSWER_S = 300.0
STOP_S = 30.0

Tokens = list[int]


class Client:
    """Sends prompts to a server, all at once, each on a connection of its own that stays open."""

    def __init__(self, port: int, model: str, *, width: int) -> None:
        self._model = model
        self._connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S) for _ in range(width)]
        self._pool = ThreadPoolExecutor(max_workers=width, thread_name_prefix="bench-client")

    def generate(self, prompts: Sequence[Tokens], *, tokens: int) -> list[Tokens]:
        """The greedy answer of exactly so many tokens to each prompt; waits for all of them."""
        width = len(prompts)
        return list(self._pool.map(self._ask, self._connections[:width], prompts, [tokens] * width))

    def _ask(self, connection: http.client.HTTPConnection, prompt: Tokens, tokens: int) -> Tokens:
        wanted = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        wanted |= {"ignore_eos": True, "return_token_ids": True}
        connection.request("POST", "/v1/completions", json.dumps(wanted), {"content-type": "application/json"})
        response = connection.getresponse()
        body = json.loads(response.read())
        if response.status != http.client.OK:
            raise ReplicaFailed(f"the server answered {response.status}: {body}")
        answer: Tokens = body["choices"][0]["token_ids"]
        return answer

    def close(self) -> None:
        """Close the connections and end the threads."""
        for connection in self._connections:
            connection.close()
        self._pool.shutdown()


@contextmanager
def served(model_dir: Path, *, ranks: int, scratch: Path) -> Iterator[int]:
    """`weightcast serve` as a process of its own; gives its port when it is ready."""
    port_file = scratch / f"port-{model_dir.name}-{ranks}"
    with listening("serve", str(model_dir), "--ranks", str(ranks), "--port", "0", port_file=port_file) as (process, port):
        deadline = Deadline.after(START_S)
        while not _healthy(port):
            _check_alive(process, deadline)
            time.sleep(0.1)
        yield port


@contextmanager
def listening(*command: str, port_file: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command of weightcast that takes `--port-file`, as a process of its own. Gives its port as soon as it has one."""
    arguments = [sys.executable, "-m", "weightcast", "-q", *command, "--port-file", str(port_file)]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)  # noqa: S603 - our own
    try:
        deadline = Deadline.after(START_S)
        while not (port_file.exists() and (port := port_file.read_text().strip())):
            _check_alive(process, deadline)
            time.sleep(0.05)
        yield process, int(port)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)


def _check_alive(process: subprocess.Popen[bytes], deadline: Deadline) -> None:
    deadline.check("starting the server")
    if process.poll() is not None:
        raise ReplicaFailed(f"the server ended with status {process.returncode} before it was ready.")


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()
