"""`python -m weightcast.bench.update_trainer`: one trainer rank that publishes from memory, for `weightcast bench update`.

One rank alone publishes whole tensors for its host (`ipc`), several publish boxes for other hosts (`shares`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import numpy as np

from weightcast.bench.ipc_children import Message, serve
from weightcast.bench.model_versions import as_bf16, flip_all, flip_some
from weightcast.publish.depot_publisher import DepotPublisher
from weightcast.publish.publication import Publication
from weightcast.publish.publisher import Publisher
from weightcast.publish.shares import Shard
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.store import Store
from weightcast.tensors.flat import Array


class Trainer:
    """Holds the weights of a version of a store, or its share of their rows, changes them and publishes them."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        self._number = 0

    def begin(self, kind: str, directory: str, store: str, version: str, rank: int, ranks: int, seed: int) -> Message:
        """Take the weights and listen; tells where."""
        self._random = np.random.default_rng([seed, rank])
        whole = {name: array.view(np.uint16) for name, array in Store(store).load(version).items()}
        self._shapes = {name: array.shape for name, array in whole.items()}
        self._starts = {name: rank * len(array) // ranks for name, array in whole.items()}
        stops = {name: (rank + 1) * len(array) // ranks for name, array in whole.items()}
        self._bits = {name: array[self._starts[name] : stops[name]].copy() for name, array in whole.items()}
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)  # all ranks are on one host
        deltas = DeltaPolicy(threads=threads)
        self._publish: Callable[[str, Mapping[str, object]], Publication]
        if kind == "ipc":
            publisher = self._opened.enter_context(Publisher(f"ipc://{directory}", deltas=deltas))
            self._publish, url = publisher.publish, publisher.url
        else:
            depot = self._opened.enter_context(
                DepotPublisher("127.0.0.1:0", rank=rank, ranks=ranks, threads=threads, deltas=deltas)
            )
            self._publish, url = depot.publish, depot.url
        return {"url": url}

    def publish(self, version: str, change: str) -> Message:
        """Change every weight ("full") or one in a hundred ("delta"), and publish.

        Tells the seconds, those of CPU, and what it became.
        """
        self._number += 1
        for array in self._bits.values():
            if change == "full":
                flip_all(array, self._number)
            elif array.size:
                flip_some(array, self._random)
        tensors = {name: self._published(name, array) for name, array in as_bf16(self._bits)}
        began, used = time.perf_counter(), time.process_time()
        publication = self._publish(version, tensors)
        taken, used = time.perf_counter() - began, time.process_time() - used
        return {"publish_s": taken, "cpu_s": used, "kind": "delta" if publication.manifest.payloads else "full"}

    def _published(self, name: str, array: Array) -> object:
        shape = self._shapes[name]
        return array if array.shape == shape else Shard(array, shape, (self._starts[name], *(0 for _ in shape[1:])))


def main() -> None:
    """Answer the bench until it closes the input."""
    with ExitStack() as opened:
        trainer = Trainer(opened)
        serve({"begin": trainer.begin, "publish": trainer.publish})


if __name__ == "__main__":
    main()
