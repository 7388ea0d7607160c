"""`python -m weightcast.bench.ipc_receiver`: an engine's process, reduced to a model that takes what a trainer publishes."""

from __future__ import annotations

import time
from pathlib import Path

from weightcast.bench.ipc_children import Message, serve
from weightcast.bench.ipc_tensors import blank_tensors
from weightcast.clock import Deadline
from weightcast.transports.ipc.receiver import IpcReceiver
from weightcast.worker.live_model import LiveModel
from weightcast.worker.result import CommitMode


class Engine:
    """Takes version after version. All moments are of the monotonic clock, which is one for all processes of a host."""

    def begin(self, directory: str, nbytes: int) -> Message:
        """Make the model, every page of it touched."""
        self._receiver = IpcReceiver(Path(directory))
        self._live = LiveModel(blank_tensors(nbytes), keep_previous=False)
        self._after: str | None = None
        return {}

    def update(self, commit: CommitMode, timeout_s: float) -> Message:
        """Wait for the next version, take it, and tell when it was noticed and committed."""
        deadline = Deadline.after(timeout_s)
        version = self._receiver.wait_newer(self._after, deadline=deadline)
        noticed_s = time.monotonic()
        result = self._live.update(version, source=self._receiver, commit=commit, timeout=deadline.remaining())
        committed_s = time.monotonic()
        self._after = version
        return {"noticed_s": noticed_s, "committed_s": committed_s, "result": result.as_dict()}

    def digest(self) -> Message:
        """That of the live bytes, read again."""
        return {"digest": self._live.root_digest()}


def main() -> None:
    """Answer the bench until it closes the input."""
    engine = Engine()
    serve({"begin": engine.begin, "update": engine.update, "digest": engine.digest})


if __name__ == "__main__":
    main()
