"""Tensor-parallel ranks in processes of their own, without a front end, agree by gloo on what they commit."""

import json
import signal
import time

import numpy as np
import pytest

from weightcast import Store

from .children import end, start_module

RANKS = 3
GROUP_S = 5.0  # after which gloo gives a rank up


@pytest.fixture
def ranks(tmp_path):
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    store = Store(tmp_path / "store")
    store.publish("step_1", weights)
    weights["up"][::7] += 1
    weights["down"][:, 1] += 1
    store.publish("step_2", weights, mode="delta")
    weights["norm"] *= 2
    store.publish("step_3", weights, mode="delta")
    children = [start_module("agreeing_rank", rank, RANKS, tmp_path, GROUP_S) for rank in range(RANKS)]
    try:
        yield children
    finally:
        for child in children:
            end(child)


SHAPES = {"up": (12, 40), "down": (40, 12), "norm": (40,)}


def tell(child, version):
    child.stdin.write(f"{version}\n")
    child.stdin.flush()


def hear(child):
    line = child.stdout.readline()
    assert line, child.stderr.read()[-4000:]
    return json.loads(line)


def test_ranks_take_versions_together_and_none_goes_on_without_one_that_is_killed(ranks):
    for version, mode in (("step_1", "copy"), ("step_2", "delta"), ("step_9", None)):
        for child in ranks:
            tell(child, version)
        answers = [hear(child) for child in ranks]
        assert all(answer["same"] for answer in answers)
        if mode is not None:
            assert [(answer["mode"], answer["version"]) for answer in answers] == [(mode, version)] * RANKS
        else:  # no such version: each says so, and none waits for the others
            assert [(answer["error"], answer["version"]) for answer in answers] == [("version_not_found", "step_2")] * RANKS

    tell(ranks[2], "!step_3")
    for child in ranks[:2]:
        tell(child, "step_3")
    assert hear(ranks[2]) == {"stops": True}
    began = time.monotonic()
    ranks[2].send_signal(signal.SIGKILL)
    answers = [hear(child) for child in ranks[:2]]
    assert time.monotonic() - began < 10 * GROUP_S
    for answer in answers:
        assert (answer["error"], answer["version"], answer["same"]) == ("update_failed", "step_2", True)
        assert "the ranks could not agree" in answer["message"]
