"""Fixtures and moves of the tests that do harm to a replica on the stand."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightcast.control.statuses import status_of
from weightcast.engines.base import UpdateRequest, UpdateStatus
from weightcast.engines.states import ReplicaState
from weightcast.errors import NotReady, UpdateInProgress

from .replicas import children, open_files
from .update_fault_stand import SLACK_S, Stand
from .update_fault_world import DELTA_1, PROMPTS, World

slow = pytest.mark.slow
both_ranks = pytest.mark.parametrize("rank", [0, 1])


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A replica for all tests of a file. It leaves nothing behind, whatever was done to it."""
    torch.set_num_threads(1)
    world = World(tmp_path_factory.mktemp("faults"))
    processes, files = children(), open_files()
    with (
        tempfile.TemporaryDirectory(prefix="wc-") as run_root,
        pytest.MonkeyPatch.context() as patch,
        asyncio.Runner() as runner,
    ):
        patch.setattr(tempfile, "tempdir", run_root)
        stand = Stand(world)
        stand.runner = runner
        runner.run(stand.start())
        try:
            yield stand
            shared = [line for pid in stand.replica.status.pids for line in Path(f"/proc/{pid}/maps").read_text().split()]
            assert not [path for path in shared if path.startswith("/dev/shm")]
        finally:
            runner.run(stand.close())
            print(f"\n{stand.table()}")
        assert os.listdir(run_root) == []
    assert children() <= processes
    assert open_files() <= files


def on_stand(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on the replica of its file. After one that fails the next one gets a fresh replica."""

    @functools.wraps(test)
    def run(*, stand: Stand, **arguments: Any) -> None:
        try:
            stand.runner.run(_tidily(test(stand=stand, **arguments)))
            assert not stand.clear_faults()
        except BaseException:
            stand.runner.run(stand.start_again())
            raise

    return run


async def one_after_another(stand: Stand, *tests: tuple[Callable[..., Any], dict[str, Any]]) -> None:
    """Tests of `on_stand`, with their arguments, as one: so that every day starts one replica."""
    for test, arguments in tests:
        try:
            await test.__wrapped__(stand=stand, **arguments)
            assert not stand.clear_faults()
        except BaseException as error:
            error.add_note(f"in {test.__name__}, {arguments}")
            raise


async def _tidily(test: Coroutine[Any, Any, None]) -> None:
    await test
    await asyncio.sleep(0)
    left = {task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}}
    assert left <= {"replica-supervisor"}


# -- damage --------------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """One bit, of a tensor or of a packed delta, in place: others may be reading."""
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte ^ 0x10]))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def part_of(store: Path, version: str) -> Path:
    """The last part of a full version, or the payload of a delta."""
    return sorted((store / "versions" / version).glob("*.bin" if version == DELTA_1 else "*.safetensors"))[-1]


# -- moves ---------------------------------------------------------------------------------------------------------------


async def refused(stand: Stand, error: type[Exception], status: int, **request: Any) -> str:
    """An update fails with this, and nothing has happened to what is served. Returns what was said."""
    serving = stand.replica.status.version
    flying, task = await stand.fly()
    found = await stand.fails(UpdateRequest(**{"timeout_s": SLACK_S} | request))
    assert type(found) is error, f"{type(found).__name__}: {found}"
    assert status_of(type(found)) == status
    assert await stand.land(flying, task) == {serving}
    await stand.judge(serving)
    return str(found)


async def met(stand: Stand, rank: int, point: str, request: UpdateRequest, at: int = 0) -> UpdateStatus:
    """An update that waits at a point of one rank."""
    stand.plant((rank, {"point": point, "do": "meet", "at": at}))
    status = stand.replica.begin_update(request)
    await stand.met(rank)
    return status


async def failed(stand: Stand) -> None:
    """It says so, and refuses requests."""
    await stand.until(lambda: stand.replica.status.state is ReplicaState.FAILED)
    assert not stand.replica.status.healthy
    with pytest.raises(NotReady, match="FAILED"):
        stand.submit(PROMPTS[0], 1)


async def recover(stand: Stand, **request: Any) -> None:
    """One call; it may have to wait until what the replica tries by itself has failed again."""
    end = time.monotonic() + SLACK_S
    while True:
        try:
            status = stand.replica.begin_recovery(UpdateRequest(**{"timeout_s": SLACK_S} | request))
            break
        except UpdateInProgress:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
    await stand.replica.finish_update(status.id)


async def kill(stand: Stand, rank: int) -> None:
    """End a rank, and wait until all run again."""
    restarts = stand.replica.status.restarts
    os.kill(stand.replica.status.pids[rank], signal.SIGKILL)
    await stand.until(lambda: stand.replica.status.restarts > restarts)
