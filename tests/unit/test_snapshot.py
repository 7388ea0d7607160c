"""Snapshots of the legacy layout: where they are looked for, what is checked before loading, how they are written."""

import json
import logging
import pickle
import shutil
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from weightcast.clock import Deadline
from weightcast.errors import (
    Corrupt,
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    ManifestCorrupt,
    PartCorrupt,
    PickleRefused,
    SnapshotInvalid,
    SnapshotNotFound,
    StorageFailed,
    UnsupportedFormat,
)
from weightcast.store.safetensors_file import SafetensorsFile
from weightcast.store.snapshot import DEFAULT_SHARED_DIR, list_snapshots, locate, open_snapshot, write_snapshot
from weightcast.store.snapshot.names import legacy_name, manifest_name, part_name, single_name
from weightcast.tensors.digest import ALGORITHMS, array_digest
from weightcast.tensors.dtypes import DType
from weightcast.tensors.sums import array_sum
from weightcast.wire.seal import seal
from weightcast.wire.snapshot_manifest import decode_snapshot_manifest

GOLDEN = Path(__file__).parent.parent / "golden" / "paddle"
UUID = "GPU-1f2e3d4c-0000-aaaa-bbbb-0123456789ab"


def tensors(rng, count=4, seed_name="t"):
    return {f"{seed_name}{i}": rng.random((8, i + 1), dtype=np.float32) for i in range(count)}


def write(directory, state, **options):
    options = {"rank": 0, "ranks": options.get("rank", 0) + 1, "device_id": "7", "version": "v1", "part_nbytes": 1} | options
    return write_snapshot(directory, state, **options)


def find(directory, **options):
    return locate(directory, **({"rank": 0, "device_id": "7", "shared_dir": directory / "none"} | options))


def opened(directory, **options):
    return open_snapshot(find(directory, **options))


def loaded(snapshot):
    return {name: np.array(array) for name, array in snapshot.tensors()}


def from_pieces(snapshot, **options):
    data = {name: bytearray(spec.nbytes) for name, spec in snapshot.specs.items()}
    for piece in snapshot.pieces(Deadline.after(60), **options):
        data[piece.tensor][piece.offset : piece.offset + len(piece.data)] = piece.data
    return data


def assert_holds(snapshot, state):
    assert snapshot.specs.keys() == state.keys()
    found = loaded(snapshot)
    for name, array in state.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes(), name
    assert {name: bytes(data) for name, data in from_pieces(snapshot).items()} == {
        name: array.tobytes() for name, array in state.items()
    }


def foreign(path, state=None, **metadata):
    """A safetensors file by someone else."""
    path.parent.mkdir(exist_ok=True)
    save_file({"w": np.zeros(2)} if state is None else state, path, metadata or None)


def problems_of(directory, **options):
    with pytest.raises(SnapshotInvalid) as caught:
        opened(directory, **options)
    return "\n".join(caught.value.problems)


# Looking


def test_the_four_places_are_tried_in_order_and_the_first_hit_wins(tmp_path):
    model, shared = tmp_path / "model", tmp_path / "shared"
    files = [
        (model / part_name(2, "7", 0), 1, "parts", "snapshot-part0"),
        (model / single_name(2, "7"), 2, "single", "snapshot"),
        (model / legacy_name("7"), 3, "legacy", "snapshot-legacy"),
        (shared / single_name(2, "7"), 4, "single", "snapshot-shared"),
        (shared / legacy_name("7"), 4, "legacy", "snapshot-shared-legacy"),
    ]
    for path, *_ in files:
        foreign(path)
    tried = []
    for path, level, kind, label in files:
        found = locate(model, rank=2, device_id="7", shared_dir=shared)
        tried.append(path if kind != "parts" else model / "model_state.tp2.7.part*.pdparams")
        assert (found.level, found.kind, found.directory) == (level, kind, path.parent)
        assert [(file.path, file.label) for file in found.files] == [(path, label)]
        assert list(found.tried) == tried
        path.unlink()
    with pytest.raises(SnapshotNotFound) as caught:
        locate(model, rank=2, device_id="7", shared_dir=shared)
    assert list(caught.value.tried) == [str(path) for path in tried]
    assert all(str(path) in str(caught.value) for path in tried)
    assert isinstance(caught.value, FileNotFoundError)


def test_a_directory_that_is_not_there_holds_nothing(tmp_path):
    with pytest.raises(SnapshotNotFound):
        locate(tmp_path / "nowhere", rank=0, device_id="7", shared_dir=tmp_path / "nowhere-else")
    assert Path("/shared_ipc_meta") == DEFAULT_SHARED_DIR


def test_files_of_another_rank_or_id_are_not_found(tmp_path):
    for rank, device_id in ((12, "34"), (1, "2345"), (1, "23"), (0, "1234")):
        foreign(tmp_path / single_name(rank, device_id))
        foreign(tmp_path / part_name(rank, device_id, 0))
    with pytest.raises(SnapshotNotFound):
        find(tmp_path, rank=1, device_id="234")


def test_parts_come_in_the_order_of_their_numbers_and_labels_carry_the_numbers(tmp_path):
    for number in range(1, 13):
        foreign(tmp_path / part_name(0, "7", number), {f"t{number}": np.full(2, number)})
    snapshot = opened(tmp_path)
    assert [file.label for file in snapshot.located.files] == [f"snapshot-part{number}" for number in range(1, 13)]
    assert list(snapshot.specs) == [name for name, _ in snapshot.tensors()] == [f"t{number}" for number in range(1, 13)]


def test_the_choice_is_logged_in_one_line_and_once(tmp_path, caplog):
    foreign(tmp_path / single_name(0, "7"))
    with caplog.at_level(logging.INFO):
        for _ in range(3):  # as a follower looks
            find(tmp_path)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"snapshot located  rank=0 device_id=7 place=2 kind=single files=1 manifest=no path={tmp_path}"
    )


@pytest.mark.parametrize(("rank", "warned"), [(0, 0), (3, 1)])
def test_the_legacy_name_for_another_rank_than_0_is_a_warning(tmp_path, caplog, rank, warned):
    foreign(tmp_path / legacy_name("7"))
    find(tmp_path, rank=rank)
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == warned


@pytest.mark.parametrize("name", ["a[1]*?", "model.part3", "model_state.tp0.7.part9.pdparams", "ü {x}"])
def test_the_path_of_the_directory_is_never_a_pattern(tmp_path, rng, name):
    state = tensors(rng)
    write(tmp_path / name, state)
    assert_holds(opened(tmp_path / name), state)


@pytest.mark.parametrize("device_id", ["0", "17", UUID, "MIG-GPU-5f_1-2-0"])
def test_ids_may_be_uuids(tmp_path, rng, device_id):
    state = tensors(rng)
    write(tmp_path, state, device_id=device_id)
    assert_holds(opened(tmp_path, device_id=device_id), state)


def test_a_missing_part_a_double_part_and_a_bad_name_are_all_reported_at_once(tmp_path):
    for name in ("part2", "part5", "part05", "partX"):
        foreign(tmp_path / f"model_state.tp0.7.{name}.pdparams")
    with pytest.raises(SnapshotInvalid) as caught:
        find(tmp_path)
    text = str(caught.value)
    for said in (
        "part 1 is missing",
        "part 3 is missing",
        "part 4 is missing",
        "part 5 is there 2 times",
        "partX.pdparams looks",
    ):
        assert said in text
    assert "part 0" not in text


@pytest.mark.parametrize("first", [0, 1])
def test_numbering_may_start_at_0_or_1(tmp_path, first):
    for number in (first, first + 1):
        foreign(tmp_path / part_name(0, "7", number))
    assert [file.part for file in find(tmp_path).files] == [first, first + 1]


def test_numbering_cannot_start_at_2_and_a_huge_number_does_not_list_every_gap(tmp_path):
    foreign(tmp_path / part_name(0, "7", 2))
    with pytest.raises(SnapshotInvalid, match="part 1 is missing"):
        find(tmp_path)
    foreign(tmp_path / part_name(0, "7", 10**12))
    with pytest.raises(SnapshotInvalid, match="most of the parts 1 to 1000000000000 are missing"):
        find(tmp_path)


def test_bad_names_can_be_ignored_on_request_with_a_warning(tmp_path, caplog):
    foreign(tmp_path / part_name(0, "7", 0))
    foreign(tmp_path / "model_state.tp0.7.part1.bak.pdparams")
    with pytest.raises(SnapshotInvalid, match=r"part1\.bak"):
        find(tmp_path)
    found = find(tmp_path, ignore_bad_names=True)
    assert [file.part for file in found.files] == [0]
    assert "part1.bak" in caplog.text


def test_a_bad_name_alone_stops_the_search(tmp_path):
    foreign(tmp_path / "model_state.tp0.7.partX.pdparams")
    foreign(tmp_path / single_name(0, "7"))
    with pytest.raises(SnapshotInvalid):
        find(tmp_path)
    assert find(tmp_path, ignore_bad_names=True).level == 2


@pytest.mark.parametrize("options", [{"rank": -1}, {"device_id": "part3"}, {"device_id": "a.b"}])
def test_a_rank_or_id_that_cannot_be_is_refused(tmp_path, options):
    with pytest.raises(InvalidInput):
        find(tmp_path, **options)


def test_a_directory_that_cannot_be_listed_is_a_failure_of_storage_not_an_empty_one(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(StorageFailed):
        find(loop)


# Opening foreign files


def test_files_of_real_paddle_open_under_legacy_names(tmp_path):
    for source, name in (("sd_st", single_name(0, "1")), ("sd_p4", legacy_name("2")), ("sd_p2", part_name(0, "3", 1))):
        shutil.copy(GOLDEN / f"{source}.pdparams", tmp_path / name)
    found = [opened(tmp_path, device_id=device_id) for device_id in "123"]
    assert [snapshot.version for snapshot in found] == [None] * 3
    assert [snapshot.algorithm for snapshot in found] == [None] * 3
    assert found[0].entries == {}
    first = {name: (array.dtype, array.tobytes()) for name, array in loaded(found[0]).items()}
    assert first["b"][0] == DType.BF16.numpy
    for snapshot in found[1:]:
        assert {name: (array.dtype, array.tobytes()) for name, array in loaded(snapshot).items()} == first
        assert {name: bytes(data) for name, data in from_pieces(snapshot).items()} == {
            name: data for name, (_, data) in first.items()
        }


def test_a_torch_file_opens_under_a_legacy_name_and_gives_pieces_in_c_order(tmp_path):
    weight = torch.arange(600.0).reshape(20, 30)
    torch.save({"w": weight, "t": weight.t(), "b": weight.bfloat16()}, tmp_path / single_name(0, "7"))
    data = from_pieces(opened(tmp_path), buffers=[memoryview(bytearray(7)), memoryview(bytearray(64))])
    assert bytes(data["w"]) == weight.numpy().tobytes()
    assert bytes(data["t"]) == weight.t().contiguous().numpy().tobytes()
    assert bytes(data["b"]) == weight.bfloat16().view(torch.int16).numpy().tobytes()


def test_a_safetensors_header_that_begins_like_a_pickle_is_still_safetensors(tmp_path):
    path = tmp_path / single_name(0, "7")
    header = json.dumps({"w": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}).ljust(0x280).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    assert path.read_bytes().startswith(b"\x80\x02")
    assert loaded(opened(tmp_path))["w"].tobytes() == b"abc"


def test_a_hostile_pickle_is_refused_by_name(tmp_path):
    (tmp_path / single_name(0, "7")).write_bytes(pickle.dumps({"w": print}))
    with pytest.raises(PickleRefused, match=r"builtins\.print"):
        opened(tmp_path)


def test_files_that_are_neither_are_listed_all_at_once(tmp_path):
    (tmp_path / part_name(0, "7", 0)).write_bytes(b"")
    (tmp_path / part_name(0, "7", 1)).write_bytes(b"not a tensor file at all")
    (tmp_path / part_name(0, "7", 2)).mkdir()
    text = problems_of(tmp_path)
    assert all(part_name(0, "7", number) in text for number in range(3))


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"weightcast.version": "v2"}, "different versions: v1 in .*part0.*; v2 in .*part1"),
        ({}, "different versions: v1 in .*; none in "),
        ({"weightcast.version": "v1", "weightcast.rank": "3"}, "part1.* says that it is of rank 3, not 0"),
        ({"weightcast.version": "v1", "weightcast.part": "2"}, "part1.* says that it is part 2, not 1"),
        ({"weightcast.version": "v1", "weightcast.parts": "3"}, "a number of files of 3, not 2"),
        ({"weightcast.version": "v1", "weightcast.write": "other"}, "different writes"),
    ],
)
def test_what_the_parts_record_must_agree(tmp_path, second, said):
    first = {"weightcast.version": "v1", "weightcast.rank": "0", "weightcast.part": "0", "weightcast.parts": "2"}
    foreign(tmp_path / part_name(0, "7", 0), {"a": np.zeros(1)}, **first)
    foreign(tmp_path / part_name(0, "7", 1), {"b": np.zeros(1)}, **(first | {"weightcast.part": "1"}))
    assert opened(tmp_path).version == "v1"
    foreign(tmp_path / part_name(0, "7", 1), {"b": np.zeros(1)}, **second)
    with pytest.raises(SnapshotInvalid, match=said):
        opened(tmp_path)


def test_a_legacy_file_that_records_another_rank_is_refused(tmp_path):
    foreign(tmp_path / legacy_name("7"), **{"weightcast.rank": "0"})
    assert opened(tmp_path, rank=0).located.kind == "legacy"
    assert "says that it is of rank 0, not 3" in problems_of(tmp_path, rank=3)


def test_a_part_under_the_name_of_a_whole_snapshot_is_refused(tmp_path):
    foreign(tmp_path / single_name(0, "7"), **{"weightcast.part": "1"})
    assert "says that it is part 1, not None" in problems_of(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    foreign(tmp_path / part_name(0, "7", 0), {"a": np.zeros(1), "b": np.zeros(1)})
    foreign(tmp_path / part_name(0, "7", 1), {"b": np.zeros(1)})
    assert f"tensor 'b' is in {part_name(0, '7', 0)} and in {part_name(0, '7', 1)}" in problems_of(tmp_path)


def test_a_snapshot_without_tensors_is_refused(tmp_path):
    (tmp_path / single_name(0, "7")).write_bytes(pickle.dumps({}))
    assert problems_of(tmp_path) == "it holds no tensors"


# Writing


@pytest.mark.parametrize("part_nbytes", [None, 1, 70_000, 1 << 30])
@pytest.mark.parametrize("form", [dict, lambda state: iter(state.items())])
def test_all_dtypes_come_back_bit_for_bit(tmp_path, rng, part_nbytes, form):
    state = {}
    for dtype in DType:
        patterns = np.frombuffer(rng.bytes(35 * dtype.itemsize), dtype=np.uint8)
        if dtype is DType.BOOL:
            patterns = patterns & 1
        state[f"{dtype}.odd"] = patterns.view(dtype.numpy).reshape(5, 7)
        state[f"{dtype}.transposed"] = patterns.view(dtype.numpy).reshape(5, 7).T
        state[f"{dtype}.even"] = patterns.view(dtype.numpy)[:32]
        state[f"{dtype}.scalar"] = patterns.view(dtype.numpy)[:1].reshape(())
        state[f"{dtype}.empty"] = patterns.view(dtype.numpy)[:0].reshape(0, 3)
    manifest = write(tmp_path, form(state), part_nbytes=part_nbytes, rank=3, device_id=UUID)
    snapshot = opened(tmp_path, rank=3, device_id=UUID)
    assert_holds(snapshot, state)
    assert snapshot.version == "v1"
    assert {name: entry.digest for name, entry in snapshot.entries.items()} == {
        name: array_digest(array) for name, array in state.items()
    }
    assert {name: entry.sum for name, entry in snapshot.entries.items()} == {
        name: str(array_sum(snapshot.specs[name], array)) for name, array in state.items()
    }
    for part in manifest.files:
        with SafetensorsFile(tmp_path / part.file) as file:
            assert all(place.offset % place.spec.dtype.itemsize == 0 for place in file.places.values())


def test_torch_tensors_can_be_written(tmp_path):
    weight = torch.randn(6, 5).bfloat16()
    write(tmp_path, {"w": weight, "t": weight.t()})
    data = from_pieces(opened(tmp_path))
    assert bytes(data["t"]) == weight.t().contiguous().view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_digests_are_by_the_algorithm_that_was_asked_for(tmp_path, rng, algorithm):
    state = tensors(rng)
    write(tmp_path, state, algorithm=algorithm)
    snapshot = opened(tmp_path)
    assert snapshot.algorithm == algorithm
    assert {name: (entry.digest, entry.sum) for name, entry in snapshot.entries.items()} == {
        name: (array_digest(array, algorithm), str(array_sum(snapshot.specs[name], array))) for name, array in state.items()
    }
    assert_holds(snapshot, state)


def test_other_tools_can_read_what_was_written(tmp_path, rng):
    state = tensors(rng)
    write(tmp_path, state, part_nbytes=None)
    found = load_file(tmp_path / single_name(0, "7"))
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in state.items()
    }
    with safe_open(tmp_path / single_name(0, "7"), framework="np") as file:
        recorded = file.metadata()
    assert (recorded["weightcast.version"], recorded["weightcast.rank"]) == ("v1", "0")


def test_parts_are_split_by_a_budget_and_numbered_from_0(tmp_path, rng):
    state = {"a": rng.random(1000), "b": rng.random(1000), "large": rng.random(20_000), "c": rng.random(1000)}
    manifest = write(tmp_path, state, part_nbytes=65_536 + 20_000)
    assert [part.file for part in manifest.files] == [part_name(0, "7", number) for number in range(3)]
    assert [entry.part for entry in manifest.tensors] == [0, 0, 1, 2]
    with SafetensorsFile(tmp_path / part_name(0, "7", 2)) as file:
        assert file.metadata["weightcast.part"] == "2"


def test_tensors_of_an_iterator_may_reuse_their_memory(tmp_path):
    memory = np.zeros(3, dtype=np.uint8)

    def stream():
        for number in range(5):
            memory[:] = number
            yield f"t{number}", memory

    write(tmp_path, stream(), part_nbytes=None)
    assert {name: array.tolist() for name, array in loaded(opened(tmp_path)).items()} == {f"t{n}": [n] * 3 for n in range(5)}


def test_a_stream_into_one_file_that_cannot_be_aligned_says_what_to_do(tmp_path):
    stream = [("odd", np.zeros((1 << 20) + 1, dtype=np.uint8)), ("wide", np.zeros(4))]
    with pytest.raises(InvalidInput, match="Allow several parts"):
        write(tmp_path, iter(stream), part_nbytes=None)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path, dict(stream), part_nbytes=None)
    assert_holds(opened(tmp_path), dict(stream))


def test_many_small_odd_tensors_wait_for_the_end_of_a_single_file(tmp_path):
    state = {f"odd{n}": np.full(400_001, n, dtype=np.uint8) for n in range(4)} | {"wide": np.arange(4.0)}
    write(tmp_path, iter(state.items()), part_nbytes=None)
    assert_holds(opened(tmp_path), state)


def test_many_tensors_fit_into_the_header_of_one_file(tmp_path):
    state = {f"model.layers.{n}.mlp.down_proj.weight": np.array([n]) for n in range(3000)}
    write(tmp_path, state, part_nbytes=None)
    assert len(opened(tmp_path).specs) == 3000
    write(tmp_path, iter(state.items()), part_nbytes=None)
    assert len(opened(tmp_path).specs) == 3000


@pytest.mark.parametrize(("old", "new"), [(None, 1), (1, None), (1, 70_000), (70_000, 1), (1, 1)])
def test_writing_over_an_older_snapshot_leaves_only_the_new_one(tmp_path, rng, old, new):
    write(tmp_path, tensors(rng, 6, "old"), part_nbytes=old)
    (tmp_path / "model_state.tp0.7.part007.pdparams").write_bytes(b"stale, with zeros in its number")
    others = [
        tmp_path / single_name(1, "7"),
        tmp_path / single_name(0, "77"),
        tmp_path / legacy_name("7"),
        tmp_path / "config.json",
    ]
    for path in others:
        path.write_bytes(b"not ours")
    state = tensors(rng, 3, "new")
    manifest = write(tmp_path, state, part_nbytes=new, version="v2")
    snapshot = opened(tmp_path)
    assert snapshot.version == "v2"
    assert_holds(snapshot, state)
    assert {path.name for path in tmp_path.iterdir()} == (
        {part.file for part in manifest.files} | {path.name for path in others} | {manifest_name(0, "7")}
    )


def test_a_stream_that_fails_leaves_the_old_snapshot_and_no_garbage(tmp_path, rng):
    state = tensors(rng)
    write(tmp_path, state)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def broken():
        yield "new0", np.zeros(3)
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError, match="the trainer died"):
        write(tmp_path, broken(), version="v2")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert_holds(opened(tmp_path), state)


def test_a_failure_in_the_middle_of_the_change_leaves_no_manifest_and_is_refused(tmp_path, rng):
    write(tmp_path, tensors(rng))
    in_the_way = tmp_path / part_name(0, "7", 1)
    in_the_way.unlink()
    (in_the_way / "x").mkdir(parents=True)
    with pytest.raises(StorageFailed, match="part1"):
        write(tmp_path, tensors(rng), version="v2")
    assert not (tmp_path / manifest_name(0, "7")).exists()
    assert "different versions" in problems_of(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_an_interrupted_write_left_aside_is_removed_by_the_next(tmp_path, rng):
    aside = tmp_path / f".{part_name(0, '7', 3)}.tmp"
    other = tmp_path / f".{part_name(1, '7', 3)}.tmp"
    for path in (aside, other):
        path.write_bytes(b"half")
    write(tmp_path, tensors(rng))
    assert not aside.exists()
    assert other.exists()


@pytest.mark.parametrize(
    ("options", "state"),
    [
        ({"rank": -1}, {"w": np.zeros(1)}),
        ({"device_id": "part3"}, {"w": np.zeros(1)}),
        ({"version": "a/b"}, {"w": np.zeros(1)}),
        ({"part_nbytes": 0}, {"w": np.zeros(1)}),
        ({}, {}),
        ({}, [("w", np.zeros(1)), ("w", np.zeros(1))]),
    ],
)
def test_a_call_that_cannot_be_right_writes_nothing(tmp_path, options, state):
    with pytest.raises(InvalidInput):
        write(tmp_path, state, **options)
    assert list(tmp_path.iterdir()) == []


# What the manifest proves


def test_the_manifest_says_what_was_written(tmp_path, rng):
    state = tensors(rng)
    manifest = write(tmp_path, state, rank=3)
    path = tmp_path / manifest_name(3, "7")
    assert decode_snapshot_manifest(path.read_bytes(), path) == manifest
    assert [part.nbytes for part in manifest.files] == [(tmp_path / part.file).stat().st_size for part in manifest.files]


def test_every_prefix_of_the_files_is_refused_until_the_manifest_is_there(tmp_path, rng):
    whole = tmp_path / "whole"
    manifest = write(whole, tensors(rng))
    part_way = tmp_path / "part-way"
    part_way.mkdir()
    for part in manifest.files:
        shutil.copy(whole / part.file, part_way)
        assert "is missing, so the write of these files was not finished" in problems_of(part_way)
    shutil.copy(whole / manifest_name(0, "7"), part_way)
    assert opened(part_way).version == "v1"


def test_new_files_over_old_ones_are_refused_at_every_point_of_the_change(tmp_path, rng):
    old, new, mixed = tmp_path / "old", tmp_path / "new", tmp_path / "mixed"
    write(old, tensors(rng))
    manifest = write(new, tensors(rng))  # same version, same names, other bytes
    shutil.copytree(old, mixed)
    (mixed / manifest_name(0, "7")).unlink()
    for number, part in enumerate(manifest.files):
        text = problems_of(mixed)
        assert "not finished" in text
        assert ("different writes" in text) == (number > 0)
        shutil.copy(new / part.file, mixed)
    assert "not finished" in problems_of(mixed)
    shutil.copy(new / manifest_name(0, "7"), mixed)
    assert opened(mixed).entries == opened(new).entries


def test_a_missing_part_is_named(tmp_path, rng):
    manifest = write(tmp_path, tensors(rng))
    (tmp_path / manifest.files[-1].file).unlink()
    assert problems_of(tmp_path) == f"{manifest.files[-1].file} is missing"


def test_a_stale_part_beside_newer_files_is_named(tmp_path, rng):
    manifest = write(tmp_path, tensors(rng))
    stale = part_name(0, "7", len(manifest.files))
    foreign(tmp_path / stale, {"stale": np.zeros(1)})
    assert f"{stale} is not part of version v1" in problems_of(tmp_path)


def test_a_stale_part_beside_a_newer_single_file_is_named(tmp_path, rng):
    write(tmp_path, tensors(rng), part_nbytes=None)
    foreign(tmp_path / part_name(0, "7", 0), {"stale": np.zeros(1)})
    text = problems_of(tmp_path)
    assert f"{part_name(0, '7', 0)} is not part of version v1" in text


def test_a_stale_single_file_beside_newer_parts_is_named(tmp_path, rng):
    write(tmp_path, tensors(rng))
    foreign(tmp_path / single_name(0, "7"), {"stale": np.zeros(1)})
    assert f"{single_name(0, '7')} is not part of version v1" in problems_of(tmp_path)


def test_a_manifest_without_its_files_stops_the_search_for_older_ones(tmp_path, rng):
    manifest = write(tmp_path, tensors(rng))
    foreign(tmp_path / legacy_name("7"))
    for part in manifest.files:
        (tmp_path / part.file).unlink()
    with pytest.raises(SnapshotInvalid, match="none of the files that it lists"):
        find(tmp_path)


def test_the_files_of_another_write_of_the_same_size_are_noticed(tmp_path, rng):
    write(tmp_path / "a", tensors(rng), part_nbytes=None)
    write(tmp_path / "b", tensors(rng), part_nbytes=None)
    shutil.copy(tmp_path / "b" / single_name(0, "7"), tmp_path / "a")
    assert "another header than the one that was written" in problems_of(tmp_path / "a")


def test_the_files_of_another_rank_under_this_name_are_noticed(tmp_path, rng):
    write(tmp_path, tensors(rng), rank=1, part_nbytes=None)
    shutil.copy(tmp_path / single_name(1, "7"), tmp_path / single_name(0, "7"))
    shutil.copy(tmp_path / manifest_name(1, "7"), tmp_path / manifest_name(0, "7"))
    text = problems_of(tmp_path)
    assert "says that it is of rank 1, not 0" in text
    assert "the manifest is of rank 1, not 0" in text


def test_a_truncated_or_grown_file_is_named(tmp_path, rng):
    manifest = write(tmp_path, tensors(rng))
    first, second = (tmp_path / part.file for part in manifest.files[:2])
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(second.read_bytes() + b"x")
    text = problems_of(tmp_path)
    assert first.name in text
    assert second.name in text


def test_a_flipped_byte_in_the_data_is_caught_by_the_digest_of_its_tensor(tmp_path, rng):
    state = tensors(rng)
    manifest = write(tmp_path, state)
    path = tmp_path / manifest.files[2].file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    snapshot = opened(tmp_path)
    for read in (lambda: loaded(snapshot), lambda: from_pieces(snapshot)):
        with pytest.raises(DigestMismatch) as caught:
            read()
        assert caught.value.tensors == ("t2",)
    assert from_pieces(snapshot, check=False).keys() == state.keys()


def test_a_flipped_byte_anywhere_is_caught(tmp_path, rng):
    write(tmp_path, tensors(rng, 3))
    files = sorted(tmp_path.iterdir())
    for _ in range(120):
        path = files[int(rng.integers(len(files)))]
        data = bytearray(path.read_bytes())
        spots = [0, 8, len(data) - 1, int(rng.integers(len(data))), int(rng.integers(min(400, len(data))))]
        at = spots[int(rng.integers(len(spots)))]
        data[at] ^= int(rng.integers(1, 256))
        intact = path.read_bytes()
        path.write_bytes(data)
        with pytest.raises(Corrupt):
            loaded(opened(tmp_path))
        path.write_bytes(intact)
    assert len(loaded(opened(tmp_path))) == 3


def test_a_manifest_that_was_edited_or_is_newer_is_refused(tmp_path, rng):
    write(tmp_path, tensors(rng))
    path = tmp_path / manifest_name(0, "7")
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"v1"', b'"v2"'))
    with pytest.raises(ManifestCorrupt, match="seal"):
        opened(tmp_path)
    manifest = decode_snapshot_manifest(good, path)
    for change, error in (
        ({"format": 2}, UnsupportedFormat),
        ({"files": ()}, ManifestCorrupt),
        ({"version": "/"}, ManifestCorrupt),
    ):
        path.write_bytes(seal(msgspec.structs.replace(manifest, **change)))
        with pytest.raises(error):
            opened(tmp_path)


def test_a_sealed_manifest_that_tells_of_other_contents_is_noticed(tmp_path):
    manifest = write(tmp_path, {"w": np.zeros(2)}, part_nbytes=None)
    (part,), (entry,) = manifest.files, manifest.tensors
    larger = {
        "files": (msgspec.structs.replace(part, nbytes=part.nbytes + 8),),
        "tensors": (msgspec.structs.replace(entry, shape=(3,), nbytes=24),),
    }
    for change, said in (
        ({"version": "v2"}, ["is of version v1, the manifest of v2"]),
        (larger, ["the manifest says", "other tensors than the manifest lists"]),
        ({"tensors": (msgspec.structs.replace(entry, name="x"),)}, ["other tensors than the manifest lists"]),
    ):
        (tmp_path / manifest_name(0, "7")).write_bytes(seal(msgspec.structs.replace(manifest, **change)))
        text = problems_of(tmp_path)
        assert all(line in text for line in said)


# Reading


def test_pieces_go_through_the_buffers_in_turn_and_cover_every_byte_once(tmp_path, rng):
    state = tensors(rng, 3)
    write(tmp_path, state, part_nbytes=None)
    ring = [memoryview(bytearray(40)) for _ in range(3)]
    snapshot = opened(tmp_path)
    covered = dict.fromkeys(state, 0)
    for turn, piece in enumerate(snapshot.pieces(Deadline.after(60), buffers=ring)):
        assert piece.data.obj is ring[turn % 3].obj
        assert piece.offset == covered[piece.tensor]
        covered[piece.tensor] += len(piece.data)
    assert covered == {name: array.nbytes for name, array in state.items()}


def test_pieces_of_named_tensors_only(tmp_path, rng):
    write(tmp_path, tensors(rng))
    assert {piece.tensor for piece in opened(tmp_path).pieces(Deadline.after(60), names={"t1", "t3"})} == {"t1", "t3"}


def test_reading_stops_at_the_deadline(tmp_path, rng):
    write(tmp_path, tensors(rng))
    with pytest.raises(DeadlineExceeded, match="reading the snapshot in"):
        next(opened(tmp_path).pieces(Deadline.after(0)))


def test_one_file_is_open_at_a_time_and_none_afterwards(tmp_path, rng):
    def open_files():
        return [link for link in Path("/proc/self/fd").iterdir() if link.exists() and link.resolve().parent == tmp_path]

    write(tmp_path, tensors(rng, 6))
    snapshot = opened(tmp_path)
    assert open_files() == []
    assert {len(open_files()) for _ in snapshot.tensors()} == {1}
    assert {len(open_files()) for _ in snapshot.pieces(Deadline.after(60))} == {1}
    half = snapshot.pieces(Deadline.after(60))
    next(half)
    half.close()
    assert open_files() == []


def test_a_snapshot_that_is_replaced_while_it_is_read_is_noticed(tmp_path, rng):
    write(tmp_path, tensors(rng))
    reading = opened(tmp_path).tensors()
    next(reading)
    write(tmp_path, tensors(rng))
    with pytest.raises(PartCorrupt, match="replaced after"):
        list(reading)


@pytest.mark.parametrize("part", [0, 1], ids=["read already", "not read yet"])
@pytest.mark.parametrize("way", ["replaced", "written in place"])
def test_a_foreign_part_that_changes_while_the_snapshot_is_read_is_noticed(tmp_path, rng, part, way):
    paths = [tmp_path / part_name(0, "7", index) for index in range(2)]
    states = [{f"t{index}": rng.random((8, 4), dtype=np.float32)} for index in range(2)]
    for path, state in zip(paths, states, strict=True):
        save_file(state, path)
    reading = opened(tmp_path).tensors()
    next(reading)
    new = {name: -array for name, array in states[part].items()}  # with the same header: only the bytes differ
    if way == "replaced":
        save_file(new, tmp_path / "new")
        (tmp_path / "new").rename(paths[part])
    else:
        save_file(new, paths[part])
    with pytest.raises(PartCorrupt, match="replaced"):
        list(reading)


def test_memory_is_bounded_by_the_buffers_not_by_the_file(tmp_path, rng):
    write(tmp_path, {"big": rng.random(4 << 20)}, part_nbytes=None)  # 32 MiB
    snapshot = opened(tmp_path)
    tracemalloc.start()
    try:
        for _ in snapshot.pieces(Deadline.after(60), buffers=[memoryview(bytearray(1 << 20))]):
            pass
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


# Listing


def test_everything_in_a_directory_is_listed_by_rank_and_id(tmp_path, rng):
    manifest = write(tmp_path, tensors(rng, 11), rank=0)
    write(tmp_path, tensors(rng), rank=2, device_id=UUID, part_nbytes=None)
    foreign(tmp_path / legacy_name("9"))
    for name in (
        "model_state.tp0.7.partX.pdparams",
        "model_state.tpx.pdparams",
        "config.json",
        ".model_state.tp0.7.pdparams.tmp",
    ):
        (tmp_path / name).write_bytes(b"")
    listed = list_snapshots(tmp_path)
    assert [(entry.rank, entry.device_id) for entry in listed.snapshots] == [(0, "7"), (0, "9"), (2, UUID)]
    first = listed.snapshots[0]
    assert [file.name.part for file in first.files] == [*range(11), None]
    written = [*(part.file for part in manifest.files), manifest_name(0, "7")]
    assert first.nbytes == sum((tmp_path / name).stat().st_size for name in written)
    assert [path.name for path in listed.bad_names] == ["model_state.tp0.7.partX.pdparams", "model_state.tpx.pdparams"]
    assert list_snapshots(tmp_path / "nowhere").snapshots == ()


# -- the number of ranks -------------------------------------------------------------------------------------------------


def test_a_snapshot_records_its_rank_and_the_number_of_ranks(tmp_path, rng):
    state = tensors(rng)
    assert write(tmp_path, state, rank=1, ranks=4).ranks == 4
    snapshot = opened(tmp_path, rank=1)
    assert (snapshot.rank, snapshot.ranks) == (1, 4)
    for file in snapshot._files:
        assert file.metadata["weightcast.ranks"] == "4"


def test_snapshots_of_older_releases_are_read_as_before(tmp_path, rng):
    state = tensors(rng)
    write(tmp_path, state)
    path = tmp_path / "model_state.tp0.7.manifest.json"
    fields = json.loads(path.read_text())
    del fields["seal"], fields["ranks"]
    path.write_bytes(seal(fields))
    snapshot = opened(tmp_path)
    assert snapshot.ranks is None
    assert_holds(snapshot, state)


@pytest.mark.parametrize("ranks", [0, 1, True, "2"])
def test_a_number_of_ranks_that_cannot_be_is_refused(tmp_path, rng, ranks):
    with pytest.raises(InvalidInput, match="number of ranks"):
        write(tmp_path, tensors(rng), rank=1, ranks=ranks)
    assert not list(tmp_path.iterdir())


def test_a_manifest_of_a_rank_that_its_number_of_ranks_does_not_have_is_corrupt(tmp_path, rng):
    write(tmp_path, tensors(rng))
    path = tmp_path / "model_state.tp0.7.manifest.json"
    fields = json.loads(path.read_text()) | {"ranks": 0}
    del fields["seal"]
    path.write_bytes(seal(fields))
    with pytest.raises(ManifestCorrupt, match="rank 0 of 0"):
        opened(tmp_path)
