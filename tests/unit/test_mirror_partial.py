"""A version on its way into a store: what can be read of it, what is left of it, and when it is one."""

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import msgspec
import pytest

from relays import PiecewiseStore, check_same, fails_with_source_failed, read_through, tensors
from weightcast import Store
from weightcast.clock import Deadline
from weightcast.depot.holding import Holding
from weightcast.depot.partial import PartialVersion
from weightcast.errors import (
    DeadlineExceeded,
    InvalidInput,
    ManifestCorrupt,
    NotFound,
    SourceFailed,
    StorageFailed,
    UpdateCancelled,
)
from weightcast.tensors.digest import algorithm_of, bytes_digest
from weightcast.wire.manifest import file_entry

SIZE = 64 << 10


@pytest.fixture
def source(tmp_path):
    store = PiecewiseStore(tmp_path / "source")
    store.publish("v1", tensors(1), files={"config.json": b"{}", "empty.txt": b""}, part_nbytes=500_000)
    return store


def data_of(source, version, file):
    return (source.path / "versions" / version / file).read_bytes()


def opened(source, store, version="v1"):
    partial = PartialVersion(store.path, source.manifest(version))
    partial.open()
    return partial


def fill(partial, source, count=1 << 30, version="v1"):
    """Look for what is there, and give it as many pieces as said."""
    partial.resume()
    for _ in range(count):
        run = partial.take(lambda _: 0)
        if run is None:
            return
        data = data_of(source, version, run.file)[run.start : run.stop]
        partial.write(run.file, run.start, memoryview(data))
        assert partial.came(run.pieces[0], bytes_digest(data, algorithm_of(run.pieces[0].digest)), 0)


def test_it_is_a_holding_before_anything_has_come(source, store):
    partial: Holding = PartialVersion(store.path, source.manifest("v1"))
    assert partial.encoded == data_of(source, "v1", "manifest.json")
    assert partial.files == {path.name: path.stat().st_size for path in (source.path / "versions/v1").glob("[!m]*")} | {
        path.name: path.stat().st_size for path in (source.path / "versions/v1").glob("model*")
    }
    assert partial.offer.complete is False


def test_a_whole_version_is_sealed_as_the_same_files(source, store):
    partial = opened(source, store)
    fill(partial, source)
    assert partial.whole
    assert store.versions() == []  # not before it is sealed
    partial.seal(newest=True)
    assert (store.versions(), store.newest()) == (["v1"], "v1")
    check_same(source.path, store.path, "v1")


def test_a_piece_that_is_wrong_is_not_given_out(source, store):
    partial = opened(source, store)
    partial.resume()
    run = partial.take(lambda piece: 5 if piece.file == "config.json" else None)
    while run is None or run.file != "config.json":
        run = partial.take(lambda _: 5)
    partial.write("config.json", 0, memoryview(b"[]"))
    assert not partial.came(run.pieces[0], bytes_digest(b"[]"), run.source)
    assert [piece.wrong for piece in partial.missing() if piece.file == "config.json"] == [{5: 1}]
    with pytest.raises(DeadlineExceeded):
        read_through(partial, "config.json", 0, 2, seconds=0.01)


def test_a_base_is_sealed_without_becoming_the_newest(source, store):
    store.publish("mine", tensors(3))
    partial = opened(source, store)
    fill(partial, source)
    partial.seal(newest=False)
    assert store.newest() == "mine"
    assert set(store.versions()) == {"mine", "v1"}


def test_readers_wait_for_their_pieces_and_for_no_others(source, store):
    partial = PartialVersion(store.path, source.manifest("v1"))
    part = source.manifest("v1").parts[0].file
    expected, found = data_of(source, "v1", part), []
    readers = [
        threading.Thread(target=lambda: found.append(read_through(partial, part, 0, SIZE + 1))),
    ]
    for reader in readers:
        reader.start()
    time.sleep(0.05)
    assert found == []
    partial.open()
    time.sleep(0.05)
    assert found == []
    small = sum(1 for file, nbytes in partial.files.items() if nbytes and not file.startswith("model-"))
    fill(partial, source, count=small + 2)
    for reader in readers:
        reader.join()
    assert expected[: SIZE + 1] in found
    with pytest.raises(DeadlineExceeded, match="on its way"):
        read_through(partial, part, SIZE, 2 * SIZE + 1, seconds=0.05)
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(UpdateCancelled):
        partial.views(part, 0, len(expected), deadline=Deadline.after(5, cancelled=stopped))


def test_all_who_wait_are_told_at_once_that_it_is_given_up(source, store):
    partial, ends = opened(source, store), []
    fill(partial, source, count=3)
    part = source.manifest("v1").parts[1].file
    waiting = [
        fails_with_source_failed(lambda: read_through(partial, part, 0, 10, seconds=30), ends),
    ]
    time.sleep(0.05)
    partial.give_up(SourceFailed("the upstream is gone"))
    for thread in waiting:
        thread.join(timeout=5)
        assert not thread.is_alive()
    assert all("given up" in str(error) and "the upstream is gone" in str(error) and s < 5 for error, s in ends)
    with pytest.raises(SourceFailed):
        read_through(partial, "config.json", 0, 1)  # also what had come


def test_ranges_and_names_that_it_has_not_are_refused(source, store):
    partial = opened(source, store)
    fill(partial, source)
    part = source.manifest("v1").parts[0]
    for start, stop in ((-1, 1), (2, 1), (0, part.nbytes + 1)):
        with pytest.raises(InvalidInput):
            read_through(partial, part.file, start, stop)
    for call in (
        lambda: read_through(partial, "manifest.json", 0, 1),
        lambda: read_through(partial, "../v1/config.json", 0, 1),
    ):
        with pytest.raises(NotFound):
            call()
    assert read_through(partial, "empty.txt", 0, 0) == b""


def test_what_an_interrupted_one_leaves_is_garbage_that_gc_removes(source, store):
    store.publish("mine", tensors(3))
    partial = opened(source, store)
    fill(partial, source, count=5)
    partial.close()
    assert store.versions() == ["mine"]
    assert store.gc().garbage == ["v1"]
    assert not (store.path / "versions/v1").exists()


def test_the_next_try_goes_on_with_the_pieces_that_are_right(source, store):
    partial = opened(source, store)
    fill(partial, source, count=9)
    there = partial.pieces_there
    partial.close()
    directory = store.path / "versions/v1"
    (directory / "stray.bin").write_bytes(b"of another try")
    (directory / ".manifest.json.tmp").write_bytes(b"{")
    part = source.manifest("v1").parts[0].file
    with (directory / part).open("r+b") as file:  # a page that was not on the medium when the power went
        file.seek(SIZE + 100)
        file.write(b"\0" * 100)
    again = opened(source, store)
    fill(again, source, count=0)
    assert 5 < again.pieces_there == there - 1
    assert {(piece.file, piece.index) for piece in again.missing()} >= {(part, 1)}
    with pytest.raises(DeadlineExceeded):
        read_through(again, part, SIZE, 2 * SIZE, seconds=0.05)
    fill(again, source)
    again.seal(newest=True)
    check_same(source.path, store.path, "v1")


@pytest.mark.parametrize("size", [0, 1, 10_000_000])
def test_a_file_of_another_size_is_not_trusted(source, store, size):
    part = source.manifest("v1").parts[0]
    (store.path / "versions/v1").mkdir(parents=True)
    (store.path / "versions/v1" / part.file).write_bytes(b"x" * size)
    partial = opened(source, store)
    fill(partial, source, count=0)
    assert partial.pieces_there == 0
    fill(partial, source)
    partial.seal(newest=True)
    check_same(source.path, store.path, "v1")


def test_a_version_of_format_1_comes_in_pieces_as_large_as_its_tensors(store):
    source = Store(Path(__file__).parents[1] / "golden" / "format1" / "store")
    for version in source.versions():
        partial = opened(source, store, version)
        fill(partial, source, version=version)
        partial.seal(newest=True)
        assert all(
            (store.path / "versions" / version / file).read_bytes() == data_of(source, version, file)
            for file in partial.files
        )
        assert store.verify(version).problems == []


def test_a_seal_that_fails_leaves_the_store_as_it_was(source, store, monkeypatch):
    store.publish("mine", tensors(3))
    before = (store.path / "version.yaml").read_bytes()
    partial = opened(source, store)
    fill(partial, source)
    sync = os.fsync

    def full(fd):
        if "version.yaml" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return sync(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFailed, match=r"version\.yaml"):
        partial.seal(newest=True)
    monkeypatch.setattr(os, "fsync", sync)
    assert (store.path / "version.yaml").read_bytes() == before
    assert (store.versions(), partial.complete) == (["mine"], False)
    partial.seal(newest=True)
    assert store.newest() == "v1"


def test_what_has_no_room_is_refused_before_anything_is_fetched(source, store, monkeypatch):
    status = os.statvfs(source.path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*status[:4], 1, *status[5:])))
    with pytest.raises(StorageFailed, match="needed"):
        opened(source, store)


def test_a_manifest_that_lists_itself_is_refused(source, store):
    manifest = source.manifest("v1")
    itself = file_entry("manifest.json", b"hello", "xxh3-128")
    partial = PartialVersion(store.path, msgspec.structs.replace(manifest, files=(*manifest.files, itself)))
    with pytest.raises(ManifestCorrupt, match="own version"):
        partial.open()
    assert not (store.path / "versions/v1").exists()


def test_views_stay_readable_when_the_files_are_removed(source, store):
    partial = opened(source, store)
    fill(partial, source)
    (view,) = partial.views("config.json", 0, 2, deadline=Deadline.after(1))
    partial.close()
    shutil.rmtree(store.path)
    assert bytes(view) == b"{}"
