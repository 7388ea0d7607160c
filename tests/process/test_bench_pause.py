"""The bench of pauses on a tiny model: it measures every way to commit, and leaves nothing behind, also on Ctrl-C."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from click.testing import CliRunner

from weightcast.cli.main import cli


@pytest.mark.slow
def test_a_tiny_run_measures_all_commits_and_asserts_none(tmp_path):
    files, report_file = tmp_path / "files", tmp_path / "report.json"
    files.mkdir()
    before = set(psutil.Process().children(recursive=True))
    arguments = ["--size", "2MiB", "--rounds", "1", "--dir", str(files), "--json", str(report_file)]
    result = CliRunner().invoke(cli, ["bench", "pause", *arguments])
    assert result.exit_code == 0, result.output
    report = json.loads(report_file.read_bytes())
    rows = {row["kind"]: row for row in report["rows"]}
    assert {kind: rows[kind]["rounds"] for kind in rows if kind != "memcpy"} == {
        "copy": 2, "swap": 3, "first_delta_swap": 1, "delta_swap": 2, "delta": 2,
    }  # fmt: skip
    assert rows["memcpy"]["rounds"] == 4
    assert all(0 < row["ms"] <= row["median_ms"] for row in rows.values() if "ms" in row)
    assert not any(target["asserted"] for target in report["targets"].values())
    assert all("too much" in target["why"] for target in report["targets"].values())
    for kind in ("copy", "swap", "delta_swap", "delta"):
        assert kind in result.output
    assert not list(files.iterdir())
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_removes_all_files(tmp_path):
    command = [sys.executable, "-m", "weightcast", "bench", "pause", "--size", "2MiB", "--dir", str(tmp_path)]
    bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        started = []
        until = time.monotonic() + 60
        while len(started) < 4 and time.monotonic() < until:  # two that copy, two ranks
            time.sleep(0.05)
            started = psutil.Process(bench.pid).children(recursive=True)
        assert len(started) == 4
        bench.send_signal(signal.SIGINT)
        _, said = bench.communicate(timeout=60)
    finally:
        bench.kill()
        bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())
    assert not psutil.wait_procs(started, timeout=20)[1]
