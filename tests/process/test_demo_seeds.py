"""The whole demo for several seeds: the reward rises, and the weights are equal at the end."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
def test_the_reward_doubles_at_least_for_every_seed(seed, tmp_path):
    command = [sys.executable, "-m", "weightcast", "demo", "--seed", str(seed), "--json", "--out", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)["summary"]
    assert summary["equal"]
    assert summary["rise"] > 4  # 2 is promised; it is 8 where it goes as it should
