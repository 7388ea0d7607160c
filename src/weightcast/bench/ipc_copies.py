"""The limit of an update on one host: copying the same bytes twice, from the trainer and to the receiver."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np

from weightcast.tensors.flat import Array, flat_bytes


class Memcpys:
    """Copies tensors to memory of its own that is as large, every page of it touched. A context manager, for its threads."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        largest_first = sorted(tensors.values(), key=lambda array: -array.nbytes)
        self._pairs = [(np.ones(array.nbytes, dtype=np.uint8), flat_bytes(array)) for array in largest_first]
        nbytes = sum(array.nbytes for array in largest_first)
        self._piece = np.ones(nbytes, dtype=np.uint8), np.ones(nbytes, dtype=np.uint8)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="bench-copy")
        self.two(1)
        self.two(2)
        self.two_of_one_piece()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._threads.shutdown()

    def two(self, threads: int) -> float:
        """The seconds that it takes to copy everything two times, one time after the other."""
        began = time.perf_counter()
        for _ in range(2):
            left = deque(self._pairs)
            if threads == 1:
                _copy(left)
            else:
                for done in [self._threads.submit(_copy, left) for _ in range(threads)]:
                    done.result()
        return time.perf_counter() - began

    def two_of_one_piece(self) -> float:
        """The same, as if all tensors were one: large copies go past the caches, which no copy of small tensors does."""
        began = time.perf_counter()
        for _ in range(2):
            np.copyto(*self._piece)
        return time.perf_counter() - began


def _copy(left: deque[tuple[Array, Array]]) -> None:
    while True:
        try:
            target, source = left.popleft()
        except IndexError:
            return
        np.copyto(target, source)
