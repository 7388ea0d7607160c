"""Publishing, reading, checking, comparing and pruning versions."""

import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from weightcast import Store
from weightcast.errors import (
    DigestMismatch,
    InvalidInput,
    PartCorrupt,
    StorageFailed,
    StoreNotFound,
    UnsupportedTensor,
    VersionExists,
    VersionNotFound,
    VersionNotSet,
)
from weightcast.store import layout
from weightcast.store.reader import VersionReader
from weightcast.tensors.dtypes import DType


def same_bits(a, b) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture
def tensors(rng):
    return {
        "embed": rng.integers(0, 2**16, (50, 40), dtype=np.uint16).view(ml_dtypes.bfloat16),
        "norm": rng.standard_normal(40).astype(np.float32),
        "odd.u8": rng.integers(0, 255, 7, dtype=np.uint8),
        "odd.bf16": rng.integers(0, 2**16, 3, dtype=np.uint16).view(ml_dtypes.bfloat16),
        "wide": rng.standard_normal((3, 11)),
        "scalar": np.array(2.5, np.float32),
        "empty": np.empty((0, 4), np.float16),
        "transposed": rng.standard_normal((8, 6)).T,
    }


def part_paths(store, version):
    directory = layout.version_dir(store.path, version)
    return [directory / part.file for part in store.manifest(version).parts]


def test_what_was_published_loads_back_bit_for_bit(store, tensors):
    manifest = store.publish("step_100", tensors)
    loaded = store.load("step_100")
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], tensors[name]) for name in tensors)
    assert (manifest.step, manifest.sequence, manifest.kind) == (100, 1, "full")
    assert store.newest() == "step_100"
    assert (store.path / "version.yaml").read_text() == "step: 100\nversion: step_100\n"


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F8_E4M3, DType.F8_E5M2, DType.F8_E8M0])
def test_every_bit_pattern_survives(store, dtype):
    every = np.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype.numpy)
    store.publish("v", {"every": every})
    assert same_bits(store.load("v")["every"], every)


def test_every_bit_pattern_survives_from_torch(store):
    every = {
        "bf16": torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16),
        "f16": torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16),
        "e4m3": torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn),
        "e5m2": torch.arange(256).to(torch.uint8).view(torch.float8_e5m2),
    }
    store.publish("v", every)
    loaded = store.load("v")
    for name, tensor in every.items():
        assert loaded[name].tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_parts_are_bounded_and_open_with_safetensors(store, rng):
    tensors = {f"w{i}": rng.standard_normal((100, i + 1)).astype(np.float32) for i in range(40)}
    tensors |= {f"odd{i}": rng.integers(0, 255, 2 * i + 1, dtype=np.uint8) for i in range(20)}
    manifest = store.publish("v", tensors, part_nbytes=100_000)
    assert len(manifest.parts) > 2
    names = []
    for path in part_paths(store, "v"):
        assert path.stat().st_size <= 100_000
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                names.append(name)
                assert torch.equal(file.get_tensor(name), torch.from_numpy(tensors[name]))
        assert safetensors.torch.load_file(path)
    assert sorted(names) == sorted(tensors)
    index = json.loads((layout.version_dir(store.path, "v") / layout.INDEX).read_text())
    assert index["weight_map"].keys() == tensors.keys()


def test_a_tensor_larger_than_a_part_gets_a_part_of_its_own(store, rng):
    manifest = store.publish(
        "v", {"a": np.zeros(10), "big": rng.standard_normal(50_000), "b": np.zeros(10)}, part_nbytes=100_000
    )
    assert [entry.part for entry in manifest.tensors] == [0, 1, 2]
    assert store.verify("v").ok


def test_a_version_loads_as_a_hugging_face_checkpoint(store, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "checkpoint")
    store.publish_checkpoint("step_1", tmp_path / "checkpoint", part_nbytes=70_000)
    assert len(store.manifest("step_1").parts) > 1
    opened = transformers.Qwen3ForCausalLM.from_pretrained(layout.version_dir(store.path, "step_1"), dtype=torch.bfloat16)
    for (name, a), (_, b) in zip(model.state_dict().items(), opened.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_tied_tensors_of_a_mapping_are_written_once(store):
    layer = torch.nn.Linear(8, 8, bias=False)
    manifest = store.publish("v", {"embed": layer.weight, "head": layer.weight, "other": layer.weight.detach().clone()})
    assert manifest.tied == {"head": "embed"}
    assert [entry.name for entry in manifest.tensors] == ["embed", "other"]
    loaded = store.load("v")
    assert loaded["head"] is loaded["embed"]


def test_tied_bytes_are_summed_under_the_smallest_of_their_names_whichever_holds_them(tmp_path, rng):
    weight = rng.standard_normal((8, 8)).astype(np.float32)
    orders = [("embed", "head", "a"), ("head", "a", "embed"), ("a", "embed", "head")]
    stores = [Store(tmp_path / order[0]) for order in orders]
    manifests = [one.publish("v", dict.fromkeys(order, weight)) for one, order in zip(stores, orders, strict=True)]
    alone = Store(tmp_path / "alone").publish("v", {"a": weight})
    assert [(entry.name, entry.summed_as) for one in manifests for entry in one.tensors] == [
        ("embed", "a"),
        ("head", "a"),
        ("a", ""),
    ]
    assert {entry.sum for one in manifests for entry in one.tensors} == {alone.tensors[0].sum}
    assert {one.root_digest for one in manifests} == {alone.root_digest}
    assert all(one.verify("v").ok and same_bits(one.load("v")["head"], weight) for one in stores)


def test_an_iterator_may_reuse_its_buffer_and_is_never_taken_for_tied(store):
    buffer = np.zeros(1000, np.float32)

    def stream():
        for i in range(20):
            buffer[:] = i
            yield f"w{i}", buffer
        for i in range(5):
            yield f"odd{i}", buffer[: 2 * i + 1]

    manifest = store.publish("v", stream(), part_nbytes=80_000)
    assert not manifest.tied
    loaded = store.load("v")
    assert all((loaded[f"w{i}"] == i).all() for i in range(20))
    assert all((loaded[f"odd{i}"] == 19).all() for i in range(5))


def test_thousands_of_small_tensors_go_into_parts_whose_headers_hold_them(store):
    manifest = store.publish("v", ((f"model.layers.{i}.weight", np.full(3, i, np.float32)) for i in range(3000)))
    assert len(manifest.tensors) == 3000
    assert store.verify("v").ok


def test_a_name_too_long_for_any_header_is_refused_and_leaves_nothing(store):
    with pytest.raises(UnsupportedTensor, match="too long"):
        store.publish("v", [("x" * 100_000, np.zeros(8))])
    assert store.versions() == []
    assert not layout.version_dir(store.path, "v").exists()


def test_a_failing_iterator_leaves_the_store_as_it_was(store, tensors):
    store.publish("step_1", tensors)

    def dies():
        yield "a", np.zeros(1000)
        raise RuntimeError("trainer died")

    with pytest.raises(RuntimeError, match="trainer died"):
        store.publish("step_2", dies())
    assert store.versions() == ["step_1"]
    assert store.newest() == "step_1"
    assert [path.name for path in layout.versions_dir(store.path).iterdir()] == ["step_1"]


@pytest.mark.parametrize(
    ("tensors", "error", "said"),
    [
        ({}, InvalidInput, "no tensors"),
        ([("a", np.zeros(2)), ("a", np.zeros(2))], InvalidInput, "'a' was given twice"),
        ({"a": np.zeros(2), "b": "text"}, UnsupportedTensor, "'b'"),
        ({"a": torch.zeros(2, device="meta")}, UnsupportedTensor, "'a' has no storage"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(store, tensors, error, said):
    with pytest.raises(error, match=said):
        store.publish("v", tensors)
    assert store.versions() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"files": {"manifest.json": b"{}"}}, "names that a version uses"),
        ({"files": {"model-00001-of-00001.safetensors": b""}}, "names that a version uses"),
        ({"files": {"delta-00001.bin": b""}}, "names that a version uses"),
        ({"files": {"../escape": b""}}, "cannot be called"),
        ({"files": {".hidden": b""}}, "cannot be called"),
        ({"metadata": {"run": 7}}, "texts to texts"),
        ({"step": "seven"}, "integer"),
        ({"part_nbytes": 0}, "positive"),
        ({"algorithm": "crc"}, "unknown digest"),
    ],
)
def test_bad_options_are_refused_and_leave_nothing(store, tensors, options, said):
    with pytest.raises(InvalidInput, match=said):
        store.publish("v", tensors, **options)
    assert not store.path.exists() or store.versions() == []
    assert not (store.path.parent / "escape").exists()
    store.publish("v", tensors)


def test_a_version_is_never_overwritten(store, tensors):
    store.publish("step_1", tensors)
    before = store.manifest("step_1")
    with pytest.raises(VersionExists, match="never changes"):
        store.publish("step_1", {"other": np.zeros(3)})
    assert store.manifest("step_1") == before


def test_versions_come_in_the_order_of_publication_not_of_names(store):
    for version in ("step_9", "step_10", "a", "step_8"):
        store.publish(version, {"w": np.zeros(2)})
    assert store.versions() == ["step_9", "step_10", "a", "step_8"]
    assert [store.manifest(version).step for version in store.versions()] == [9, 10, 3, 8]
    assert store.newest() == "step_8"
    store.announce("step_10")
    assert store.newest() == "step_10"
    with pytest.raises(VersionNotFound):
        store.announce("step_11")
    assert store.newest() == "step_10"


def test_read_streams_every_byte_once_in_bounded_pieces(store, tensors, rng):
    tensors["big"] = rng.standard_normal(3 << 20)
    store.publish("v", tensors)
    got = {name: bytearray(array.nbytes) for name, array in tensors.items()}
    total = 0
    for piece in store.read("v"):
        assert len(piece.data) <= 4 << 20
        got[piece.tensor][piece.offset : piece.offset + len(piece.data)] = piece.data
        total += len(piece.data)
    assert total == sum(array.nbytes for array in tensors.values())
    assert all(bytes(got[name]) == array.tobytes() for name, array in tensors.items())


def test_any_flipped_byte_of_a_part_is_caught_by_verify_and_by_load(store, tensors, rng):
    store.publish("v", tensors, part_nbytes=70_000)
    paths = part_paths(store, "v")
    for path in [*paths, layout.version_dir(store.path, "v") / layout.INDEX]:
        data = bytearray(path.read_bytes())
        header_end = 8 + int.from_bytes(data[:8], "little")
        quiet = data.find(b'"pt"') + 1  # a byte of the header that means nothing to a reader
        positions = [0, 7, 8, quiet, header_end - 1, header_end, len(data) - 1] if path in paths else [0, len(data) - 1]
        for position in {*positions, *rng.integers(0, len(data), 25).tolist()} & set(range(len(data))):
            data[position] ^= 0x10
            path.write_bytes(data)
            report = store.verify("v")
            assert not report.ok, f"{path.name} byte {position}"
            if path in paths:
                with pytest.raises((PartCorrupt, DigestMismatch)):
                    store.load("v")
                with pytest.raises((PartCorrupt, DigestMismatch)):
                    list(store.read("v"))
            data[position] ^= 0x10
        path.write_bytes(data)
    assert store.verify("v").ok


def test_all_damaged_tensors_are_listed_not_the_first(store, rng):
    store.publish("v", {name: rng.standard_normal(100) for name in "abc"})
    manifest = store.manifest("v")
    (path,) = part_paths(store, "v")
    data = bytearray(path.read_bytes())
    for entry in manifest.tensors:
        if entry.name in "ac":
            data[entry.offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestMismatch) as caught:
        store.load("v")
    assert caught.value.tensors == ("a", "c")
    assert len(store.verify("v").problems) == 2
    with pytest.raises(DigestMismatch) as caught:
        list(store.read("v"))
    assert caught.value.tensors == ("a", "c")


def test_a_missing_truncated_or_grown_part_is_named(store, tensors):
    store.publish("v", tensors)
    (path,) = part_paths(store, "v")
    data = path.read_bytes()
    for change in (data[:-1], data + b"x", data[:4], b""):
        path.write_bytes(change)
        assert str(path) in store.verify("v").problems[0]
        with pytest.raises(PartCorrupt, match=path.name):
            store.load("v")
    path.unlink()
    with pytest.raises(PartCorrupt, match="missing"):
        store.load("v")


def test_a_pipe_in_place_of_a_part_does_not_hang(store, tensors, tmp_path):
    store.publish("v", tensors)
    (path,) = part_paths(store, "v")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(PartCorrupt, match="regular file"):
        store.load("v")


def test_a_damaged_manifest_is_reported_and_does_not_hide_the_others(store, tensors):
    store.publish("step_1", tensors)
    store.publish("step_2", tensors)
    path = layout.manifest_path(store.path, "step_1")
    path.write_bytes(path.read_bytes().replace(b"step_1", b"step_9"))
    assert store.versions() == ["step_2"]
    assert [listing.version for listing in store.listings() if listing.error] == ["step_1"]
    assert not store.verify("step_1").ok
    store.publish("step_3", tensors)
    assert store.versions() == ["step_2", "step_3"]


def test_a_version_directory_under_another_name_is_refused(store, tensors):
    store.publish("step_1", tensors)
    shutil.copytree(layout.version_dir(store.path, "step_1"), layout.version_dir(store.path, "step_2"))
    assert "describes version step_1" in store.verify("step_2").problems[0]


def test_what_is_not_there_is_named_with_what_is(tmp_path, store, tensors):
    with pytest.raises(StoreNotFound, match="nowhere"):
        Store(tmp_path / "nowhere").versions()
    store.publish("step_1", tensors)
    with pytest.raises(VersionNotFound, match="it holds step_1"):
        store.manifest("step_2")
    (store.path / "version.yaml").unlink()
    with pytest.raises(VersionNotSet, match=r"version\.yaml"):
        store.load()


def test_diff_counts_elements_and_distances(store, tensors):
    store.publish("a", tensors)
    changed = {name: array.copy() for name, array in tensors.items()}
    changed["embed"].view(np.uint16)[:2, :5] ^= 1
    changed["norm"][3] = np.nextafter(changed["norm"][3], np.float32(np.inf))
    changed["norm"][4] = -changed["norm"][4]
    del changed["wide"]
    changed["scalar"] = changed["scalar"].astype(np.float64)
    changed["new"] = np.zeros(2)
    store.publish("b", changed)
    diff = store.diff("a", "b")
    by_name = {tensor.name: tensor for tensor in diff.tensors}
    assert by_name.keys() == {"embed", "norm", "wide", "scalar", "new"}
    assert (by_name["embed"].changed, by_name["embed"].max_ulp, by_name["embed"].one_ulp) == (10, 1, 10)
    assert (by_name["norm"].changed, by_name["norm"].one_ulp) == (2, 1)
    assert by_name["norm"].max_ulp > 1 << 29
    assert [by_name[name].kind for name in ("wide", "scalar", "new")] == ["removed", "reshaped", "added"]
    assert diff.same == len(tensors) - 4
    assert store.diff("a", "a").equal


def test_diff_of_versions_with_different_digests_compares_their_sums_and_reads_what_differs(store, tensors, monkeypatch):
    store.publish("a", tensors)
    store.publish("b", tensors, algorithm="blake3")
    store.publish("c", tensors | {"norm": tensors["norm"] + 1}, "full", algorithm="blake3")
    assert store.verify("b").ok
    read, original = [], VersionReader.read_into

    def noted(self, entry, start, buffer):
        read.append(entry.name)
        original(self, entry, start, buffer)

    monkeypatch.setattr(VersionReader, "read_into", noted)
    diff = store.diff("a", "b")
    assert (diff.equal, diff.same, read) == (True, len(tensors), [])
    assert [one.name for one in store.diff("a", "c").tensors] == ["norm"]
    assert set(read) == {"norm"}


@pytest.mark.parametrize("algorithm", ["xxh3-128", "blake3", "md5"])
def test_equal_states_have_equal_roots_however_they_were_cut(tmp_path, tensors, algorithm):
    a = Store(tmp_path / "a").publish("v", tensors, algorithm=algorithm)
    b = Store(tmp_path / "b").publish("w", reversed(tensors.items()), part_nbytes=70_000, algorithm=algorithm)
    plain = Store(tmp_path / "c").publish("x", tensors)
    assert a.root_digest == b.root_digest == plain.root_digest  # it is over sums, which have nothing to do with algorithms
    assert a.root_digest.startswith("sums:")
    assert all(entry.digest.startswith(f"{algorithm}:") for entry in (*a.tensors, *b.tensors))
    assert {entry.name: entry.sum for entry in a.tensors} == {entry.name: entry.sum for entry in plain.tensors}


# -- links that others planted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("planted", [".version.yaml.tmp", "version.yaml", "versions/step_2/.manifest.json.tmp"])
def test_no_file_is_written_through_a_link_that_was_planted_in_a_store(tmp_path, planted):
    store = Store(tmp_path / "store")
    store.publish("step_1", {"a": np.zeros(3, np.float32)})
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = store.path / planted
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(victim)
    store.publish("step_2", {"a": np.ones(3, np.float32)}, "full")
    store.announce("step_1")
    assert victim.read_text() == "precious"
    assert store.newest() == "step_1"
    assert store.verify("step_2").ok


def test_a_link_in_the_place_of_a_version_is_removed_and_not_followed(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("step_1", {"a": np.zeros(3, np.float32)})
    victims = tmp_path / "victims"
    victims.mkdir()
    (victims / "precious").write_text("precious")
    (store.path / "versions" / "step_2").symlink_to(victims)
    (store.path / "versions" / "step_3").symlink_to(victims)
    store.publish("step_2", {"a": np.ones(3, np.float32)}, "full")
    store.gc(keep_last=1)
    assert [path.name for path in victims.iterdir()] == ["precious"]
    assert store.versions() == ["step_2"]


def test_a_lock_file_that_is_a_link_is_refused(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("step_1", {"a": np.zeros(3, np.float32)})
    (store.path / ".lock").unlink()
    (store.path / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StorageFailed, match="lock"):
        store.publish("step_2", {"a": np.ones(3, np.float32)}, "full")
    assert not (tmp_path / "victim").exists()


def test_what_a_killed_publisher_wrote_aside_does_not_stop_the_next_one(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("step_1", {"a": np.zeros(3, np.float32)})
    (store.path / ".version.yaml.tmp").write_text("step: 17, and then it was killed")
    store.publish("step_2", {"a": np.ones(3, np.float32)}, "full")
    assert store.newest() == "step_2"
