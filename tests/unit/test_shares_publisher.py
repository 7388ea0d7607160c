"""A trainer that is its own depot: its memory is read like a store, stays what it is, and is used again."""

import gc
import os
import signal
import threading
import time
from contextlib import ExitStack, closing, suppress
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize
from shares_world import model, same, soon

from weightcast import DepotPublisher, LiveModel, Shard, Store
from weightcast.clock import Deadline
from weightcast.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    SourceFailed,
    UnsupportedTensor,
    VersionExists,
    VersionNotFound,
    WrongState,
)
from weightcast.publish import memory_shelf
from weightcast.publish.memory_parts import in_memory, parts_for
from weightcast.publish.shares import given
from weightcast.store import layout
from weightcast.tensors.boxes import Box
from weightcast.tensors.bridges import spec_of
from weightcast.transports.http.client import DepotClient
from weightcast.transports.http.receiver import HttpReceiver
from weightcast.wire.manifest import encode_manifest, find_problems


@pytest.fixture
def publisher():
    with DepotPublisher("127.0.0.1:0") as one:
        yield one


@pytest.fixture
def client(publisher):
    with closing(DepotClient(publisher.url)) as one:
        yield one


def file_of(client, manifest, name, nbytes):
    data = bytearray(nbytes)
    client.read(manifest, name, 0, memoryview(data), deadline=soon())
    return bytes(data)


def tensor_of(held, name):
    """A tensor where it lies in the memory of a publisher."""
    entry = held.manifest.by_name()[name]
    file = held.manifest.parts[entry.part].file
    (view,) = held.views(file, entry.offset, entry.offset + entry.nbytes, deadline=soon())
    return np.frombuffer(view, dtype=entry.dtype.numpy).reshape(entry.shape)


def files_of(client, manifest):
    listed = [(part.file, part.nbytes) for part in manifest.parts] + [(file.file, file.nbytes) for file in manifest.files]
    return {name: file_of(client, manifest, name, nbytes) for name, nbytes in listed}


def test_a_trainer_is_read_like_a_store_and_has_the_root_digest_that_a_store_has(publisher, client, tmp_path):
    arrays = model()
    published = Store(tmp_path / "one").publish("step_7", arrays)

    publication = publisher.publish("step_7", arrays, metadata={"run": "a"})
    manifest = client.manifest("step_7", deadline=soon())

    assert list(find_problems(manifest)) == []
    assert manifest == publication.manifest
    assert (manifest.root_digest, manifest.step, manifest.metadata) == (published.root_digest, 7, {"run": "a"})
    live = {name: np.zeros_like(array) for name, array in arrays.items()}
    with closing(HttpReceiver([publisher.url])) as receiver:
        assert receiver.newest() == "step_7"
        LiveModel(live, source=receiver).update()
    assert all(same(live[name], array) for name, array in arrays.items())


def test_the_files_of_a_trainer_are_a_checkpoint_and_a_store(publisher, client, tmp_path):
    arrays = model() | {"odd": np.arange(3, dtype=np.int8), "odder": np.arange(5, dtype=np.uint8)}
    arrays["tied"] = arrays["embed"]
    publisher.publish("step_1", arrays)
    manifest = client.manifest("step_1", deadline=soon())

    files = files_of(client, manifest)

    checkpoint = {name: read["data"] for part in manifest.parts for name, read in deserialize(files[part.file])}
    assert checkpoint == {name: array.tobytes() for name, array in arrays.items() if name != "tied"}
    directory = layout.version_dir(tmp_path, "step_1")
    directory.mkdir(parents=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    (directory / layout.MANIFEST).write_bytes(encode_manifest(manifest))
    store = Store(tmp_path)
    store.announce("step_1")
    assert all(same(array, arrays[name]) for name, array in store.load().items())
    assert store.verify().ok
    assert manifest.tied == {"tied": "embed"}


def test_tensors_lie_on_multiples_of_their_item_size_in_parts_without_gaps():
    arrays = {
        f"{dtype}{number}": np.zeros(number, dtype=dtype) for number in (3, 5, 1) for dtype in ("i1", "f8", "f4", "u2")
    }

    parts = parts_for([spec_of(name, array) for name, array in arrays.items()], part_nbytes=40)

    assert len(parts) > 2
    places = in_memory(parts)
    assert all(places[name] % array.dtype.itemsize == 0 for name, array in arrays.items())
    assert all(one.at + one.nbytes <= other.at and other.at % 4096 == 0 for one, other in pairwise(parts))


def test_what_was_published_stays_when_the_tensors_change(publisher, client):
    array = np.arange(1 << 16, dtype=np.float32)
    publisher.publish("step_1", {"a": array, "column": array.reshape(256, 256).T})
    array[:] = 0

    manifest = client.manifest("step_1", deadline=soon())
    data = dict(deserialize(file_of(client, manifest, manifest.parts[0].file, manifest.parts[0].nbytes)))

    before = np.arange(1 << 16, dtype=np.float32)
    assert data["a"]["data"] == before.tobytes()
    assert data["column"]["data"] == before.reshape(256, 256).T.tobytes()


def test_the_last_two_versions_are_held_and_the_memory_of_the_one_before_is_used_again(publisher, client):
    addresses = []
    for step in range(1, 6):
        publisher.publish(f"step_{step}", {"a": np.full(1 << 14, step, np.float32)})
        with publisher._shelf.holding(f"step_{step}") as held:
            addresses.append(tensor_of(held, "a").__array_interface__["data"][0])

    assert publisher.versions == ["step_4", "step_5"]
    assert addresses[0] == addresses[2] == addresses[4] != addresses[1] == addresses[3]
    assert [offer.version for offer in client.catalogue(deadline=soon()).versions] == ["step_4", "step_5"]
    with pytest.raises(VersionNotFound, match="it holds step_4, step_5"):
        client.manifest("step_3", deadline=soon())


def test_a_reader_of_the_oldest_version_is_waited_for(publisher):
    for step in (1, 2):
        publisher.publish(f"step_{step}", {"a": np.full(4, step, np.float32)})
    events = []
    with publisher._shelf.holding("step_1") as held:
        thread = threading.Thread(
            target=lambda: (publisher.publish("step_3", {"a": np.full(4, 3.0)}), events.append("published"))
        )
        thread.start()
        time.sleep(0.3)
        with pytest.raises(WrongState, match="publishing"):
            publisher.publish("step_4", {"a": np.zeros(1)})
        events.append("read")
        assert tensor_of(held, "a").tolist() == [1, 1, 1, 1]
    thread.join()
    assert events == ["read", "published"]
    assert publisher.versions == ["step_2", "step_3"]


def test_a_reader_that_takes_too_long_is_cut_off_and_still_never_sees_other_bytes():
    with DepotPublisher("127.0.0.1:0", hold_s=0.1) as publisher:
        for step in (1, 2):
            publisher.publish(f"step_{step}", {"a": np.full(4, step, np.float32)})
        with publisher._shelf.holding("step_1") as held:
            array = tensor_of(held, "a")
            (view,) = held.views(held.manifest.parts[0].file, 0, 8, deadline=soon())

            publisher.publish("step_3", {"a": np.full(4, 3, np.float32)})

            assert array.tolist() == [1, 1, 1, 1]
            assert len(view) == 8
            with pytest.raises(SourceFailed, match="memory was needed for a newer one"):
                held.views(held.manifest.parts[0].file, 0, 1, deadline=soon())
        assert publisher.versions == ["step_2", "step_3"]


def test_with_no_time_to_wait_for_readers_nothing_is_published_and_everything_is_as_before(publisher):
    for step in (1, 2):
        publisher.publish(f"step_{step}", {"a": np.full(4, step, np.float32)})
    with publisher._shelf.holding("step_1") as held, pytest.raises(DeadlineExceeded, match="receivers to read step_1"):
        publisher.publish("step_3", {"a": np.zeros(4)}, timeout=0.1)
    assert tensor_of(held, "a").tolist() == [1, 1, 1, 1]
    assert publisher.versions == ["step_1", "step_2"]


def test_a_publication_that_fails_leaves_the_newest_and_its_memory_for_the_next(publisher, client):
    publisher.publish("step_1", {"a": np.ones(4)})
    with pytest.raises(DeadlineExceeded, match="copying a"):
        publisher.publish("step_2", {"a": np.ones(4)}, timeout=0)
    assert client.newest(deadline=soon()).version == "step_1"
    publisher.publish("step_2", {"a": np.ones(4), "b": np.ones(3)})
    assert publisher.versions == ["step_1", "step_2"]


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda one: one.publish("step_1", {}), InvalidInput, "nothing to publish"),
        (lambda one: one.publish("a/b", {"a": np.ones(1)}), InvalidInput, "cannot be a version id"),
        (lambda one: one.publish("step_1", [("a", np.ones(1))]), InvalidInput, "mapping"),
        (lambda one: one.publish("old", {"a": np.ones(1)}), VersionExists, "never changes"),
        (lambda one: one.publish("step_1", {"a": np.ones(1)}, metadata={"a": 1}), InvalidInput, "texts to texts"),
        (lambda one: one.publish("step_1", {"a": np.ones(1)}, algorithm="sha0"), InvalidInput, "sha0"),
        (lambda one: one.publish("step_1", {"a": "text"}), UnsupportedTensor, "tensor 'a'"),
        (lambda one: one.lend("step_1", {"a": np.ones(1)}, 5), InvalidInput, "nixl=True"),
    ],
)
def test_a_wrong_call_says_what_is_wrong_and_changes_nothing(publisher, call, error, told):
    publisher.publish("old", {"a": np.ones(1)})
    with pytest.raises(error, match=told):
        call(publisher)
    assert publisher.versions == ["old"]
    publisher.publish("new", {"a": np.ones(1)})


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_that_every_reader_has_acknowledged_is_used_again_without_a_wait(monkeypatch, ranks, steps):
    monkeypatch.setattr(memory_shelf, "QUIET_S", 1000.0)  # a wait would end with the deadline of publish
    rows = {rank: slice(rank * 4, rank * 4 + 4) for rank in range(ranks)}
    engine = {"w": np.zeros((4 * ranks, 8), dtype=np.float32)}
    with ExitStack() as stack:
        publishers = [
            stack.enter_context(DepotPublisher("127.0.0.1:0", rank=rank, ranks=ranks, hold_s=1000)) for rank in range(ranks)
        ]
        hosts = ",".join(one.url.removeprefix("http://") for one in publishers)
        live = stack.enter_context(LiveModel(engine, source=f"{'shares+' if ranks > 1 else ''}http://{hosts}"))
        for step in range(5):
            whole = np.full((4 * ranks, 8), step, dtype=np.float32)
            for rank, one in enumerate(publishers):
                shard = Shard(whole[rows[rank]], shape=whole.shape, start=(rows[rank].start, 0))
                one.publish(f"step_{step}", {"w": shard if ranks > 1 else whole}, timeout=5)
            if steps:
                live.commit(live.stage(f"step_{step}"))
            else:
                live.update(f"step_{step}")
            assert (engine["w"] == step).all()
            live.update()  # as a receiver that polls does: nothing is new, and only the manifest is read


def test_memory_of_a_reader_that_never_acknowledges_is_used_again_after_a_while(monkeypatch):
    monkeypatch.setattr(memory_shelf, "QUIET_S", 1000.0)
    with DepotPublisher("127.0.0.1:0", slots=1, hold_s=0.2) as publisher, closing(DepotClient(publisher.url)) as client:
        publisher.publish("step_1", model(1), timeout=10)
        manifest = client.manifest("step_1", deadline=soon())
        publisher.publish("step_2", model(2), timeout=10)
        with pytest.raises(NotFound):
            files_of(client, manifest)


@pytest.mark.parametrize("options", [{"rank": 1}, {"ranks": 0}, {"slots": 0}, {"threads": 0}, {"hold_s": -1.0}])
def test_a_publisher_that_cannot_be_is_refused(options):
    with pytest.raises(InvalidInput):
        DepotPublisher("127.0.0.1:0", **options)


def test_whoever_waits_for_a_newer_version_is_woken(publisher, client):
    publisher.publish("step_1", {"a": np.ones(1)})
    assert client.newest(deadline=soon(), after="step_1", wait_s=0.05) is None
    later = threading.Timer(0.2, lambda: publisher.publish("step_2", {"a": np.ones(1)}))
    later.start()
    assert client.newest(deadline=soon(), after="step_1", wait_s=20).version == "step_2"
    later.join()


def test_closing_ends_everything_twice_and_after_it_nothing_is_published():
    publisher = DepotPublisher("127.0.0.1:0")
    publisher.publish("step_1", {"a": np.ones(1)})
    memory = publisher._shelf._slots[0].memory
    with closing(DepotClient(publisher.url)) as client:
        waiting = threading.Thread(target=lambda: _quietly(client))
        waiting.start()
        time.sleep(0.1)
        publisher.close()
        publisher.close()
        waiting.join(timeout=5)
        assert not waiting.is_alive()
    with pytest.raises(WrongState):
        publisher.publish("step_2", {"a": np.ones(1)})
    with pytest.raises(WrongState):
        memory.bytes  # noqa: B018 - it is gone


def _quietly(client):
    with suppress(SourceFailed, NotFound):
        client.newest(deadline=Deadline.after(10), after="step_1", wait_s=10)


def test_a_publisher_that_nobody_refers_to_frees_its_memory_and_its_port():
    publisher = DepotPublisher("127.0.0.1:0")
    publisher.publish("step_1", {"a": np.ones(1)})
    memory, url = publisher._shelf._slots[0].memory, publisher.url
    del publisher
    gc.collect()
    with pytest.raises(WrongState):
        memory.bytes  # noqa: B018 - it is gone
    with closing(DepotClient(url)) as client, pytest.raises(SourceFailed):
        client.catalogue(deadline=soon())


def test_a_child_of_a_fork_leaves_the_publisher_alone(publisher, client):
    publisher.publish("step_1", {"a": np.ones(1)})
    child = os.fork()
    if child == 0:
        publisher.close()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert client.newest(deadline=soon()).version == "step_1"


# -- what a rank gives ---------------------------------------------------------------------------------------------------


def test_boxes_that_cannot_be_are_told_all_at_once():
    array = np.zeros((2, 3), dtype=ml_dtypes.bfloat16)
    shards = {"a": Shard(array, (3, 3), (2, 0)), "b": Shard(array, (2, 3), (0, 0)), "c": Shard(array, (2, 2), (0, 0))}
    with pytest.raises(InvalidInput) as caught:
        given(shards, ranks=2)
    assert "'a' cannot have a box" in str(caught.value)
    assert "'c' cannot have a box" in str(caught.value)
    assert "'b'" not in str(caught.value)
    with pytest.raises(InvalidInput, match="cannot start at"):
        given({"a": Shard(array, (3,), (0,))}, ranks=2)
    with pytest.raises(InvalidInput, match="only a box of shape"):
        given({"a": Shard(array, (4, 3), (0, 0))}, ranks=1)


def test_names_are_tied_if_they_are_the_same_box_of_the_same_memory():
    array = np.zeros((4, 3))
    own, tied = given(
        {
            "a": Shard(array, (8, 3), (0, 0)),
            "same": Shard(array, (8, 3), (0, 0)),
            "elsewhere": Shard(array, (8, 3), (4, 0)),
            "whole": array,
            "empty": Shard(array[:0], (8, 3), (8, 0)),
        },
        ranks=2,
    )
    assert tied == {"same": "a"}
    assert own.keys() == {"a", "elsewhere", "whole", "empty"}
    assert own["empty"].box == Box((8, 0), (0, 3))
