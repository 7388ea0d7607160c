"""Digests of bytes that somebody else writes, in any order."""

import random
import threading
from itertools import pairwise

import numpy as np
import pytest

from weightcast.tensors.digest import array_digest
from weightcast.worker.hashing import LandedDigest, RunningDigest


def stretches(total: int, rng: random.Random) -> list[tuple[int, int]]:
    edges = sorted({0, total, *(rng.randrange(total) for _ in range(20))})
    return [(start, stop - start) for start, stop in pairwise(edges)]


@pytest.mark.parametrize("seed", range(8))
def test_bytes_that_land_in_any_order_have_the_digest_of_the_whole(seed):
    rng = random.Random(seed)
    data = np.random.default_rng(seed).integers(0, 256, 100_003, dtype=np.uint8)
    memory, running = np.zeros_like(data), RunningDigest("xxh3-128")
    digest = LandedDigest(memory, running)
    parts = stretches(len(data), rng)
    rng.shuffle(parts)
    for start, nbytes in parts:
        memory[start : start + nbytes] = data[start : start + nbytes]
        digest.add(start, nbytes)
    memory[:] = 0  # everything was hashed as it came
    assert running.finish(memory[: len(data)], lambda: None) == array_digest(data)


def test_what_has_not_come_is_read_at_the_end():
    data = np.arange(5000, dtype=np.uint8)
    running = RunningDigest("xxh3-128")
    LandedDigest(data, running).add(100, 200)
    assert running.finish(data, lambda: None) == array_digest(data)


def test_several_threads_may_tell_what_landed():
    data = np.random.default_rng(5).integers(0, 256, 1 << 22, dtype=np.uint8)
    running = RunningDigest("xxh3-128")
    digest, parts = LandedDigest(data, running), stretches(len(data), random.Random(5))
    threads = [
        threading.Thread(target=lambda share=share: [digest.add(*part) for part in share])
        for share in (parts[::3], parts[1::3], parts[2::3])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert running.finish(None, lambda: None) == array_digest(data)
