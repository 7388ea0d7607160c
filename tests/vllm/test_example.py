"""`examples/vllm_update.py`, run as a user runs it."""

import sys
from pathlib import Path

from processes import OwnProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_update.py"
RUN_S = 400


def test_a_running_server_takes_a_delta_and_goes_back_and_nothing_is_left():
    example = OwnProcess([sys.executable, EXAMPLE], {})
    try:
        status = example.wait_end(RUN_S)
        said = example.said()
        assert status == 0, said
        assert "step_1: a delta on it" in said
        assert said.count("update to step_0: staged in") == 2
        assert said.count("update to step_1: staged in") == 1
        assert said.rstrip().endswith("step_0 answers as before")
        assert not list(example.tmp_dir.glob("wc-*")), "its temporary directory is left"
    finally:
        left = example.end()
    assert not left
