"""`weightcast demo` as a newcomer runs it: a few steps over each transport, with the kill, and what is left behind."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from weightcast.demo.sources import TRANSPORTS

RUN_S = 150
STEPS = 4


class Demo:
    """A run in a process of its own. Its temporary directory is its own, so that whatever lies there afterwards it left."""

    def __init__(self, *arguments, stdout=subprocess.PIPE, without=None):
        self.home = Path(tempfile.mkdtemp(prefix="wc-"))  # short: the paths of sockets must be
        self.tmp_dir, self.out_dir = self.home / "t", self.home / "out"
        self.tmp_dir.mkdir()
        command = [sys.executable, "-m", "weightcast", "demo", *arguments, "--out", str(self.out_dir)]
        environ = {**os.environ, "TMPDIR": str(self.tmp_dir)}
        if without is not None:
            (self.home / f"{without}.py").write_text("raise ImportError('it is as if not installed')")
            environ["PYTHONPATH"] = str(self.home)
        self.process = subprocess.Popen(command, env=environ, stdout=stdout, stderr=subprocess.PIPE, text=True)

    def finish(self):
        out, err = self.process.communicate(timeout=RUN_S)
        return self.process.returncode, out, err

    def processes(self):
        """Every process that was started with this run's temporary directory."""
        found = []
        for one in psutil.process_iter():
            try:
                if one.environ().get("TMPDIR") == str(self.tmp_dir) and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
            except psutil.Error:
                continue
        return found

    def left_behind(self):
        files = [path for path in self.tmp_dir.iterdir() if not path.name.startswith("torchinductor_")]  # a cache of torch's
        return [str(one) for one in self.processes()] + [str(path) for path in files]

    def wait_for(self, path, text):
        end = time.monotonic() + RUN_S
        while not (path.exists() and text in path.read_text()):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, f"{text!r} did not come"
            time.sleep(0.05)


@contextmanager
def demo(*arguments, **options):
    run = Demo(*arguments, **options)
    try:
        yield run
    finally:
        run.process.kill()
        for one in run.processes():
            one.kill()
        run.process.communicate()
        shutil.rmtree(run.home)


@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "file"])
def test_a_few_steps_lose_a_rank_and_end_with_equal_weights(transport):
    with demo("--transport", transport, "--steps", str(STEPS), "--seed", "3", "--json") as run:
        status, out, err = run.finish()
        report = json.loads(out)
        summary, recovery = report["summary"], report["summary"]["recovery"]
        assert err == ""
        assert summary["equal"], summary["problems"]
        assert status == (0 if summary["learned"] else 1)
        assert [step["committed"]["version"] for step in report["steps"]] == [f"step_{n}" for n in range(1, STEPS + 1)]
        assert {step["committed"]["kind"] for step in report["steps"]} == {"delta"}
        assert all(step["committed"]["mode"] == "delta" for step in report["steps"])
        assert summary["median_delta_nbytes"] < summary["full_nbytes"] / 5
        assert 0 < summary["median_density"] < 0.5
        assert (recovery["step"], recovery["rank"], recovery["version"]) == (3, 1, "step_2")
        assert recovery["lost_requests"] > 0
        assert recovery["lost_answers"] == 16 * recovery["lost_requests"]
        assert 0 < recovery["recovery_s"] < 60
        assert any("SIGKILL" in event["text"] for event in report["events"])
        assert max(step["gap"] for step in report["steps"]) < 0.2, "trainer and engine do not compute the same"
        assert Path(report["plot"]).read_bytes().startswith(b"\x89PNG")
        assert sorted(path.name for path in run.out_dir.iterdir()) == ["engine.log", "plot.png"]
        assert run.left_behind() == []


@pytest.mark.timeout(RUN_S)
def test_without_a_terminal_each_step_is_a_line_and_without_matplotlib_it_says_so():
    with demo("--no-tty", "--steps", "2", "--transport", "file", without="matplotlib") as run:
        status, out, err = run.finish()
        assert (status, err) == (1, "")
        lines = out.splitlines()
        assert lines[0].startswith("engine: 2 ranks at http://127.0.0.1:")
        assert len([line for line in lines if re.match(r"step +\d+  reward 0\.\d{3}  step_\d+ +delta ", line)]) == 2
        assert len([line for line in lines if re.match(r"step +2  ! ", line)]) == 3
        assert re.search(r"^final weights equal, bit for bit: yes \(step_2, sums:[0-9a-f]{32}\)$", out, re.MULTILINE)
        assert re.search(r"^plot +none: the plot needs matplotlib", out, re.MULTILINE)
        assert "less than 2: give it more --steps" in lines[-1]
        assert "\x1b" not in out


@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_whoever_interrupts_it_finds_nothing_left_and_no_noise_of_the_engine(number):
    terminal, side = pty.openpty()
    try:
        with demo("--steps", "400", stdout=side) as run:
            log = run.out_dir / "engine.log"
            run.wait_for(log, "step_2")
            run.process.send_signal(number)
            assert run.process.wait(RUN_S) == 130
            assert run.left_behind() == []
            shown = os.read(terminal, 1 << 20).decode(errors="replace")
            assert "starting an engine of 2 ranks" in shown
            assert "INFO" not in shown
    finally:
        os.close(terminal)
        os.close(side)


@pytest.mark.timeout(RUN_S)
def test_an_engine_that_dies_ends_the_run_with_its_log_and_nothing_left():
    with demo("--no-tty", "--steps", "400") as run:
        log = run.out_dir / "engine.log"
        run.wait_for(log, "step_1")
        servers = [one for one in run.processes() if "serve" in one.cmdline()]
        assert len(servers) == 1
        servers[0].kill()
        status, _, err = run.finish()
        assert status == 1
        assert str(log) in err
        assert "Traceback" not in err
        until = time.monotonic() + 10  # the ranks of a dead front end end by themselves
        while run.processes() and time.monotonic() < until:
            time.sleep(0.05)
        assert run.processes() == []


@pytest.mark.timeout(RUN_S)
def test_the_engine_ends_with_a_demo_that_is_killed():
    with demo("--no-tty", "--steps", "400") as run:
        run.wait_for(run.out_dir / "engine.log", "step_1")
        run.process.kill()
        run.process.wait(RUN_S)
        until = time.monotonic() + 30
        while run.left_behind() and time.monotonic() < until:
            time.sleep(0.05)
        assert run.left_behind() == []
