"""A connection that is worth keeping from one update to the next."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from weightcast.errors import DeadlineExceeded, UpdateCancelled, WeightcastError
from weightcast.transports.base import LandingReceiver, MappedReceiver, Receiver
from weightcast.transports.registry import Source, open_receiver

T = TypeVar("T")
_LASTING = (MappedReceiver, LandingReceiver)  # they are connected, or have memory mapped or registered
_Key = tuple[str, int]


class KeptReceiver:
    """Opens receivers, and keeps the last one that is connected, for whoever asks for the same source next.

    It is closed when another source is asked for, by `close`, and when this object goes. Any thread may call.
    """

    def __init__(self) -> None:
        self._kept: dict[_Key, Receiver] = {}  # one at most; it is not here while it is used
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._kept)

    def open(self, source: Source, *, rank: int, ask: Callable[[Receiver], T]) -> tuple[Use, T]:
        """The receiver of a source and its answer to a first question. It is the caller's alone until the use is over.

        If one that was kept fails at the question, its other end has gone since: then a new one is opened and asked.
        """
        use = self._use(source, rank)
        try:
            return use, ask(use.receiver)
        except BaseException as error:
            use.drop()
            stale = use.kept and isinstance(error, WeightcastError)
            if not stale or isinstance(error, DeadlineExceeded | UpdateCancelled):
                raise
        return self.open(source, rank=rank, ask=ask)  # nothing is kept any more, so this one is new

    def close(self) -> None:
        """Close what is kept. The next use opens it again."""
        with self._lock:
            kept = list(self._kept.values())
            self._kept.clear()
        for receiver in kept:
            receiver.close()

    def _use(self, source: Source, rank: int) -> Use:
        key = (source, rank) if isinstance(source, str) else None
        with self._lock:
            found = self._kept.pop(key, None) if key is not None else None
        if found is not None:
            return Use(found, self, source, key, kept=True)
        self.close()
        receiver = open_receiver(source, rank=rank)
        return Use(receiver, self, source, key, given=receiver is source)

    def _keep(self, key: _Key, receiver: Receiver) -> bool:
        """Take a receiver in; False if another one was kept meanwhile."""
        with self._lock:
            if not self._kept:
                self._kept[key] = receiver
            return self._kept.get(key) is receiver


class Use:
    """A receiver while it is used. Leaving the context without an error keeps it for the next use, if it is worth that;
    leaving it with one closes it. One that the caller opened is his own: it is neither kept nor closed.
    """

    _outlasts = False

    def __init__(
        self,
        receiver: Receiver,
        owner: KeptReceiver,
        source: Source,
        key: _Key | None,
        *,
        kept: bool = False,
        given: bool = False,
    ) -> None:
        self.receiver, self.source, self.kept = receiver, source, kept
        self._owner, self._key, self._over = owner, key, given

    def __enter__(self) -> Receiver:
        return self.receiver

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None and self._outlasts:
            return
        if kind is None and not self._over and self._key is not None and isinstance(self.receiver, _LASTING):
            self._over = self._owner._keep(self._key, self.receiver)
        self.drop()

    def outlast(self) -> Callable[[], None]:
        """Leave it open beyond the context: the caller says when nobody needs it any more, and then it is closed."""
        self._outlasts = True
        return self.drop

    def drop(self) -> None:
        """Close it and do not keep it. Safe twice."""
        over, self._over = self._over, True
        if not over:
            self.receiver.close()


def _close_all(kept: dict[_Key, Receiver]) -> None:
    for receiver in kept.values():
        receiver.close()
