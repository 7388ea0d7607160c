"""A process that has used NIXL ends with the exit code that it should have, after all its own work at exit."""

import subprocess

import pytest

from .children import end, start_module
from .nixl_stand import needs_nixl

pytestmark = needs_nixl


def ended(how: str) -> tuple[int, str, str]:
    child = start_module("nixl_exit", how)
    try:
        output, errors = child.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        end(child)
        raise
    return child.returncode, output, errors


@pytest.mark.parametrize(("how", "code"), [("torch", 0), ("code", 3), ("error", 1)])
def test_a_process_that_used_nixl_ends_with_its_own_exit_code(how, code):
    found, output, errors = ended(how)
    assert found == code, errors[-2000:]
    assert sorted(output.splitlines()) == ["c is done", "python is done"]
    assert ("ValueError: an error that nobody catches" in errors) == (how == "error")


def test_children_end_with_their_own_exit_codes_and_a_fork_is_told_that_it_cannot_use_nixl():
    found, output, errors = ended("children")
    assert found == 0, errors[-2000:]
    assert {"spawn ended with 5", "fork ended with 6"} <= set(output.splitlines()), output + errors[-2000:]
