"""`weightcast doctor`, as a user runs it: on this machine, and on one where packages are broken in every way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from weightcast import Store

RUN_S = 120.0  # far more than it takes, on a machine that may be busy


def doctor(*arguments, cwd=None, **variables):
    command = [sys.executable, "-m", "weightcast", "doctor", *arguments]
    env = os.environ | {key: str(value) for key, value in variables.items()}
    return subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False, env=env, cwd=cwd)


def test_programs_are_told_what_is_here_what_will_be_used_and_what_a_source_has(tmp_path):
    Store(tmp_path / "store").publish("step_7", {"a": np.arange(4.0)})
    (tmp_path / "numba.py").write_text("raise ImportError('somebody else, who lies where we are called')")
    ended = doctor("--json", "--timeout", "60", "--source", str(tmp_path / "store"), cwd=tmp_path)
    found = json.loads(ended.stdout)

    assert (ended.returncode, found["ok"], ended.stderr) == (0, True, "")
    levels = {one["name"]: one["level"] for one in found["packages"]}
    assert levels == {"torch": "ok", "numba": "ok", "ZeroMQ": "ok", "NIXL": "ok", "server": "ok"}
    used = {one["task"]: one["used"] for one in found["uses"]}
    assert used["same host"] == "ipc://"
    assert used["delta kernels"] == "compiled"
    assert "embedded" in used["engine"]
    assert "newest step_7" in found["sources"][0]["found"]


def test_people_get_a_line_for_what_is_well_and_a_cure_for_what_is_not():
    ended = doctor("--timeout", "60", "--source", "http://127.0.0.1:9")

    assert ended.returncode == 1
    assert "  ok       memfd " in ended.stdout
    assert "cure: pip install 'weightcast[vllm]'" in ended.stdout
    assert "  PROBLEM  source         http://127.0.0.1:9 cannot be reached" in ended.stdout
    assert "what will be used" in ended.stdout


BREAKING = {
    "zmq": "import os; os.abort()",
    "numba": "raise ImportError('numba needs another NumPy')",
    "tokenizers": "import subprocess, time; subprocess.Popen(['sleep', '987.125']); time.sleep(60)",
}


def test_what_crashes_raises_or_hangs_is_a_problem_of_its_own_and_nothing_of_it_stays(tmp_path):
    for name, code in BREAKING.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
    (tmp_path / "sitecustomize.py").write_text("import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))")
    started = time.monotonic()
    ended = doctor("--json", "--timeout", "20", PYTHONPATH=tmp_path)
    took = time.monotonic() - started

    found = {one["name"]: one for one in json.loads(ended.stdout)["packages"]}
    assert ended.returncode == 1
    assert found["ZeroMQ"]["found"] == f"loading it ends with {signal.SIGABRT.name}"
    assert found["numba"]["found"] == "ImportError: numba needs another NumPy"
    assert found["server"]["found"] == "not loaded within 20 s"
    assert all(found[name]["cure"] for name in ("ZeroMQ", "numba", "server"))
    used = {one["task"]: one["used"] for one in json.loads(ended.stdout)["uses"]}
    assert (used["same host"], used["delta kernels"], used["engine"]) == ("file://", "NumPy", "none")
    assert took < 60
    assert not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "987.125"]]


@pytest.mark.parametrize(("nbytes", "level"), [(512 << 10, "problem"), (64 << 20, "note"), (65 << 20, "ok")])
def test_a_small_shared_memory_is_noted_and_one_that_holds_nothing_is_a_problem(nbytes, level):
    look = "from weightcast.doctor.machine import SHM, shared_directory; print(shared_directory(SHM).level)"
    steps = f'mount -t tmpfs -o size={nbytes} tmpfs /dev/shm && exec "$0" -c "{look}"'
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], check=False, timeout=20).returncode:
        pytest.skip("mounting needs root and a mount namespace of its own")
    command = ["unshare", "-m", "sh", "-c", steps, sys.executable]
    assert subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=True).stdout.strip() == level
