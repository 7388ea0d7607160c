"""The rank processes: started, watched through the kernel, ended and reaped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec

from weightcast import logs
from weightcast.engines.embedded.settings import RankSettings
from weightcast.errors import ReplicaFailed

log = logs.get(__name__)


class RankProcess:
    """One rank, in a session of its own: Ctrl-C at the terminal reaches the front end alone, which then drains.

    Its standard output and error are ours. `on_exit` is called once, as soon as the process has ended; it is reaped then.
    """

    def __init__(self, program: Sequence[str], settings: RankSettings, on_exit: Callable[[RankProcess], None]) -> None:
        self.rank, self._on_exit = settings.rank, on_exit
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        try:
            self._child = subprocess.Popen(list(program), stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603 - the caller's own program
        except OSError as error:
            raise ReplicaFailed(f"rank {self.rank} could not be started as {' '.join(program)}: {error}.") from error
        self.pid = self._child.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError as error:
            self._child.kill()
            self._child.communicate(timeout=10)
            raise ReplicaFailed(f"rank {self.rank} cannot be watched (pidfd_open: {error}): Linux 5.3 is needed.") from error
        self._loop.add_reader(self._pidfd, self._reap)
        self._hand_over(settings)

    def _hand_over(self, settings: RankSettings) -> None:
        stdin = self._child.stdin
        if stdin is not None:
            with suppress(BrokenPipeError), stdin:  # it has ended already, which is told by its exit
                stdin.write(msgspec.json.encode(settings))

    @property
    def running(self) -> bool:
        """Whether it has not been reaped yet."""
        return self._child.returncode is None

    @property
    def killed(self) -> bool:
        """Whether a signal ended it, so that it cannot have said anything."""
        return not self.running and self._child.returncode < 0

    def describe_end(self) -> str:
        """How it ended, for people."""
        code = self._child.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was ended by signal {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"

    def terminate(self) -> None:
        """Ask it to end."""
        self._child.terminate()

    def kill(self) -> None:
        """End it and whatever it started, also if it is stopped. It is reaped a moment later."""
        if self.running:  # not reaped, so neither the process id nor the group id can belong to anybody else
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        self.kill()  # the rest of its group, while its id is still held
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._child.wait()  # it has ended: returns at once
        if not self._ended.done():
            self._ended.set_result(None)
        log.debug("rank reaped", rank=self.rank, pid=self.pid, how=self.describe_end())
        self._on_exit(self)

    async def wait(self) -> None:
        """Until it has been reaped."""
        await asyncio.shield(self._ended)


async def wait_all(processes: Iterable[RankProcess], timeout_s: float) -> list[RankProcess]:
    """Wait until all have ended. Returns those that still run after `timeout_s`."""
    running = [process for process in processes if process.running]
    if running:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for process in running:
                    await process.wait()
    return [process for process in running if process.running]
