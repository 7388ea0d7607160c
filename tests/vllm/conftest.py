"""The models that the tests serve, a server that they share, and a look at what they leave in /dev/shm.

Tests that leave the shared server serving `model_a` may use it; a test that may break a server starts its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from models import nudged, published, tiny_model
from processes import ENVIRON, MEMORY, in_use
from safetensors.torch import load_file, save_file
from servers import VllmServer

from weightcast import Store

TIMEOUT_S = 600  # several servers may have to start
NAMES = ("vllm_", "weightcast", "wc-", "psm_")

os.environ["NUMBA_CACHE_DIR"] = ENVIRON["NUMBA_CACHE_DIR"]  # this process publishes deltas, too
torch.set_num_threads(1)  # models this small gain nothing from a second thread, and wait for it where cores are shared


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure is shown with what the shared server said last."""
    report = yield
    server = getattr(item, "funcargs", {}).get("shared_server")
    if report.failed and server is not None:
        report.sections.append(("The shared server said", server.said()))
    return report


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def model_a(models_dir: Path) -> Path:
    return tiny_model(models_dir / "a", seed=0)


@pytest.fixture(scope="session")
def model_b(models_dir: Path) -> Path:
    """Nothing in common with `model_a`."""
    return tiny_model(models_dir / "b", seed=1)


@pytest.fixture(scope="session")
def tied_a(models_dir: Path) -> Path:
    return tiny_model(models_dir / "tied-a", seed=2, tied=True)


@pytest.fixture(scope="session")
def tied_b(models_dir: Path) -> Path:
    return tiny_model(models_dir / "tied-b", seed=3, tied=True)


@pytest.fixture(scope="session")
def nudged_once(models_dir: Path, model_a: Path) -> Path:
    """`model_a` after a step: one element in a hundred has changed."""
    return nudged(model_a, models_dir / "a-1", seed=4)


@pytest.fixture(scope="session")
def nudged_twice(models_dir: Path, nudged_once: Path) -> Path:
    return nudged(nudged_once, models_dir / "a-2", seed=5)


@pytest.fixture(scope="session")
def one_projection(models_dir: Path, model_a: Path) -> Path:
    """`model_a` with another query projection in one layer, and nothing else changed."""
    folder = models_dir / "a-q"
    shutil.copytree(model_a, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def steps(
    tmp_path_factory: pytest.TempPathFactory, model_a: Path, model_b: Path, nudged_once: Path, nudged_twice: Path
) -> str:
    """A store with `step_0` (`model_a`), the deltas `step_1` and `step_2` that follow it, and `other` (`model_b`)."""
    path = tmp_path_factory.mktemp("store") / "s"
    store = Store(path)
    published(store, "step_0", model_a, mode="full")
    assert published(store, "step_1", nudged_once, mode="delta").kind == "delta"
    assert published(store, "step_2", nudged_twice, mode="delta").kind == "delta"
    published(store, "other", model_b, mode="full")
    return f"file://{path}"


@pytest.fixture(scope="session")
def shared_server(model_a: Path) -> Iterator[VllmServer]:
    """A server of one rank that tests share. It starts with `model_a`."""
    with VllmServer(model_a) as server:
        yield server


@pytest.fixture
def server(shared_server: VllmServer) -> VllmServer:
    """The shared server, which must be healthy. What it serves is what the last test left."""
    assert shared_server.get("/health").status_code == 200, f"an earlier test broke it:\n{shared_server.said()}"
    return shared_server


@pytest.fixture(scope="session", autouse=True)
def nothing_stays_in_shared_memory() -> Iterator[None]:
    """Servers look after what they used; this also sees what a process made and left before anyone looked."""
    before = set(MEMORY.iterdir())
    yield
    made = {path for path in set(MEMORY.iterdir()) - before if path.name.startswith(NAMES)}
    left = made - in_use()  # others on this machine may be using theirs
    assert not left, f"left in {MEMORY}: {sorted(path.name for path in left)}"
