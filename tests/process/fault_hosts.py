"""The hosts of the fault trials, and the depots that run on the far one: they are killed, stopped, cut off and restarted."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from .children import TESTS

START_S = 60.0
LINKED_S = 20.0
TOKEN = "the-token-of-the-trials"


@dataclass(frozen=True)
class Hosts:
    """Where depots run: on a host of its own behind a link, or on this one if there can be no such host."""

    far: tuple[str, ...] = ()  # the words before a command that is to run there
    address: str = "127.0.0.1"
    near_address: str = "127.0.0.1"

    @property
    def apart(self) -> bool:
        """Whether there is a link to cut."""
        return bool(self.far)

    def ports(self, names: Sequence[str]) -> dict[str, int]:
        """A port for each of these there, that nobody else has."""
        if self.apart:
            return {name: 8300 + number for number, name in enumerate(names)}
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_server((self.address, 0))) for _ in names]
            return {name: sock.getsockname()[1] for name, sock in zip(names, sockets, strict=True)}

    def set_link(self, end: str, *, up: bool) -> None:
        """Cut the link at one of its ends, or mend it."""
        words = self.far if end == "far" else ()
        subprocess.run([*words, "ip", "link", "set", "eth0", "up" if up else "down"], check=True, timeout=20)

    def wait_linked(self, port: int) -> None:
        """Until a connection can be made: the first packets over a link that is mended may still be lost."""
        until = time.monotonic() + LINKED_S
        while True:
            try:
                socket.create_connection((self.address, port), timeout=0.3).close()
            except OSError:
                assert time.monotonic() < until, "the link does not come back"
                time.sleep(0.05)
            else:
                return


class DepotChild:
    """A depot that can be killed and comes back at the same address."""

    def __init__(self, hosts: Hosts, port: int, log: Path, *command: object) -> None:
        self._hosts, self._port, self._log, self._command = hosts, port, log, [str(word) for word in command]
        self.process: subprocess.Popen[str] | None = None
        self.starts = 0
        self.killed = False
        self._ready = False

    @property
    def address(self) -> tuple[str, int]:
        return self._hosts.address, self._port

    @property
    def host(self) -> str:
        """As it stands in URLs."""
        return f"{self._hosts.address}:{self._port}"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def status(self) -> int | None:
        """How it ended; None if it runs, or never has."""
        return None if self.process is None else self.process.poll()

    def start(self, *, wait: bool = True) -> None:
        """Start it if it does not run."""
        if self.alive:
            return
        self.end()
        words = [word.replace("{listen}", self.host) for word in self._command]
        search = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        environ = {**os.environ, "PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [*self._hosts.far, sys.executable, "-m", *words],
                env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        # It stays in our process group, so that it goes with us when that is killed.
        self.starts += 1
        self.killed = self._ready = False
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Until it says where it serves."""
        process = self.process
        assert process is not None
        assert process.stdout is not None
        until, line = time.monotonic() + START_S, self.host if self._ready else ""
        while self.host not in line:  # libraries in C may have something to say before
            assert process.poll() is None, self.told()
            assert time.monotonic() < until, f"it does not start:\n{self.told()}"
            if select.select([process.stdout], [], [], 0.1)[0]:
                line = process.stdout.readline()
        self._ready = True

    def told(self) -> str:
        return self._log.read_text()[-3000:]

    def kill(self) -> None:
        assert self.process is not None
        self.killed = True
        self.process.kill()

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill it, and leave nothing of it here."""
        process, self.process = self.process, None
        if process is not None:
            with process:
                process.kill()

    def size(self) -> tuple[int, int]:
        """How many threads and open files it has."""
        assert self.process is not None
        root = Path("/proc") / str(self.process.pid)
        return len(list((root / "task").iterdir())), len(list((root / "fd").iterdir()))
