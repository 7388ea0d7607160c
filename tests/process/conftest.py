"""Children that are ended whatever happens, and a directory in memory for many small files."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .children import end, start_module

MEMORY = Path("/dev/shm")
ROOM_NBYTES = 4 << 30  # containers often have a small one


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a module of this folder as a child."""
    children: list[subprocess.Popen[str]] = []

    def begin(module: str, *arguments: object) -> subprocess.Popen[str]:
        children.append(start_module(module, *arguments))
        return children[-1]

    yield begin
    for child in children:
        end(child)


@pytest.fixture(params=["sampled", pytest.param("full", marks=pytest.mark.slow)])
def form(request: pytest.FixtureRequest) -> str:
    """A long matrix has two forms: every day a sample of its points, and with `make test-slow` all of them."""
    return request.param


@pytest.fixture(scope="module")
def memory_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in memory, where syncing costs nothing: what survives a kill does not depend on the medium."""
    if not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < ROOM_NBYTES:
        yield tmp_path_factory.mktemp("memory")
        return
    path = Path(tempfile.mkdtemp(prefix="weightcast-test-", dir=MEMORY))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def memory_dir(memory_root: Path) -> Iterator[Path]:
    """An empty directory in memory."""
    path = Path(tempfile.mkdtemp(dir=memory_root))
    yield path
    shutil.rmtree(path, ignore_errors=True)
