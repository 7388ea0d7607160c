"""Versions that trainer ranks share, in stores: written by the ranks themselves, or fetched by a mirror."""

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from msgspec.structs import replace
from shares_world import columns_of, model, rows_of, same, share_of, soon, trainers
from test_shares_deltas import boxes_of, publish_all, stepped, wide

from weightcast import DeltaPolicy, LiveModel, Shard, ShareWriter, Store
from weightcast.delta import Cut, Slicing, slicing
from weightcast.depot.mirror import Mirror
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.errors import (
    DeadlineExceeded,
    DigestMismatch,
    GatherFailed,
    InvalidInput,
    ManifestCorrupt,
    StorageFailed,
    VersionExists,
)
from weightcast.store.files import replace_synced
from weightcast.store.version_file import write_version_file
from weightcast.tensors.boxes import Box, Held, box_of
from weightcast.tensors.bridges import spec_of
from weightcast.transports.http.receiver import HttpReceiver
from weightcast.wire.manifest import ShareFile, decode_manifest, encode_manifest
from weightcast.worker.shards import Shards


class Writers:
    """Trainer ranks, each in a thread of its own."""

    def __init__(self, path, ranks, **options):
        self.all = [ShareWriter(path, rank=rank, ranks=ranks, **options) for rank in range(ranks)]

    def publish(self, version, shares, *, timeout=30.0, only=None, late=None, **options):
        """What each rank returned or raised."""

        def run(rank):
            time.sleep(0.2 * (rank == late))
            try:
                return self.all[rank].publish(version, shares[rank], timeout=timeout, **options)
            except Exception as error:
                return error

        chosen = range(len(self.all)) if only is None else only
        with ThreadPoolExecutor(len(self.all)) as threads:
            return list(threads.map(run, chosen))


def shares_of(arrays, ranks, tied=()):
    shares = [share_of(arrays, rank, ranks) for rank in range(ranks)]
    return [share | {name: share[holder] for name, holder in dict(tied).items()} for share in shares]


def published(writers, version, shares, **options):
    told = writers.publish(version, shares, **options)
    assert all(one == told[0] for one in told), told
    return told[0]


def all_same(found, arrays):
    return all(same(found[name], array) for name, array in arrays.items())


def await_version(mirror, version):
    deadline = soon()
    while (found := mirror.newest()) is None or found.version != version or version not in Store(mirror.path).versions():
        deadline.check(f"waiting for {version}: {mirror.problems()}")
        time.sleep(0.02)


# -- ranks that write into a store -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_write_their_boxes_and_then_only_changes(rng, tmp_path, ranks):
    arrays, store, whole = model(), Store(tmp_path / "store"), Store(tmp_path / "whole")
    writers = Writers(store.path, ranks)
    live = {name: np.zeros_like(array) for name, array in arrays.items()}
    target = LiveModel(live, source=store)
    for number in range(4):
        manifest = published(writers, f"step_{number}", shares_of(arrays, ranks))
        assert (manifest.kind, manifest.sequence) == ("delta" if number else "full", number + 1)
        assert manifest.root_digest == whole.publish(f"step_{number}", arrays, "full").root_digest
        assert len(manifest.payloads) == (ranks if number else 0)
        assert {path.name for path in (store.path / "versions" / f"step_{number}").iterdir()} == {
            "manifest.json", *manifest.listed_files
        }  # fmt: skip
        assert target.update().mode == ("delta" if number else "copy")
        assert all_same(live, arrays)
        assert all_same(store.load(), arrays)
        assert store.verify().ok
        arrays = stepped(rng, arrays)
    assert store.versions() == [f"step_{number}" for number in range(4)]


@pytest.mark.parametrize("tied", [{"zero": "norm"}, {"a_head": "embed"}], ids=["replicated", "sharded"])
def test_tied_weights_stay_tied_in_the_store(rng, tmp_path, tied):
    arrays, store = model(), Store(tmp_path)
    writers = Writers(store.path, 3)
    for number in range(3):
        manifest = published(writers, f"step_{number}", shares_of(arrays, 3, tied))
        assert (manifest.kind, manifest.tied) == ("delta" if number else "full", tied)
        found = store.load()
        assert all_same(found, arrays)
        assert all(found[name] is found[holder] for name, holder in tied.items())
        arrays = stepped(rng, arrays)


@pytest.mark.parametrize("how", ["rows", "columns", "both", "replicated"])
@pytest.mark.parametrize("packing", ["gaps", "classes"])
@pytest.mark.parametrize("way", ["file", "http"])
def test_ranks_of_any_sharding_follow_a_store(rng, monkeypatch, tmp_path, how, packing, way):
    monkeypatch.setattr(slicing, "SLICED_NBYTES", 0)
    cuts = Slicing((Cut(("rows",), 0, parts=6), Cut(("columns",), 1, parts=6)))
    writers = Writers(tmp_path, 4, deltas=DeltaPolicy(packing=packing, slicing=cuts))
    arrays, engines = wide(rng), 3

    def shares():
        boxes = [boxes_of(arrays, rank, 4, how) for rank in range(4)]
        return [
            {name: Shard(box_of(array, own[name]), array.shape, own[name].start) for name, array in arrays.items()}
            for own in boxes
        ]

    def held(rank):
        places = {
            "rows": rows_of(arrays["rows"], rank, engines), "columns": columns_of(arrays["columns"], rank, engines),
            "norm": Box.whole((64,)), "odd": Box.whole((31, 7)),
        }  # fmt: skip
        return {name: Held.slice_of(spec_of(name, arrays[name]), box) for name, box in places.items()}

    published(writers, "step_0", shares())
    with (
        closing(StoredShelf(tmp_path)) as shelf,
        Depot(shelf, "127.0.0.1:0") as depot,
        closing(HttpReceiver([depot.url])) as receiver,
    ):
        source = Store(tmp_path) if way == "file" else receiver
        ranks = []
        for rank in range(engines):
            layout = Shards(tuple(held(rank).values()), {name: array.shape for name, array in arrays.items()})
            live = {name: np.zeros(one.spec.shape, np.float32) for name, one in held(rank).items()}
            ranks.append((live, LiveModel(live, source=source, layout=layout)))
            ranks[-1][1].update()
        late = LiveModel({name: np.zeros_like(array) for name, array in arrays.items()}, source=source)
        for number in range(1, 4):
            arrays = stepped(rng, arrays, 40)
            assert published(writers, f"step_{number}", shares()).kind == "delta"
            for rank, (live, target) in enumerate(ranks):
                assert target.update().mode == "delta"
                for name, one in held(rank).items():
                    assert same(live[name], box_of(arrays[name], one.placements[0].box))
        late.update()
        assert all_same(Store(tmp_path).load(), arrays)


def test_a_store_of_shares_is_an_ordinary_store(rng, tmp_path):
    arrays, store = model(), Store(tmp_path)
    writers = Writers(store.path, 2)
    states = [arrays]
    for number in range(4):
        published(writers, f"step_{number}", shares_of(states[-1], 2))
        states.append(stepped(rng, states[-1]))
    assert store.publish("whole", states[4], "delta").base.version == "step_3"  # one rank goes on alone
    assert all_same(store.load("whole"), states[4])
    assert {one.name for one in store.diff("step_0", "step_3").tensors} == arrays.keys() - {"nothing"}
    folded = store.fold("step_3")
    assert (folded.base.version, folded.boxes) == ("step_0", {})
    assert all_same(store.load("step_3"), states[3])
    report = store.gc(keep_last=1)
    assert {"step_1", "step_2"} <= set(report.removed)
    assert all(store.verify(version).ok for version in store.versions())
    assert all_same(store.load("whole"), states[4])


def test_a_rank_that_was_started_again_makes_the_next_version_full(rng, tmp_path):
    arrays, store = model(), Store(tmp_path)
    writers = Writers(tmp_path, 3)
    published(writers, "step_0", shares_of(arrays, 3))
    writers.all[1] = ShareWriter(tmp_path, rank=1, ranks=3)
    for number, kind in ((1, "full"), (2, "delta")):
        arrays = stepped(rng, arrays)
        manifest = published(writers, f"step_{number}", shares_of(arrays, 3))
        assert (manifest.kind, len(manifest.shares)) == (kind, 3 if kind == "full" else 0)
        assert len(list((tmp_path / "versions" / f"step_{number}").glob("delta-*"))) == len(manifest.payloads)
        assert all_same(store.load(), arrays)


def test_a_full_version_comes_every_so_often_and_after_its_base_is_gone(rng, tmp_path):
    arrays = model()
    writers = Writers(tmp_path, 2, deltas=DeltaPolicy(full_every=2))
    kinds = []
    for number in range(6):
        if number == 5:
            shutil.rmtree(tmp_path / "versions" / "step_4")
        kinds.append(published(writers, f"step_{number}", shares_of(arrays, 2)).kind)
        arrays = stepped(rng, arrays)
    assert kinds == ["full", "delta", "full", "delta", "full", "full"]


def test_a_rank_that_does_not_come_ends_the_others_and_the_store_is_as_before(rng, tmp_path):
    arrays, store = model(), Store(tmp_path)
    writers = Writers(tmp_path, 3)
    published(writers, "step_0", shares_of(arrays, 3))
    later = stepped(rng, arrays)
    told = writers.publish("step_1", shares_of(later, 3), timeout=0.5, only=[0, 1])
    assert isinstance(told[0], GatherFailed)
    assert "rank(s) 2 of 3" in str(told[0])
    assert store.versions() == ["step_0"]
    assert store.newest() == "step_0"
    assert published(writers, "step_1", shares_of(later, 3)).kind == "delta"  # over what the first try left
    assert all_same(store.load(), later)


def test_the_error_of_one_rank_is_told_to_all(tmp_path):
    arrays, store = model(), Store(tmp_path)
    writers = Writers(tmp_path, 3)
    shares = shares_of(arrays, 3)
    for bad in (0, 2):
        broken = list(shares)
        broken[bad] = broken[bad] | {"norm": np.full(48, np.nan, np.float32)}
        broken = [share | {"embed": np.zeros((64, 48), np.float32)} for share in broken]  # that of the model has NaNs
        began = time.monotonic()
        told = writers.publish("step_0", broken, finite=True, late=bad)
        assert time.monotonic() - began < 10
        assert isinstance(told[bad], InvalidInput)
        assert all(isinstance(one, GatherFailed) for rank, one in enumerate(told) if rank != bad), told
        assert store.versions() == []
    published(writers, "step_0", shares)
    assert all_same(store.load(), arrays)
    assert all(isinstance(one, VersionExists) for one in writers.publish("step_0", shares))


def test_what_a_dead_rank_0_left_is_not_taken_for_a_beginning(tmp_path):
    arrays, left = model(), tmp_path / "versions" / "step_0"
    left.mkdir(parents=True)
    (left / ".publish.json").write_text('["dead", 1]')
    replace_synced(left / ".publish.json", b'{"attempt": "dead", "sequence": 7}')
    (left / "share-00001.bin").write_bytes(b"half")
    writers = Writers(tmp_path, 2)
    shares = shares_of(arrays, 2)
    with ThreadPoolExecutor(2) as threads:
        follower = threads.submit(writers.all[1].publish, "step_0", shares[1], timeout=30)
        await_file(left, ".share-00001-dead.json")
        leader = threads.submit(writers.all[0].publish, "step_0", shares[0], timeout=30)
        assert leader.result() == follower.result()
    assert leader.result().sequence == 1
    assert all_same(Store(tmp_path).load(), arrays)


def await_file(directory, pattern):
    deadline = soon()
    while not list(directory.glob(pattern)):
        deadline.check(f"waiting for {pattern} in {directory}")
        time.sleep(0.01)


def test_a_rank_that_was_started_again_does_not_replace_what_its_predecessor_announced(tmp_path):
    arrays, directory = model(), tmp_path / "versions" / "step_0"
    writers, shares = Writers(tmp_path, 3), shares_of(arrays, 3)
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(writers.all[rank].publish, "step_0", shares[rank], timeout=30) for rank in (0, 1)]
        await_file(directory, ".share-00001-*.json")
        with pytest.raises(GatherFailed, match="another process of rank 1"):
            ShareWriter(tmp_path, rank=1, ranks=3).publish("step_0", shares_of(model(2), 3)[1], timeout=3)
        running.append(threads.submit(writers.all[2].publish, "step_0", shares[2], timeout=30))
        manifests = [one.result() for one in running]
    assert manifests == [manifests[0]] * 3
    assert Store(tmp_path).verify("step_0").ok
    assert all_same(Store(tmp_path).load(), arrays)


@pytest.mark.parametrize("end", ["published", "taken back", "dead after version.yaml", "dead before version.yaml"])
def test_a_rank_returns_once_rank_0_can_take_the_version_back_no_more(tmp_path, end):
    """The test plays rank 0, so it chooses where to stop."""
    arrays, directory = model(), tmp_path / "versions" / "step_0"
    manifest = Store(tmp_path / "other").publish("step_0", arrays)
    directory.mkdir(parents=True)
    state = directory / ".publish.json"
    replace_synced(state, b'{"attempt": "one", "sequence": 1}')
    with ThreadPoolExecutor(1) as threads:
        follower = threads.submit(
            ShareWriter(tmp_path, rank=1, ranks=2).publish, "step_0", share_of(arrays, 1, 2), timeout=2
        )
        await_file(directory, ".share-00001-one.json")
        replace_synced(directory / "manifest.json", encode_manifest(manifest))
        time.sleep(0.3)
        assert not follower.done()  # the manifest may still be removed
        if end == "taken back":
            (directory / "manifest.json").unlink()
            replace_synced(state, b'{"attempt": "one", "sequence": 1, "error": "no space"}')
            with pytest.raises(GatherFailed, match="no space"):
                follower.result()
        elif end == "dead before version.yaml":
            with pytest.raises(DeadlineExceeded):
                follower.result()
        else:
            write_version_file(tmp_path, version="step_0", step=manifest.step)
            if end == "published":
                state.unlink()
            assert follower.result() == manifest


def test_rank_0_ends_the_try_before_it_removes_what_that_left(tmp_path):
    directory = tmp_path / "versions" / "step_0"
    (directory / ".a_directory_that_cannot_be_removed_as_a_file").mkdir(parents=True)
    replace_synced(directory / ".publish.json", b'{"attempt": "dead", "sequence": 7}')
    with pytest.raises(StorageFailed, match="cannot_be_removed"):
        ShareWriter(tmp_path, rank=0, ranks=2).publish("step_0", share_of(model(), 0, 2), timeout=5)
    assert not (directory / ".publish.json").exists()


def test_a_share_of_less_than_no_bytes_is_refused(tmp_path):
    manifest = published(Writers(tmp_path, 2), "step_0", shares_of(model(), 2))
    lie = replace(manifest, shares=(*manifest.shares, ShareFile(file="share-00002.bin", nbytes=-5, pieces=b"")))
    with pytest.raises(ManifestCorrupt, match=r"'share-00002.bin' has -5 bytes"):
        decode_manifest(encode_manifest(lie), "m")


def test_a_rank_that_holds_nothing_does_not_keep_the_others_from_writing_deltas(rng, tmp_path):
    arrays = {"w": rng.standard_normal((256, 1024)).astype(np.float32)}
    writers = Writers(tmp_path, 2)
    for number in range(2):
        empty = Shard(np.empty((0, 1024), np.float32), (256, 1024), (256, 0))
        manifest = published(writers, f"step_{number}", [arrays, {"w": empty}])
        assert manifest.kind == ("delta" if number else "full")
        assert all_same(Store(tmp_path).load(), arrays)
        arrays = stepped(rng, arrays)


def test_changes_above_max_share_are_written_as_a_full_version(rng, tmp_path):
    arrays = {"w": rng.standard_normal((2048, 1024)).astype(np.float32)}
    halves = [rows_of(arrays["w"], rank, 2) for rank in (0, 1)]
    for share, kind in ((0.5, "delta"), (0.02, "full")):
        writers, current = Writers(tmp_path / kind, 2, deltas=DeltaPolicy(max_share=share)), arrays
        for number in range(2):
            shards = [{"w": Shard(box_of(current["w"], box), (2048, 1024), box.start)} for box in halves]
            manifest = published(writers, f"step_{number}", shards)
            current = stepped(rng, current, 400_000)
        assert manifest.kind == kind


def test_a_damaged_share_is_found(rng, tmp_path):
    arrays, store = model(), Store(tmp_path)
    published(Writers(tmp_path, 3), "step_0", shares_of(arrays, 3))
    for rank in range(3):
        path = tmp_path / "versions" / "step_0" / f"share-{rank:05d}.bin"
        whole = path.read_bytes()
        at = int(rng.integers(len(whole)))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        report = store.verify("step_0")
        assert len(report.problems) == 1
        assert path.name in report.problems[0]
        path.write_bytes(whole[:-1])
        assert "bytes" in store.verify("step_0").problems[0]
        path.write_bytes(whole)
    assert store.verify("step_0").ok
    path = tmp_path / "versions" / "step_0" / "share-00000.bin"  # the embedding lies first in it
    path.write_bytes(bytes(64) + path.read_bytes()[64:])
    with pytest.raises(DigestMismatch, match="embed"):
        store.load("step_0")


# -- mirrors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mirror_takes_what_ranks_share_and_serves_it_to_others(rng, tmp_path, ranks):
    arrays = model()
    live = {name: np.zeros_like(array) for name, array in arrays.items()}
    rows = {name: rows_of(array, 1, 3) if array.ndim > 1 else Box.whole(array.shape) for name, array in arrays.items()}
    held = tuple(Held.slice_of(spec_of(name, array), rows[name]) for name, array in arrays.items())
    cut = {one.spec.name: np.zeros(one.spec.shape, one.spec.dtype.numpy) for one in held}
    with trainers(ranks) as publishers:
        hosts = ",".join(one.url.removeprefix("http://") for one in publishers)
        with (
            Mirror(tmp_path / "first", [f"shares+http://{hosts}"], poll_s=0.2) as mirror,
            Depot(mirror, "127.0.0.1:0") as depot,
            Mirror(tmp_path / "second", [depot.url], poll_s=0.2) as second,
            closing(HttpReceiver([depot.url])) as receiver,
        ):
            target = LiveModel(live, source=receiver)
            sliced = LiveModel(cut, source=receiver, layout=Shards(held, {name: a.shape for name, a in arrays.items()}))
            for number in range(3):
                publish_all(publishers, f"step_{number}", arrays)
                await_version(mirror, f"step_{number}")
                await_version(second, f"step_{number}")
                for one in (target, sliced):
                    assert one.update().mode == ("delta" if number else "copy")
                assert all_same(live, arrays)
                assert all(same(cut[name], box_of(array, rows[name])) for name, array in arrays.items())
                for path in (mirror.path, second.path):
                    assert all_same(Store(path).load(f"step_{number}"), arrays)
                    assert Store(path).verify().ok
                arrays = stepped(rng, arrays)
            assert mirror.problems() == {}


def test_a_mirror_waits_for_the_slowest_rank(tmp_path):
    arrays = model()
    with trainers(2) as publishers:
        hosts = ",".join(one.url.removeprefix("http://") for one in publishers)
        with Mirror(tmp_path, [f"shares+http://{hosts}"], poll_s=0.2) as mirror:
            publishers[0].publish("step_0", share_of(arrays, 0, 2))
            time.sleep(0.5)
            assert mirror.newest() is None
            threading.Timer(0.1, publishers[1].publish, ("step_0", share_of(arrays, 1, 2))).start()
            await_version(mirror, "step_0")
        assert all_same(Store(tmp_path).load("step_0"), arrays)
