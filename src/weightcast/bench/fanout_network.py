"""Hosts on one machine: network namespaces, each with a link of its own to a switch, capped in both directions.

Needs root and iproute2. Everything has the process id in its name and is removed when the network is closed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, InvalidInput, UpdateFailed

MAX_HOSTS = 200
_COMMAND_S = 20.0
_BURST_NBYTES = 256 << 10  # several of the large packets that a virtual link carries
_QUEUE_S = 0.015  # what waits for the link before packets are dropped
_NUMBERS = itertools.count()


def lacking() -> str:
    """Why there can be no such network here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces and capped links need root"
    missing = [command for command in ("ip", "tc") if _found(command) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 cannot be found"
    try:
        with Network(1, rate_bits=1_000_000_000):
            return ""
    except (UpdateFailed, DeadlineExceeded) as error:
        return str(error)


class Network:
    """So many hosts and a switch between them. A context manager. Every host has `lo` and a link of `rate_bits` per second.

    What runs on a host must have ended before the network is closed.
    """

    def __init__(self, hosts: int, *, rate_bits: int) -> None:
        if not 1 <= hosts <= MAX_HOSTS or rate_bits < 1:
            raise InvalidInput(
                f"a network has 1 to {MAX_HOSTS} hosts and a rate of 1 bit/s or more, not {hosts} and {rate_bits}."
            )
        self.hosts, self.rate_bits = hosts, rate_bits
        name = f"weightcast-{os.getpid()}-{next(_NUMBERS)}"
        self._switch = f"{name}-switch"
        self._names = [f"{name}-{index}" for index in range(hosts)]
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        with self._opened as opened:
            self._add(self._switch, opened)
            _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "switch", "up")
            for index, name in enumerate(self._names):
                self._add(name, opened)
                self._join(index, name)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.__exit__(kind, error, trace)

    def _add(self, name: str, opened: ExitStack) -> None:
        opened.callback(_run, "ip", "netns", "delete", name, fails=False)  # also if adding it is interrupted
        _run("ip", "netns", "add", name)

    def _join(self, index: int, name: str) -> None:
        port, switch = f"port{index}", self._switch
        _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
        _run("ip", "-n", name, "address", "add", f"{self.address(index)}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", link, "up")
        self._pace(index, name)
        for namespace, link in ((name, "eth0"), (switch, port)):
            self._cap(namespace, link)

    def _pace(self, index: int, name: str) -> None:
        """Let connections of a host be paced as they are by default nearly everywhere, whatever this machine prefers.

        The other one that is common, bbr, sends too little where answers wait behind data: on links as slow as these.
        """
        route = ("10.77.0.0/24", "dev", "eth0", "src", self.address(index))
        _run("ip", "-n", name, "route", "change", *route, "congctl", "cubic", fails=False)

    def _cap(self, namespace: str, link: str) -> None:
        cap = ("rate", f"{self.rate_bits}bit", "burst", str(_BURST_NBYTES), "latency", f"{_QUEUE_S * 1e3:.0f}ms")
        _run("tc", "-n", namespace, "qdisc", "add", "dev", link, "root", "tbf", *cap)

    def address(self, index: int) -> str:
        """The address of a host."""
        return f"10.77.0.{index + 1}"

    def under(self, index: int) -> tuple[str, ...]:
        """The words before a command that is to run on a host."""
        return (_found("ip") or "ip", "netns", "exec", self._names[index])

    def sent_nbytes(self, index: int) -> int:
        """What a host has sent over its link so far, headers included."""
        return int(_run("cat", "/sys/class/net/eth0/statistics/tx_bytes", under=self.under(index)))

    def set_link(self, index: int, *, up: bool) -> None:
        """Cut the link of a host, or mend it: packets are lost, and nobody is told."""
        _run("ip", "-n", self._switch, "link", "set", f"port{index}", "up" if up else "down")


def _found(command: str) -> str | None:
    return shutil.which(command) or next((str(path) for path in (Path("/usr/sbin") / command,) if path.exists()), None)


def _run(command: str, *arguments: str, under: Sequence[str] = (), fails: bool = True) -> str:
    """Run a command and return what it prints; with `fails`, raise `UpdateFailed` if it does."""
    line = [*under, _found(command) or command, *arguments]
    deadline = Deadline.after(_COMMAND_S)
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=deadline.remaining(), check=False)  # noqa: S603 - our own
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(" ".join(line), _COMMAND_S) from error
    except OSError as error:
        raise UpdateFailed(f"cannot run {' '.join(line)}: {error}.") from error
    if done.returncode and fails:
        raise UpdateFailed(f"{' '.join(line)} ended with status {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout
