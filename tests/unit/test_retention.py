"""What gc keeps and what it removes."""

import msgspec
import numpy as np
import pytest

from weightcast.errors import InvalidInput, VersionNotFound
from weightcast.store import layout
from weightcast.store.retention import plan_retention
from weightcast.wire.manifest import BaseRef, encode_manifest


@pytest.fixture
def ten(store):
    for i in range(1, 11):
        store.publish(f"step_{i}", {"w": np.full(8, i)})
    return store


def kept(store, **options):
    manifests = [store.manifest(version) for version in store.versions()]
    return list(
        plan_retention(manifests, **({"keep_last": 1, "keep_full_every": None, "newest": None, "protect": ()} | options))
    )


def test_the_last_ones_stay_and_the_rest_goes(ten):
    report = ten.gc(keep_last=3)
    assert ten.versions() == ["step_8", "step_9", "step_10"]
    assert report.removed == [f"step_{i}" for i in range(1, 8)]
    assert report.freed_nbytes > 7 * 64
    assert all(ten.verify(version).ok for version in ten.versions())


def test_a_full_version_stays_at_every_so_many_publications_and_gc_is_stable(ten):
    ten.gc(keep_last=2, keep_full_every=4)
    assert ten.versions() == ["step_1", "step_5", "step_9", "step_10"]
    assert ten.gc(keep_last=2, keep_full_every=4).removed == []


def test_the_announced_and_the_protected_stay(ten):
    ten.announce("step_4")
    ten.gc(keep_last=1, protect=["step_6", "unknown"])
    assert ten.versions() == ["step_4", "step_6", "step_10"]


def test_the_bases_of_kept_deltas_stay_all_the_way_down(ten):
    manifests = [ten.manifest(version) for version in ten.versions()]
    for index in (7, 8, 9):  # step_8 … step_10 as deltas, each on the one before
        base = manifests[index - 1]
        ref = BaseRef(version=base.version, root_digest=base.root_digest)
        manifests[index] = msgspec.structs.replace(manifests[index], kind="delta", base=ref)
    keep = plan_retention(manifests, keep_last=1, keep_full_every=None, newest=None, protect=())
    assert set(keep) == {"step_10", "step_9", "step_8", "step_7"}
    assert keep["step_7"] == "base of step_8"


def test_bases_that_lead_in_a_circle_are_kept_and_planning_ends(ten):
    manifests = [ten.manifest(version) for version in ten.versions()]
    for index, base in ((8, manifests[9]), (9, manifests[8])):
        ref = BaseRef(version=base.version, root_digest=base.root_digest)
        manifests[index] = msgspec.structs.replace(manifests[index], kind="delta", base=ref)
    assert set(plan_retention(manifests, keep_last=1, keep_full_every=None, newest=None, protect=())) == {
        "step_9",
        "step_10",
    }


@pytest.fixture
def chained(store, rng):
    """Full versions at step_1 and step_5, deltas in between and after."""
    state = rng.standard_normal(4000)
    for number in range(1, 9):
        state[number] = number
        store.publish(f"step_{number}", {"w": state}, mode="full" if number == 5 else "auto")
    assert [store.manifest(version).kind for version in store.versions()] == ["full", *["delta"] * 3] * 2
    return store


def test_gc_keeps_what_the_newest_delta_is_built_on_and_drops_an_older_chain(chained):
    report = chained.gc(keep_last=1)
    assert chained.versions() == ["step_5", "step_6", "step_7", "step_8"]
    assert report.kept["step_5"] == "base of step_6"
    assert all(chained.verify(version).ok for version in chained.versions())


def test_gc_keeps_what_a_protected_delta_is_built_on(chained):
    chained.gc(keep_last=1, protect=["step_3"])
    assert chained.versions() == ["step_1", "step_2", "step_3", "step_5", "step_6", "step_7", "step_8"]
    assert chained.load("step_3")["w"][3] == 3


def test_only_full_versions_are_kept_every_so_often(chained):
    chained.gc(keep_last=1, keep_full_every=3)
    assert chained.versions() == ["step_1", "step_5", "step_6", "step_7", "step_8"]


def test_gc_removes_files_that_no_manifest_knows_and_leaves_the_rest(chained):
    directory = layout.version_dir(chained.path, "step_8")
    for name in ("delta-00002.bin", ".manifest.json.tmp"):
        (directory / name).write_bytes(b"of a fold that died")
    before = {path.name for path in directory.iterdir()} - {"delta-00002.bin", ".manifest.json.tmp"}
    damaged = layout.version_dir(chained.path, "step_2")
    (damaged / "manifest.json").write_bytes(b"{")
    (damaged / "delta-00002.bin").write_bytes(b"nobody knows what this belongs to")
    report = chained.gc(keep_last=8)
    assert report.garbage == ["step_8/.manifest.json.tmp", "step_8/delta-00002.bin"]
    assert {path.name for path in directory.iterdir()} == before
    assert (damaged / "delta-00002.bin").exists()


def test_a_dry_run_removes_nothing_and_says_what_would_go(ten):
    report = ten.gc(keep_last=9, dry_run=True)
    assert report.removed == ["step_1"]
    assert report.freed_nbytes > 0
    assert len(ten.versions()) == 10


def test_garbage_of_an_interrupted_publish_goes_and_a_damaged_version_stays(ten):
    garbage = layout.version_dir(ten.path, "step_11")
    garbage.mkdir()
    (garbage / ".part-00001.tmp").write_bytes(b"half")
    damaged = layout.manifest_path(ten.path, "step_2")
    damaged.write_bytes(encode_manifest(ten.manifest("step_2"))[:-5])
    report = ten.gc(keep_last=10)
    assert report.garbage == ["step_11"]
    assert not garbage.exists()
    assert damaged.exists()  # evidence is not removed
    with pytest.raises(VersionNotFound):
        ten.manifest("step_11")


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_last": 1, "keep_full_every": 0}])
def test_a_store_cannot_be_emptied(ten, options):
    with pytest.raises(InvalidInput):
        ten.gc(**options)
    assert len(ten.versions()) == 10


def test_each_kept_version_has_a_reason(ten):
    assert kept(ten, keep_last=2) == ["step_9", "step_10"]
    assert ten.gc(keep_last=1, keep_full_every=5).kept == {
        "step_10": "one of the last 1",
        "step_1": "a full version every 5",
        "step_6": "a full version every 5",
    }
