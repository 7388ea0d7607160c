"""Extras: every command that tells a user to install one names one that exists."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

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


KNOWN_HOLES = {  # the release that closed the last hole that was known in November 2026
    "h11": "0.16",  # CVE-2025-43859: smuggled requests
    "jinja2": "3.1.6",  # CVE-2025-27516: a template leaves its sandbox, and chat templates come with models
    "ray": "2.52",  # CVE-2025-62593
    "starlette": "0.49.1",  # CVE-2025-62727: quadratic work on a Range header
    "torch": "2.6",  # CVE-2025-32434
}


def test_lower_bounds_leave_out_releases_with_known_holes():
    required = [*PROJECT["dependencies"], *(one for several in EXTRAS.values() for one in several)]
    bounds = {name: Version(bound) for name, _, bound in (one.partition(">=") for one in required) if bound}

    assert {
        name: bounds.get(name) for name, safe in KNOWN_HOLES.items() if bounds.get(name, Version("0")) < Version(safe)
    } == {}


def test_readme_lists_every_extra():
    installing = (ROOT / "README.md").read_text().partition("## Installing")[2].partition("## ")[0]
    listed = {one for found in re.findall(r"\[([a-z,]+)\](?!\()", installing) for one in found.split(",")}

    assert listed == EXTRAS.keys()


def test_everything_that_the_project_installs_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    wanted, found = [("weightcast", ("demo", "test", "lint"))], {}
    while wanted:
        name, extras = wanted.pop()
        if (name, extras) in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # a choice that another platform makes
        found[name, extras] = distribution.version
        for line in distribution.requires or ():
            one = Requirement(line)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                wanted.append((canonicalize_name(one.name), tuple(sorted(one.extras))))
    installed = {name: version.partition("+")[0] for (name, _), version in found.items() if name != "weightcast"}

    assert len(installed) > 60
    assert {name: (version, pinned.get(name)) for name, version in installed.items() if pinned.get(name) != version} == {}
