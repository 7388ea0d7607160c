"""The fan-out bench and relays on hosts with links of their own: network namespaces, where this machine can have them."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from click.testing import CliRunner

from weightcast.bench import fanout_bench
from weightcast.bench.fanout_host import ROLES
from weightcast.bench.ipc_children import Child
from weightcast.cli.main import cli
from weightcast.clock import Deadline
from weightcast.errors import InvalidInput

from .leftovers import bench_dirs, left_since
from .namespaces import namespaces_of, network, skip_without_namespaces

HOST = "weightcast.bench.fanout_host"


@pytest.mark.slow
def test_a_small_run_reports_times_and_bytes_and_leaves_nothing_behind(tmp_path):
    skip_without_namespaces()
    children, files, report_file = set(psutil.Process().children()), bench_dirs(), tmp_path / "report.json"
    arguments = ["--hosts", "3", "--size", "6MiB", "--rate", "200", "--rounds", "1", "--json", str(report_file)]
    result = CliRunner().invoke(cli, ["bench", "fanout", *arguments])
    assert result.exit_code == 0, result.output
    report = json.loads(report_file.read_bytes())
    one, everyone, killed = report["rows"]
    assert [row["kind"] for row in report["rows"]] == ["1 host", "3 hosts", "3 hosts, relay 2 killed half-way"]
    assert (len(one["host_s"]), len(everyone["host_s"]), len(killed["host_s"])) == (1, 3, 2)
    assert everyone["over_one"] == pytest.approx(everyone["s"] / one["s"])
    assert one["s"] > one["nbytes"] * 8 / 200e6 * 0.9  # the links are capped
    assert 1 <= one["sent_over_version"] < 1.5
    assert 1 <= everyone["sent_over_version"] < 2
    assert not any(target["asserted"] for target in report["targets"].values())
    assert set(report["targets"]) == {"3_hosts.over_one", "publisher.sent_over_version"}
    assert everyone["kind"] in result.output
    assert namespaces_of(os.getpid()) == []
    assert not left_since(files)
    assert set(psutil.Process().children()) <= children


def test_being_interrupted_removes_all_namespaces_processes_and_files():
    skip_without_namespaces()
    files = bench_dirs()
    command = [sys.executable, "-m", "weightcast", "bench", "fanout", "--hosts", "2", "--size", "4MiB", "--rounds", "1000"]
    bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        started, until = [], time.monotonic() + 60
        while len(started) < 5 and time.monotonic() < until:
            time.sleep(0.05)
            started = psutil.Process(bench.pid).children(recursive=True)
        assert len(namespaces_of(bench.pid)) == 4
        bench.send_signal(signal.SIGINT)
        _, said = bench.communicate(timeout=60)
    finally:
        bench.kill()
        bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert "Traceback" not in said
    assert namespaces_of(bench.pid) == []
    assert not left_since(files)
    assert not psutil.wait_procs(started, timeout=20)[1]


def test_a_relay_whose_link_is_cut_in_the_middle_is_routed_around(memory_dir):
    with network(3, rate_bits=100_000_000) as net:
        urls = [f"http://{net.address(index)}:7070" for index in range(3)]
        deadline = Deadline.after(90)
        with (
            Child(HOST, "publisher", under=net.under(0)) as publisher,
            Child(HOST, "relay", under=net.under(1)) as first,
            Child(HOST, "relay", under=net.under(2)) as second,
        ):
            listen = "0.0.0.0:7070"
            publisher.ask("publisher", deadline, store=str(memory_dir / "p"), listen=listen, nbytes=24 << 20, seed=0)
            first.ask("follow", deadline, store=str(memory_dir / "1"), listen=listen, urls=urls[:1], stall_s=1.0)
            second.ask("follow", deadline, store=str(memory_dir / "2"), listen=listen, urls=urls[1::-1], stall_s=1.0)
            nbytes = publisher.ask("publish", deadline, version="v1")["nbytes"]
            while net.sent_nbytes(1) < nbytes // 3:
                deadline.check("relaying a third")
                time.sleep(0.02)
            net.set_link(1, up=False)
            sent = net.sent_nbytes(0)
            second.ask("settle", deadline, version="v1", timeout_s=60)
            assert net.sent_nbytes(0) - sent < nbytes  # it went on where it was
            net.set_link(1, up=True)
            first.ask("settle", deadline, version="v1", timeout_s=60)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (fanout_bench.FanoutSettings(hosts=1), "at least 2 hosts"),
        (fanout_bench.FanoutSettings(nbytes=10), "too few"),
        (fanout_bench.FanoutSettings(nbytes=1 << 50), "memory"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings, why):
    if why == "memory":
        skip_without_namespaces()
    with pytest.raises(InvalidInput, match=why):
        fanout_bench.run_fanout_bench(settings)


def test_without_root_it_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InvalidInput, match="root"):
        fanout_bench.run_fanout_bench(fanout_bench.FanoutSettings(nbytes=4 << 20))


def test_every_role_of_a_host_does_what_it_is_told_to_do():
    for role in ROLES.values():
        assert all(method.__doc__ for name, method in vars(role).items() if not name.startswith("_"))
