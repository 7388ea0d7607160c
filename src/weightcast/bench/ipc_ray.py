"""`python -m weightcast.bench.ipc_ray`: the same bytes through the object store of Ray, to an actor with live tensors."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import ray

from weightcast.bench.ipc_children import Message, serve
from weightcast.bench.ipc_tensors import Model, blank_tensors, digest_of
from weightcast.tensors.flat import Array

STORES = 2.5  # times the size of the tensors: room for a version while that before it is being dropped
SLACK_NBYTES = 80 << 20  # the least that Ray takes
DROPPED_S = 0.3  # until the store has noticed that nobody refers to the last version


class Engine:
    """The actor: a process of its own."""

    def __init__(self, nbytes: int) -> None:
        self._arrays = blank_tensors(nbytes)

    def take(self, stored: list[ray.ObjectRef[dict[str, Array]]]) -> float:
        """Map everything and copy it; the moment at which that was done. (A reference in a list is not fetched before.)"""
        sent = ray.get(stored[0])
        for name, array in self._arrays.items():
            np.copyto(array.view(np.uint16), sent[name])
        return time.monotonic()

    def digest(self) -> str:
        """Of all tensors."""
        return digest_of(self._arrays)


class Trainer:
    """The driver, with a cluster of this host alone that ends with it."""

    def begin(self, directory: str, nbytes: int, seed: int, timeout_s: float) -> Message:
        """Start Ray and the actor. Where `directory` is long, Ray refuses: its sockets are in it."""
        self._timeout_s = timeout_s
        remote = self._start(directory, int(nbytes * STORES) + SLACK_NBYTES)
        self._model = Model(nbytes, seed)
        self._sent = {name: array.view(np.uint16) for name, array in self._model.tensors.items()}  # a dtype that Ray knows
        self._engine = remote(Engine).remote(nbytes)
        ray.get(self._engine.digest.remote(), timeout=timeout_s)
        return {}

    def _start(self, directory: str, store_nbytes: int) -> Any:
        """Start Ray; what makes an actor of a class."""
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
            object_store_memory=store_nbytes, _temp_dir=directory, _node_ip_address="127.0.0.1",
        )  # fmt: skip
        return ray.remote

    def change(self, number: int) -> Message:
        """Make it another version."""
        self._model.change(number)
        time.sleep(DROPPED_S)
        return {}

    def move(self) -> Message:
        """Put everything, and let the actor take it."""
        began_s = time.monotonic()
        stored = ray.put(self._sent)
        ended_s = ray.get(self._engine.take.remote([stored]), timeout=self._timeout_s)
        return {"began_s": began_s, "ended_s": ended_s}

    def digest(self) -> Message:
        """Of all tensors of both."""
        return {"digest": self._model.digest(), "taken": ray.get(self._engine.digest.remote(), timeout=self._timeout_s)}

    def close(self) -> None:
        """End what was started."""
        ray.shutdown()


def run(trainer: Trainer) -> None:
    """Answer the bench until it closes the input."""
    try:
        serve({"begin": trainer.begin, "change": trainer.change, "move": trainer.move, "digest": trainer.digest})
    finally:
        trainer.close()


if __name__ == "__main__":
    run(Trainer())
