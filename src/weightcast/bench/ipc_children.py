"""Processes of the bench of same-host updates: each does what lines of JSON at its input say, and answers line by line.

`Child` is the end of the bench, `serve` that of the process. What a process or its libraries print is no answer: it is kept
for the message if the process fails.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weightcast.clock import Deadline
from weightcast.errors import ReplicaFailed

Message = dict[str, Any]
Handlers = Mapping[str, Callable[..., Message]]

GRACE_S = 5.0  # for a process to end by itself once its input has
_LOOK_S = 0.2
_KILLED_S = 10.0
_SHOWN_LINES = 6


class Child:
    """One process, `python -m module`, in a session of its own: Ctrl-C at the terminal reaches the bench alone.

    A context manager: leaving it ends the process, and everything that it started; after an error at once. Nothing that
    they hold outlives them, but for files in a directory that the bench removes.
    `environment` is set on top of that of the bench. `under` are the words of a command that runs it.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        grace_s: float = GRACE_S,
        under: Sequence[str] = (),
    ) -> None:
        self.name = " ".join([module.rpartition(".")[2], *arguments])
        self._grace_s = grace_s
        self._heard = b""
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        command = [sys.executable, "-m", module, *arguments]
        if environment:  # only env(1) adds to an environment that nobody here reads
            command = [shutil.which("env") or "env", *(f"{name}={value}" for name, value in environment.items()), *command]
        self._process = subprocess.Popen(  # noqa: S603 - our own
            [*under, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._printed, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end(at_once=kind is not None)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def tell(self, do: str, **facts: object) -> None:
        """Let it do something. The answer is to be heard."""
        line = json.dumps({"do": do, **facts}).encode() + b"\n"
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed() from error

    def hear(self, deadline: Deadline) -> Message:
        """Its next answer. `ReplicaFailed` if it ends instead, with what it printed last."""
        if self._process.stdout is None:
            raise self._failed()
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._heard:
                deadline.check(f"waiting for {self.name}, a process of the bench,")
                if not selector.select(min(_LOOK_S, deadline.remaining())):
                    continue
                data = os.read(descriptor, 1 << 16)
                if not data:
                    raise self._failed()
                self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        answer: Message = json.loads(line)
        return answer

    def ask(self, do: str, deadline: Deadline, **facts: object) -> Message:
        """Tell and hear."""
        self.tell(do, **facts)
        return self.hear(deadline)

    def end(self, *, at_once: bool = False) -> None:
        """Close its input and wait; kill it, and what it started, if it is still there then. Safe twice."""
        process = self._process
        if self._printed.closed:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        try:
            if not at_once:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(self._grace_s)
        finally:
            kill_session(process.pid)
            process.wait(_KILLED_S)
            self._printed.close()

    def _failed(self) -> ReplicaFailed:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)
        self._printed.seek(0)
        last = self._printed.read().decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
        said = f" It printed: {' / '.join(last)}" if last else ""
        return ReplicaFailed(f"{self.name}, a process of the bench, ended with status {self._process.returncode}.{said}")


def kill_session(session: int) -> None:
    """Kill all processes of a session, those included that have a process group of their own, and wait until they are gone.

    Its leader is left for its parent to be waited for.
    """
    until = time.monotonic() + _KILLED_S
    while (members := session_members(session)) and time.monotonic() < until:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def session_members(session: int) -> list[int]:
    """Living processes of a session."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state not in "ZX":
                members.append(int(stat.parent.name))
    return members


def descendants_of(parent: int) -> list[int]:
    """Living processes that a process has started, and those that they have."""
    return [pid for child in children_of(parent) for pid in (child, *descendants_of(child))]


def children_of(parent: int) -> list[int]:
    """Living processes that a process has started, the oldest first."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, of = stat.read_text().rpartition(")")[2].split()[:2]
            if int(of) == parent and state not in "ZX":
                children.append(int(stat.parent.name))
    return sorted(children)


# -- the other end -------------------------------------------------------------------------------------------------------


def serve(handlers: Handlers) -> None:
    """Answer every line until the input ends. What libraries print to standard output goes where errors go."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for line in sys.stdin.buffer:
            facts = json.loads(line)
            answers.write(json.dumps(handlers[facts.pop("do")](**facts)) + "\n")
