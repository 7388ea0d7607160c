"""Updates from sources that are damaged, wrong, gone or silent: what is served stays served, and the error says why."""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest

from weightcast import Store
from weightcast.engines.base import UpdateRequest
from weightcast.errors import (
    BaseVersionMismatch,
    CommitFailed,
    DeadlineExceeded,
    DigestMismatch,
    ManifestCorrupt,
    PartCorrupt,
    StoreNotFound,
    VersionDoesNotFit,
    VersionNotFound,
)

from .update_fault_moves import (
    both_ranks,
    failed,
    flip,
    met,
    on_stand,
    part_of,
    recover,
    refused,
    slow,
    stand,
    to_pipe,
    truncate,
)
from .update_fault_stand import SLACK_S
from .update_fault_world import DELTA_1, DELTA_2, FULL_A, FULL_B, TENSOR

__all__ = ["stand"]  # a fixture

DAMAGES = [  # the commit mode, the version, the one that is damaged, how, and what is said
    ("copy", FULL_B, FULL_B, flip, DigestMismatch),
    ("swap", FULL_B, FULL_B, truncate, PartCorrupt),
    ("inplace", FULL_B, FULL_B, flip, DigestMismatch),
    ("inplace", FULL_B, FULL_B, Path.unlink, PartCorrupt),
    ("copy", FULL_B, FULL_B, to_pipe, PartCorrupt),
    ("delta", DELTA_1, DELTA_1, flip, DigestMismatch),
    ("swap", DELTA_1, DELTA_1, truncate, PartCorrupt),
    ("delta", DELTA_1, DELTA_1, to_pipe, PartCorrupt),
]


@slow
@pytest.mark.parametrize(("commit", "damage"), [("delta", flip), ("swap", Path.unlink)])
@on_stand
async def test_a_delta_on_what_is_served_does_not_read_its_base(stand, commit, damage):
    await stand.bring_to(FULL_A)
    store = stand.world.copy()
    damage(part_of(store, FULL_A))
    await stand.update(DELTA_1, commit=commit, source=f"file://{store}")
    await stand.judge(DELTA_1)


@slow
@pytest.mark.parametrize("damages", [DAMAGES[:4], DAMAGES[4:]], ids=["some", "others"])
@on_stand
async def test_a_damaged_source_is_refused(stand, damages):
    for commit, version, damaged, damage, error in damages:
        await stand.bring_to(FULL_A)
        store = stand.world.copy()
        damage(part_of(store, damaged))
        await refused(stand, error, 502, version=version, source=f"file://{store}", commit=commit)


@slow
@on_stand
async def test_a_source_that_is_not_there_is_not_found(stand):
    await stand.bring_to(FULL_A)
    store = stand.world.copy()
    await refused(stand, VersionNotFound, 404, version="step_99", source=f"file://{store}")
    (store / "versions" / FULL_B / "manifest.json").write_text('{"version": ')
    await refused(stand, ManifestCorrupt, 502, version=FULL_B, source=f"file://{store}")
    shutil.rmtree(store)
    await refused(stand, StoreNotFound, 404, version=FULL_B, source=f"file://{store}")


@slow
@pytest.mark.parametrize("commit", ["copy", "swap", "inplace"])
@on_stand
async def test_a_version_of_another_model_does_not_fit(stand, commit):
    await stand.bring_to(FULL_A)
    state = dict(stand.world.states[FULL_B])
    missing = {name: array for name, array in state.items() if name != TENSOR}
    said = await refused(stand, VersionDoesNotFit, 422, version="v", source=stand.world.publish("v", missing), commit=commit)
    assert TENSOR in said
    wrong = state | {TENSOR: np.ascontiguousarray(state[TENSOR][:-1]), "model.norm.weight": state["model.norm.weight"][:8]}
    said = await refused(stand, VersionDoesNotFit, 422, version="v", source=stand.world.publish("v", wrong), commit=commit)
    assert TENSOR in said
    assert "model.norm.weight" in said


@slow
@pytest.mark.parametrize("serving", [FULL_A, FULL_B])
@on_stand
async def test_a_delta_on_another_base_is_refused_unless_its_base_is_what_is_served(stand, serving):
    await stand.bring_to(serving)
    other = stand.world.copy()
    for version in (FULL_A, DELTA_1, DELTA_2, FULL_B):
        shutil.move(other / "versions" / version, other / f"aside-{version}")
    Store(other).publish(FULL_A, stand.world.states[FULL_B], mode="full")
    (other / f"aside-{DELTA_1}").rename(other / "versions" / DELTA_1)
    for commit in ("delta", "swap", "inplace"):
        if serving == FULL_A:
            await stand.update(DELTA_1, source=f"file://{other}", commit=commit)
            await stand.judge(DELTA_1)
            await stand.bring_to(FULL_A)
        else:
            await refused(stand, BaseVersionMismatch, 409, version=DELTA_1, source=f"file://{other}", commit=commit)
    shutil.rmtree(other / "versions" / FULL_A)
    if serving == FULL_A:
        await stand.update(DELTA_1, source=f"file://{other}", commit="delta")
        await stand.judge(DELTA_1)
    else:
        await refused(stand, BaseVersionMismatch, 409, version=DELTA_1, source=f"file://{other}", commit="delta")


@slow
@on_stand
async def test_a_source_that_never_answers_ends_by_the_deadline_and_can_be_cancelled(stand):
    await stand.bring_to(FULL_A)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = f"http://127.0.0.1:{silent.getsockname()[1]}"
        await refused(stand, DeadlineExceeded, 504, version=FULL_B, source=source, timeout_s=0.5)
        status = stand.replica.begin_update(UpdateRequest(version=FULL_B, source=source))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(SLACK_S):
            await stand.replica.cancel_update(status.id)
        await stand.judge(FULL_A)
        await stand.update(FULL_B)


# -- a source that changes meanwhile -------------------------------------------------------------------------------------


def lie(store: Path) -> None:
    flip(part_of(store, FULL_B))


@slow
@both_ranks
@on_stand
async def test_a_source_that_dies_while_it_is_read_is_told(stand, rank):
    for damage, error in ((shutil.rmtree, PartCorrupt), (lie, DigestMismatch)):
        await stand.bring_to(FULL_A)
        store = stand.world.copy()
        request = UpdateRequest(version=FULL_B, source=f"file://{store}", timeout_s=SLACK_S)
        status = await met(stand, rank, "read", request, at=3)
        damage(store)
        stand.go_on(rank)
        with pytest.raises(error):
            await stand.replica.finish_update(status.id)
        assert not stand.clear_faults()
        await stand.judge(FULL_A)


@slow
@both_ranks
@pytest.mark.parametrize("commit", ["copy", "swap", "delta", "delta swap"])
@on_stand
async def test_a_source_that_dies_after_the_vote_is_not_missed(stand, rank, commit):
    await stand.bring_to(FULL_A)
    store, version = stand.world.copy(), DELTA_1 if commit.startswith("delta") else FULL_B
    commit = commit.removeprefix("delta ")
    request = UpdateRequest(version=version, source=f"file://{store}", timeout_s=SLACK_S, commit=commit)
    status = await met(stand, rank, "commit", request)
    shutil.rmtree(store)
    stand.go_on(rank)
    await stand.replica.finish_update(status.id)
    assert not stand.clear_faults()
    await stand.judge(version)
    await stand.update(FULL_A)


@slow
@both_ranks
@pytest.mark.parametrize("damage", [lie, shutil.rmtree], ids=["lies", "dies"])
@on_stand
async def test_a_source_that_fails_a_stream_into_live_weights_is_replaced_by_that_of_the_old_version(stand, rank, damage):
    await stand.bring_to(FULL_A)
    store = stand.world.copy()
    request = UpdateRequest(version=FULL_B, source=f"file://{store}", timeout_s=SLACK_S, commit="inplace")
    status = await met(stand, rank, "apply", request)  # after the first parameter
    damage(store)
    stand.go_on(rank)
    with pytest.raises(CommitFailed, match=FULL_A):
        await stand.replica.finish_update(status.id)
    assert not stand.clear_faults()
    await stand.judge(FULL_A)


@slow
@both_ranks
@on_stand
async def test_a_stream_that_can_neither_go_on_nor_back_ends_failed_and_any_other_source_mends_it(stand, rank):
    store = stand.world.copy()
    await stand.update(FULL_A, source=f"file://{store}")
    await stand.update(FULL_B, source=f"file://{store}")
    flying, task = await stand.fly()
    request = UpdateRequest(version=FULL_A, source=f"file://{store}", timeout_s=SLACK_S, commit="inplace")
    status = await met(stand, rank, "apply", request)  # after the first parameter
    shutil.rmtree(store)
    stand.go_on(rank)
    with pytest.raises(CommitFailed):
        await stand.replica.finish_update(status.id)
    assert not stand.clear_faults()
    await stand.land(flying, task)
    await failed(stand)
    await recover(stand, source=stand.world.source)
    await stand.judge(FULL_B)


EVERY_DAY = (
    (test_a_damaged_source_is_refused, {"damages": DAMAGES[1:3]}),
    (test_a_source_that_is_not_there_is_not_found, {}),
    (test_a_delta_on_another_base_is_refused_unless_its_base_is_what_is_served, {"serving": FULL_A}),
    (test_a_source_that_never_answers_ends_by_the_deadline_and_can_be_cancelled, {}),
    (test_a_source_that_dies_while_it_is_read_is_told, {"rank": 1}),
    (test_a_source_that_fails_a_stream_into_live_weights_is_replaced_by_that_of_the_old_version, {"rank": 1, "damage": lie}),
    (test_a_stream_that_can_neither_go_on_nor_back_ends_failed_and_any_other_source_mends_it, {"rank": 0}),
)  # part of the sample in test_update_faults.py
