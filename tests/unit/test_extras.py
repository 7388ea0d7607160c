"""Extras: every command that tells a user to install one names one that exists."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import weightcast

ROOT = Path(__file__).parents[2]
SRC = Path(weightcast.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def named_extras():
    """(where, extra) for each extra that a source file names: to MissingExtra, to the doctor's `extra`, or in a text."""
    for path in sorted(SRC.rglob("*.py")):
        text = path.read_text()
        for found in re.findall(r"weightcast\[([a-z,]+)\]", text):
            yield from ((path.name, one) for one in found.split(","))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("MissingExtra", "extra"):
                at = 1 if node.func.id == "MissingExtra" else 0
                if isinstance(node.args[at], ast.Constant):
                    yield f"{path.name}:{node.lineno}", node.args[at].value


def test_every_extra_that_is_named_can_be_installed():
    named = list(named_extras())

    assert len(named) > 20
    assert [(where, extra) for where, extra in named if extra not in EXTRAS] == []


def test_extras_that_stand_for_others_name_those_that_exist():
    for requirements in EXTRAS.values():
        for requirement in requirements:
            inner = re.match(r"weightcast\[(.*)\]$", requirement)
            assert inner is None or set(inner.group(1).split(",")) <= EXTRAS.keys()


def test_a_package_has_the_same_lower_bound_wherever_it_is_required():
    bounds: dict[str, set[str]] = {}
    for requirement in [*PROJECT["dependencies"], *(one for several in EXTRAS.values() for one in several)]:
        name, _, bound = requirement.partition(">=")
        bounds.setdefault(name, set()).add(bound)

    assert {name: found for name, found in bounds.items() if len(found) > 1} == {}


def test_the_core_requires_no_framework():
    core = {re.split(r"[>=<\[]", requirement)[0] for requirement in PROJECT["dependencies"]}

    assert core.isdisjoint({"torch", "numba", "pyzmq", "fastapi", "nixl-cu12", "vllm", "paddlepaddle", "transformers"})
