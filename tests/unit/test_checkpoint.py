"""Publishing what other tools wrote."""

import json

import numpy as np
import pytest
import safetensors.numpy

from weightcast.errors import InvalidInput, NotFound, PartCorrupt
from weightcast.store import layout


@pytest.fixture
def checkpoint(tmp_path, rng):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    one, two = {"a": rng.standard_normal((4, 4))}, {"b": rng.standard_normal(5).astype(np.float32), "c": np.arange(3)}
    safetensors.numpy.save_file(one, directory / "model-00001-of-00002.safetensors")
    safetensors.numpy.save_file(two, directory / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors"} | dict.fromkeys(two, "model-00002-of-00002.safetensors")
    (directory / layout.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text('{"model_type": "x"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model-card.md").write_text("# Model")
    (directory / ".hidden").write_text("not taken")
    (directory / "pytorch_model.bin").write_bytes(b"not taken")
    (directory / "version.yaml").write_text("step: 1")
    return directory


def test_tensors_and_small_files_come_along_and_foreign_weights_do_not(store, checkpoint):
    manifest = store.publish_checkpoint("step_3", checkpoint)
    assert {entry.name for entry in manifest.tensors} == {"a", "b", "c"}
    directory = layout.version_dir(store.path, "step_3")
    assert {file.file for file in manifest.files} == {"config.json", "tokenizer.json", "model-card.md", layout.INDEX}
    assert (directory / "config.json").read_text() == '{"model_type": "x"}'
    assert not (directory / "pytorch_model.bin").exists()
    assert store.verify("step_3").ok


def test_a_sealed_version_can_be_published_again_as_a_checkpoint(store, checkpoint):
    first = store.publish_checkpoint("step_3", checkpoint)
    second = store.publish_checkpoint("step_4", layout.version_dir(store.path, "step_3"))
    assert second.root_digest == first.root_digest


def test_an_index_that_lies_is_refused_with_all_differences(store, checkpoint):
    (checkpoint / layout.INDEX).write_text(json.dumps({"weight_map": {"a": "x", "lost": "y"}}))
    with pytest.raises(PartCorrupt, match=r"missing \['lost'\], not listed \['b', 'c'\]"):
        store.publish_checkpoint("v", checkpoint)
    assert not store.path.exists()


@pytest.mark.parametrize("index", ["[]", "{", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(store, checkpoint, index):
    (checkpoint / layout.INDEX).write_text(index)
    with pytest.raises(PartCorrupt, match="not an index"):
        store.publish_checkpoint("v", checkpoint)


def test_the_same_tensor_in_two_files_is_refused(store, checkpoint):
    safetensors.numpy.save_file({"a": np.zeros(2)}, checkpoint / "model-extra.safetensors")
    with pytest.raises(InvalidInput, match="another file holds too: a"):
        store.publish_checkpoint("v", checkpoint)


def test_a_directory_without_safetensors_is_refused(store, tmp_path):
    with pytest.raises(NotFound, match="not a directory"):
        store.publish_checkpoint("v", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match=r"no \.safetensors"):
        store.publish_checkpoint("v", tmp_path / "empty")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b'{"a": 3}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        b'{"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,6]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    ],
)
def test_a_malformed_file_is_refused_by_name(store, tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(PartCorrupt, match=path.name):
        store.publish_checkpoint("v", tmp_path)


def test_a_header_that_claims_more_than_the_file_is_refused_before_memory_is_taken(store, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(PartCorrupt, match="not a safetensors file"):
        store.publish_checkpoint("v", tmp_path)
