"""Work that is divided among depots: each takes the next batch when it is done with one, and another one's if that fails."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, NotFound, SourceFailed, UpdateCancelled, WeightcastError
from weightcast.transports.http.client import DepotClient
from weightcast.transports.http.depots import combined

log = logs.get(__name__)

ROUNDS = 3  # how often a depot that breaks off is asked again, once all others have failed too
_PAUSE_S = 0.2
_LOOK_S = 0.1
_JOIN_S = 5.0

Job = TypeVar("Job")
Result = TypeVar("Result")
Do = Callable[[DepotClient, Job, Deadline], Result]


def shared_out(
    clients: Sequence[DepotClient],
    jobs: Sequence[Job],
    do: Do[Job, Result],
    *,
    deadline: Deadline,
    what: str,
    spread: int = 0,
    each: int = 2,
    pinned: bool = False,
) -> Generator[Result, None, None]:
    """What `do` returns for each job, in any order, worked on by `each` threads per depot. Raises when a job fails at all.

    Only the first `spread` depots are asked (0: all) as long as they answer. A thread prefers the depot it was started for;
    if `pinned`, each job goes to the same depot whoever asks. Closing this iterator cancels the rest. Memory that a job
    writes to is referred to until no thread can write to it any more.
    """
    near = min(spread, len(clients)) or len(clients)
    crew = _Crew(clients, jobs, do, deadline, what, near=near, pinned=pinned)
    threads = [
        threading.Thread(target=logs.carried(crew.work), args=(number,), name=f"prefetch {what} {number}", daemon=True)
        for number in range(min(len(jobs), each * near))
    ]
    for thread in threads:
        thread.start()
    try:
        left = len(jobs)
        while left:
            try:
                found = crew.results.get(timeout=min(deadline.remaining(), _LOOK_S))
            except queue.Empty:
                deadline.check(what)
                continue
            if isinstance(found, _Failed):
                raise found.error
            left -= 1
            yield found.result
    finally:
        crew.stop.set()
        until = Deadline.after(_JOIN_S)
        for thread in threads:
            thread.join(timeout=until.remaining())
        if any(thread.is_alive() for thread in threads):
            log.warning("thread left", what=what, why="it is stuck in a call that does not return")


@dataclass(frozen=True)
class _Done(Generic[Result]):
    result: Result


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class _Crew(Generic[Job, Result]):
    """Threads that take jobs from one list."""

    def __init__(
        self,
        clients: Sequence[DepotClient],
        jobs: Sequence[Job],
        do: Do[Job, Result],
        deadline: Deadline,
        what: str,
        *,
        near: int,
        pinned: bool,
    ) -> None:
        self._clients, self._do, self._what, self._near, self._pinned = clients, do, what, near, pinned
        self.stop = threading.Event()
        self._deadline = Deadline.after(deadline.remaining(), cancelled=self.stop)
        self._jobs: queue.SimpleQueue[tuple[int, Job]] = queue.SimpleQueue()
        for item in enumerate(jobs):
            self._jobs.put(item)
        self._down: set[DepotClient] = set()
        self.results: queue.SimpleQueue[_Done[Result] | _Failed] = queue.SimpleQueue()

    def work(self, number: int) -> None:
        """Do jobs until there are none left, or somebody says stop."""
        try:
            while not self.stop.is_set():
                try:
                    place, job = self._jobs.get_nowait()
                except queue.Empty:
                    return
                self.results.put(_Done(self._one(place if self._pinned else number, job)))
        except BaseException as error:  # noqa: BLE001 - it is raised again by whoever waits for the results
            self.results.put(_Failed(error))

    def _one(self, first: int, job: Job) -> Result:
        reasons: dict[DepotClient, WeightcastError] = {}
        for round_ in range(ROUNDS):
            for client in self._in_turn(first):
                said = reasons.get(client)
                if said is not None and not isinstance(said, SourceFailed):
                    continue  # it has refused: asking again would change nothing
                try:
                    return self._do(client, job, self._deadline)
                except (DeadlineExceeded, UpdateCancelled):
                    raise
                except WeightcastError as error:
                    log.info("depot failed", url=client.url, error=error)
                    reasons[client] = error
                    if not isinstance(error, NotFound):
                        self._down.add(client)
            if round_ + 1 == ROUNDS or not any(isinstance(error, SourceFailed) for error in reasons.values()):
                break
            self.stop.wait(min(_PAUSE_S * (round_ + 1), self._deadline.remaining()))
        raise combined(self._what, [(client.url, reasons.get(client)) for client in self._clients])

    def _in_turn(self, first: int) -> list[DepotClient]:
        """All depots, from the preferred one on; then those that are not near, and at last those that failed before."""
        turned = [self._clients[(first + step) % self._near] for step in range(self._near)]
        return sorted([*turned, *self._clients[self._near :]], key=lambda client: client in self._down)
