"""The versions of a store on a depot's shelf: what is opened, kept, let go and refused."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from depot_stand import PART, WAIT_S, eventually, nothing_left, part_bytes, tensors

from weightcast import Store
from weightcast.clock import Deadline
from weightcast.depot import stored
from weightcast.depot.stored import KEPT_VERSIONS, StoredShelf
from weightcast.errors import InvalidInput, ManifestCorrupt, NotFound, PartCorrupt, VersionNotFound, WrongState
from weightcast.wire.manifest import decode_manifest


def soon():
    return Deadline.after(WAIT_S)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("step_1", tensors(), files={"config.json": b"{}", "nothing.txt": b""})
    return store


@pytest.fixture
def shelf(store):
    with nothing_left():
        with StoredShelf(store.path, keep_s=0.0, linger_s=0.0) as shelf:
            yield shelf
        gc.collect()


def opened(store):
    """Files of the store that this process has open or mapped, removed ones included."""
    with open("/proc/self/maps") as maps:
        mapped = [line for line in maps if str(store.path) in line]
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(path))
    return mapped + [link for link in links if str(store.path) in link]


def test_a_holding_gives_files(store, shelf):
    with shelf.holding("step_1") as holding:
        assert decode_manifest(holding.encoded, "x") == store.manifest("step_1")
        assert holding.manifest.listed_files == store.manifest("step_1").listed_files
        assert dict(holding.files) == {
            file: (store.path / "versions" / "step_1" / file).stat().st_size
            for file in (PART, "config.json", "nothing.txt", "model.safetensors.index.json")
        }
        (view,) = holding.views(PART, 3, 1000, deadline=soon())
        assert view.readonly
        assert view == part_bytes(store)[3:1000]
        assert holding.views("nothing.txt", 0, 0, deadline=soon()) == []
        del view


def test_what_a_version_does_not_have_is_refused(store, shelf):
    with shelf.holding("step_1") as holding:
        for start, stop in ((-1, 5), (5, 3), (0, holding.files[PART] + 1)):
            with pytest.raises(InvalidInput, match="bytes"):
                holding.views(PART, start, stop, deadline=soon())
        with pytest.raises(NotFound, match="has no file"):
            holding.views("../step_1/config.json", 0, 1, deadline=soon())
    for version, error in (("step_2", VersionNotFound), ("../x", InvalidInput), ("", InvalidInput)):
        with pytest.raises(error), shelf.holding(version):
            pass


def test_payloads_of_deltas_are_files_and_offers_say_what_they_are_built_on(store, shelf):
    for number in (2, 3, 4):
        base = tensors()
        store.publish(f"step_{number}", base, mode="full")
    base["a"][0, 0] += 1
    store.publish("step_5", base, mode="delta")

    with shelf.holding("step_5") as holding:
        payload = holding.manifest.payloads[0]
        (view,) = holding.views(payload.file, 0, payload.nbytes, deadline=soon())
        assert view == (store.path / "versions" / "step_5" / payload.file).read_bytes()
        del view
    offers = shelf.offers()
    assert [offer.version for offer in offers] == [f"step_{number}" for number in range(1, 6)]
    assert [offer.kind for offer in offers][-2:] == ["full", "delta"]
    assert offers[-1].base == "step_4"


def test_versions_stay_readable_while_they_are_held_whatever_gc_removes(store, shelf):
    data = part_bytes(store)
    with shelf.holding("step_1") as holding:
        store.publish("step_2", tensors(1), mode="full")
        store.gc(keep_last=1)
        assert store.versions() == ["step_2"]
        (view,) = holding.views(PART, 0, len(data), deadline=soon())
        assert view == data
        with shelf.holding("step_1") as again:
            assert again is holding
        del view, again
    del holding
    eventually(lambda: not opened(store), "the end of the open files")
    with pytest.raises(VersionNotFound), shelf.holding("step_1"):
        pass


def test_a_version_that_left_the_store_lingers_for_those_who_began_with_it(store):
    data = part_bytes(store)
    with StoredShelf(store.path, linger_s=WAIT_S) as shelf:
        with shelf.holding("step_1"):
            pass
        store.publish("step_2", tensors(1), mode="full")
        store.gc(keep_last=1)
        with shelf.holding("step_1") as holding:
            assert bytes(holding.views(PART, 0, len(data), deadline=soon())[0]) == data
        assert [offer.version for offer in shelf.offers()] == ["step_2"]


def test_files_that_nobody_uses_are_closed_and_opened_again(store, shelf):
    with shelf.holding("step_1"):
        assert opened(store)
    eventually(lambda: not opened(store), "the end of the open files")
    with shelf.holding("step_1") as holding:
        assert holding.views(PART, 0, 1, deadline=soon())


def test_a_version_that_was_replaced_by_another_of_its_name_is_not_mixed_up(store):
    with StoredShelf(store.path) as shelf:
        with shelf.holding("step_1") as old:
            store.publish("step_2", tensors(1), mode="full")
            store.gc(keep_last=1)
            store.publish("step_1", tensors(2), mode="full")
            with shelf.holding("step_1") as new:
                assert new.manifest.listed_files == store.manifest("step_1").listed_files
                assert new.manifest.root_digest != old.manifest.root_digest
                assert bytes(new.views(PART, 0, 5000, deadline=soon())[0]) == part_bytes(store)[:5000]
        assert {offer.root_digest for offer in shelf.offers()} >= {store.manifest("step_1").root_digest}


def test_a_payload_that_a_fold_replaced_can_still_be_had_by_those_who_began_with_it(store):
    state = tensors()
    for step in (2, 3):
        state["a"][step] += 1
        store.publish(f"step_{step}", state, mode="delta")
    with StoredShelf(store.path) as shelf:
        with shelf.holding("step_3") as before:
            old = before.manifest.payloads[0]
        store.fold("step_3")
        store.gc(keep_last=1)
        with shelf.holding("step_3") as after:
            new = after.manifest.payloads[0]
            assert new.file != old.file
            base = decode_manifest(after.encoded, "x").base
            assert base is not None
            assert base.version == "step_1"
            for payload in (old, new):
                assert sum(map(len, after.views(payload.file, 0, payload.nbytes, deadline=soon()))) == payload.nbytes


@pytest.mark.parametrize("change", ["shorter", "longer", "gone", "a pipe", "a directory"])
def test_a_part_that_is_not_as_published_is_refused_when_it_is_opened(store, shelf, change):
    path = store.path / "versions" / "step_1" / PART
    if change in ("shorter", "longer"):
        os.truncate(path, path.stat().st_size + (1 if change == "longer" else -1))
    else:
        path.unlink()
        if change == "a pipe":
            os.mkfifo(path)
        if change == "a directory":
            path.mkdir()

    with pytest.raises(PartCorrupt), shelf.holding("step_1"):
        pass


@pytest.mark.parametrize("nbytes", [0, 1, 5000])
def test_a_part_that_is_truncated_after_it_was_opened_is_an_error_and_not_the_end_of_the_process(store, shelf, nbytes):
    with shelf.holding("step_1") as holding:
        os.truncate(store.path / "versions" / "step_1" / PART, nbytes)
        with pytest.raises(PartCorrupt, match=f"has {nbytes} bytes now"):
            holding.views(PART, 0, 4, deadline=soon())


def test_a_damaged_manifest_is_left_out_and_does_not_hide_the_others(store, shelf, caplog):
    store.publish("step_2", tensors(1), mode="full")
    path = store.path / "versions" / "step_2" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"step_2", b"step_3"))

    assert [offer.version for offer in shelf.offers()] == ["step_1"]
    assert "version left out" in caplog.text
    assert "version=step_2" in caplog.text
    assert shelf.newest() is None
    with pytest.raises(ManifestCorrupt), shelf.holding("step_2"):
        pass


def test_the_newest_version_is_the_announced_one_also_if_that_is_an_older_one(store, shelf):
    assert shelf.newest().version == "step_1"
    store.publish("step_2", tensors(1), mode="full")
    assert shelf.newest().version == "step_2"
    store.announce("step_1")
    assert shelf.newest().version == "step_1"
    assert shelf.wait_newer("step_2", deadline=soon()).version == "step_1"
    assert shelf.wait_newer("step_1", deadline=Deadline.after(0.05)) is None


def test_a_store_that_is_made_later_is_served_then(tmp_path):
    store = Store(tmp_path / "later" / "store")
    with StoredShelf(store.path) as shelf:
        assert shelf.newest() is None
        assert shelf.offers() == []
        with pytest.raises(NotFound), shelf.holding("step_1"):
            pass
        store.publish("step_1", tensors())
        assert shelf.newest().version == "step_1"


def test_a_hundred_waiting_threads_are_woken_by_one_that_looks(store, shelf):
    found = []
    waiting = [
        threading.Thread(target=lambda: found.append(shelf.wait_newer("step_1", deadline=soon()))) for _ in range(100)
    ]
    for thread in waiting:
        thread.start()
    assert len([thread for thread in threading.enumerate() if thread.name == "depot shelf"]) <= 1
    store.publish("step_2", tensors(1), mode="full")
    for thread in waiting:
        thread.join(WAIT_S)
    assert [newest.version for newest in found] == ["step_2"] * 100


def test_closing_ends_those_who_wait_and_leaves_to_readers_what_they_read(store):
    shelf, found = StoredShelf(store.path), []
    waiting = threading.Thread(target=lambda: found.append(shelf.wait_newer("step_1", deadline=soon())))
    with nothing_left(), shelf.holding("step_1") as holding:
        waiting.start()
        shelf.close()
        waiting.join(WAIT_S)
        assert bytes(holding.views(PART, 0, 100, deadline=soon())[0]) == part_bytes(store)[:100]
        del holding
        gc.collect()
    assert found == [None]
    with pytest.raises(WrongState), shelf.holding("step_1"):
        pass


def test_only_so_many_versions_that_nobody_reads_stay_open(tmp_path):
    store = Store(tmp_path / "store")
    with StoredShelf(store.path) as shelf, ExitStack() as reading:
        for step in range(3 * KEPT_VERSIONS):
            store.publish(f"step_{step}", tensors(step, elements=20), "full")
            with shelf.holding(f"step_{step}"):
                pass
            if step == 1:
                reading.enter_context(shelf.holding("step_1"))
        assert len(shelf._kept) == 2 + KEPT_VERSIONS  # two were read when the last was opened
        assert {"step_1", f"step_{3 * KEPT_VERSIONS - 1}"} <= shelf._kept.keys()
        with shelf.holding("step_0") as again:
            assert again.manifest.version == "step_0"


def test_of_those_that_left_the_store_more_stay_open_for_their_readers_to_go_on(tmp_path, monkeypatch):
    store = Store(tmp_path / "store")
    with StoredShelf(store.path) as shelf:
        for step in range(2 * KEPT_VERSIONS):
            store.publish(f"step_{step}", tensors(step, elements=20), "full")
            with shelf.holding(f"step_{step}"):
                pass
            store.gc(keep_last=1)
        with shelf.holding("step_0") as gone:
            assert gone.views(PART, 0, 8, deadline=Deadline.after(5))
        monkeypatch.setattr(stored, "KEPT_GONE", 4)
        store.publish("last", tensors(), "full")
        with shelf.holding("last"):
            assert shelf._kept.keys() >= {"step_0", "last"}
            assert len(shelf._kept) == 1 + 1 + 4  # the last one, the one before it, and those that are gone
