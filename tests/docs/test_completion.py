"""Completion in a real shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from weightcast import Store

PROGRAMS = Path(sys.executable).parent
PATH = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"

# What readline does: it splits the line into words, calls the function that `complete` named, and reads COMPREPLY.
BASH = r"""
source <(weightcast completion bash)
registered=$(complete -p weightcast)
function=${registered#*-F }; function=${function%% *}
while IFS= read -r line; do
  read -r -a COMP_WORDS <<< "$line"
  [[ $line == *' ' ]] && COMP_WORDS+=("")
  COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMPREPLY=()
  "$function" weightcast
  echo "${COMPREPLY[*]}"
done
"""


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "store")
    for version in ("step_1", "step_2", "final"):
        made.publish(version, {"a": np.arange(4.0)}, "full")
    return tmp_path / "store"


def completed(*lines):
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-c", BASH],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env=os.environ | {"PATH": PATH},
    )
    assert done.stderr == ""
    return [line.split() for line in done.stdout.splitlines()]


def test_bash_completes_commands_options_and_the_versions_of_a_store(store):
    inner, options, started, option, none = completed(
        "weightcast store v",
        "weightcast publish --di",
        f"weightcast store show {store} st",
        f"weightcast store gc {store} --protect ",
        "weightcast store show /nowhere ",
    )

    assert inner == ["verify"]
    assert options == ["--digest"]
    assert started == ["step_1", "step_2"]
    assert option == ["step_1", "step_2", "final"]
    assert none == []


@pytest.mark.parametrize(
    ("shell", "check", "says"),
    [
        ("bash", ["bash", "-n"], "complete "),
        ("zsh", ["zsh", "-n"], "#compdef weightcast"),
        ("fish", ["fish", "--no-execute"], "complete --no-files --command weightcast"),
    ],
)
def test_a_script_of_each_shell_is_printed_and_is_one(shell, check, says, tmp_path):
    command = [str(PROGRAMS / "weightcast"), "completion", shell]
    script = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout

    assert says in script
    assert "_WEIGHTCAST_COMPLETE" in script
    (tmp_path / "script").write_text(script)
    if shutil.which(shell):
        subprocess.run([*check, str(tmp_path / "script")], timeout=100, check=True)
