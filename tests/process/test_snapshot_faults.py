"""A snapshot that is being replaced when the disk fails: the old one, the new one, or a refusal; never a mixture."""

from __future__ import annotations

import errno
import shutil

import numpy as np
import pytest

from weightcast.errors import SnapshotInvalid, SnapshotNotFound, StorageFailed
from weightcast.store.snapshot import locate, open_snapshot, write_snapshot

from .operations import Operation, listing, refusing, watched

WHICH = {"rank": 0, "device_id": "3"}


def write(directory, version):
    tensors = {f"w{number}": np.full((64, 33), float(version[-1]) + number, np.float32) for number in range(6)}
    write_snapshot(directory, tensors, **WHICH, ranks=4, version=version, part_nbytes=80_000)


def read(directory):
    """The version that a reader gets, every byte of it proved; or that it is refused."""
    try:
        snapshot = open_snapshot(locate(directory, **WHICH, shared_dir=directory / "none"))
        first = {name: float(array[0, 0]) for name, array in snapshot.tensors()}
    except (SnapshotInvalid, SnapshotNotFound):
        return "refused"
    assert first == {f"w{number}": float(snapshot.version[-1]) + number for number in range(6)}
    return snapshot.version


@pytest.mark.parametrize(("error", "ever_after"), [(errno.ENOSPC, False), (errno.EROFS, True)])
def test_a_disk_that_fails_at_any_operation_of_a_snapshot_never_leaves_a_mixture(memory_dir, error, ever_after):
    before, place = memory_dir / "before", memory_dir / "place"
    write(before, "step_1")
    log: list[Operation] = []
    shutil.copytree(before, place)
    with watched(place, listing(log)):
        write(place, "step_2")
    outcomes = set()
    for number, operation in enumerate(log):
        shutil.rmtree(place)
        shutil.copytree(before, place)
        with watched(place, refusing(number, error, ever_after=ever_after)), pytest.raises(StorageFailed) as caught:
            write(place, "step_2")
        assert caught.value.errno == error, operation
        outcomes.add(read(place))
        write(place, "step_3")
        assert read(place) == "step_3", operation
        assert not [path.name for path in place.iterdir() if path.name.startswith(".")], operation
    assert len(log) > 20
    assert {"step_1", "refused"} <= outcomes <= {"step_1", "refused", "step_2"}
