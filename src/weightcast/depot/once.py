"""Answers that many ask for and one thread works out, kept for the next who asks, in bounded memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from weightcast.clock import Deadline

_LOOK_S = 0.1  # how late a cancellation is noticed while another thread works

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Once(Generic[K, V]):
    """Values by key, each worked out by one thread while others that want it wait. Any thread may call.

    Those that were asked for last are kept, up to `room` in all, where `weigh` tells what one takes (default: all the same).
    """

    def __init__(self, room: int, weigh: Callable[[V], int] = lambda _: 1) -> None:
        self._room, self._weigh = room, weigh
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._weight = 0
        self._running: dict[K, threading.Event] = {}

    def get(self, key: K, work: Callable[[], V], *, deadline: Deadline, what: str) -> V:
        """The value of a key: kept, or what `work` returns. If the work of another thread fails, it is tried here."""
        while True:
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
                running = self._running.get(key)
                if running is None:
                    done = self._running[key] = threading.Event()
                    break
            while not running.wait(min(deadline.remaining(), _LOOK_S)):
                deadline.check(what)
        try:
            value = work()
            with self._lock:
                self._keep(key, value)
            return value
        finally:
            with self._lock:
                del self._running[key]
            done.set()

    def kept(self) -> list[tuple[K, V]]:
        """Everything that is kept, that which was asked for last at the end."""
        with self._lock:
            return list(self._kept.items())

    def peek(self, key: K) -> V | None:
        """A value if it is kept, which it then is as one that was just asked for."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: K, value: V) -> None:
        self._kept[key] = value
        self._weight += self._weigh(value)
        while self._weight > self._room and self._kept:
            _, dropped = self._kept.popitem(last=False)
            self._weight -= self._weigh(dropped)


class Turns:
    """Only so many do something at a time: what each needs of memory is bounded, and so it is for all."""

    def __init__(self, count: int) -> None:
        self._places = threading.Semaphore(count)

    @contextmanager
    def taken(self, *, deadline: Deadline, what: str) -> Iterator[None]:
        """Wait for a turn, have it for as long as the context lasts."""
        while not self._places.acquire(timeout=min(deadline.remaining(), _LOOK_S)):
            deadline.check(what)
        try:
            yield
        finally:
            self._places.release()
