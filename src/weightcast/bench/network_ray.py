"""`python -m weightcast.bench.network_ray`: the same bytes between two nodes of Ray, from one object store to the other.

Two nodes, as on one Ray shares memory and nothing crosses a network: `weightcast bench ipc` measures that.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
from ray.cluster_utils import Cluster

from weightcast.bench.ipc_children import Message, serve
from weightcast.bench.ipc_ray import DROPPED_S, SLACK_NBYTES, STORES, Engine
from weightcast.bench.ipc_tensors import Model

_NODE = "receiver"  # a resource that only the second node has


class Trainer:
    """The driver, on the first of two nodes that end with it. The actor is on the second."""

    _cluster: Any = None

    def begin(self, directory: str, nbytes: int, seed: int, timeout_s: float) -> Message:
        """Start both nodes and the actor. Where `directory` is long, Ray refuses: its sockets are in it.

        RAY_TMPDIR must name it too: that is how all of Ray gets to know of it.
        """
        self._timeout_s = timeout_s
        store_nbytes = int(nbytes * STORES) + SLACK_NBYTES
        (Path(directory) / "ray").mkdir()
        self._cluster = Cluster()
        first = self._cluster.add_node(num_cpus=1, object_store_memory=store_nbytes, include_dashboard=False)
        self._cluster.add_node(num_cpus=1, object_store_memory=store_nbytes, resources={_NODE: 1})
        ray.init(address=first.address, log_to_driver=False, logging_level=logging.ERROR)
        self._model = Model(nbytes, seed)
        self._sent = {name: array.view(np.uint16) for name, array in self._model.tensors.items()}  # a dtype that Ray knows
        self._engine = cast("Any", ray.remote(resources={_NODE: 1})(Engine).remote(nbytes))  # methods made at run time
        ray.get(self._engine.digest.remote(), timeout=timeout_s)
        return {}

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
        """End both nodes."""
        ray.shutdown()
        if self._cluster is not None:
            self._cluster.shutdown()


def main() -> None:
    """Answer the bench until it closes the input."""
    trainer = Trainer()
    try:
        serve({"begin": trainer.begin, "change": trainer.change, "move": trainer.move, "digest": trainer.digest})
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
