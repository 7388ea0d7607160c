"""Stores of releases before sums: they are read, proved and built on, and what is built on them has sums."""

import logging
import os
import shutil
from pathlib import Path

import delta_reader
import ml_dtypes
import numpy as np
import pytest
from older_states import STEPS, TIED, states, tied, untied

from weightcast import DeltaPolicy, LiveModel, Store, delta
from weightcast.clock import Deadline
from weightcast.errors import Conflict, DigestMismatch, SourceFailed
from weightcast.store import layout
from weightcast.tensors.digest import root_digest
from weightcast.tensors.sums import array_sum
from weightcast.transports.checkpoint import CheckpointReceiver
from weightcast.wire.manifest import compute_root

GOLDEN = Path(__file__).parents[1] / "golden" / "format1"


@pytest.fixture
def path(tmp_path):
    """The store, in a place that may be written to."""
    shutil.copytree(GOLDEN / "store", tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def older(path):
    return Store(path, delta=DeltaPolicy(max_share=1))


def later(state):
    """A state after one of the golden ones."""
    own = {name: array.copy() for name, array in untied(state).items()}
    own["w"].view(np.uint16).reshape(-1)[5::300] += np.uint16(1)
    own["bias"][7] = np.float32(np.pi)
    own["count"][...] = -1
    return tied(own) if "x" in state else own


def zeros(state):
    """A model for such a state."""
    empty = {name: np.zeros_like(array) for name, array in untied(state).items()}
    return tied(empty) if "x" in state else empty


def same_state(a, b):
    return a.keys() == b.keys() and all(
        (a[name].dtype, a[name].shape, a[name].tobytes()) == (b[name].dtype, b[name].shape, b[name].tobytes()) for name in a
    )


def sums_of(manifest, state):
    """The sums that a version of this state must have, by the names that hold bytes."""
    return {entry.name: str(array_sum(entry.sum_spec, state[entry.name])) for entry in manifest.tensors}


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# -- reading -------------------------------------------------------------------------------------------------------


def test_every_golden_version_is_read_as_it_was_published(older):
    assert older.versions() == list(STEPS)
    for step, state in states().items():
        manifest = older.manifest(step)
        assert manifest.format == 1
        assert manifest.tied == (TIED if "x" in state else {})
        assert not any(entry.sum or entry.summed_as for entry in manifest.tensors)
        assert all(entry.proof == entry.digest != "" for entry in manifest.tensors)
        specs = ((entry.spec, entry.digest) for entry in manifest.tensors)
        assert manifest.root_digest == root_digest(specs, manifest.algorithm)
        assert same_state(older.load(step), state)
        read = {}
        for piece in older.read(step):
            read.setdefault(piece.tensor, bytearray()).extend(piece.data)
        assert read == {entry.name: state[entry.name].tobytes() for entry in manifest.tensors if entry.nbytes}
        report = older.verify(step)
        assert (report.ok, report.tensors) == (True, len(manifest.tensors))


@pytest.mark.parametrize("step", STEPS)
def test_damage_in_a_golden_version_is_found_by_digests_of_bytes(older, step):
    manifest = older.manifest(step)
    file = manifest.payloads[0].file if manifest.payloads else manifest.parts[0].file
    flip(layout.version_dir(older.path, step) / file, -20)
    assert not older.verify(step).ok
    with pytest.raises(DigestMismatch, match=r"expected (xxh3-128|blake3):"):
        older.load(step)


def test_a_golden_delta_is_read_and_proved_by_the_roots_over_bytes_that_it_has():
    packed = (GOLDEN / "example.delta").read_bytes()
    old = [[0x3F80, 0x3FC0, 0x3E80, 0x4000], [0x3FA0, 0x3EC0, 0xBF80, 0x0000]]
    new = [[0x3F80, 0x3FC1, 0x3E80, 0x4000], [0x3F9F, 0x3EC0, 0x3F80, 0x0000]]
    base, end = (
        {"bias": np.zeros(2, np.float32), "w": np.array(lanes, np.uint16).view(ml_dtypes.bfloat16)} for lanes in (old, new)
    )
    told = delta.inspect(packed)
    assert (told.base_root[:9], told.new_root[:9]) == ("xxh3-128:",) * 2
    found = delta_reader.read(packed, {name: array.tobytes() for name, array in base.items()})
    assert found == {name: array.tobytes() for name, array in end.items()}
    delta.apply(base, packed)
    assert same_state(base, end)


def test_a_golden_version_and_the_same_weights_published_now_differ_in_nothing_but_their_proof(older):
    for step, state in states().items():
        now = older.publish(f"again_{step}", state, "full", algorithm=older.manifest(step).algorithm)
        assert now.root_digest.startswith("sums:")
        assert now.root_digest != older.manifest(step).root_digest
        assert {entry.name: entry.sum for entry in now.tensors} == sums_of(now, state)
        diff = older.diff(step, f"again_{step}")
        assert (diff.equal, diff.same) == (True, len(state))


@pytest.mark.parametrize("step", ["step_1", "step_4"])
def test_the_directory_of_a_golden_version_is_a_checkpoint_that_is_not_trusted_after_it_was_touched(older, step):
    directory, sealed = layout.version_dir(older.path, step), older.manifest(step)
    receiver, live = CheckpointReceiver(directory), zeros(states()[step])
    manifest = receiver.manifest(step, deadline=Deadline.after(60))
    assert (manifest.root_digest, manifest.tied) == (sealed.root_digest, sealed.tied)
    assert LiveModel(live).update(source=receiver).version == step
    assert same_state(live, states()[step])
    os.utime(directory / sealed.parts[0].file, ns=(1, 1))
    with pytest.raises(SourceFailed, match="changed while a version was read"):
        next(receiver.pieces(manifest, deadline=Deadline.after(60)))


# -- building on it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["gaps", "classes"])
@pytest.mark.parametrize("keep", ["store", "memory"])
@pytest.mark.parametrize("base", STEPS)
def test_a_delta_is_published_on_a_golden_version_and_both_verify(older, base, keep, packing):
    older.announce(base)
    store = Store(older.path, delta=DeltaPolicy(max_share=1, keep=keep, packing=packing))
    before = store.manifest(base)
    state, after = later(states()[base]), later(later(states()[base]))
    first = store.publish("step_6", state, "delta", algorithm=before.algorithm)
    second = store.publish("step_7", after, "delta", algorithm=before.algorithm)

    assert [(one.format, one.kind) for one in (before, first, second)] == [(1, before.kind), (2, "delta"), (2, "delta")]
    assert (first.base.version, first.base.root_digest) == (base, before.root_digest)
    assert first.tied == before.tied
    for manifest, wanted in ((first, state), (second, after)):
        assert {entry.name: entry.sum for entry in manifest.tensors} == sums_of(manifest, wanted)
        assert manifest.by_name()["bias"].summed_as == ("a_bias" if before.tied else "")
        assert manifest.root_digest == compute_root(manifest.tensors, manifest.algorithm)
        assert manifest.root_digest.startswith("sums:")
        assert same_state(store.load(manifest.version), wanted)
    assert all(store.verify(version).ok for version in (base, "step_6", "step_7"))
    whole = Store(store.path.with_name("other")).publish("v", after)
    assert whole.root_digest == second.root_digest


@pytest.mark.parametrize("base", ["step_4", "step_5"])
def test_tensors_that_come_one_by_one_are_published_as_a_delta_on_a_golden_version(older, base):
    older.announce(base)
    state = later(states()[base])
    manifest = older.publish("step_6", iter(state.items()), "delta", algorithm="blake3")
    assert (manifest.kind, manifest.base.version, older.manifest(base).format) == ("delta", base, 1)
    assert {entry.name: entry.sum for entry in manifest.tensors} == sums_of(manifest, state)
    assert same_state(older.load("step_6"), state)
    assert older.verify("step_6").ok
    given = iter([*list(state.items())[:-1], ("another", np.zeros(3))])  # known too late to be a delta
    full = older.publish("step_7", given, algorithm="blake3")
    assert full.kind == "full"
    assert same_state(older.load("step_7"), {**dict(list(state.items())[:-1]), "another": np.zeros(3)})


@pytest.mark.parametrize("as_given", [dict, lambda state: iter(state.items())], ids=["mapping", "iterator"])
@pytest.mark.parametrize("base", ["step_4", "step_5"])
@pytest.mark.parametrize("where", ["in an element that stays", "in one that changes", "back to what is published now"])
def test_a_golden_version_that_is_damaged_is_not_built_on(older, base, where, as_given, caplog):
    caplog.set_level(logging.INFO, logger="weightcast.store.publishing")
    older.announce(base)
    full, state = older.manifest("step_4"), later(states()[base])
    path = layout.version_dir(older.path, "step_4") / full.parts[0].file
    at = full.by_name()["bias"].offset + 4 * (8 if where == "in an element that stays" else 7)
    if where == "back to what is published now":
        data = bytearray(path.read_bytes())
        data[at : at + 4] = state["bias"][7].tobytes()
        path.write_bytes(data)
    else:
        flip(path, at)
    with pytest.raises(Conflict, match=f"tensor bias of {base} is damaged in the store"):
        older.publish("step_6", as_given(state), "delta", algorithm="blake3")
    manifest = older.publish("step_6", as_given(state), algorithm="blake3")
    assert (manifest.kind, manifest.format) == ("full", 2)
    assert "is damaged in the store" in [record.msg.fields.get("why", "") for record in caplog.records][-2]
    assert same_state(older.load("step_6"), state)


def test_versions_of_both_formats_are_folded_and_joined_to_one_delta(older):
    older.announce("step_3")
    state = later(states()["step_3"])
    published = older.publish("step_6", state, "delta")
    joined = older.delta_between("step_1", "step_6")
    told = delta.inspect(joined)
    assert (told.base_root, told.new_root) == (older.manifest("step_1").root_digest, published.root_digest)
    arrays = untied(older.load("step_1"))
    delta.move(arrays, delta.decode(joined, arrays))
    assert same_state(tied(arrays), state)
    folded = older.fold("step_6")
    assert (folded.base.version, folded.root_digest, folded.tensors) == (
        "step_1",
        published.root_digest,
        published.tensors,
    )
    assert same_state(older.load("step_6"), state)
    assert older.verify("step_6").ok


def test_a_golden_delta_that_is_folded_keeps_its_format(older):
    before = older.manifest("step_3")
    folded = older.fold("step_3")
    assert (folded.format, folded.root_digest, folded.tensors) == (1, before.root_digest, before.tensors)
    assert same_state(older.load("step_3"), states()["step_3"])
    assert older.verify("step_3").ok


@pytest.mark.parametrize("commit", ["delta", "swap"])
def test_a_live_model_follows_from_format_1_to_sums(older, commit):
    older.announce("step_3")
    state = later(states()["step_3"])
    older.publish("step_6", state, "delta")
    live = zeros(state)
    model = LiveModel(live, source=f"file://{older.path}")
    for step, mode in (("step_1", "copy"), ("step_2", commit), ("step_3", commit), ("step_6", commit)):
        result = model.update(step, commit=mode)
        assert (result.version, result.mode) == (step, mode)
        assert same_state(live, state if step == "step_6" else states()[step])
        assert model.root_digest() == older.manifest(step).root_digest
