"""Runs the shell blocks of a page as a reader would: one shell, the blocks one after the other, servers left running.

What differs from a reader's machine: directories such as /tmp and /mnt lie in a directory of the page, hosts are this one
and ports are free ones. A comment `# on NAME` says on which host the commands below it run. Pages make the files that they
use. Only a depot that another host runs, without a block that starts it, is made for them.
"""

from __future__ import annotations

import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from documents import Block, calls_of, command_lines, comment_of
from weightcast import Store
from weightcast.engines.embedded.presets import init_checkpoint

COMMAND_S = 60
START_S = 90
STOP_S = 30

SERVERS = ("serve", "depot")
_HERE = ("localhost", "127.0.0.1", "0.0.0.0")
_ADDRESS = re.compile(r"(?<![\w.@-])(localhost|127\.0\.0\.1|0\.0\.0\.0|trainer|relay|[a-z]+-(?:host|\d)):(\d{4,5})\b")
_PLACES = ("/tmp/", "/mnt/", "/dev/shm/")


@dataclass
class Running:
    """A server that a block has started."""

    pid: int
    command: str


class ShellPage:
    """The shell of one page."""

    def __init__(self) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="wc-"))  # short: the paths of sockets must be
        self._work = self.dir / "w"
        self._work.mkdir()
        for place in _PLACES:
            self._place(place).mkdir(parents=True)
        self._log = self.dir / "log"
        self._ports: dict[tuple[str, int], int] = {}
        self._running: dict[int, Running] = {}
        self._host = "localhost"
        self._told, tell = os.pipe()
        environ = {
            **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(self._work),
            "TMPDIR": str(self._place("/tmp/")), "NO_COLOR": "1",
        }  # fmt: skip
        with self._log.open("ab") as log:
            self._shell = subprocess.Popen(
                ["bash", "--norc"], cwd=self._work, env=environ, stdin=subprocess.PIPE, stdout=log, stderr=log,
                pass_fds=[tell], text=True, start_new_session=True,
            )  # fmt: skip
        os.close(tell)
        self._tell = tell
        self._do("set -o pipefail")
        self._do('curl() { command curl --silent --show-error --fail-with-body --max-time 50 "$@"; }')

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.stop()
            else:
                error.add_note(f"The page's shell said last:\n{self.said()}")
        finally:
            self._kill()
            os.close(self._told)
            shutil.rmtree(self.dir, ignore_errors=True)

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]

    def run(self, block: Block) -> None:
        """Every command of a block. One that fails, or does not say that it will (`exits 1` in its comment), is an error."""
        self._host = "localhost"
        listened = {self._listening(command) for command in command_lines(block.text)}
        self._host = "localhost"
        for command in command_lines(block.text):
            if host := re.match(r"on (?:the )?([a-z0-9-]+)", comment_of(command)):
                self._host = host[1]
            if command.lstrip().startswith("#"):
                continue
            self._provide(command, listened)
            local = self.local(command)
            if server := self._server(command):
                self._start(block, local, server)
                continue
            status = self._do(local)
            expected = re.search(r"\bexits (\d+)", comment_of(command))
            wanted = int(expected[1]) if expected else 0
            assert status == wanted, f"{block}: exit status {status} of\n  {local}\n{self.said()}"

    def run_python(self, block: Block) -> None:
        """A program that talks to what runs."""
        program = self._work / f"block-{block.line}.py"
        program.write_text(self.local(block.text))
        status = self._do(f"python {program}")
        assert status == 0, f"{block}: exit status {status}\n{self.said()}"

    def local(self, text: str) -> str:
        """The same for this machine."""
        for place in _PLACES:
            text = re.sub(rf"(?<![\w.]){re.escape(place)}", f"{self._place(place)}/", text)
        return _ADDRESS.sub(lambda found: f"127.0.0.1:{self._port(found[1], int(found[2]))}", text)

    def stop(self) -> None:
        """End the servers in the polite way, the last one first; all must end with status 0."""
        for port in reversed(list(self._running)):
            self._stop(port)

    # -- addresses and places ------------------------------------------------------------------------------------------

    def _place(self, place: str) -> Path:
        return self.dir / place.strip("/").rpartition("/")[2]

    def _port(self, host: str, port: int) -> int:
        key = (self._host if host in _HERE else host, port)
        if key not in self._ports:
            self._ports[key] = free_port()
        return self._ports[key]

    def _server(self, command: str) -> list[str] | None:
        """The arguments of the server that a command runs, if it does."""
        calls = [arguments for arguments in calls_of(command, "weightcast") if any(one in SERVERS for one in arguments[:3])]
        return calls[0] if calls else None

    def _listening(self, command: str) -> tuple[str, int] | None:
        if host := re.match(r"on (?:the )?([a-z0-9-]+)", comment_of(command)):
            self._host = host[1]
        arguments = self._server(command)
        return None if arguments is None else (self._host, int(_port_argument(arguments)))

    # -- what a page takes for granted ---------------------------------------------------------------------------------

    def _provide(self, command: str, listened: Iterable[tuple[str, int] | None]) -> None:
        for host, port in set(_ADDRESS.findall(command)):
            key = (self._host if host in _HERE else host, int(port))
            if host not in _HERE and key not in self._ports and key not in listened:
                self._depot(key, token="token" in command)

    def _depot(self, key: tuple[str, int], *, token: bool) -> None:
        """A depot that another host of the page runs."""
        store = self.dir / f"store-of-{key[0]}"
        Store(store).publish_checkpoint("step_7", _model())
        port = self._port(*key)
        line = f"weightcast depot --store {store} --listen 127.0.0.1:{port}" + (" --token-file token.txt" if token else "")
        self._begin(f"the depot of {key[0]}", line, port, "http")

    # -- processes -----------------------------------------------------------------------------------------------------

    def _do(self, command: str, timeout_s: float = COMMAND_S) -> int:
        """The exit status of a command of the shell."""
        word = secrets.token_hex(8)
        assert self._shell.stdin is not None
        with self._log.open("a") as log:
            log.write(f"$ {command}\n")
        self._shell.stdin.write(f"{{ {command}\n}} </dev/null\necho {word} $? >&{self._tell}\n")
        self._shell.stdin.flush()
        end, answer = time.monotonic() + timeout_s, ""
        while not answer.endswith("\n"):
            ready, _, _ = select.select([self._told], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no end within {timeout_s} s of\n  {command}\n{self.said()}"
            piece = os.read(self._told, 4096).decode()
            assert piece, f"the shell ended at\n  {command}\n{self.said()}"
            answer += piece
        assert answer.startswith(word), answer
        return int(answer.split()[1])

    def _start(self, block: Block, local: str, arguments: list[str]) -> None:
        port = self._port("localhost", int(_port_argument(arguments)))
        words = re.split(r"\s#", local)[0].rstrip().removesuffix("&").rstrip()
        if "serve" in arguments:
            words += f" --port {port}" + ("" if "--threads" in arguments else " --threads 1")  # cores are shared
        elif "--listen" not in arguments:
            words += f" --listen 127.0.0.1:{port}"
        self._begin(str(block), words, port, "https" if "--tls-cert" in arguments else "http")

    def _begin(self, what: str, command: str, port: int, scheme: str) -> None:
        if port in self._running:
            self._stop(port)
        self._do(f"{command} &\necho $! > {self.dir}/pid")
        self._running[port] = Running(int((self.dir / "pid").read_text()), command)
        end = time.monotonic() + START_S
        while not _healthy(f"{scheme}://127.0.0.1:{port}/health"):
            alive = Path(f"/proc/{self._running[port].pid}/cmdline").exists()
            assert alive, f"{what}: the server ended:\n  {command}\n{self.said()}"
            assert time.monotonic() < end, f"{what}: no answer within {START_S} s of\n  {command}\n{self.said()}"
            time.sleep(0.05)

    def _stop(self, port: int) -> None:
        one = self._running.pop(port)
        os.kill(one.pid, signal.SIGTERM)
        status = self._do(f"wait {one.pid}", STOP_S)
        assert status == 0, f"exit status {status} after SIGTERM of\n  {one.command}\n{self.said()}"

    def _kill(self) -> None:
        """The shell and all that it started are one session."""
        for pid in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]:
            try:
                if os.getsid(pid) == self._shell.pid:
                    os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._shell.wait(STOP_S)
        assert self._shell.stdin is not None
        self._shell.stdin.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _port_argument(arguments: list[str]) -> str:
    for name, value in pairwise(arguments):
        if name in ("--port", "--listen"):
            return value.rpartition(":")[2]
    return "8000" if "serve" in arguments else "8300"


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, verify=False).status_code == 200
    except httpx.TransportError:
        return False


@cache
def _models_dir() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="wc-models-")


@cache
def _model() -> Path:
    """What another host's depot holds: the tiny model, with other weights than the pages make."""
    path = Path(_models_dir().name) / "other"
    init_checkpoint(path, preset="tiny", seed=7)
    return path
