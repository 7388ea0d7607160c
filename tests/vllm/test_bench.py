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
    idle, loaded = ({row["kind"]: row for row in told["rows"] if row["loaded"] is streams} for streams in (False, True))
    assert set(idle) == set(loaded) == {"full", "delta", "reload"}
    for row in (*idle.values(), *loaded.values()):
        assert row["total_s"] >= row["s"] >= row["pause_s"] > 0
    assert all(sum(row["cpu_s"].values()) > 0 for row in idle.values())
    assert all(row["longest_gap_ms"] >= row["commit_gap_ms"] > 0 for row in loaded.values())
    assert 0 < idle["delta"]["bytes"] < 0.1 * idle["full"]["bytes"]
    assert told["targets"]["delta.pause_over_reload"]["ok"]
    assert told["targets"]["delta.pause_over_reload"]["asserted"]
    assert not told["targets"]["delta.over_reload"]["asserted"]  # of a model that is so small
