"""The house rules that a reader relies on, checked on the sources themselves."""

import ast
from functools import cache
from pathlib import Path

import pytest

import weightcast

SRC = Path(weightcast.__file__).parent
ROOMS = {
    "errors": -1, "clock": 0, "config": 0, "logs": 0,
    "tensors": 1,
    "wire": 2,
    "delta": 3,
    "store": 4,
    "transports": 5,
    "depot": 6,
    "publish": 7, "worker": 7,
    "engines": 8, "control": 9, "fleet": 10,
    "bench": 11, "chaos": 11, "demo": 11, "doctor": 11,
    "cli": 12,
}  # fmt: skip
FILES = sorted(SRC.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imported_modules(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_a_file_imports_only_from_its_own_room_and_from_lower_ones(path):
    room = path.relative_to(SRC).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    climbs = []
    for module, line in imported_modules(parsed(path)):
        if module.startswith("weightcast.") and room_of(module) != room and ROOMS[room_of(module)] >= ROOMS[room]:
            climbs.append(f"{path.name}:{line} imports {module}")
    assert not climbs


def test_only_the_digest_module_hashes():
    hashing = {"hashlib", "xxhash", "blake3"}
    users = {
        str(path.relative_to(SRC))
        for path in FILES
        for module, _ in imported_modules(parsed(path))
        if module.split(".")[0] in hashing
    }
    assert users == {"tensors/digest.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_nothing_unpickles_or_reads_the_environment(path):
    forbidden = {
        *(("pickle", name) for name in ("load", "loads", "Unpickler")),
        *(("torch", name) for name in ("load", "save")),
        *(("os", name) for name in ("environ", "getenv")),
    }
    if path in (SRC / "config.py", SRC / "transports/nixl/library.py"):  # UCX has no other settings
        forbidden.remove(("os", "environ"))
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and (node.value.id, node.attr) in forbidden:
                found.append(f"{path.name}:{node.lineno} {node.value.id}.{node.attr}")
            if node.attr == "recv_pyobj":
                found.append(f"{path.name}:{node.lineno} recv_pyobj")
    assert not found
