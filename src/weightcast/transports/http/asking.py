"""Asking several depots the same thing at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import TypeVar

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, SourceFailed, UpdateCancelled, VersionNotSet, WeightcastError
from weightcast.transports.http.client import DepotClient
from weightcast.transports.http.depots import combined
from weightcast.transports.http.patience import TICK_S
from weightcast.wire.depot import Newest

GRACE_S = 1.0  # for the others, once one depot has answered
_POLL_S = 20.0
_AGAIN_S = 0.5
_JOIN_S = 5.0

_Answer = TypeVar("_Answer")
_Question = Callable[[DepotClient, Deadline], _Answer]
_Told = tuple[DepotClient, _Answer | WeightcastError]


def ask_all(
    clients: Sequence[DepotClient], question: _Question[_Answer], *, deadline: Deadline, what: str
) -> list[_Told[_Answer]]:
    """What each depot answers, or why it does not. Those that are late when others have answered are not waited for."""
    if len(clients) == 1:
        try:
            return [(clients[0], question(clients[0], deadline))]
        except (DeadlineExceeded, UpdateCancelled):
            raise
        except WeightcastError as error:
            return [(clients[0], error)]
    answers: dict[DepotClient, _Answer | WeightcastError] = {}
    first_at: float | None = None
    with closing(_answers(clients, question, deadline, what)) as told:
        for found in told:
            if found is not None:
                answers[found[0]] = found[1]
                if first_at is None and not isinstance(found[1], WeightcastError):
                    first_at = monotonic()
            late = first_at is not None and monotonic() - first_at >= GRACE_S
            if len(answers) == len(clients) or late:
                break
    silent = SourceFailed("it has not answered yet.")
    return [(client, answers.get(client, silent)) for client in clients]


def newest_of(clients: Sequence[DepotClient], *, deadline: Deadline, what: str) -> Newest:
    """The newest version of all depots that answer. Raises what they say if none does."""
    told = ask_all(clients, lambda client, until: client.newest(deadline=until), deadline=deadline, what=what)
    return _best(told, what)


def wait_newer(clients: Sequence[DepotClient], after: Newest | str, *, deadline: Deadline, what: str) -> Newest:
    """The newest version of all depots once it is another than `after`. Each is asked to answer when it has another one.

    If the order of `after` is known, an older one is not taken for a new one because only a depot that is behind answers.
    """
    if len(clients) == 1:
        return _wait_for_one(clients[0], after, deadline, what)
    latest: dict[DepotClient, Newest | WeightcastError] = {}
    seen = dict.fromkeys(clients, "")
    began = monotonic()

    def watch(client: DepotClient, until: Deadline) -> Newest:
        while True:
            newest = client.newest(deadline=until, after=seen[client], wait_s=min(_POLL_S, until.remaining()))
            if newest is not None and newest.version != seen[client]:
                seen[client] = newest.version
                return newest

    with closing(_answers(clients, watch, deadline, what, again=True)) as told:
        for found in told:
            if found is not None:
                latest[found[0]] = found[1]
            heard = len(latest) == len(clients) or monotonic() - began >= GRACE_S
            if heard and all(isinstance(one, WeightcastError) for one in latest.values()):
                if len(latest) == len(clients) and not any(isinstance(one, VersionNotSet) for one in latest.values()):
                    raise combined(
                        what, [(client.url, one) for client, one in latest.items() if isinstance(one, WeightcastError)]
                    )
                continue
            best = max((one for one in latest.values() if isinstance(one, Newest)), key=_sequence, default=None)
            if heard and best is not None and _is_newer(best, after):
                return best
    raise AssertionError("the answers end only with the deadline")


def _wait_for_one(client: DepotClient, after: Newest | str, deadline: Deadline, what: str) -> Newest:
    """The same in the thread of the caller: threads of our own would be ended a moment after the answer has come."""
    seen = after if isinstance(after, str) else after.version
    while True:
        deadline.check(what)
        try:
            newest = client.newest(deadline=deadline, after=seen, wait_s=min(_POLL_S, deadline.remaining()))
        except VersionNotSet:
            sleep(min(_AGAIN_S, deadline.remaining()))
            continue
        except (DeadlineExceeded, UpdateCancelled):
            raise
        except WeightcastError as error:
            raise combined(what, [(client.url, error)]) from error
        if newest is not None and _is_newer(newest, after):
            return newest
        seen = newest.version if newest is not None else seen  # of a depot that is behind; the next answer is worth a wait


def _is_newer(found: Newest, after: Newest | str) -> bool:
    return found.version != after if isinstance(after, str) else found.sequence > after.sequence


def _sequence(newest: Newest) -> int:
    return newest.sequence


def _best(told: Sequence[_Told[Newest | None]], what: str) -> Newest:
    found = [newest for _, newest in told if isinstance(newest, Newest)]
    if found:
        return max(found, key=_sequence)
    errors = [(client.url, error) for client, error in told if isinstance(error, WeightcastError)]
    unset = [error for _, error in errors if isinstance(error, VersionNotSet)]
    raise unset[0] if unset else combined(what, errors)


def _answers(
    clients: Sequence[DepotClient], question: _Question[_Answer], deadline: Deadline, what: str, *, again: bool = False
) -> Generator[_Told[_Answer] | None, None, None]:
    """The answers as they come, and None now and then. With `again` each depot is asked over and over.

    Closing it ends the threads that ask.
    """
    stop = threading.Event()
    until = Deadline.after(deadline.remaining(), cancelled=stop)
    told: SimpleQueue[_Told[_Answer]] = SimpleQueue()

    def run(client: DepotClient) -> None:
        while not stop.is_set():
            try:
                told.put((client, question(client, until)))
            except (DeadlineExceeded, UpdateCancelled):
                return  # the caller knows
            except WeightcastError as error:
                told.put((client, error))
                stop.wait(_AGAIN_S)
            if not again:
                return

    ask = logs.carried(run)
    threads = [threading.Thread(target=ask, args=(one,), name=f"ask {one.url}", daemon=True) for one in clients]
    try:
        for thread in threads:
            thread.start()
        while True:
            try:
                yield told.get(timeout=min(deadline.remaining(), TICK_S))
            except Empty:
                deadline.check(what)
                yield None
    finally:
        stop.set()
        end = Deadline.after(_JOIN_S)
        for thread in threads:
            thread.join(end.remaining())
