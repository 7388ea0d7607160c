"""Trainer ranks that write into one store and are killed at any moment: the store holds whole versions, and they go on."""

from __future__ import annotations

import random
import time

import pytest

from weightcast import Store
from weightcast.clock import Deadline
from weightcast.errors import StoreNotFound, VersionNotSet

from .children import end, start_module
from .share_writer import weights

RANKS = 3
WAIT_S = 60.0


def newest(store):
    try:
        return int(store.newest().removeprefix("step_"))
    except (StoreNotFound, VersionNotSet):
        return -1


def await_version(store, number, children):
    deadline = Deadline.after(WAIT_S)
    while newest(store) < number:
        deadline.check(f"waiting for step_{number}, at {newest(store)}")
        for child in children:
            assert child.poll() is None, child.stderr.read()[-4000:]
        time.sleep(0.02)


def check_newest(store):
    number = newest(store)
    found = store.load(f"step_{number}")
    assert all(found[name].tobytes() == array.tobytes() for name, array in weights(number).items())
    assert store.verify(f"step_{number}").ok


@pytest.mark.parametrize("killed", [0, 2])
def test_a_killed_rank_leaves_whole_versions_and_all_go_on_when_it_is_back(tmp_path, killed):
    store, chance = Store(tmp_path / "store"), random.Random(killed)
    children = [start_module("share_writer", store.path, rank, RANKS, 0) for rank in range(RANKS)]
    try:
        for _ in range(4):
            await_version(store, newest(store) + 3, children)
            time.sleep(chance.uniform(0, 0.2))
            end(children[killed])
            check_newest(store)
            last = newest(store)
            children[killed] = start_module("share_writer", store.path, killed, RANKS, last)
            await_version(store, last + 2, children)
    finally:
        for child in children:
            end(child)
    check_newest(store)
    last = newest(store)
    kinds = {store.manifest(version).kind for version in store.versions()}
    assert kinds == {"full", "delta"}
    store.gc(keep_last=2)
    files = {path.name for path in (store.path / "versions" / f"step_{last}").iterdir()}
    assert files == {"manifest.json", *store.manifest(f"step_{last}").listed_files}
    assert sorted(path.name for path in (store.path / "versions").iterdir()) == sorted(store.versions())
    check_newest(store)
