"""Modules of this folder, run as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent


def start_module(module: str, *arguments: object, under: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start a module in a process group of its own; the caller ends it. `under` is a command to run it with."""
    search = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [*under, sys.executable, "-m", f"process.{module}", *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environ, text=True, start_new_session=True, **pipes)


def end(child: subprocess.Popen[str]) -> None:
    """End a child and those it started, whatever they are doing, and close its pipes."""
    with child:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)


def report_of(module: str, *arguments: object, timeout: float = 100, under: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run a module to its end and return the JSON object that it prints."""
    child = start_module(module, *arguments, under=under)
    try:
        output, errors = child.communicate(timeout=timeout)
    finally:
        end(child)
    assert child.returncode == 0, f"{module} ended with {child.returncode}:\n{output[-2000:]}\n{errors[-4000:]}"
    return json.loads(output.splitlines()[-1])
