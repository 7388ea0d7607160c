"""Programs that run in a session of their own, with their own temporary directory, and are ended whatever happens.

This folder must not become a package: it is called `vllm`, as the package that it tests is.
"""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

HERE = Path(__file__).parent
MEMORY = Path("/dev/shm")
ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "NUMBA_CACHE_DIR": str(Path(sys.prefix) / "numba-cache"),  # the Numba of another environment would write over it
    "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "vllm-cache"),  # it takes vLLM seconds to learn about a model class
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; vLLM would take a large share of the machine
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that update weights
    "WEIGHTCAST_ALLOW_SOURCE": "file:///* checkpoint:///* ipc:///* http://127.0.0.1:* shares+http://127.0.0.1:* nixl://127.0.0.1:*",
}
STOP_S = 60
CHILDREN_S = 10  # for children to notice that their parent has ended
LEAKED_BY_VLLM = "vllm_dist_"


def _give_way(pid: int) -> None:
    """Let a program run after the tests. vLLM's engine and worker poll each other without rest, which on two cores has kept
    a client from running until the request was over whose middle it wanted to see.
    """
    os.setpriority(os.PRIO_PROCESS, pid, 10)
    with contextlib.suppress(OSError):  # where Linux shares out the cores by session, only this counts
        Path(f"/proc/{pid}/autogroup").write_text("10")


class OwnProcess:
    """A program in a session of its own. `environ` adds to the environment; what it says goes into a log."""

    def __init__(self, command: Sequence[object], environ: Mapping[str, str]) -> None:
        self.tmp_dir = Path(tempfile.mkdtemp(prefix="wcv-"))  # short: the paths of sockets must be
        self.log = self.tmp_dir.with_name(f"{self.tmp_dir.name}.log")
        self.shared: set[Path] = set()
        self._gone = False
        self._words = ""
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                list(map(str, command)),
                env={**os.environ, **ENVIRON, "TMPDIR": str(self.tmp_dir), **environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _give_way(self.process.pid)

    def processes(self) -> list[psutil.Process]:
        """Everything that runs in its session, also what has lost its parent. What has only to be reaped counts as ended."""
        found: list[psutil.Process] = []
        if self._gone:  # the system may have given the number of the session to another
            return found
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(one.pid) == self.process.pid and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    def alive(self) -> bool:
        return self.process.poll() is None

    def said(self, nchars: int = 6000) -> str:
        """The end of its log, also when it has ended."""
        text = self.log.read_text(errors="replace") if self.log.exists() else self._words
        return text[-nchars:]

    def look(self) -> None:
        """Remember the names in /dev/shm that its processes use now, so that they can be missed later."""
        for one in self.processes():
            self.shared |= shared_names(one.pid)

    def wait_for(self, fact: Callable[[], object], what: str, timeout_s: float) -> None:
        """Wait until `fact()` is true; if it does not come about, show what the program said last."""
        until = time.monotonic() + timeout_s
        while not fact():
            assert self.alive(), f"the program ended with {self.process.returncode}. It said:\n{self.said()}"
            assert time.monotonic() < until, f"{what} did not come about in {timeout_s} s. The program said:\n{self.said()}"
            time.sleep(0.1)

    def wait_end(self, timeout_s: float) -> int:
        """Wait until the program ends by itself and return its exit status."""
        until = time.monotonic() + timeout_s
        while self.alive():
            assert time.monotonic() < until, f"the program did not end in {timeout_s} s. It said:\n{self.said()}"
            self.look()
            time.sleep(0.1)
        return self.process.returncode

    def end(self, number: int = signal.SIGTERM, timeout_s: float = STOP_S, children_s: float = CHILDREN_S) -> list[str]:
        """Send a signal, wait, and kill what is left. Return what should not have stayed: processes that had to be killed,
        and files in /dev/shm, but for those that vLLM itself is known to leave. Nothing stays in any case. Safe twice.
        """
        self.look()
        if self.alive():
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        self._wait_for_children(children_s)
        left = [f"process {one}" for one in self.processes()]
        return [*left, *self.kill()]

    def kill(self) -> list[str]:
        """End it at once, and remove what it used. Return the files in /dev/shm that it left and that vLLM does not."""
        for one in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait(STOP_S)
        self._wait_for_children(STOP_S)
        assert not self.processes(), f"killed, and still there: {self.processes()}"
        self._gone = True
        stayed = {path for path in self.shared if path.exists()}
        if stayed:
            stayed -= in_use()
        for path in stayed:
            path.unlink(missing_ok=True)
        shutil.rmtree(self.tmp_dir, ignore_errors=True)
        self._words = self.said(1 << 20)
        self.log.unlink(missing_ok=True)
        return [f"file {path}" for path in sorted(stayed) if not path.name.startswith(LEAKED_BY_VLLM)]

    def _wait_for_children(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while self.processes() and time.monotonic() < until:
            time.sleep(0.05)


def shared_names(pid: int) -> set[Path]:
    """The files in /dev/shm itself that a process has open or mapped. Those in its folders belong to others."""
    names: set[str] = set()
    with contextlib.suppress(OSError):  # it may end at any moment
        names.update(re.findall(rf"{MEMORY}/.+", Path(f"/proc/{pid}/maps").read_text()))
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                names.add(os.readlink(descriptor))
    return {Path(name) for name in names if Path(name).parent == MEMORY and not name.endswith("(deleted)")}


def in_use() -> set[Path]:
    """The same for all processes of this machine."""
    return set().union(*map(shared_names, psutil.pids()))
