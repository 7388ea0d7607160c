"""A checkpoint directory is a version: named, hashed once, streamed, and not trusted after it was touched."""

import os
import shutil
import threading

import numpy as np
import pytest
import yaml
from delta_samples import same
from safetensors.numpy import save_file
from shard_models import by_hand, cut_version, parameters, random_tensors, shards_of

from weightcast import LiveModel
from weightcast.clock import Deadline
from weightcast.errors import (
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    ManifestCorrupt,
    NotFound,
    PartCorrupt,
    SourceFailed,
    UpdateCancelled,
    VersionNotFound,
)
from weightcast.tensors.digest import array_digest
from weightcast.tensors.sums import array_sum, root_of_sums
from weightcast.transports import checkpoint
from weightcast.transports.base import Receiver, StateReceiver
from weightcast.transports.checkpoint import CheckpointReceiver
from weightcast.transports.registry import open_receiver
from weightcast.wire.manifest import compute_root


def soon():
    return Deadline.after(60)


@pytest.fixture
def tensors(rng):
    return {"a": rng.standard_normal((30, 20)), "b": rng.integers(0, 99, 50), "c": np.zeros((0, 2), np.float32)}


@pytest.fixture
def directory(tmp_path, tensors):
    """A checkpoint of two files, as other tools write it."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    save_file({name: tensors[name] for name in "ac"}, path / "model-00001-of-00002.safetensors")
    save_file({"b": tensors["b"]}, path / "model-00002-of-00002.safetensors")
    return path


def received(receiver, manifest, **more):
    """The bytes of every tensor that a receiver streams."""
    found = {}
    for piece in receiver.pieces(manifest, deadline=soon(), **more):
        assert len(found.setdefault(piece.tensor, bytearray())) == piece.offset
        found[piece.tensor] += piece.data
    return {name: bytes(data) for name, data in found.items()}


def test_a_directory_without_a_name_is_called_after_its_root_digest(directory, tensors):
    receiver = open_receiver(f"checkpoint://{directory}", rank=3)
    assert isinstance(receiver, Receiver)
    assert not isinstance(receiver, StateReceiver)
    assert receiver.url == f"checkpoint://{directory}"
    version = receiver.newest()
    manifest = receiver.manifest(version, deadline=soon())
    assert version == manifest.version == manifest.root_digest == compute_root(manifest.tensors, "xxh3-128")
    assert (manifest.kind, manifest.sequence, manifest.step, manifest.base) == ("full", 0, 0, None)
    assert {entry.name: entry.digest for entry in manifest.tensors} == {n: array_digest(a) for n, a in tensors.items()}
    assert all(entry.sum == str(array_sum(entry.spec, tensors[entry.name])) for entry in manifest.tensors)
    assert version == root_of_sums((entry.spec, entry.sum) for entry in manifest.tensors)
    assert received(receiver, manifest) == {name: tensors[name].tobytes() for name in "ab"}
    assert received(receiver, manifest, names=["b"]) == {"b": tensors["b"].tobytes()}
    with pytest.raises(VersionNotFound, match="it holds sums:"):
        receiver.manifest("step_1", deadline=soon())


@pytest.mark.parametrize(
    ("contents", "version", "step"),
    [({"version": "step_40", "step": 4}, "step_40", 4), ({"version": "sft-12"}, "sft-12", 12), ({"step": 7}, "7", 7)],
)
def test_a_version_file_names_it(contents, version, step, directory):
    (directory / "version.yaml").write_text(yaml.safe_dump(contents))
    receiver = CheckpointReceiver(directory)
    assert receiver.newest() == version
    manifest = receiver.manifest(version, deadline=soon())
    assert (manifest.version, manifest.step) == (version, step)
    with pytest.raises(VersionNotFound, match=f"it holds {version}"):
        CheckpointReceiver(directory).manifest("other", deadline=Deadline.after(0))  # not a byte is read for that


def test_a_version_file_that_names_no_version_id_is_refused(directory):
    (directory / "version.yaml").write_text("version: a/b\n")
    with pytest.raises(InvalidInput, match="a/b"):
        CheckpointReceiver(directory).newest()


def test_a_version_directory_of_a_store_keeps_its_name_and_place(store, tensors):
    store.publish("step_8", {"first": tensors["b"]}, step=3)
    sealed = store.publish("step_9", tensors | {"tied": tensors["a"]}, step=5, algorithm="blake3", part_nbytes=2000)
    receiver = CheckpointReceiver(store.path / "versions" / "step_9")
    assert receiver.newest() == "step_9"
    manifest = receiver.manifest("step_9", deadline=soon())
    assert manifest == sealed
    assert (manifest.sequence, manifest.step, manifest.tied) == (sealed.sequence, 5, {"tied": "a"})
    assert received(receiver, manifest) == {name: tensors[name].tobytes() for name in "ab"}


@pytest.mark.parametrize("tied", ["tied", "_tied"])  # under which "a" is not summed, and under which it is
def test_a_version_directory_with_tied_names_is_its_own_manifest_and_not_trusted_after_it_was_touched(store, tensors, tied):
    sealed = store.publish("step_9", tensors | {tied: tensors["a"]})
    directory = store.path / "versions" / "step_9"
    receiver = CheckpointReceiver(directory)
    manifest = receiver.manifest("step_9", deadline=soon())
    assert manifest == sealed
    assert manifest.root_digest == compute_root(manifest.tensors, manifest.algorithm)
    os.utime(directory / sealed.parts[0].file, ns=(1, 1))
    with pytest.raises(SourceFailed, match="changed while a version was read"):
        next(receiver.pieces(manifest, deadline=soon()))


def test_files_that_are_not_what_the_manifest_says_are_refused(store, tensors):
    manifest = store.publish("v", tensors)
    directory = store.path / "versions" / "v"
    path = directory / manifest.parts[0].file
    whole = path.read_bytes()
    damaged = bytearray(whole)
    for name in "ab":
        damaged[manifest.by_name()[name].offset] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DigestMismatch) as caught:
        CheckpointReceiver(directory).manifest("v", deadline=soon())
    assert set(caught.value.tensors) == {"a", "b"}
    path.write_bytes(whole)
    save_file({"d": tensors["a"]}, directory / "more.safetensors")
    with pytest.raises(PartCorrupt, match="not listed"):
        CheckpointReceiver(directory).manifest("v", deadline=soon())
    (directory / "more.safetensors").unlink()
    CheckpointReceiver(directory).manifest("v", deadline=soon())
    (directory / "manifest.json").write_bytes((directory / "manifest.json").read_bytes().replace(b'"v"', b'"w"'))
    with pytest.raises(ManifestCorrupt):
        CheckpointReceiver(directory).newest()


def test_a_delta_is_no_checkpoint(store, tensors):
    store.publish("v0", tensors)
    changed = tensors | {"b": tensors["b"] + 1}
    store.publish("v1", changed, mode="delta")
    with pytest.raises(InvalidInput, match="open the store"):
        CheckpointReceiver(store.path / "versions" / "v1").newest()


def test_bytes_are_hashed_once_and_again_after_a_file_was_touched(directory, tensors, monkeypatch):
    read = []
    monkeypatch.setattr(checkpoint, "_digests", lambda *args: read.append(1) or real(*args))
    receiver = CheckpointReceiver(directory)
    before = receiver.identify(deadline=soon())
    assert receiver.identify(deadline=soon()) == before
    assert len(read) == 1
    save_file({"b": tensors["b"] + 1}, directory / "model-00002-of-00002.safetensors")
    after = receiver.identify(deadline=soon())
    assert len(read) == 2
    assert after.version != before.version
    receiver.close()
    assert receiver.identify(deadline=soon()) == after
    assert len(read) == 3


real = checkpoint._digests


def test_a_file_that_was_touched_since_the_manifest_fails_the_stream(directory, tensors):
    receiver = CheckpointReceiver(directory)
    manifest = receiver.identify(deadline=soon())
    other = CheckpointReceiver(directory)
    path = directory / "model-00002-of-00002.safetensors"
    save_file({"b": tensors["b"] + 1}, path)  # the same size and header
    with pytest.raises(SourceFailed, match="model-00002"):
        next(receiver.pieces(manifest, deadline=soon()))  # before anything is sent
    assert received(other, manifest)["b"] == (tensors["b"] + 1).tobytes()  # its digest decides, where it is written
    receiver.identify(deadline=soon())
    assert received(receiver, manifest)["a"] == tensors["a"].tobytes()


def test_a_file_that_is_touched_while_it_streams_fails_it_at_the_end(directory):
    receiver = CheckpointReceiver(directory)
    manifest = receiver.identify(deadline=soon())
    pieces = receiver.pieces(manifest, deadline=soon())
    touched = directory / "model-00001-of-00002.safetensors"
    real_read = checkpoint.VersionReader.pieces

    def slow(self, *args, **more):
        yield from real_read(self, *args, **more)
        os.utime(touched, ns=(1, 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.VersionReader, "pieces", slow)
        with pytest.raises(SourceFailed, match="model-00001"):
            list(pieces)


def test_a_directory_that_changes_while_it_is_hashed_is_refused(directory, monkeypatch):
    def touch(*args):
        os.utime(directory / "model-00001-of-00002.safetensors", ns=(1, 1))
        return real(*args)

    monkeypatch.setattr(checkpoint, "_digests", touch)
    with pytest.raises(SourceFailed, match="changed while"):
        CheckpointReceiver(directory).identify(deadline=soon())


def test_hashing_is_cancelled_and_ends_at_the_deadline(tmp_path, rng):
    save_file({"w": rng.integers(0, 9, 4 << 20)}, tmp_path / "model.safetensors")
    stop = threading.Event()
    stop.set()
    receiver = CheckpointReceiver(tmp_path)
    with pytest.raises(UpdateCancelled):
        receiver.identify(deadline=Deadline.after(60, cancelled=stop))
    with pytest.raises(DeadlineExceeded):
        receiver.identify(deadline=Deadline.after(0))
    assert receiver.identify(deadline=soon()).nbytes == 32 << 20


def test_what_is_no_checkpoint_is_refused(tmp_path, directory):
    with pytest.raises(NotFound, match="not a directory"):
        CheckpointReceiver(tmp_path / "nowhere").newest()
    with pytest.raises(NotFound, match=r"no \.safetensors"):
        CheckpointReceiver(tmp_path).newest()
    with pytest.raises(InvalidInput, match="unknown option"):
        open_receiver(f"checkpoint://{directory}?id=0", rank=0)
    path = directory / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PartCorrupt):
        CheckpointReceiver(directory).newest()


def test_live_models_and_ranks_load_checkpoints(store, tmp_path, rng):
    tensors = random_tensors(rng)
    store.publish("step_1", tensors)
    copy = tmp_path / "copied elsewhere"
    shutil.copytree(store.path / "versions" / "step_1", copy)
    model = {name: np.zeros_like(array) for name, array in tensors.items()}
    assert LiveModel(model).update(source=CheckpointReceiver(copy)).version == "step_1"
    assert same(model, tensors)
    receiver = CheckpointReceiver(copy)
    version = cut_version(receiver, "step_1", shards_of(1, 2))
    assert same(dict(parameters(version)), by_hand(tensors, 1, 2))


def test_a_checkpoint_without_a_name_is_taken_under_its_digest(tmp_path):
    save_file({"w": np.arange(8, dtype=np.float32)}, tmp_path / "model.safetensors")
    arrays = {"w": np.zeros(8, dtype=np.float32)}
    result = LiveModel(arrays, source=f"checkpoint://{tmp_path}").update()
    assert result.version == CheckpointReceiver(tmp_path).newest()
    assert arrays["w"].tolist() == list(range(8))
