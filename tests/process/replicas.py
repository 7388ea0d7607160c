"""Replicas of scripted ranks for tests, and a check that nothing of them is left behind."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.numpy

from weightcast.engines.embedded.messages import Output, Sampling, Submit
from weightcast.engines.embedded.replica.answers import Answer
from weightcast.engines.embedded.replica.backoff import Backoff
from weightcast.engines.embedded.replica.replica import Replica
from weightcast.engines.embedded.settings import EngineSettings

PROGRAM = (sys.executable, str(Path(__file__).parent / "scripted_rank.py"))
FIRST = 4  # the first command that a test gives: the version that a replica starts with takes three
PATIENCE_S = 20.0  # for facts that come soon on a machine that is not ours alone

_made: list[Replica] = []  # in the test that runs


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test, and see that it left no task, child process or file descriptor behind."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        before, files = children(), open_files()
        asyncio.run(_without_tasks_left(test(*args, **kwargs)))
        assert children() <= before
        assert open_files() <= files

    return run


async def _without_tasks_left(coroutine: Coroutine[Any, Any, None]) -> None:
    _made.clear()
    try:
        await coroutine
    except BaseException:
        for replica in _made:  # else what the traceback keeps alive, sockets and ranks, would keep pytest from ending
            await replica.close(drain_s=0)
        raise
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def run_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where run directories are made: a short path, and empty when the test is over."""
    with tempfile.TemporaryDirectory(prefix="wc-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)
        assert os.listdir(directory) == []


@pytest.fixture
def model_dir(tmp_path: Path, run_root: Path) -> Path:
    """A checkpoint of one small tensor, at version step_7."""
    write_weights(tmp_path, 1.0)
    (tmp_path / "version.yaml").write_text("step: 7\nversion: step_7\n")
    return tmp_path


def write_weights(directory: Path, value: float) -> None:
    safetensors.numpy.save_file({"w": np.full(64, value, np.float32)}, directory / "model.safetensors")


def write_script(model_dir: Path, **ranks: dict[str, Any]) -> None:
    """How the ranks start next time, and what they do with commands from now on: `rank_1={"start": "never"}`."""
    script = {name.removeprefix("rank_"): how for name, how in ranks.items()}
    (model_dir / "script.new").write_text(json.dumps(script))
    (model_dir / "script.new").rename(model_dir / "script.json")  # a rank may be reading it


def new_replica(
    model_dir: Path, *, ranks: int = 2, heartbeat_s: float = 5.0, start_timeout_s: float = 30.0, **more: Any
) -> Replica:
    """A replica that was not started. Its heartbeat is slow where no rank is meant to hang: the machine may be."""
    settings = EngineSettings(
        model_dir=str(model_dir), ranks=ranks, heartbeat_s=heartbeat_s, start_timeout_s=start_timeout_s
    )
    replica = Replica(settings, **({"program": PROGRAM, "backoff": Backoff(first_s=0.05, longest_s=0.1)} | more))
    _made.append(replica)
    return replica


@asynccontextmanager
async def running(model_dir: Path, **settings: Any) -> AsyncIterator[Replica]:
    """A replica that serves, and is closed in the end."""
    replica = new_replica(model_dir, **settings)
    await replica.start()
    try:
        yield replica
    finally:
        await replica.close(drain_s=0)


def request(number: int, *prompt: int) -> Submit:
    return Submit(id=f"request-{number}", prompt=prompt, sampling=Sampling(max_tokens=8))


async def read(answer: Answer) -> list[Output]:
    """All outputs of an answer, which must end."""
    async with asyncio.timeout(PATIENCE_S), answer:
        return [output async for output in answer]


async def until(fact: Callable[[], bool], replica: Replica | None = None) -> None:
    """Wait for a fact; on failure tell what was last seen."""
    end = time.monotonic() + PATIENCE_S
    while not fact():
        assert time.monotonic() < end, replica.status if replica else "the fact did not come about"
        await asyncio.sleep(0.01)
