"""The same call to many servers at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from weightcast import logs
from weightcast.errors import WeightcastError

MAX_THREADS = 128

_One = TypeVar("_One")
_Got = TypeVar("_Got")


def on_all(
    ones: Iterable[_One], call: Callable[[_One], _Got], *, interrupted: threading.Event | None = None
) -> list[_Got | WeightcastError]:
    """What the call gave for each, or the error of ours that it raised. Returns when all have ended.

    How long that takes is for `call` to limit. What is not an error of ours is raised, after all have ended. If the caller
    itself is interrupted, `interrupted` is set, so that calls which look at it end early.
    """
    several = list(ones)

    def caught(one: _One) -> _Got | WeightcastError:
        try:
            return call(one)
        except WeightcastError as error:
            return error

    if len(several) < 2:
        return [caught(one) for one in several]
    with ThreadPoolExecutor(min(len(several), MAX_THREADS), thread_name_prefix="fleet") as pool:
        try:
            return list(pool.map(logs.carried(caught), several))
        except BaseException:
            if interrupted is not None:
                interrupted.set()
            raise
