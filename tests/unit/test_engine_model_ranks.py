"""Two real processes that divide a model compute what one computes alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_rank_child import run_alone

from weightcast.engines.embedded.drafts import init_draft
from weightcast.engines.embedded.presets import init_checkpoint

CHILD = Path(__file__).with_name("engine_rank_child.py")
KINDS = {
    "dense tied": {"preset": "tiny"},
    "dense untied": {"preset": "tiny", "tied": False},
    "one key head for both ranks": {"preset": "tiny", "num_key_value_heads": 1},
    "experts sharded": {"preset": "moe"},
    "experts replicated": {"preset": "moe", "experts": "replicated"},
    "mtp head": {"preset": "tiny", "draft": "mtp"},
}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What two ranks computed, and the jobs. All jobs run in one pair of processes."""
    directory = tmp_path_factory.mktemp("ranks")
    jobs = []
    for index, changes in enumerate(KINDS.values()):
        kind = dict(changes)
        job = {"model": str(directory / f"model-{index}"), "experts": kind.pop("experts", "sharded")}
        draft = kind.pop("draft", None)
        init_checkpoint(job["model"], seed=4, **kind)
        if draft:
            job["draft"] = str(directory / f"draft-{index}")
            init_draft(job["draft"], job["model"], draft, seed=4)
        jobs.append(job)
    path = directory / "jobs.json"
    path.write_text(json.dumps(jobs))
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    children = [
        subprocess.Popen([sys.executable, CHILD, path, str(rank), "2"], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for child in children:
            _, errors = child.communicate(timeout=100)
            assert child.returncode == 0, errors
    finally:
        for child in children:
            child.kill()
            child.communicate()
    return jobs, [np.load(path.with_suffix(f".{rank}.npz")) for rank in range(2)]


@pytest.mark.parametrize("index", range(len(KINDS)), ids=[kind.replace(" ", "-") for kind in KINDS])
def test_two_ranks_equal_one(both, index):
    jobs, ranks = both
    wanted, routing = run_alone(jobs[index])
    found = np.concatenate([rank[f"logits-{index}"] for rank in ranks], axis=1)
    assert found.shape[1] == 260  # an odd vocabulary, padded
    assert np.isneginf(found[:, 259]).all()
    np.testing.assert_allclose(found[:, :259], wanted, atol=3e-5, rtol=3e-5)
    for rank in ranks:
        assert np.array_equal(rank[f"routing-{index}"], routing)


def test_ranks_speak_as_often_as_their_layers_need(both):
    """Per pass: the embedding, and two per layer; a block of replicated experts needs nobody."""
    calls = {kind: {int(rank[f"calls-{index}"]) for rank in both[1]} for index, kind in enumerate(KINDS)}
    passes = 3
    assert calls["dense tied"] == {passes * (1 + 2 * 2)}
    assert calls["experts sharded"] == {passes * (1 + 3 * 2)}
    assert calls["experts replicated"] == {passes * (1 + 3 * 2 - 2)}
    assert calls["mtp head"] == {2 * passes * (1 + 2 * 2)}
