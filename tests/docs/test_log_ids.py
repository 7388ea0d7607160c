"""The ids of a request and of its update, in the log lines of every process that had to do with them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

START_S, WAIT_S = 90.0, 60.0
REQUEST_ID = "trainer-7 step_1"


class Program:
    """A command of `weightcast`, with its log in a file of its own."""

    def __init__(self, directory: Path, name: str, *arguments: object) -> None:
        self.stdout, self.stderr, self.port_file = (directory / f"{name}.{kind}" for kind in ("out", "err", "port"))
        command = [sys.executable, "-m", "weightcast", *map(str, arguments), "--port-file", str(self.port_file)]
        environ = {**os.environ, "TMPDIR": str(directory)}
        with self.stdout.open("wb") as out, self.stderr.open("wb") as err:
            self.process = subprocess.Popen(command, env=environ, stdout=out, stderr=err, start_new_session=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{int(self.port_file.read_text())}"

    def wait_for(self, fact: Callable[[], bool], what: str, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not fact():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.stderr.read_text()[-4000:]}"
            assert time.monotonic() < until, f"{what} did not come about: {self.stderr.read_text()[-4000:]}"
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def end(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(WAIT_S)

    def lines(self) -> list[dict[str, Any]]:
        """Every line of standard error: each is one JSON object, or this fails."""
        return [json.loads(line) for line in self.stderr.read_text().split("\n")[:-1]]


def weightcast(*arguments: object) -> None:
    command = [sys.executable, "-m", "weightcast", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr.decode()


def ready(server: Program) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return server.port_file.exists() and httpx.get(f"{server.url}/health", timeout=WAIT_S).status_code == 200
    return False


@pytest.fixture(scope="module")
def said() -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]], str]]:
    """What a server with two ranks and the depot that it updates from have logged, and the id of the update."""
    directory = Path(tempfile.mkdtemp(prefix="wc-"))  # short: the paths of sockets must be
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        for seed in (0, 1):
            weightcast("model", "init", directory / f"model-{seed}", "--seed", seed)
        weightcast("publish", directory / "store", "step_1", directory / "model-1")
        asked = ("-v", "--log-format", "json", "depot", "--store", directory / "store", "--listen", "127.0.0.1:0")
        depot = Program(directory, "depot", *asked)
        stack.callback(depot.end)
        depot.wait_for(depot.port_file.exists, "the depot's port", START_S)
        asked = ("--log-format", "json", "serve", directory / "model-0", "--ranks", 2, "--threads", 1, "--port", 0)
        server = Program(directory, "server", *asked, "--source", depot.url)
        stack.callback(server.end)
        server.wait_for(lambda: ready(server), "READY", START_S)
        headers = {"x-request-id": REQUEST_ID}
        reply = httpx.post(f"{server.url}/v1/update_weights", json={"version": "step_1"}, headers=headers, timeout=WAIT_S)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-request-id"] == REQUEST_ID
        update_id = reply.headers["location"].rpartition("/")[2]
        depot.wait_for(lambda: "receiver serves" in depot.stderr.read_text(), "the acknowledgement", WAIT_S)
        assert (server.stop(), depot.stop()) == (0, 0)
        yield server.lines(), depot.lines(), update_id


def of(lines: list[dict[str, Any]], update_id: str) -> list[dict[str, Any]]:
    return [line for line in lines if (line.get("request_id"), line.get("update_id")) == (REQUEST_ID, update_id)]


def events(lines: list[dict[str, Any]]) -> list[str]:
    return [line["event"] for line in lines]


def test_every_line_has_what_all_lines_have(said):
    server, depot, _ = said
    for line in server + depot:
        assert {"ts", "level", "logger", "event"} <= line.keys()
        assert line["level"] in ("DEBUG", "INFO"), line


def test_the_front_end_tells_the_way_of_an_update_under_both_ids(said):
    server, _, update_id = said
    front = [line for line in of(server, update_id) if "rank" not in line]
    assert events(front) == ["update received", "update staged", "update committed"]
    assert front[-1]["version"] == "step_1"
    assert front[-1]["nbytes"] > 0
    assert front[-1]["pause_ms"] > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_logs_under_the_same_ids_and_says_which_it_is(said, rank):
    server, _, update_id = said
    own = [line for line in of(server, update_id) if line.get("rank") == rank]
    assert {"vote cast", "model updated"} <= set(events(own))


def test_the_depot_logs_what_it_was_asked_for_by_front_end_and_ranks_under_the_same_ids(said):
    _, depot, update_id = said
    own = of(depot, update_id)
    assert {"manifest served", "receiver serves"} <= set(events(own))
    answered = [line for line in own if line["event"] == "request answered"]
    assert len({line["client"] for line in answered if line["path"].endswith(".safetensors")}) >= 2  # one of each rank
    assert all(line["client"].startswith("127.0.0.1:") for line in own)


def test_the_start_and_the_end_are_told(said):
    server, depot, _ = said
    assert {"server listening", "ranks started", "rank ready", "replica ready", "server ready"} <= set(events(server))
    assert events(server)[-1] == "replica closed"
    assert events(depot)[:2] == ["depot listening", "depot started"]
    assert events(depot)[-1] == "depot closed"
