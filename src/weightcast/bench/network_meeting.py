"""How two processes of the bench of the network find each other, and what they move when it is one piece of memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from weightcast.bench.ipc_tensors import Model, blank_tensors
from weightcast.clock import Deadline
from weightcast.tensors.flat import Array, Bytes, flat_bytes

_LOOK_S = 0.02


def leave(directory: str, name: str, data: bytes) -> None:
    """Put something where the other process finds it, whole."""
    path = Path(directory) / name
    beside = path.with_suffix(".new")
    beside.write_bytes(data)
    beside.rename(path)


def find(directory: str, name: str, deadline: Deadline) -> bytes:
    """What the other process has left, or will."""
    path = Path(directory) / name
    while not path.exists():
        deadline.check(f"waiting for {path}")
        time.sleep(_LOOK_S)
    return path.read_bytes()


class OnePiece:
    """The tensors of a model one after the other in one piece of memory: what moves fastest. `tensors` are views of it."""

    def __init__(self, nbytes: int, seed: int | None) -> None:
        """A trainer's, or, without a seed, a receiver's: every page of it is touched."""
        self._model = None if seed is None else Model(nbytes, seed)
        tensors = blank_tensors(nbytes) if self._model is None else self._model.tensors
        self.memory, self.tensors = _in_one_piece(tensors)
        if self._model is not None:
            self._model.tensors = self.tensors

    def change(self, number: int) -> None:
        """Make it another version; a receiver has none of its own."""
        if self._model is not None:
            self._model.change(number)


def _in_one_piece(tensors: Mapping[str, Array]) -> tuple[Bytes, dict[str, Array]]:
    memory = np.ones(sum(array.nbytes for array in tensors.values()), dtype=np.uint8)
    views: dict[str, Array] = {}
    at = 0
    for name, array in tensors.items():
        place = memory[at : at + array.nbytes]
        place[:] = flat_bytes(array)
        views[name] = place.view(array.dtype).reshape(array.shape)
        at += array.nbytes
    return memory, views
