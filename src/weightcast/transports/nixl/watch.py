"""Whether a depot is still there: NIXL does not tell, so it is asked over HTTP."""

from __future__ import annotations

import threading

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import SourceFailed, WeightcastError
from weightcast.transports.http.client import DepotClient
from weightcast.wire.depot import PREFIX
from weightcast.wire.nixl import Grant, Renewal, Standing

log = logs.get(__name__)

_RELEASE_S = 1.0
_JOIN_S = 1.0


class Watch:
    """Asks a depot again and again, in a thread, whether a grant is still good; that renews it. `stop` ends that."""

    def __init__(self, client: DepotClient, grant: Grant, *, stall_s: float) -> None:
        self._client, self._grant, self._stall_s = client, grant, stall_s
        self._path = f"{PREFIX}/nixl/grants/{grant.grant}"
        self._stopped = threading.Event()
        self._problem: WeightcastError | None = None
        self._thread = threading.Thread(target=logs.carried(self._run), name="nixl watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `SourceFailed` if the depot did not answer, or does not stand by its grant any more."""
        if self._problem is not None:
            raise SourceFailed(str(self._problem)) from self._problem

    def confirm(self, *, deadline: Deadline) -> None:
        """All was read: have the depot say that it was there all the time, and had the right bytes there.

        Only this makes what was read good: NIXL also says "done" of reads from a process that is dead.
        """
        self.stop()
        self.check()
        self._ask("DELETE", deadline)

    def release(self) -> None:
        """Nothing is read any more, and what was does not matter. A depot that cannot be told finds out by itself."""
        self.stop()
        if self._problem is None:
            try:
                self._ask("DELETE", Deadline.after(min(_RELEASE_S, self._stall_s)))
            except WeightcastError as error:
                log.debug("grant not released", url=self._client.url, error=error)

    def stop(self) -> None:
        """Ask no more. Safe twice."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_JOIN_S)  # if it still waits for an answer, it ends with that

    def _ask(self, method: str, deadline: Deadline) -> None:
        body = Renewal(self._grant.agent) if method == "POST" else None
        standing = self._client.ask(method, self._path, body, Standing, deadline=deadline)
        if standing.agent != self._grant.agent:
            raise SourceFailed(f"{self._client.url} was started anew while a version was read from it.")

    def _run(self) -> None:
        interval_s = min(self._stall_s, self._grant.seconds) / 3
        while not self._stopped.wait(interval_s):
            try:
                self._ask("POST", Deadline.after(2 * self._stall_s))  # silence is noticed before
            except WeightcastError as error:
                self._problem = error
                return
