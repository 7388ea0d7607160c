"""`weightcast bench vllm`, in small: it runs, reports, and its limits hold."""

import json
import subprocess
import sys


def test_a_delta_pauses_a_server_far_shorter_than_a_reload(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "weightcast", "bench", "vllm", "--size", "128MiB", "--rounds", "1", "--json", report]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(report.read_text())
    assert {row["kind"] for row in told["rows"]} == {"full", "delta", "reload"}
    assert all(row["cpu_s"] > 0 and row["gap_ms"] > 0 for row in told["rows"])
    assert all(row["s"] >= row["pause_ms"] / 1e3 > 0 for row in told["rows"])
    assert told["targets"]["delta.pause_over_reload"]["ok"]
    assert told["targets"]["delta.pause_over_reload"]["asserted"]
    assert not told["targets"]["delta.over_reload"]["asserted"]  # of a model that is so small
