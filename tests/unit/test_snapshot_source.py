"""A live model takes legacy snapshots through the same pipeline as versions."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from msgspec.structs import replace

from weightcast import LiveModel, State
from weightcast.errors import (
    CommitFailed,
    DigestMismatch,
    InvalidInput,
    SnapshotInvalid,
    SnapshotNotFound,
    SourceFailed,
    VerificationUnavailable,
    VersionNotSet,
)
from weightcast.store.snapshot import write_snapshot
from weightcast.tensors.digest import root_digest
from weightcast.tensors.sums import array_sum, root_of_sums
from weightcast.transports.registry import open_receiver
from weightcast.wire.snapshot_manifest import decode_snapshot_manifest, encode_snapshot_manifest

GOLDEN = Path(__file__).parents[1] / "golden" / "paddle"


@pytest.fixture
def new(rng):
    return {f"w{i}": rng.standard_normal((64, 33)).astype(np.float32) for i in range(6)}


def write(directory, tensors, version, *, rank=0, part_nbytes=80_000):
    return write_snapshot(
        directory, tensors, rank=rank, ranks=rank + 1, device_id="3", version=version, part_nbytes=part_nbytes
    )


def zeros(tensors):
    return {name: np.zeros_like(array) for name, array in tensors.items()}


@pytest.mark.parametrize("mode", ["copy", "swap", "inplace"])
@pytest.mark.parametrize("part_nbytes", [80_000, None])
def test_every_mode_takes_parts_and_single_files_and_proves_them(tmp_path, new, mode, part_nbytes):
    written = write(tmp_path, new, "step_5", part_nbytes=part_nbytes)
    assert (len(written.files) > 1) == (part_nbytes is not None)
    model = zeros(new)
    live = LiveModel(model, source=f"snapshot://{tmp_path}?id=3")
    result = live.update(commit=mode)
    assert (result.version, result.source, result.tensors) == ("step_5", f"snapshot://{tmp_path}?id=3", 6)
    assert all((model[name] == array).all() for name, array in new.items())
    assert live.root_digest() == root_of_sums((entry.spec, entry.sum) for entry in written.tensors)
    assert all(entry.sum == str(array_sum(entry.spec, new[entry.name])) for entry in written.tensors)


@pytest.mark.parametrize("mode", ["copy", "swap", "inplace"])
def test_a_snapshot_of_a_release_without_sums_is_proved_by_digests_of_bytes(tmp_path, new, mode):
    written = write(tmp_path, new, "step_5")
    older = replace(written, tensors=tuple(replace(entry, sum="") for entry in written.tensors))
    (path,) = tmp_path.glob("*.json")
    assert decode_snapshot_manifest(path.read_bytes(), path) == written
    path.write_bytes(encode_snapshot_manifest(older))
    model = zeros(new)
    live = LiveModel(model, source=f"snapshot://{tmp_path}?id=3")
    assert live.update(commit=mode).version == "step_5"
    assert all((model[name] == array).all() for name, array in new.items())
    assert live.root_digest() == root_digest((entry.spec, entry.digest) for entry in written.tensors)
    file = tmp_path / written.files[0].file
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DigestMismatch, match="expected xxh3-128:"):
        LiveModel(zeros(new), source=f"snapshot://{tmp_path}?id=3").update()


def test_each_rank_takes_its_own_shard(tmp_path, new):
    other = {name: array + 1 for name, array in new.items()}
    write(tmp_path, new, "step_5", rank=0)
    write(tmp_path, other, "step_5", rank=1)
    model = zeros(new)
    LiveModel(model, rank=1, source=f"snapshot://{tmp_path}?id=3").update("step_5")
    assert (model["w0"] == other["w0"]).all()


def test_a_recorded_version_is_the_only_one(tmp_path, new):
    write(tmp_path, new, "step_5")
    with pytest.raises(SourceFailed, match="step_6 was asked for"):
        LiveModel(zeros(new), source=f"snapshot://{tmp_path}?id=3").update("step_6")


def test_a_flipped_byte_is_caught_before_anything_is_written(tmp_path, new):
    written = write(tmp_path, new, "step_5")
    path = tmp_path / written.files[1].file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    model = zeros(new)
    live = LiveModel(model, source=f"snapshot://{tmp_path}?id=3")
    with pytest.raises(DigestMismatch):
        live.update()
    assert not any(array.any() for array in model.values())
    with pytest.raises(CommitFailed, match="did not come from a version"):
        live.update(commit="inplace")
    assert live.state is State.FAILED


def test_parts_of_two_versions_are_never_mixed(tmp_path, new):
    write(tmp_path / "a", new, "step_5")
    write(tmp_path / "b", {name: array + 1 for name, array in new.items()}, "step_6")
    shutil.copy(tmp_path / "a" / "model_state.tp0.3.part1.pdparams", tmp_path / "b")
    with pytest.raises(SnapshotInvalid, match="different versions"):
        LiveModel(zeros(new), source=f"snapshot://{tmp_path / 'b'}?id=3").update()


def test_foreign_files_have_no_digests_and_say_so(tmp_path, new):
    safetensors.numpy.save_file(new, tmp_path / "model_state.tp0.3.pdparams")
    model = zeros(new)
    live = LiveModel(model, source=f"snapshot://{tmp_path}?id=3")
    with pytest.raises(VerificationUnavailable, match="verify_checksum=False"):
        live.update("step_5")
    assert not model["w0"].any()
    with pytest.raises(VersionNotSet, match=r"version\.yaml"):
        live.update(verify_checksum=False)
    (tmp_path / "version.yaml").write_text("step: 12")
    assert live.update(verify_checksum=False).version == "12"
    assert (model["w5"] == new["w5"]).all()


def test_a_file_that_paddle_pickled_goes_into_a_model(tmp_path):
    shutil.copy(GOLDEN / "sd_p4.pdparams", tmp_path / "model_state.tp07.pdparams")
    receiver = open_receiver(f"snapshot://{tmp_path}?id=7", rank=0)
    specs = receiver._snapshot().specs
    model = {name: np.zeros(spec.shape, spec.dtype.numpy) for name, spec in specs.items()}
    LiveModel(model, source=receiver).update("step_1", verify_checksum=False)
    assert model["w"].tolist() == np.arange(12, dtype=np.float32).reshape(3, 4).tolist()
    assert model["b"].astype(np.float32).tolist() == list(range(6))
    assert model["s"] == 3.5


def test_options_of_the_url_are_checked(tmp_path, new):
    with pytest.raises(InvalidInput, match="device id"):
        open_receiver(f"snapshot://{tmp_path}", rank=0)
    with pytest.raises(InvalidInput, match="known: id, shared_dir"):
        open_receiver(f"snapshot://{tmp_path}?id=3&speed=11", rank=0)
    write(tmp_path / "shared", new, "step_5", part_nbytes=None)
    (tmp_path / "empty").mkdir()
    found = open_receiver(f"snapshot://{tmp_path / 'empty'}?id=3&shared_dir={tmp_path / 'shared'}", rank=0)
    assert found.newest() == "step_5"
    with pytest.raises(SnapshotNotFound) as caught:
        open_receiver(f"snapshot://{tmp_path / 'empty'}?id=3&shared_dir={tmp_path}", rank=0).newest()
    assert len(caught.value.tried) == 5
