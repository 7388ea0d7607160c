"""The bench of updates in small: it takes versions from every source with real processes, and leaves nothing behind."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from click.testing import CliRunner

from weightcast.bench.update_bench import PHASES
from weightcast.cli.main import cli

from .leftovers import bench_dirs, left_since

MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_takes_versions_from_every_source_and_asserts_nothing(tmp_path):
    files, report_file = tmp_path / "files", tmp_path / "report.json"
    files.mkdir()
    before, dirs = set(psutil.Process().children(recursive=True)), bench_dirs()
    arguments = ["--quick", "--sizes", "2MiB", "--dir", str(files), "--json", str(report_file)]
    result = CliRunner().invoke(cli, ["bench", "update", *arguments])
    assert result.exit_code == 0, result.output
    report = json.loads(report_file.read_bytes())
    updates = [row for row in report["rows"] if row["kind"] == "update" and "missing" not in row]
    ways = ["full", "position 1", "position 2", "1 behind", "2 behind"]
    quiet = {(row["source"], row["nbytes"] // MIB, row["way"]): row for row in updates if not row["loaded"]}
    assert {key for key in quiet if key[1] == 4 and key[0] in ("file", "http")} == {
        (source, 4, way) for source in ("file", "http") for way in ways
    }
    assert {("ipc", 4, "full"), ("shares", 4, "full"), ("file", 2, "full"), ("file", 2, "2 behind")} <= set(quiet)
    for (source, _, way), row in quiet.items():
        assert row["mode"] == ("copy" if way == "full" else "delta")
        assert row["total_s"] == pytest.approx(sum(row[phase] for phase in PHASES), rel=0.5)  # medians of several
        assert {"front end", "rank 0", "rank 1"} <= set(row["cpu_s"])
        assert ("depot" in row["cpu_s"]) is (source == "http")
    full, delta = quiet["file", 4, "full"], quiet["file", 4, "position 1"]
    assert delta["bytes"] < 0.1 * full["bytes"]
    loaded = [row for row in updates if row["loaded"]]
    assert {row["source"] for row in loaded} == {"file", "http", "ipc", "shares"}
    assert all(row["longest_gap_ms"] >= row["usual_gap_ms"] > 0 for row in loaded)
    assert not any(target["asserted"] for target in report["targets"].values())
    assert not list(files.iterdir())
    assert not left_since(dirs)
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_ends_all_processes_and_removes_all_files(tmp_path):
    command = [sys.executable, "-m", "weightcast", "bench", "update", "--quick", "--dir", str(tmp_path)]
    bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        started = []
        until = time.monotonic() + 120
        while len(started) < 6 and time.monotonic() < until:  # a front end, two ranks, three trainers
            time.sleep(0.05)
            started = psutil.Process(bench.pid).children(recursive=True)
        assert len(started) >= 6
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
