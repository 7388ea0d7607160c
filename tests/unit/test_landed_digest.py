"""Digests of bytes that somebody else writes, in any order."""

import random
import threading
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from weightcast.tensors.digest import array_digest
from weightcast.tensors.dtypes import DType
from weightcast.tensors.sums import array_sum
from weightcast.wire.manifest import TensorEntry
from weightcast.worker.hashing import LandedDigest, RunningDigest


@pytest.fixture(params=["digest", "sum of bytes", "sum of words", "sum of long words"])
def entry_of(request):
    """The entry of a tensor that has these bytes, with a digest of them or with a sum alone."""

    def make(data: np.ndarray) -> TensorEntry:
        dtype = {"sum of words": DType.BF16, "sum of long words": DType.F64}.get(request.param, DType.U8)
        shape = (len(data) // dtype.itemsize,)
        entry = TensorEntry(name="w", dtype=dtype, shape=shape, part=0, offset=0, nbytes=len(data), digest="")
        if request.param == "digest":
            return replace(entry, digest=array_digest(data))
        return replace(entry, sum=str(array_sum(entry.sum_spec, data.view(dtype.numpy))))

    return make


def stretches(total: int, rng: random.Random) -> list[tuple[int, int]]:
    edges = sorted({0, total, *(rng.randrange(total) for _ in range(20))})
    return [(start, stop - start) for start, stop in pairwise(edges)]


@pytest.mark.parametrize("seed", range(8))
def test_bytes_that_land_in_any_order_have_the_digest_of_the_whole(seed, entry_of):
    rng = random.Random(seed)
    data = np.random.default_rng(seed).integers(0, 256, 100_008, dtype=np.uint8)
    entry = entry_of(data)
    memory, running = np.zeros_like(data), RunningDigest(entry)
    digest = LandedDigest(memory, running)
    parts = stretches(len(data), rng)
    rng.shuffle(parts)
    for start, nbytes in parts:
        memory[start : start + nbytes] = data[start : start + nbytes]
        digest.add(start, nbytes)
    memory[:] = 0  # everything was hashed as it came
    assert running.finish(memory[: len(data)], lambda: None) == entry.proof


def test_what_has_not_come_is_read_at_the_end(entry_of):
    data = np.arange(5000, dtype=np.uint8)
    entry = entry_of(data)
    running = RunningDigest(entry)
    LandedDigest(data, running).add(100, 200)
    assert running.finish(data, lambda: None) == entry.proof


def test_several_threads_may_tell_what_landed(entry_of):
    data = np.random.default_rng(5).integers(0, 256, 1 << 22, dtype=np.uint8)
    entry = entry_of(data)
    running = RunningDigest(entry)
    digest, parts = LandedDigest(data, running), stretches(len(data), random.Random(5))
    threads = [
        threading.Thread(target=lambda share=share: [digest.add(*part) for part in share])
        for share in (parts[::3], parts[1::3], parts[2::3])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert running.finish(None, lambda: None) == entry.proof


def followed(digest: LandedDigest, memory: np.ndarray, offset: int, nbytes: int) -> bool:
    """Receive bytes as a thread does that hashes them chunk by chunk; whether it was its turn."""
    follow = digest.follow(offset)
    if follow is not None:
        for at in range(offset, offset + nbytes, 1000):
            follow(memory[at : min(at + 1000, offset + nbytes)].data)
    digest.add(offset, nbytes, followed=follow is not None)
    return follow is not None


def test_bytes_that_are_followed_are_hashed_once(entry_of):
    data = np.random.default_rng(6).integers(0, 256, 50_000, dtype=np.uint8)
    entry = entry_of(data)
    memory, running = data.copy(), RunningDigest(entry)
    digest = LandedDigest(memory, running)
    assert followed(digest, memory, 0, 12_345)
    assert not followed(digest, memory, 30_000, 20_000)  # there is a gap before it
    assert followed(digest, memory, 12_345, 17_655)
    memory[:] = 0
    assert running.finish(memory, lambda: None) == entry.proof


def test_what_comes_while_another_thread_follows_is_hashed_by_that_one(entry_of):
    data = np.random.default_rng(7).integers(0, 256, 9_000, dtype=np.uint8)
    entry = entry_of(data)
    memory, running = data.copy(), RunningDigest(entry)
    digest = LandedDigest(memory, running)
    follow = digest.follow(0)
    assert follow is not None
    assert digest.follow(0) is None
    assert not followed(digest, memory, 3_000, 6_000)
    follow(memory[:3_000].data)
    digest.add(0, 3_000, followed=True)
    memory[:] = 0
    assert running.finish(memory, lambda: None) == entry.proof


def test_a_thread_that_followed_and_received_nothing_lets_others_go_on(entry_of):
    data = np.arange(2_000, dtype=np.uint8)
    entry = entry_of(data)
    memory, running = data.copy(), RunningDigest(entry)
    digest = LandedDigest(memory, running)
    assert followed(digest, memory, 0, 0)
    assert followed(digest, memory, 0, 2_000)
    memory[:] = 0
    assert running.finish(memory, lambda: None) == entry.proof


def test_a_tensor_that_has_neither_yet_is_summed():
    data = np.arange(100, dtype=np.uint16)
    entry = TensorEntry(name="w", dtype=DType.U16, shape=(100,), part=0, offset=0, nbytes=200, digest="")
    assert RunningDigest(entry).finish(data.view(np.uint8), lambda: None) == str(array_sum(entry.sum_spec, data))


def test_tied_bytes_are_summed_under_the_smallest_of_their_names():
    data = np.arange(100, dtype=np.uint8)
    head = TensorEntry(name="head", dtype=DType.U8, shape=(100,), part=0, offset=0, nbytes=100, digest="", summed_as="embed")
    found = RunningDigest(head).finish(data, lambda: None)
    assert found == str(array_sum(replace(head, name="embed").spec, data)) != str(array_sum(head.spec, data))
