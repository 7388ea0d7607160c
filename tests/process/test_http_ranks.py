"""Two ranks in processes of their own, which hold slices and hear of nothing but a depot."""

from __future__ import annotations

import json
import sys

import numpy as np

from weightcast import Store
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.tensors.digest import array_digest

from .children import TESTS

sys.path.insert(0, str(TESTS / "unit"))

from shard_models import by_hand, next_tensors, random_tensors

RANKS = 2


def told(child):
    line = child.stdout.readline()
    assert line, child.stderr.read()[-4000:]
    return json.loads(line)


def test_two_ranks_follow_a_depot_through_full_versions_deltas_and_gaps_between_them(start, memory_dir):
    store, rng = Store(memory_dir / "store"), np.random.default_rng(7)
    tensors, states = random_tensors(rng), {}
    for number, kind in enumerate(["full", "delta", "delta", "delta", "full", "delta"]):
        store.publish(f"v{number}", tensors, kind)
        states[f"v{number}"] = tensors
        tensors = next_tensors(rng, tensors, density=0.01, keep=("up",))
    with StoredShelf(store.path) as shelf, Depot(shelf) as depot:
        ranks = [start("http_rank", depot.url, rank, RANKS) for rank in range(RANKS)]
        assert all(told(rank)["ready"] for rank in ranks)
        # the first load, a delta, two at once; across a full version there is none
        for version, mode in [("v0", "copy"), ("v1", "delta"), ("v3", "delta"), ("v5", "copy")]:
            for child in ranks:
                child.stdin.write(version + "\n")
                child.stdin.flush()
            for rank, child in enumerate(ranks):
                answer = told(child)
                expected = {name: array_digest(array) for name, array in by_hand(states[version], rank, RANKS).items()}
                assert (answer["version"], answer["mode"]) == (version, mode)
                assert answer["digests"] == expected
                own = sum(array.nbytes for array in by_hand(states[version], rank, RANKS).values())
                most = {"v0": 1.02 * own, "v5": sum(array.nbytes for array in states[version].values())}
                assert answer["nbytes"] <= most.get(version, 0.2 * own)  # v5 is a delta on a full version: all is read
        for child in ranks:
            child.stdin.close()
            assert child.wait(30) == 0, child.stderr.read()
