"""What importing weightcast loads, and whether it runs as a module."""

from __future__ import annotations

import subprocess
import sys

import weightcast

HEAVY = ("torch", "paddle", "zmq", "transformers", "safetensors", "rich", "click")


def run(*arguments: str) -> str:
    ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_importing_weightcast_loads_no_framework_and_nothing_of_the_command_line():
    loaded = run("-c", f"import sys, weightcast; print(*[name for name in {HEAVY} if name in sys.modules])")

    assert loaded == ""


def test_a_store_is_published_and_loaded_without_any_framework(tmp_path):
    code = f"""
import sys, numpy, weightcast
store = weightcast.Store({str(tmp_path / "store")!r})
store.publish("step_1", {{"a": numpy.arange(4.0)}})
weightcast.LiveModel({{"a": numpy.zeros(4)}}, source=store).update()
print(*[name for name in {HEAVY} if name in sys.modules])
"""

    assert run("-c", code) == ""


def test_the_package_runs_as_a_module_and_tells_its_version():
    assert weightcast.__version__ in run("-m", "weightcast", "--version")


def test_the_command_line_loads_frameworks_and_servers_only_where_they_are_used():
    heavy = ("torch", "zmq", "fastapi", "uvicorn", "tokenizers", "transformers")
    code = f"import sys, weightcast.cli.main; print(*[name for name in {heavy} if name in sys.modules])"

    assert run("-c", code) == ""
