"""Servers of our own as a user starts them, and requests: for answers, and for streams whose gaps are measured."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from weightcast.clock import Deadline
from weightcast.errors import ReplicaFailed

START_S = 120.0
ANSWER_S = 300.0
STOP_S = 30.0
SILENCE_S = 120.0

Tokens = list[int]
Wanted = Mapping[str, Any]


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
        try:
            connection.request("POST", "/v1/completions", json.dumps(wanted), {"content-type": "application/json"})
            response = connection.getresponse()
            body = json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise ReplicaFailed(f"the server did not answer: {type(error).__name__}: {error}") from error
        if response.status != http.client.OK:
            raise ReplicaFailed(f"the server answered {response.status}: {body}")
        answer: Tokens = body["choices"][0]["token_ids"]
        return answer

    def close(self) -> None:
        """Close the connections and end the threads."""
        for connection in self._connections:
            connection.close()
        self._pool.shutdown()


@dataclass(frozen=True)
class Token:
    """One chunk of a stream: when it came, the version that made it, and whether it is the first of its request."""

    at_s: float
    version: str | None
    first: bool


class TokenStream:
    """Asks for tokens without end, one request after another, and remembers when each came.

    `wanted` gives the body of the next request; fields that make it a stream are added.
    """

    def __init__(self, port: int, wanted: Callable[[], Wanted]) -> None:
        self._port, self._wanted = port, wanted
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-stream", daemon=True)
        self.tokens: list[Token] = []
        self.error: Exception | None = None
        self._thread.start()

    def wait_for(self, tokens: int, *, version: str | None = None) -> None:
        """Until so many more tokens have come, of this version if one is named."""
        begin, deadline = len(self.tokens), Deadline.after(SILENCE_S)
        while sum(version in (None, token.version) for token in self.tokens[begin:]) < tokens:
            deadline.check("waiting for tokens of the server")
            if self.error is not None:
                raise ReplicaFailed(f"the stream of tokens broke: {self.error}") from self.error
            time.sleep(0.005)

    def gaps(self, since: float, until: float, *, within_requests: bool = False) -> list[float]:
        """Seconds between two tokens, where some of them lie between two moments; the gap that `until` falls into included.

        `within_requests` leaves out the gaps from one request to the next.
        """
        return [
            after.at_s - before.at_s
            for before, after in pairwise(list(self.tokens))
            if after.at_s >= since and before.at_s <= until and not (within_requests and after.first)
        ]

    def close(self) -> None:
        """End the stream."""
        self._over.set()
        self._thread.join(SILENCE_S)

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._ask()
        except (OSError, ValueError, http.client.HTTPException) as error:
            if not self._over.is_set():
                self.error = error

    def _ask(self) -> None:
        wanted = {**self._wanted(), "stream": True, "return_token_ids": True, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SILENCE_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(wanted), {"content-type": "application/json"})
            answer, first = connection.getresponse(), True
            if answer.status != http.client.OK:
                raise ValueError(f"{answer.status} {answer.read()!r}")
            for line in answer:
                if self._over.is_set():
                    return
                if line.startswith(b"data: {"):
                    at_s = time.monotonic()
                    chunk = json.loads(line[len(b"data: ") :])
                    if "choices" not in chunk:
                        raise ValueError(f"the server sent {chunk}")
                    choices = chunk["choices"]
                    self.tokens.append(Token(at_s, choices[0].get("weight_version") if choices else None, first))
                    first = False
        finally:
            connection.close()


@contextmanager
def token_streams(port: int, wanted: Callable[[], Wanted], count: int) -> Iterator[list[TokenStream]]:
    """So many streams at once, all of which have begun."""
    streams = [TokenStream(port, wanted) for _ in range(count)]
    try:
        for stream in streams:
            stream.wait_for(4)
        yield streams
    finally:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(TokenStream.close, streams))


@dataclass(frozen=True)
class Serving:
    """A server that runs: the process of its front end, and its port."""

    pid: int
    port: int

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def served(model_dir: Path, *, ranks: int, scratch: Path, options: Sequence[str] = ()) -> Iterator[Serving]:
    """`weightcast serve` as a process of its own, once it is ready. `options` are more of its command line."""
    port_file = scratch / f"port-{model_dir.name}-{ranks}"
    command = ("serve", str(model_dir), "--ranks", str(ranks), "--port", "0", *options)
    with listening(*command, port_file=port_file) as (process, port):
        deadline = Deadline.after(START_S)
        while not _healthy(port):
            _check_alive(process, deadline)
            time.sleep(0.1)
        yield Serving(process.pid, port)


@contextmanager
def depot(store_dir: Path) -> Iterator[Serving]:
    """`weightcast depot` over a store, as a process of its own."""
    command = ("depot", "--store", str(store_dir), "--listen", "127.0.0.1:0")
    with listening(*command, port_file=store_dir.with_suffix(".port")) as (process, port):
        yield Serving(process.pid, port)


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
