"""The bench of the network on small tensors: it measures every way and every rival, and leaves nothing behind."""

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from weightcast.bench import network_ways
from weightcast.bench.network_bench import NetworkSettings, _Measuring
from weightcast.bench.network_ways import HTTP, LENT, NIXL, READ, RIVALS, STORED, TCP, missing
from weightcast.cli.main import cli

from .leftovers import bench_dirs, left_since

MEMORY = Path("/dev/shm")
MIB = 1 << 20


@pytest.fixture
def nothing_left():
    children, files = set(psutil.Process().children()), bench_dirs()
    yield
    assert not left_since(files)
    assert set(psutil.Process().children()) <= children


@pytest.mark.parametrize(
    "way",
    [
        HTTP,
        pytest.param(STORED, marks=pytest.mark.slow),
        pytest.param(READ, marks=pytest.mark.slow),
        pytest.param(NIXL, marks=pytest.mark.slow),
        pytest.param(LENT, marks=pytest.mark.slow),
        *(pytest.param(rival, marks=pytest.mark.slow) for rival in RIVALS),
    ],
    ids=lambda way: way.kind,
)
def test_everyone_moves_the_same_bytes_and_ends(way, nothing_left, monkeypatch):
    if missing(way):
        pytest.skip(missing(way))
    monkeypatch.setattr(network_ways, "WARM_UP", 1)
    measuring = _Measuring(NetworkSettings(nbytes=MIB, rounds=2), MIB, lambda _: None)
    with ExitStack() as opened:
        taken = measuring._interleaved([measuring._started(way, opened)])[way.kind]
    assert len(taken.steady_s) == 2
    assert all(seconds > 0 for seconds in (taken.cold_s, *taken.steady_s))
    if way in (HTTP, STORED, NIXL, LENT):
        row = measuring._our_row(way, {way.kind: taken, TCP.kind: taken})
        assert row["over_tcp"] == 1.0
        assert 0 < row["stage_s"] < row["s"]
        assert row["noticed_s"] < row["s"]


@pytest.mark.slow
def test_a_quick_run_measures_everything_and_asserts_nothing(tmp_path, nothing_left):
    report_file = tmp_path / "report.json"
    arguments = ["--size", "2MiB", "--rounds", "2", "--no-rivals", "--json", str(report_file)]
    result = CliRunner().invoke(cli, ["bench", "network", *arguments])
    assert result.exit_code == 0, result.output
    report = json.loads(report_file.read_bytes())
    rows = {row["kind"]: row for row in report["rows"]}
    assert set(rows) == {way.kind for way in (TCP, READ, HTTP, NIXL, STORED, LENT)} - {LENT.kind if missing(LENT) else ""}
    for row in rows.values():
        if "missing" in row:
            continue
        assert row["rounds"] == len(row["all_s"]) == 2
        assert row["s"] == min(row["all_s"])
        assert row["gb_per_s"] > 0
        assert row["kind"] in result.output
        if row["role"] == "ours":
            assert row["over_tcp"] == pytest.approx(row["tcp_s"] / row["s"])
            assert row["tcp_s"] == min(row["all_tcp_s"])
    assert len(rows[TCP.kind]["tried"]) == 8
    assert not any(target["asserted"] for target in report["targets"].values())


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_being_interrupted_ends_all_processes_and_removes_all_files(how, nothing_left):
    command = [sys.executable, "-m", "weightcast", "bench", "network", "--size", "8MiB", "--rounds", "1000"]
    before = bench_dirs()
    bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        started, until = [], time.monotonic() + 60
        while not (len(started) >= 2 and bench_dirs() > before) and time.monotonic() < until:
            time.sleep(0.05)
            started = psutil.Process(bench.pid).children(recursive=True)
        assert started
        time.sleep(1)
        started = psutil.Process(bench.pid).children(recursive=True)
        bench.send_signal(how)
        _, said = bench.communicate(timeout=60)
    finally:
        bench.kill()
        bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert not psutil.wait_procs(started, timeout=20)[1]
