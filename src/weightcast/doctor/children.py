"""Loading things in child processes: what crashes or hangs there is an answer, too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Literal

import msgspec

from weightcast.clock import Deadline
from weightcast.wire.decoding import decode

State = Literal["absent", "loaded", "broken", "silent"]


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What became of loading something: not installed, loaded, broken, or not done in time.

    `problem` says why it is broken. The other fields are what the child found; those that do not apply are empty.
    """

    state: State
    problem: str = ""
    version: str = ""
    cuda: str = ""
    devices: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()


ABSENT = Loaded(state="absent")


class _Child:
    """One probe in a process of its own, and group of its own: what it starts ends with it."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-P", "-m", "weightcast.doctor.probes", name]  # -P: nothing from where it is called
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this; a pipe could fill up
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter and a module of ours
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True
        )

    def result(self, deadline: Deadline) -> Loaded:
        """What it found, or how it failed."""
        try:
            told, _ = self._process.communicate(timeout=deadline.remaining())
        except subprocess.TimeoutExpired:
            return Loaded(state="silent", problem=f"not loaded within {deadline.seconds:g} s")
        status = self._process.returncode
        if status == 0:
            return decode(told, Loaded)
        how = f"loading it ends with {signal.Signals(-status).name}" if status < 0 else self._last_words()
        return Loaded(state="broken", problem=how)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"loading it ends with status {self._process.returncode}"

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


def load_all(names: Sequence[str], deadline: Deadline) -> Mapping[str, Loaded]:
    """Load each in a child of its own, all at the same time."""
    with _started(names) as children:
        return {name: child.result(deadline) for name, child in children.items()}


@contextlib.contextmanager
def _started(names: Sequence[str]) -> Iterator[dict[str, _Child]]:
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(contextlib.closing(_Child(name))) for name in names}
