"""Changes that lie beside a version in shared memory: receivers that hold the version before read nothing else."""

import logging

import numpy as np
import pytest
from delta_samples import same
from ipc_pairs import within
from shard_models import by_hand, next_tensors, random_tensors, shards_of

from weightcast import DeltaPolicy, LiveModel
from weightcast.delta import Cut, Slicing, slicing
from weightcast.publish.publisher import Publisher
from weightcast.transports.ipc.receiver import IpcReceiver

LARGE = 400_000  # elements: enough for the bytes of a delta to be told from those of a version


def state(rng):
    """A model with one large tensor."""
    return {"w": rng.normal(0, 1, (400, LARGE // 400)).astype(np.float32), "b": np.zeros(7, np.float32)}


def step(rng, tensors, changes=50):
    """The next state: some elements of the large tensor differ."""
    new = {name: array.copy() for name, array in tensors.items()}
    new["w"].reshape(-1)[rng.choice(LARGE, changes, replace=False)] += 1
    return new


def copies(tensors):
    return {name: array.copy() for name, array in tensors.items()}


@pytest.mark.parametrize("mode", ["copy", "swap", "delta"])
def test_a_receiver_that_holds_the_version_before_reads_the_changes_alone(publisher, receiver, rng, mode):
    tensors = state(rng)
    publisher.publish("step_0", tensors)
    target = {name: np.zeros_like(array) for name, array in tensors.items()}
    live = LiveModel(target, source=receiver)
    assert live.update(commit="copy").bytes == sum(array.nbytes for array in tensors.values())
    for number in range(1, 5):
        tensors = step(rng, tensors)
        manifest = publisher.publish(f"step_{number}", tensors).manifest
        assert (manifest.kind, manifest.base.version) == ("full", f"step_{number - 1}")
        result = live.update(commit=mode)
        assert result.bytes == manifest.payload_nbytes < 5000
        assert same(target, tensors)
        assert live.root_digest() == manifest.root_digest


def test_a_receiver_that_is_behind_or_new_takes_what_leads_there(publisher, receiver, rng):
    states = [state(rng)]
    publisher.publish("step_0", states[0])
    target = copies(states[0])
    live = LiveModel(target, source=receiver)
    live.update()
    for number in (1, 2):
        states.append(step(rng, states[-1]))
        publisher.publish(f"step_{number}", states[-1])
    whole = sum(array.nbytes for array in target.values())
    assert live.update().bytes < 10_000  # both deltas: the version between is still held
    assert same(target, states[2])
    for number in (3, 4, 5):
        states.append(step(rng, states[-1]))
        publisher.publish(f"step_{number}", states[-1])
    assert live.update().bytes == whole  # the first of three is gone
    assert same(target, states[5])
    late = {name: np.zeros_like(array) for name, array in target.items()}
    assert LiveModel(late, source=receiver).update().bytes == whole
    assert same(late, states[5])


def test_many_changes_another_model_and_other_ties_have_no_delta(publisher, rng):
    tensors = {"w": rng.normal(0, 1, (3000, 1000)).astype(np.float32)}
    publisher.publish("step_0", tensors)
    assert not publisher.publish("step_1", {"w": tensors["w"] + 1}).manifest.payloads
    assert publisher.publish("step_2", {"w": tensors["w"] + 1}).manifest.payloads
    assert not publisher.publish("step_3", {"w": tensors["w"][:10]}).manifest.payloads
    tied = publisher.publish("step_4", {"w": tensors["w"], "head": tensors["w"]}).manifest
    assert tied.tied
    assert not tied.payloads
    assert publisher.publish("step_5", {"w": tensors["w"], "head": tensors["w"]}).manifest.payloads


def test_deltas_can_be_declined_by_either_side(tmp_path, rng):
    tensors = state(rng)
    with Publisher(tmp_path / "none", deltas=None) as publisher:
        publisher.publish("step_0", tensors)
        assert not publisher.publish("step_1", step(rng, tensors)).manifest.payloads
    with Publisher(tmp_path / "one", slabs=1) as publisher:  # the version before is written over
        publisher.publish("step_0", tensors)
        assert not publisher.publish("step_1", step(rng, tensors)).manifest.payloads


def test_damage_to_the_version_before_is_noticed_and_the_version_is_whole(publisher, receiver, rng, caplog):
    tensors = state(rng)
    publisher.publish("step_0", tensors)
    publisher._clerk.shelf.held[-1].memory.bytes[1000] ^= 1
    tensors = step(rng, tensors)
    with caplog.at_level(logging.WARNING):
        manifest = publisher.publish("step_1", tensors).manifest
    assert not manifest.payloads
    assert "damaged in memory" in caplog.text
    target = {name: np.zeros_like(array) for name, array in tensors.items()}
    LiveModel(target, source=receiver).update()
    assert same(target, tensors)


def test_a_wrong_byte_of_the_changes_is_refused_and_nothing_is_changed(publisher, receiver, rng):
    tensors = state(rng)
    publisher.publish("step_0", tensors)
    target = copies(tensors)
    live = LiveModel(target, source=receiver)
    live.update()
    manifest = publisher.publish("step_1", step(rng, tensors)).manifest
    memory = publisher._clerk.shelf.held[-1].memory.bytes
    for place in (20, manifest.payloads[0].table + 5, manifest.payloads[0].nbytes - 20):
        memory[manifest.payloads[0].offset + place] ^= 1
        with pytest.raises(Exception, match="step_1"):
            live.update()
        memory[manifest.payloads[0].offset + place] ^= 1
    assert same(target, tensors)
    live.update()


@pytest.mark.parametrize("packing", ["gaps", "classes"])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2), (2, 3)])
def test_a_rank_takes_its_slices_of_the_changes(tmp_path, rng, rank, ranks, packing, monkeypatch):
    monkeypatch.setattr(slicing, "SLICED_NBYTES", 0)
    cuts = (
        Cut(("q", "k", "v", "gate", "up", "left", "right", "bias"), 0, parts=6),
        Cut(("o", "stacked.*"), 1, parts=6),
        Cut(("embed",), 0, edges=tuple(range(-(-10 // ranks), 10, -(-10 // ranks))), like="vocabulary"),
        Cut(("experts.*",), None, number=r"experts\.(\d+)", like="experts"),
    )
    tensors = random_tensors(rng)
    with Publisher(tmp_path / "run", deltas=DeltaPolicy(packing=packing, slicing=Slicing(cuts))) as publisher:
        publisher.publish("v0", tensors)
        target = {name: np.array(array) for name, array in by_hand(tensors, rank, ranks).items()}
        live = LiveModel(target, source=IpcReceiver(tmp_path / "run"), layout=shards_of(rank, ranks))
        live.update()
        for number in (1, 2, 3):
            tensors = next_tensors(rng, tensors)
            manifest = publisher.publish(f"v{number}", tensors).manifest
            result = live.update()
            assert (result.mode, result.bytes) == ("delta", manifest.payload_nbytes)
            assert same(target, by_hand(tensors, rank, ranks))
        live.close()


def test_trainer_ranks_each_have_the_changes_of_their_tensors(tmp_path, rng):
    tensors = state(rng) | {"other": rng.normal(0, 1, (300, 300)).astype(np.float32)}
    own = [("w",), ("b", "other")]
    publishers = [Publisher(tmp_path / "run", rank=rank, ranks=2) for rank in (0, 1)]
    receiver = IpcReceiver(tmp_path / "run")
    target = {name: np.zeros_like(array) for name, array in tensors.items()}
    live = LiveModel(target, source=receiver)
    try:
        before = None
        for number in range(3):
            for publisher, names in zip(publishers, own, strict=True):
                publisher.publish(f"step_{number}", {name: tensors[name] for name in names})
            manifest = receiver.manifest(f"step_{number}", deadline=within())
            result = live.update()
            if before is not None:
                assert manifest.base.root_digest == before.root_digest
                assert [payload.part for payload in manifest.payloads] == [0, 1]
                assert result.bytes == manifest.payload_nbytes < 5000
            assert same(target, tensors)
            before, tensors = manifest, step(rng, tensors)
        publishers[1].close()  # started anew it holds no base, so that the version is full for all
        publishers[1] = Publisher(tmp_path / "run", rank=1, ranks=2)
        for publisher, names in zip(publishers, own, strict=True):
            publisher.publish("step_3", {name: tensors[name] for name in names})
        manifest = receiver.manifest("step_3", deadline=within())
        assert (manifest.base, manifest.payloads) == (None, ())
        live.update()
        assert same(target, tensors)
    finally:
        live.close()
        for publisher in publishers:
            publisher.close()
