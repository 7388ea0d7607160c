"""A bounded queue between whoever produces pieces and whoever consumes them, so that both work at the same time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.tensors.flat import Piece, Pieces

log = logs.get(__name__)

DEPTH = 2
_JOIN_S = 5.0
_LOOK_S = 0.1  # how late a cancellation is noticed while nothing comes


@dataclass(frozen=True)
class _Ended:
    error: BaseException | None


def ring(nbytes: int, depth: int = DEPTH) -> list[memoryview]:
    """The buffers that a producer must rotate through: one being consumed, `depth` waiting, one being filled."""
    return [memoryview(bytearray(nbytes)) for _ in range(depth + 2)]


def prefetched(produce: Callable[[], Pieces], *, deadline: Deadline, what: str, depth: int = DEPTH) -> Pieces:
    """The pieces of `produce()`, made in a thread that runs at most `depth` pieces ahead.

    An error of the producer is raised here, with its cause. If nothing comes before the deadline, `DeadlineExceeded` names
    `what`. Closing this iterator stops the producer after its current piece, closes it and joins the thread.
    """
    pipe: queue.Queue[Piece | _Ended] = queue.Queue(maxsize=depth)
    stop = threading.Event()
    thread = threading.Thread(target=logs.carried(_run), args=(produce, pipe, stop), name=f"prefetch {what}", daemon=True)
    thread.start()
    try:
        while True:
            try:
                item = pipe.get(timeout=min(deadline.remaining(), _LOOK_S))
            except queue.Empty:
                deadline.check(what)
                continue
            if isinstance(item, _Ended):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        stop.set()
        _join(thread, pipe, what)


def _run(produce: Callable[[], Pieces], pipe: queue.Queue[Piece | _Ended], stop: threading.Event) -> None:
    error: BaseException | None = None
    try:
        with closing(produce()) as pieces:
            for piece in pieces:
                pipe.put(piece)
                if stop.is_set():
                    return
    except BaseException as caught:  # noqa: BLE001 - it is raised again in the consumer's thread
        error = caught
    pipe.put(_Ended(error))


def _join(thread: threading.Thread, pipe: queue.Queue[Piece | _Ended], what: str) -> None:
    """Wait for the producer; taking what it still puts keeps it from blocking on a full queue."""
    deadline = Deadline.after(_JOIN_S)
    while thread.is_alive() and deadline.remaining() > 0:
        try:
            pipe.get(timeout=0.01)
        except queue.Empty:
            continue
    if thread.is_alive():
        log.warning("thread left", what=what, why="it is stuck in a read that does not return")
