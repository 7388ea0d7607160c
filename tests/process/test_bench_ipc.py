"""The bench of same-host updates on small tensors: it measures every way and every rival, and leaves nothing behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from weightcast.bench import ipc_bench
from weightcast.bench.ipc_rivals import RIVALS, measure_rival
from weightcast.cli.main import cli

from .leftovers import bench_dirs, left_since

MEMORY = Path("/dev/shm")
ALL = ("swap", "swap, 2 receivers", "copy", "stream")


def test_a_quick_run_measures_all_ways_and_asserts_none(tmp_path):
    children, files, report_file = set(psutil.Process().children()), bench_dirs(), tmp_path / "report.json"
    arguments = ["--size", "2MiB", "--rounds", "2", "--no-rivals", "--json", str(report_file)]
    result = CliRunner().invoke(cli, ["bench", "ipc", *arguments])
    assert result.exit_code == 0, result.output
    report = json.loads(report_file.read_bytes())
    rows = {row["kind"]: row for row in report["rows"]}
    assert tuple(rows) == ALL
    assert {kind: row["receivers"] for kind, row in rows.items() if row["receivers"] > 1} == {"swap, 2 receivers": 2}
    for row in rows.values():
        assert row["rounds"] == 2
        assert 0 < row["s"] <= row["median_s"]
        assert 0 < row["publish_s"] < row["s"]
        assert 0 < row["noticed_s"] < row["s"]
        assert 0 < row["stage_s"] < row["s"]
        assert row["over_memcpys"] == pytest.approx(row["s"] / row["memcpys_s"])
        assert len(row["all_rounds"]) == 5
        assert len(row["all_memcpys_s"]) == len(row["all_two_threads_s"]) == len(row["all_one_piece_s"]) == 3
        assert row["cold_s"] == row["all_rounds"][0]["total_s"]
        assert row["s"] == min(one["total_s"] for one in row["all_rounds"][3:])
        assert row["kind"] in result.output
    assert not any(target["asserted"] for target in report["targets"].values())
    assert not left_since(files)
    assert set(psutil.Process().children()) <= children


@pytest.mark.slow
@pytest.mark.parametrize("rival", RIVALS, ids=lambda one: one.kind)
def test_a_rival_moves_the_same_bytes_and_ends(rival):
    if rival.lacking:
        pytest.skip(f"{rival.lacking} not installed")
    before, between = set(psutil.Process().children(recursive=True)), []
    with ipc_bench.scratch_dir() as scratch:
        seconds = measure_rival(
            rival, nbytes=1 << 20, seed=0, rounds=3, directory=scratch, between=lambda: between.append(1),
            progress=lambda _: None,
        )  # fmt: skip
    assert len(seconds) == 3
    assert all(one > 0 for one in seconds)
    assert len(between) == 2
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_being_interrupted_ends_all_processes_and_removes_all_files(how):
    files = bench_dirs()
    command = [sys.executable, "-m", "weightcast", "bench", "ipc", "--size", "8MiB", "--rounds", "1000"]
    bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        started, until = [], time.monotonic() + 60
        while not (started and bench_dirs() > files) and time.monotonic() < until:
            time.sleep(0.05)
            started = psutil.Process(bench.pid).children(recursive=True)
        assert started
        time.sleep(1)
        bench.send_signal(how)
        _, said = bench.communicate(timeout=60)
    finally:
        bench.kill()
        bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert not left_since(files)
    assert not psutil.wait_procs(started, timeout=20)[1]
