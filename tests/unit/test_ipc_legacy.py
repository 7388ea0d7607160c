"""The legacy metadata file, and reading what it lists. What a file can say is tried from both sides: right and hostile."""

import json
import os
import pickle
import stat
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from weightcast import LiveModel
from weightcast.clock import Deadline
from weightcast.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    PartCorrupt,
    PickleRefused,
    SnapshotInvalid,
    SourceFailed,
    StorageFailed,
    UpdateCancelled,
    VersionNotFound,
    VersionNotSet,
)
from weightcast.publish.publisher import Publisher
from weightcast.store.version_file import write_version_file
from weightcast.tensors.bridges import host_array
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import empty, flat_bytes
from weightcast.transports.base import Receiver
from weightcast.transports.ipc import legacy
from weightcast.transports.ipc.device import Handle
from weightcast.transports.ipc.legacy import DTYPE_INDEX, LegacyHandle, legacy_path, read_legacy, write_legacy
from weightcast.transports.ipc.legacy_receiver import LegacyIpcReceiver
from weightcast.transports.ipc.place import Place
from weightcast.wire.manifest import Manifest, TensorEntry

CUDA = bytes(range(192, 256)).decode("latin-1")
HANDLE = Handle(kind="memfd", id=7, nbytes=1000)


def ours(**changes):
    fields = {"place": "/dev/shm/run/rank-0", "handle": HANDLE, "version": "step_1", "root_digest": "xxh3-128:" + "0" * 32}
    return msgspec.msgpack.encode(LegacyHandle(**fields | changes)).decode("latin-1")


def row(**changes):
    """[handle, offset, size, dtype index, dims, lod, device index] of an F32[2, 3]."""
    fields = {"handle": ours(), "offset": 8, "nbytes": 24, "dtype": 10, "dims": [2, 3], "lod": [], "device": 0} | changes
    return list(fields.values())


def manifest_of(tensors, version="step_1", kind="full", **changes):
    entries, offset = [], 0
    for name, (dtype, shape) in tensors.items():
        entry = TensorEntry(name=name, dtype=dtype, shape=shape, part=0, offset=offset, nbytes=0, digest="")
        entries.append(msgspec.structs.replace(entry, nbytes=entry.spec.nbytes))
        offset += entry.spec.nbytes + 64
    fields = {"sequence": 1, "step": 1, "created_s": 0.0, "algorithm": None, "root_digest": "xxh3-128:" + "0" * 32}
    return Manifest(version=version, kind=kind, parts=(), tensors=tuple(entries), **fields | changes)


@pytest.fixture
def path(tmp_path):
    return legacy_path(tmp_path, "0")


@pytest.fixture(params=["pickle 2", "pickle 4", "pickle 5", "json"])
def put(path, request):
    def write(found):
        name, _, protocol = request.param.partition(" ")
        data = pickle.dumps(found, int(protocol)) if name == "pickle" else json.dumps(found).encode()
        path.write_bytes(data)

    return write


# -- the format --------------------------------------------------------------------------------------------------------


def test_a_file_of_a_trainer_with_paddle_is_read(path, put):
    put({"model.w": [CUDA, 512, 12, 16, [2, 3], [], 3], "model.b": [CUDA, 0, 8, 9, [], [], 3]})
    found = read_legacy(path)
    assert [(one.spec.describe(), one.offset) for one in found.values()] == [("BF16[2, 3]", 512), ("I64[]", 0)]
    for one in found.values():
        assert (one.source.place, one.source.version) == ("", "")
        assert (one.source.handle.kind, one.source.handle.data) == ("cuda", CUDA.encode("latin-1"))
        assert one.source.handle.nbytes == 524  # as far as the tensors reach


def test_tuples_in_the_place_of_lists_are_the_same(path):
    path.write_bytes(pickle.dumps({"w": tuple(row(dims=(2, 3), lod=()))}))
    assert read_legacy(path)["w"].spec.shape == (2, 3)


def test_what_was_written_is_read_back_and_pickle_can_read_it_too(path, tmp_path):
    tensors = {str(dtype): (dtype, (n, 3)) for n, dtype in enumerate(DTYPE_INDEX)} | {"ünïcode ✓": (DType.F32, ())}
    manifest = manifest_of(tensors, tied={"tied": "BF16"}, sequence=4)
    handle = Handle(kind="memfd", id=1 << 40, nbytes=1 << 45)
    write_legacy(path, manifest, place=tmp_path / "rank-3", handle=handle, device_index=5)
    found = read_legacy(path)
    assert {name: (one.spec.dtype, one.spec.shape) for name, one in found.items()} == tensors | {"tied": tensors["BF16"]}
    assert found["tied"].offset == found["BF16"].offset
    source = LegacyHandle(
        place=str(tmp_path / "rank-3"), handle=handle, version="step_1", root_digest=manifest.root_digest, sequence=4
    )
    assert all(one.source == source for one in found.values())

    plain = pickle.loads(path.read_bytes())
    assert type(plain) is dict
    text, *rest = plain["BF16"]
    assert rest == [found["BF16"].offset, found["BF16"].spec.nbytes, 16, list(found["BF16"].spec.shape), [], 5]
    assert msgspec.msgpack.decode(text.encode("latin-1"), type=LegacyHandle) == source
    assert path.stat().st_size < 200 * len(found) + 400  # the handle is not repeated


def test_large_offsets_are_written_as_they_are(path, tmp_path):
    manifest = manifest_of({"w": (DType.U8, (5,))})
    (entry,) = manifest.tensors
    manifest = msgspec.structs.replace(manifest, tensors=(msgspec.structs.replace(entry, offset=(1 << 62) + 3),))
    write_legacy(path, manifest, place=tmp_path, handle=Handle(kind="memfd", id=1, nbytes=1 << 63))
    assert read_legacy(path)["w"].offset == pickle.loads(path.read_bytes())["w"][1] == (1 << 62) + 3


def test_a_file_is_replaced_in_one_step_and_is_private(path, tmp_path):
    path.write_bytes(b"old")
    path.chmod(0o644)
    held = path.open("rb")
    write_legacy(path, manifest_of({"w": (DType.F32, (3,))}), place=tmp_path, handle=HANDLE)
    with held:
        assert held.read() == b"old"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [path.name]


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_beside_it(path, tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError(28, "No space left on device")

    path.write_bytes(b"old")
    monkeypatch.setattr("pathlib.Path.replace", refuse)
    with pytest.raises(StorageFailed, match="No space left"):
        write_legacy(path, manifest_of({"w": (DType.F32, (3,))}), place=tmp_path, handle=HANDLE)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [path.name]
    with pytest.raises(StorageFailed, match="cannot write"):
        write_legacy(tmp_path / "no" / "x", manifest_of({"w": (DType.F32, (3,))}), place=tmp_path, handle=HANDLE)


def test_what_the_format_cannot_say_is_refused_by_name(path, tmp_path):
    tensors = {"good": (DType.F32, (3,)), "scale": (DType.F8_E8M0, (4,)), "far": (DType.F32, (1000,))}
    with pytest.raises(InvalidInput) as caught:
        write_legacy(path, manifest_of(tensors), place=tmp_path, handle=HANDLE)
    assert "scale is F8_E8M0" in str(caught.value)
    assert "far is outside" in str(caught.value)
    assert "good" not in str(caught.value)
    for manifest in (manifest_of({}), manifest_of({"w": (DType.F32, (3,))}, kind="delta")):
        with pytest.raises(InvalidInput, match="legacy format"):
            write_legacy(path, manifest, place=tmp_path, handle=HANDLE)
    assert not path.exists()


@pytest.mark.parametrize("device_id", ["../x", "a/b", "", ".", "part3"])
def test_a_device_id_is_no_path(tmp_path, device_id):
    with pytest.raises(InvalidInput, match="device id"):
        legacy_path(tmp_path, device_id)


# -- files that are wrong ----------------------------------------------------------------------------------------------

WRONG = {
    "short": (row()[:6], "a list of 6, not a list of 7"),
    "long": ([*row(), 1], "a list of 8"),
    "a text": ("xxxxxxx", "not a list of 7"),
    "a dict": ({str(n): n for n in range(7)}, "a dict"),
    "None": (None, "a NoneType"),
    "negative offset": (row(offset=-8), "its offset -8"),
    "float offset": (row(offset=8.0), "its offset 8.0"),
    "true offset": (row(offset=True), "its offset True"),
    "text offset": (row(offset="8"), "its offset of type"),
    "huge offset": (row(offset=1 << 63), "its offset"),
    "beyond": (row(offset=977), "ends at byte 1001 of a memory of 1000 bytes"),
    "overflow": (row(offset=(1 << 63) - 8), "ends at byte"),
    "size": (row(nbytes=25), "F32[2, 3], which is 24 bytes and not 25"),
    "negative size": (row(nbytes=-24, dims=[-2, 3]), "its size -24"),
    "dims overflow": (row(dims=[1 << 62, 1 << 62], nbytes=0), "bytes and not 0"),
    "dims wrap": (row(dims=[1 << 32, 1 << 32], nbytes=0), "bytes and not 0"),
    "negative dims": (row(dims=[-2, -3]), "its dims"),
    "many dims": (row(dims=[1] * 33), "at most 32"),
    "dims of texts": (row(dims=["2", "3"]), "its dims"),
    "dims of lists": (row(dims=[[2], [3]]), "its dims"),
    "no dims": (row(dims=None), "its dims"),
    "lod": (row(lod=[[0, 2]]), "level of detail"),
    "lod text": (row(lod="x"), "level of detail"),
    "unknown dtype": (row(dtype=13), "its dtype index 13"),
    "list dtype": (row(dtype=[10]), "its dtype index of type list"),
    "true dtype": (row(dtype=True), "its dtype index True"),
    "device": (row(device=None), "its device index None"),
    "number as handle": (row(handle=5), "its handle is not a text"),
    "greek handle": (row(handle="αβγ"), "neither one of CUDA nor one of weightcast"),
    "short handle": (row(handle=CUDA[:63]), "neither one of CUDA nor one of weightcast"),
    "no handle": (row(handle=""), "neither one of CUDA nor one of weightcast"),
    "relative place": (row(handle=ours(place="rank-0")), "names no publisher"),
    "place with a zero": (row(handle=ours(place="/a\0b")), "names no publisher"),
    "no version": (row(handle=ours(version="../x")), "names no version"),
    "\0": (row(), "cannot be the name"),
    "__metadata__": (row(), "cannot be the name"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_entry_that_is_wrong_is_told_with_its_name(path, put, name):
    entry, message = WRONG[name]
    put({"good": row(), name: entry})
    with pytest.raises(SnapshotInvalid) as caught:
        read_legacy(path)
    assert len(caught.value.problems) == 1
    assert message in caught.value.problems[0]
    assert repr(name) in caught.value.problems[0]


def test_everything_that_is_wrong_is_told_at_once(path, put):
    put({name: entry for name, (entry, _) in WRONG.items()} | {"many": row(offset=-1, dtype=99, lod=[1], handle=None)})
    with pytest.raises(SnapshotInvalid) as caught:
        read_legacy(path)
    assert len(caught.value.problems) == len(WRONG) + 1
    assert all(text in caught.value.problems[-1] for text in ("offset -1", "index 99", "level of detail", "handle"))


def test_a_file_of_two_versions_or_of_none_is_refused(path, put):
    put({"a": row(), "b": row(handle=ours(version="step_2"))})
    with pytest.raises(SnapshotInvalid, match="more than one publication"):
        read_legacy(path)
    put({"a": row(), "b": row(handle=ours(handle=Handle(kind="memfd", id=8, nbytes=1000)))})
    with pytest.raises(SnapshotInvalid, match="more than one publication"):
        read_legacy(path)
    put({"a": row(), "b": row(handle=CUDA)})
    with pytest.raises(SnapshotInvalid, match="more than one publication"):
        read_legacy(path)
    put({})
    with pytest.raises(SnapshotInvalid, match="lists no tensors"):
        read_legacy(path)
    for other in ([row()], "text", 7, None):
        put(other)
        with pytest.raises(SnapshotInvalid, match="not a dict of tensors"):
            read_legacy(path)


class Evil:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "value",
    [
        Evil(os.system, ("touch evil",)),
        Evil(eval, ("open('evil', 'w')",)),
        Evil(bytearray, (1 << 40,)),
        np.zeros(3),
        {1, 2},
        3 + 4j,
        bytearray(b"x"),
        slice(3),
        torch.float32,
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_wants_to_build_anything_else_is_refused(path, tmp_path, value, protocol, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path.write_bytes(pickle.dumps({"w": row(), "x": row(dims=value)}, protocol))
    with pytest.raises((PickleRefused, PartCorrupt, SnapshotInvalid)):
        read_legacy(path)
    path.write_bytes(pickle.dumps(value, protocol))
    with pytest.raises((PickleRefused, PartCorrupt, SnapshotInvalid)):
        read_legacy(path)
    assert os.listdir(tmp_path) == [path.name]


def test_a_pickle_that_holds_itself_does_no_harm(path):
    dims = [2]
    dims.append(dims)
    path.write_bytes(pickle.dumps({"w": row(dims=dims)}))
    with pytest.raises(SnapshotInvalid, match="its dims"):
        read_legacy(path)
    found = {}
    found["w"] = found
    path.write_bytes(pickle.dumps(found))
    with pytest.raises(SnapshotInvalid, match="a dict"):
        read_legacy(path)


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_a_file_that_was_cut_or_damaged_anywhere_is_never_more_than_refused(path, form):
    entries = {"a": row(), "b": row(offset=40)}
    whole = pickle.dumps(entries, 2) if form == "pickle" else json.dumps(entries).encode()
    random = np.random.default_rng(11)
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises((SnapshotInvalid, PartCorrupt, PickleRefused)):
            read_legacy(path)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[random.integers(len(whole))] = random.integers(256)
        path.write_bytes(damaged)
        try:
            for one in read_legacy(path).values():
                assert 0 <= one.offset <= one.offset + one.spec.nbytes <= one.source.handle.nbytes
        except (SnapshotInvalid, PartCorrupt, PickleRefused):
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": [], "a": []}', "twice"),
        (b"[" * 200_000, "recursion"),
        (b'{"a":' * 50_000, "recursion"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b"\xff\xfe{}", "neither a pickle"),
        (b"", "neither a pickle"),
        (b"\0" * 100, "neither a pickle"),
    ],
    ids=["twice", "deep lists", "deep dicts", "a long number", "not UTF-8", "empty", "zeros"],
)
def test_json_that_means_harm_is_refused(path, data, message):
    path.write_bytes(data)
    with pytest.raises(SnapshotInvalid, match=message):
        read_legacy(path)


def test_files_that_are_none_are_refused(path, tmp_path, monkeypatch):
    with pytest.raises(SourceFailed, match=r"missing.*start it first"):
        read_legacy(path)
    os.mkfifo(path)
    with pytest.raises(SourceFailed, match="not a regular file"):
        read_legacy(path)
    path.unlink()
    monkeypatch.setattr(legacy, "MAX_NBYTES", 100)
    path.write_bytes(pickle.dumps({"w": row()}))
    with pytest.raises(SnapshotInvalid, match="100 are allowed"):
        read_legacy(path)


# -- receiving ---------------------------------------------------------------------------------------------------------


def weights(seed):
    random = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(300, 64, generator=random).to(torch.bfloat16),
        "transposed": torch.randn(50, 70, generator=random).T,
        "scalar": torch.tensor(float(seed)),
        "nothing": torch.empty(0, 4),
    }


def place_of(publisher):
    return Place.of_rank(Path(publisher.url.removeprefix("ipc://")), 0).path


def publish(publisher, version, tensors, path):
    publisher.publish(version, tensors, timeout=30)
    assert publisher.write_legacy(path.parent, path.name.removeprefix("ipc_metas_")) == path


def received(receiver, manifest, names=None):
    arrays = {entry.name: empty(entry.spec) for entry in manifest.tensors if names is None or entry.name in names}
    for piece in receiver.pieces(manifest, deadline=Deadline.after(20), names=names):
        flat_bytes(arrays[piece.tensor])[piece.offset : piece.offset + len(piece.data)] = piece.data
    return arrays


def same(arrays, tensors):
    return all(np.array_equal(host_array(name, tensors[name]), array) for name, array in arrays.items())


@pytest.fixture
def publisher(tmp_path):
    with Publisher(f"ipc://{tmp_path}/run", threads=1) as publisher:
        yield publisher


@pytest.fixture
def receiver(tmp_path):
    receiver = LegacyIpcReceiver(tmp_path, "0")
    yield receiver
    receiver.close()


def test_versions_come_from_the_memory_that_the_file_names(publisher, receiver, path, tmp_path):
    assert isinstance(receiver, Receiver)
    assert receiver.url == f"legacy-ipc://{tmp_path}?id=0"
    for step in (1, 2, 3):
        tensors = weights(step)
        publish(publisher, f"step_{step}", tensors, path)
        assert receiver.newest() == f"step_{step}"
        manifest = receiver.manifest("anything", deadline=Deadline.after(10))
        assert (manifest.version, manifest.step, manifest.algorithm, manifest.sealed) == (f"step_{step}", step, None, True)
        arrays = received(receiver, manifest)
        assert arrays.keys() == tensors.keys()
        assert same(arrays, tensors)
        assert received(receiver, manifest, names=["scalar"]).keys() == {"scalar"}


def test_a_piece_is_a_whole_tensor_in_place_that_cannot_be_written(publisher, receiver, path):
    publish(publisher, "v", weights(1), path)
    manifest = receiver.manifest("v", deadline=Deadline.after(10))
    pieces = {piece.tensor: piece for piece in receiver.pieces(manifest, deadline=Deadline.after(10))}
    assert {name: len(piece.data) for name, piece in pieces.items()} == {
        entry.name: entry.nbytes for entry in manifest.tensors if entry.nbytes
    }
    with pytest.raises(TypeError, match="read-only"):
        pieces["embed"].data[0] = 1


def test_the_publisher_waits_for_whoever_reads_and_not_for_whoever_gave_up(publisher, receiver, path):
    first = weights(1)
    publish(publisher, "one", first, path)
    manifest = receiver.manifest("one", deadline=Deadline.after(10))
    pieces = receiver.pieces(manifest, deadline=Deadline.after(20))
    piece = next(pieces)
    publisher.publish("two", weights(2), timeout=30)  # into the other slab
    with pytest.raises(DeadlineExceeded, match="to read the last version"):
        publisher.publish("three", weights(3), timeout=0.3)
    assert bytes(piece.data) == flat_bytes(np.ascontiguousarray(host_array("x", first[piece.tensor]))).tobytes()
    pieces.close()
    publisher.publish("four", weights(4), timeout=30)


def test_a_reader_that_was_not_waited_for_learns_of_it_at_the_end(tmp_path, receiver, path):
    with Publisher(f"ipc://{tmp_path}/run", threads=1, hold_s=0) as publisher:
        publish(publisher, "one", weights(1), path)
        pieces = receiver.pieces(receiver.manifest("one", deadline=Deadline.after(10)), deadline=Deadline.after(20))
        next(pieces)
        for version in ("two", "three"):
            publisher.publish(version, weights(2), timeout=30)
        with pytest.raises(SourceFailed):
            list(pieces)


def test_a_version_that_is_gone_or_changed_is_never_read(publisher, receiver, path):
    publish(publisher, "one", weights(1), path)
    manifest = receiver.manifest("one", deadline=Deadline.after(10))
    before = path.read_bytes()
    for version in ("two", "three"):
        publish(publisher, version, weights(2), path)
    with pytest.raises(VersionNotFound, match="one"):
        received(receiver, manifest)
    path.write_bytes(before)  # a file that nobody replaced
    with pytest.raises(VersionNotFound, match="one"):
        received(receiver, receiver.manifest("one", deadline=Deadline.after(10)))


def test_a_version_that_lies_elsewhere_by_now_is_never_read(publisher, receiver, path):
    tensors = weights(1)
    publish(publisher, "one", tensors, path)
    manifest = receiver.manifest("one", deadline=Deadline.after(10))
    for version in ("two", "three"):
        publisher.publish(version, weights(2), timeout=30)
    for version in ("four", "one"):  # the same tensors in the same slab, in another order
        publisher.publish(version, dict(reversed(tensors.items())), timeout=30)
    slab = publisher._clerk.shelf.held[-1]
    assert (slab.manifest.version, slab.handle) == ("one", read_legacy(path)["embed"].source.handle)
    with pytest.raises((VersionNotFound, SourceFailed)):
        received(receiver, manifest)


def test_a_publisher_that_holds_nothing_has_nothing_to_write(publisher, tmp_path):
    with pytest.raises(NotFound, match="publish a version first"):
        publisher.write_legacy(tmp_path, "0")
    assert not legacy_path(tmp_path, "0").exists()


def test_the_file_is_a_source_like_any_other(publisher, path):
    publish(publisher, "one", weights(1), path)
    model = {name: np.zeros_like(host_array(name, tensor)) for name, tensor in weights(2).items()}
    with LiveModel(model, source=f"legacy-ipc://{path.parent}?id=0") as live:
        assert live.update("one", verify_checksum=False).version == "one"
    for name, tensor in weights(1).items():
        assert model[name].tobytes() == np.ascontiguousarray(host_array(name, tensor)).tobytes()


def test_a_manifest_of_another_file_is_refused(publisher, receiver, path, tmp_path):
    publish(publisher, "one", weights(1), path)
    manifest = receiver.manifest("one", deadline=Deadline.after(10))
    publish(publisher, "two", {"other": torch.zeros(3)}, path)
    stranger = LegacyIpcReceiver(tmp_path, "0")
    with pytest.raises(SourceFailed, match="lists two now, and one"):
        received(stranger, manifest)
    stranger.close()


def test_a_file_that_names_other_memory_of_the_publisher_is_refused(publisher, receiver, path):
    publish(publisher, "one", weights(1), path)
    slab = publisher._clerk.shelf.held[-1]
    wrong = msgspec.structs.replace(slab.handle, id=slab.handle.id + 1000)
    write_legacy(path, slab.manifest, place=place_of(publisher), handle=wrong)
    with pytest.raises(SourceFailed, match="its publisher says memory"):
        received(receiver, receiver.manifest("one", deadline=Deadline.after(10)))


def test_memory_of_a_publisher_that_is_gone_is_an_error(publisher, receiver, path):
    publish(publisher, "one", weights(1), path)
    manifest = receiver.manifest("one", deadline=Deadline.after(10))
    pieces = receiver.pieces(manifest, deadline=Deadline.after(20))
    next(pieces)
    publisher.close()
    with pytest.raises(SourceFailed):
        list(pieces)
    with pytest.raises(SourceFailed, match="no publisher at"):
        received(receiver, manifest)


def test_a_deadline_that_has_passed_stops_everything(publisher, receiver, path):
    publish(publisher, "one", weights(1), path)
    with pytest.raises(DeadlineExceeded):
        receiver.manifest("one", deadline=Deadline.after(0))
    manifest = receiver.manifest("one", deadline=Deadline.after(10))
    with pytest.raises(DeadlineExceeded):
        list(receiver.pieces(manifest, deadline=Deadline.after(0)))


def test_an_update_that_is_cancelled_stops_before_the_next_tensor(publisher, receiver, path):
    publish(publisher, "one", weights(1), path)
    cancelled = threading.Event()
    manifest = receiver.manifest("one", deadline=Deadline.after(10))
    pieces = receiver.pieces(manifest, deadline=Deadline.after(20, cancelled=cancelled))
    next(pieces)
    cancelled.set()
    with pytest.raises(UpdateCancelled):
        next(pieces)


def test_it_can_be_closed_twice_and_used_again(publisher, receiver, path):
    tensors = weights(1)
    publish(publisher, "one", tensors, path)
    manifest = receiver.manifest("one", deadline=Deadline.after(10))
    assert same(received(receiver, manifest), tensors)
    receiver.close()
    receiver.close()
    assert same(received(receiver, manifest), tensors)


def test_bare_handles_of_cuda_need_a_version_file_and_a_gpu(path, tmp_path, receiver):
    path.write_bytes(pickle.dumps({"w": row(handle=CUDA)}))
    with pytest.raises(VersionNotSet):
        receiver.newest()
    write_version_file(tmp_path, version="step_9", step=9)
    assert receiver.newest() == "step_9"
    manifest = receiver.manifest("mine", deadline=Deadline.after(10))
    assert manifest.version == "mine"
    with pytest.raises(InvalidInput, match="&device=cuda:0"):
        received(receiver, manifest)
