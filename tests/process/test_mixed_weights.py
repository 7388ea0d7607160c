"""Ranks that are given different weights: the front end compares what each of them read, and nothing is committed."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from weightcast import DepotPublisher, Publisher, Store
from weightcast.engines.base import UpdateRequest, UpdateStatus
from weightcast.errors import Conflict, DigestMismatch, SourceFailed
from weightcast.store.snapshot import write_snapshot

from .update_fault_moves import failed, kill, on_stand, recover, refused, stand
from .update_fault_stand import SLACK_S
from .update_fault_world import FULL_A, FULL_B, State

__all__ = ["stand"]  # a fixture


def snapshots(directory: Path, *states: tuple[str, State], ranks: int = 2) -> str:
    """One snapshot of ours per rank: the version that it records, and its tensors."""
    for rank, (version, state) in enumerate(states):
        write_snapshot(directory, state, rank=rank, ranks=ranks, device_id="0", version=version, part_nbytes=None)
    return f"snapshot://{directory}?id=0"


def foreign(path: Path, state: State) -> None:
    """A snapshot file of another system, which records neither version nor rank."""
    path.parent.mkdir(exist_ok=True)
    safetensors.numpy.save_file(dict(state), path)


def negated(state: State) -> State:
    """Other weights of the same names and shapes."""
    return {name: -array for name, array in state.items()}


@on_stand
async def test_snapshots_of_two_versions_are_refused_without_checksums(stand, tmp_path):
    await stand.bring_to(FULL_A)
    source = snapshots(tmp_path, ("step_2", stand.world.states[FULL_A]), ("step_3", stand.world.states[FULL_B]))
    said = await refused(stand, SourceFailed, 502, source=source, verify_checksum=False)
    assert re.search(r"rank 1.*step_2.*step_3", said), said


@on_stand
async def test_snapshots_of_two_versions_are_refused_with_checksums(stand, tmp_path):
    await stand.bring_to(FULL_A)
    source = snapshots(tmp_path, ("step_2", stand.world.states[FULL_A]), ("step_3", stand.world.states[FULL_B]))
    said = await refused(stand, SourceFailed, 502, source=source)
    assert re.search(r"rank 1.*step_2.*step_3", said), said


@on_stand
async def test_snapshots_of_one_name_and_different_bytes_are_refused(stand, tmp_path):
    await stand.bring_to(FULL_A)
    source = snapshots(tmp_path, ("step_2", stand.world.states[FULL_A]), ("step_2", stand.world.states[FULL_B]))
    said = await refused(stand, SourceFailed, 502, source=source, verify_checksum=False)
    assert "rank 1" in said


@on_stand
async def test_snapshots_for_another_number_of_ranks_are_refused(stand, tmp_path):
    await stand.bring_to(FULL_A)
    source = snapshots(tmp_path, *[("step_2", stand.world.states[FULL_B])] * 2, ranks=4)
    said = await refused(stand, SourceFailed, 502, source=source)
    assert "number of ranks: expected 2, found 4" in said


@on_stand
async def test_snapshots_that_record_nothing_are_compared_by_their_bytes(stand, tmp_path):
    await stand.bring_to(FULL_A)
    for rank, version in enumerate((FULL_A, FULL_B)):
        foreign(tmp_path / f"model_state.tp{rank}.0.pdparams", stand.world.states[version])
    source = f"snapshot://{tmp_path}?id=0"
    said = await refused(stand, SourceFailed, 502, source=source, version="step_2", verify_checksum=False)
    assert "rank 1" in said
    foreign(tmp_path / "model_state.tp1.0.pdparams", stand.world.states[FULL_A])
    await stand.update("step_2", source=source, verify_checksum=False)
    assert (await digests(stand))[0] == (await digests(stand))[1]


@pytest.mark.parametrize("shared", [False, True], ids=["model directory", "shared directory"])
@on_stand
async def test_the_oldest_form_of_a_snapshot_feeds_all_ranks(stand, tmp_path, shared):
    await stand.bring_to(FULL_A)
    foreign(tmp_path / ("shared" if shared else "model") / "model_state.tp00.pdparams", stand.world.states[FULL_B])
    source = f"snapshot://{tmp_path / 'model'}?id=0&shared_dir={tmp_path / 'shared'}"
    await stand.update("step_2", source=source, verify_checksum=False)
    first, second = await digests(stand)
    assert first == second


async def digests(stand) -> list[object]:
    """Those of a tensor that every rank holds whole, by rank."""
    answers = await stand.replica.digest(["model.norm.weight"], "xxh3-128", timeout_s=SLACK_S)
    return [one["digests"] for one in answers]


# -- a source that changes between two looks -----------------------------------------------------------------------------


async def held_back(stand, point: str, request: UpdateRequest) -> UpdateStatus:
    """An update that rank 0 has staged, and that waits at a point of rank 1."""
    stand.plant((0, {"point": "staged", "do": "meet"}), (1, {"point": point, "do": "meet"}))
    status = stand.replica.begin_update(request)
    await stand.met(0, 0)
    await stand.met(1, 1)
    stand.go_on(0, 0)
    return status


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("point", ["fetch", "read"])
@on_stand
async def test_a_version_that_is_published_again_between_the_looks_is_refused(stand, point, checksum):
    await stand.bring_to(FULL_A)
    store = stand.world.copy()
    request = UpdateRequest(version=FULL_B, source=f"file://{store}", timeout_s=SLACK_S, verify_checksum=checksum)
    status = await held_back(stand, point, request)
    shutil.rmtree(store / "versions" / FULL_B)
    Store(store).publish(FULL_B, negated(stand.world.states[FULL_B]), mode="full", part_nbytes=256 << 10)
    stand.go_on(1, 1)
    with pytest.raises((SourceFailed, DigestMismatch)):
        await stand.replica.finish_update(status.id)
    assert not stand.clear_faults()
    await stand.judge(FULL_A)


@pytest.mark.parametrize("checksum", [True, False])
@on_stand
async def test_a_checkpoint_that_is_replaced_between_the_looks_is_refused(stand, tmp_path, checksum):
    await stand.bring_to(FULL_A)
    directory = tmp_path / "checkpoint"
    foreign(directory / "model.safetensors", stand.world.states[FULL_B])
    (directory / "version.yaml").write_text("step: 2\nversion: step_2\n")
    request = UpdateRequest(source=f"checkpoint://{directory}", timeout_s=SLACK_S, verify_checksum=checksum)
    status = await held_back(stand, "fetch", request)
    foreign(directory / "new" / "model.safetensors", negated(stand.world.states[FULL_B]))
    (directory / "new" / "model.safetensors").rename(directory / "model.safetensors")
    stand.go_on(1, 1)
    with pytest.raises(DigestMismatch):
        await stand.replica.finish_update(status.id)
    assert not stand.clear_faults()
    await stand.judge(FULL_A)


@on_stand
async def test_legacy_shared_memory_that_is_published_again_between_the_looks_is_refused(stand, tmp_path):
    await stand.bring_to(FULL_A)
    places = [Path(tempfile.mkdtemp(prefix="wc-ipc-")) for _ in range(2)]
    try:
        with Publisher(f"ipc://{places[0]}/run") as first, Publisher(f"ipc://{places[1]}/run") as second:
            first.publish("step_2", stand.world.states[FULL_B])
            first.write_legacy(tmp_path, "0")
            second.publish("step_2", negated(stand.world.states[FULL_B]))
            request = UpdateRequest(source=f"legacy-ipc://{tmp_path}?id=0", timeout_s=SLACK_S, verify_checksum=False)
            status = await held_back(stand, "fetch", request)
            second.write_legacy(tmp_path, "0")
            stand.go_on(1, 1)
            with pytest.raises(SourceFailed, match="rank 1"):
                await stand.replica.finish_update(status.id)
            assert not stand.clear_faults()
            await stand.judge(FULL_A)
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


@pytest.mark.parametrize("checksum", [True, False])
@on_stand
async def test_a_trainers_memory_that_is_published_again_between_the_looks_is_refused(stand, checksum):
    await stand.bring_to(FULL_A)
    place = Path(tempfile.mkdtemp(prefix="wc-ipc-"))
    try:
        for source, publisher in ((f"ipc://{place}/run", Publisher), ("127.0.0.1:0", DepotPublisher)):
            with publisher(source) as first:
                first.publish("step_2", stand.world.states[FULL_B])
                url = first.url
                request = UpdateRequest(source=url, timeout_s=SLACK_S, verify_checksum=checksum)
                status = await held_back(stand, "fetch", request)
            with publisher(url.removeprefix("http://")) as second:
                second.publish("step_2", negated(stand.world.states[FULL_B]))
                stand.go_on(1, 1)
                with pytest.raises((SourceFailed, Conflict), match=r"root digest|other bytes"):
                    await stand.replica.finish_update(status.id)
            assert not stand.clear_faults()
            await stand.judge(FULL_A)
    finally:
        shutil.rmtree(place, ignore_errors=True)


# -- the same where ranks are brought back -------------------------------------------------------------------------------


def publish_again(directory: Path, state: State) -> None:
    snapshots(directory, ("step_2", state), ("step_2", state))


def write_again(directory: Path, state: State) -> None:
    for rank in range(2):
        foreign(directory / f"model_state.tp{rank}.0.pdparams", state)


@pytest.mark.parametrize("write", [publish_again, write_again], ids=["ours", "foreign"])
@pytest.mark.parametrize("way", ["restart", "wake-up"])
@on_stand
async def test_ranks_that_are_brought_back_from_a_source_that_changed_serve_nothing(
    stand, tmp_path, way, write: Callable[[Path, State], None]
):
    await stand.bring_to(FULL_A)
    write(tmp_path, stand.world.states[FULL_B])
    await stand.update("step_2", source=f"snapshot://{tmp_path}?id=0", verify_checksum=False)
    write(tmp_path, negated(stand.world.states[FULL_B]))
    if way == "restart":
        await kill(stand, 1)
        await failed(stand)
        assert "step_2" in stand.replica.status.reason
    else:
        await stand.replica.sleep(["weight"], "keep", timeout_s=SLACK_S)
        with pytest.raises(SourceFailed):
            await stand.replica.wake(["weight"], timeout_s=SLACK_S)
    write(tmp_path, stand.world.states[FULL_B])
    if way == "restart":
        await recover(stand)
    else:
        await stand.replica.wake(["weight"], timeout_s=SLACK_S)
    assert stand.replica.status.version == "step_2"
    assert np.unique([str(one) for one in await digests(stand)]).size == 1
    await stand.bring_to(FULL_A)
    await stand.judge(FULL_A)
