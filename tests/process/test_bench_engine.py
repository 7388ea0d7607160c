"""The bench of the engine runs, compares with `transformers`, and leaves nothing behind."""

import json
import os

import psutil
import pytest
from click.testing import CliRunner

from weightcast.cli.main import cli


@pytest.mark.slow
def test_the_quick_bench_measures_and_finds_the_same_tokens(tmp_path):
    result = CliRunner().invoke(cli, ["bench", "engine", "--quick", "--json", str(tmp_path / "report.json")])
    assert result.exit_code == 0, result.output
    assert "same tokens" in result.output
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert [(row["preset"], row["ranks"], row["width"]) for row in report["rows"]] == [("tiny", 1, 1), ("tiny", 1, 2)]
    assert all(row["same_tokens"] == 1 for row in report["rows"])
    assert all(row["over_transformers"] == row["tokens_per_s"] / row["transformers_tokens_per_s"] for row in report["rows"])
    assert not report["targets"]["tiny.1_ranks.1_at_once.over_transformers"]["asserted"]
    assert report["targets"]["tiny.1_ranks.1_at_once.same_tokens"]["asserted"]
    assert not [child for child in psutil.Process(os.getpid()).children() if "serve" in child.cmdline()]
