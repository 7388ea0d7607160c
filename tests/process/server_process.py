"""`weightcast serve` as a process of its own, with clients for it and a look at what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

START_S = 90
WAIT_S = 30


class ServerProcess:
    """A running server. Its temporary directory is its own, so that whatever lies there at the end is what it left."""

    def __init__(self, model_dir: Path, *arguments: object, logging: Sequence[str] = ()) -> None:
        self.tmp_dir = Path(tempfile.mkdtemp(prefix="wc-"))  # short: the paths of sockets must be
        self.log = self.tmp_dir.with_name(f"{self.tmp_dir.name}.log")
        self.port_file = self.tmp_dir.with_name(f"{self.tmp_dir.name}.port")
        command = [
            sys.executable, "-m", "weightcast", *logging, "serve", model_dir,
            "--served-model-name", "tiny", "--port", 0, "--port-file", self.port_file, "--threads", 1, *arguments,
        ]  # fmt: skip
        environ = {**os.environ, "TMPDIR": str(self.tmp_dir), "PYTHONDONTWRITEBYTECODE": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                list(map(str, command)), env=environ, stdout=log, stderr=log, start_new_session=True
            )
        self.started: set[psutil.Process] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{int(self.port_file.read_text())}"

    def health(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/health", timeout=WAIT_S).json()

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=WAIT_S, **{"max_retries": 0, **options})

    def stats(self) -> list[dict[str, Any]]:
        """The counters of every rank, in their order."""
        return httpx.get(f"{self.url}/v1/stats", timeout=WAIT_S).json()["data"]

    def ranks(self) -> list[int]:
        """The processes of the ranks, in their order."""
        self.look()
        return [rank["pid"] for rank in self.stats()]

    def look(self) -> None:
        """Remember the processes that run now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            front_end = psutil.Process(self.process.pid)
            self.started |= {front_end, *front_end.children(recursive=True)}

    def wait_for(self, fact: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
        """Wait until `fact()` is true; if it does not come about, show what the server said last."""
        end = time.monotonic() + timeout_s
        while not fact():
            assert time.monotonic() < end, f"{what} did not come about. The server said:\n{self.said()}"
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.said()}"
            time.sleep(0.02)

    def wait_ready(self) -> None:
        self.wait_for(self.port_file.exists, "the port file", START_S)
        self.wait_for(lambda: self.health()["state"] == "READY", "READY", START_S)
        self.look()

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it in the polite way and return its exit status."""
        self.look()
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def shared_memory(self) -> set[str]:
        """Names in /dev/shm that any of its processes has open or mapped."""
        found: set[str] = set()
        for process in self.started:
            with contextlib.suppress(OSError):
                found.update(re.findall(r"/dev/shm/\S+", Path(f"/proc/{process.pid}/maps").read_text()))
                found.update(
                    target
                    for fd in Path(f"/proc/{process.pid}/fd").iterdir()
                    if (target := os.readlink(fd)).startswith("/dev/shm/")
                )
        return {name for name in found if not name.endswith("(deleted)")}

    def alive(self) -> list[psutil.Process]:
        return [one for one in self.started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    def left_behind(self) -> list[str]:
        """Processes that live, and files in its temporary directory."""
        return [str(one) for one in self.alive()] + sorted(str(path) for path in self.tmp_dir.iterdir())

    def end(self) -> None:
        """Whatever happened: nothing stays."""
        self.look()
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(WAIT_S)
        shutil.rmtree(self.tmp_dir, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        self.port_file.unlink(missing_ok=True)


@contextlib.contextmanager
def server_process(model_dir: Path, *arguments: object, logging: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """A server that takes requests; it is ended whatever happens. `logging` are options that stand before the command."""
    server = ServerProcess(model_dir, *arguments, logging=logging)
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()


def complete(client: openai.OpenAI, prompt: str = "Hello", **options: Any) -> Any:
    """A greedy completion that is as long as it was asked to be."""
    options = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}, **options}
    return client.completions.create(model="tiny", prompt=prompt, **options)
