"""`python -m weightcast.bench.network_ray`: the same bytes between two nodes of Ray, from one object store to the other.

Two nodes, as on one Ray shares memory and nothing crosses a network: `weightcast bench ipc` measures that.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from weightcast.bench.ipc_ray import Trainer, run

_NODE = "receiver"  # a resource that only the second node has


class TrainerOfTwo(Trainer):
    """The driver, on the first of two nodes that end with it. The actor is on the second."""

    _cluster: Any = None

    def _start(self, directory: str, store_nbytes: int) -> Any:
        """Start both nodes. RAY_TMPDIR must name the directory: that is how all of Ray gets to know of it."""
        (Path(directory) / "ray").mkdir()
        self._cluster = Cluster()
        first = self._cluster.add_node(num_cpus=1, object_store_memory=store_nbytes, include_dashboard=False)
        self._cluster.add_node(num_cpus=1, object_store_memory=store_nbytes, resources={_NODE: 1})
        ray.init(address=first.address, log_to_driver=False, logging_level=logging.ERROR)
        return ray.remote(resources={_NODE: 1})

    def close(self) -> None:
        """End both nodes."""
        super().close()
        if self._cluster is not None:
            self._cluster.shutdown()


if __name__ == "__main__":
    run(TrainerOfTwo())
