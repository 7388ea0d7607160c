"""Versions that a publisher holds: publisher and receivers in one process."""

import os
import threading
import time

import numpy as np
import pytest
import torch
from ipc_pairs import (
    Running,
    copied,
    held,
    in_bytes,
    mappings,
    weights,
    within,
)

from weightcast import LiveModel
from weightcast.clock import Deadline
from weightcast.errors import (
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    SourceFailed,
    UnsupportedTensor,
    UpdateCancelled,
    VersionExists,
    VersionNotFound,
    VersionNotSet,
    WeightcastError,
)
from weightcast.publish.publisher import Publisher
from weightcast.tensors.digest import algorithm_of
from weightcast.tensors.sums import is_sum
from weightcast.transports.ipc.receiver import IpcReceiver

# -- what comes ----------------------------------------------------------------------------------------------------------


def test_every_kind_of_tensor_comes_as_it_was_published(publisher, receiver):
    arrays = weights(1)
    embedding = torch.arange(300, dtype=torch.bfloat16).reshape(20, 15)
    tensors = {
        **arrays, "half": torch.linspace(-1, 1, 33, dtype=torch.float16).reshape(3, 11).T,
        "embed": embedding, "head": embedding, "view": embedding[1:],
    }  # fmt: skip
    publication = publisher.publish("step_1", tensors)
    manifest = receiver.manifest("step_1", deadline=within())
    assert manifest.tied == {"head": "embed"}
    assert manifest == publication.manifest
    found = held(receiver)
    expected = in_bytes(arrays) | {
        "half": tensors["half"].contiguous().numpy().tobytes(),
        "embed": embedding.view(torch.int16).numpy().tobytes(),
        "view": embedding[1:].contiguous().view(torch.int16).numpy().tobytes(),
    }
    assert found == expected
    with receiver.mapped(manifest, deadline=within()) as mapped:
        shapes = {name: array.shape for name, array in mapped.items()}
        with pytest.raises(ValueError, match="read-only"):
            mapped["layer.0"][0] = 1
    assert shapes == {entry.name: entry.shape for entry in manifest.tensors}
    publication.wait(2, timeout=10)
    assert publication.taken == [f"process {os.getpid()}"] * 2


def test_the_proof_of_a_held_version_is_its_sums_unless_another_digest_is_asked_for(publisher, receiver, store):
    plain = publisher.publish("step_1", weights(1)).manifest
    assert all(is_sum(entry.sum) and not entry.digest for entry in plain.tensors)
    both = publisher.publish("step_2", weights(1), algorithm="blake3").manifest
    assert {algorithm_of(entry.digest) for entry in both.tensors} == {"blake3"}
    assert held(receiver, "step_1") == held(receiver, "step_2") == in_bytes(weights(1))
    assert [entry.sum for entry in both.tensors] == [entry.sum for entry in plain.tensors]
    stored = store.publish("step_1", {name: np.asarray(array) for name, array in weights(1).items()})
    assert plain.root_digest == both.root_digest == stored.root_digest


def test_names_of_the_same_memory_have_one_sum_whichever_comes_first(publisher, receiver):
    memory = torch.arange(300, dtype=torch.bfloat16).reshape(20, 15)
    first = publisher.publish("step_1", {"head": memory, "embed": memory}).manifest
    assert (first.tied, [entry.summed_as for entry in first.tensors]) == ({"embed": "head"}, ["embed"])
    held(receiver)
    second = publisher.publish("step_2", {"embed": memory, "head": memory}).manifest
    assert (second.tied, [entry.summed_as for entry in second.tensors]) == ({"head": "embed"}, [""])
    held(receiver)
    assert first.root_digest == second.root_digest


@pytest.mark.parametrize("algorithm", ["xxh3-128", "blake3"])
def test_bytes_that_changed_in_the_memory_of_the_publisher_are_not_taken(publisher, receiver, algorithm):
    arrays = {name: np.array(array) for name, array in weights(1).items()}
    publisher.publish("step_1", arrays, algorithm=algorithm)
    target = {name: np.zeros_like(array) for name, array in arrays.items()}
    live = LiveModel(target, source=receiver)
    entry = next(entry for entry in receiver.manifest("step_1", deadline=within()).tensors if entry.name == "odd")
    memory = publisher._clerk.shelf.held[-1].memory
    there = np.frombuffer(publisher._device.read(memory, entry.offset, entry.offset + 1), np.uint8).copy()
    publisher._device.copy(next(iter(publisher._device.blocks("odd", there ^ 1))), memory, entry.offset)
    with pytest.raises(DigestMismatch) as caught:
        live.update("step_1")
    assert caught.value.tensors == ("odd",)
    assert not any(array.any() for array in target.values())
    publisher._device.copy(next(iter(publisher._device.blocks("odd", there))), memory, entry.offset)
    live.update("step_1")
    assert in_bytes(target) == in_bytes(arrays)


def test_a_held_version_can_be_had_in_pieces_and_by_name(publisher, receiver):
    arrays = weights(2)
    publisher.publish("step_1", arrays)
    manifest = receiver.manifest("step_1", deadline=within())
    names = {"layer.1", "odd", "empty"}
    assert copied(receiver, manifest, names=names).keys() == names
    found = {}
    for piece in receiver.pieces(manifest, deadline=within(), names=names):
        found[piece.tensor] = found.get(piece.tensor, b"") + bytes(piece.data)
    assert found == {name: data for name, data in in_bytes(arrays).items() if name in names - {"empty"}}


def test_tensors_that_change_right_after_publish_change_nothing_that_is_read(publisher, receiver):
    """While a receiver copies and hashes, the trainer writes over its tensors without a pause."""
    arrays = weights(3, count=8, side=200)
    trainer = {name: np.array(array) for name, array in arrays.items()}
    stop = threading.Event()

    def overwrite():
        while not stop.is_set():
            for array in trainer.values():
                array[...] = 77

    for step in range(5):
        for name, array in trainer.items():
            array[...] = arrays[name]
        publisher.publish(f"step_{step}", trainer)
        stop.clear()
        training = Running(overwrite)
        for _ in range(3):
            assert held(receiver) == in_bytes(arrays)
        stop.set()
        training.result()


def test_a_receiver_that_dawdles_gets_its_version_whole_or_an_error(root):
    """Without comparing any digest: the bytes did change under its eyes, and it is told."""
    with Publisher(root, hold_s=0.2) as publisher:
        receiver = IpcReceiver(root)
        publisher.publish("step_1", weights(1))
        manifest = receiver.manifest("step_1", deadline=within())
        with receiver.mapped(manifest, deadline=within()) as arrays:
            publisher.publish("step_2", weights(2))
            assert arrays["layer.0"].tobytes() == in_bytes(weights(1))["layer.0"]  # there are two slabs
        dawdling = receiver.mapped(manifest, deadline=within())
        arrays = dawdling.__enter__()
        began = time.monotonic()
        publisher.publish("step_3", weights(3))
        assert time.monotonic() - began >= 0.15
        publisher.publish("step_4", weights(4))
        assert arrays["layer.0"].tobytes() != in_bytes(weights(1))["layer.0"]
        with pytest.raises(SourceFailed, match=r"held the memory for more than 0\.2 s"):
            dawdling.__exit__(None, None, None)
        assert held(receiver) == in_bytes(weights(4))
        with pytest.raises(VersionNotFound, match=r"step_3.*step_4"):
            receiver.manifest("step_1", deadline=within())
        receiver.close()


def test_pieces_that_were_overwritten_while_they_were_read_end_in_an_error(root):
    with Publisher(root, hold_s=0.05) as publisher:
        receiver = IpcReceiver(root)
        publisher.publish("step_1", weights(1))
        pieces = receiver.pieces(receiver.manifest("step_1", deadline=within()), deadline=within())
        next(pieces)
        publisher.publish("step_2", weights(2))
        publisher.publish("step_3", weights(3))
        with pytest.raises(SourceFailed, match="did not keep"):
            list(pieces)
        receiver.close()


def test_the_trainer_waits_for_a_reader_and_goes_on_when_it_has_read(publisher, receiver):
    publisher.publish("step_1", weights(1))
    publisher.publish("step_2", weights(2))
    with receiver.mapped(receiver.manifest("step_1", deadline=within()), deadline=within()) as arrays:
        with pytest.raises(DeadlineExceeded, match="to read the last version"):
            publisher.publish("step_3", weights(3), timeout=0.1)
        publishing = Running(publisher.publish, "step_3", weights(3))
        time.sleep(0.1)
        assert publishing.is_alive()
        assert arrays["odd"].tobytes() == in_bytes(weights(1))["odd"]
    publishing.result()
    assert held(receiver) == in_bytes(weights(3))


def test_a_second_transfer_of_a_receiver_ends_the_first_with_an_error(publisher, receiver):
    publisher.publish("step_1", weights(1))
    manifest = receiver.manifest("step_1", deadline=within())
    with pytest.raises(SourceFailed, match="does not know of this transfer"), receiver.mapped(manifest, deadline=within()):
        copied(receiver, manifest)
    assert held(receiver) == in_bytes(weights(1))


def test_the_same_tensors_in_another_order_are_not_read_at_their_old_places(publisher, receiver):
    """Their root digest is the same: it does not cover where the bytes lie."""
    arrays = weights(5)
    publisher.publish("step_1", arrays)
    manifest = receiver.manifest("step_1", deadline=within())
    publisher.publish("step_2", weights(6))
    publisher.publish("step_3", weights(7))
    publisher.publish("step_1", dict(reversed(arrays.items())))
    with pytest.raises(VersionNotFound):
        copied(receiver, manifest)
    again = receiver.manifest("step_1", deadline=within())
    assert again.root_digest == manifest.root_digest
    assert copied(receiver, again) == in_bytes(arrays)


def test_a_model_that_grows_gets_new_memory_and_the_old_is_let_go(publisher, receiver):
    for step, count in enumerate([1, 1, 20, 20, 20, 1, 1, 1, 400, 1]):
        arrays = weights(step, count=count)
        publisher.publish(f"step_{step}", arrays)
        assert held(receiver) == in_bytes(arrays)
        assert len(set(mappings())) <= 2 + 1  # a slab that the receiver has not heard of being dropped
        assert len(mappings()) <= 2 + 2 + 1


# -- what is there -------------------------------------------------------------------------------------------------------


def test_a_receiver_that_waits_is_woken_by_the_next_version(publisher, receiver):
    with pytest.raises(VersionNotSet):
        receiver.newest()
    waiting = Running(receiver.wait_newer, None, deadline=within())
    publisher.publish("step_1", weights(1))
    assert waiting.result() == "step_1"
    assert receiver.wait_newer("step_0", deadline=within()) == "step_1"
    waiting = Running(receiver.wait_newer, "step_1", deadline=within())
    time.sleep(0.05)
    assert waiting.is_alive()
    publisher.publish("step_2", weights(2))
    assert waiting.result() == "step_2"
    assert receiver.newest() == "step_2"


def test_waiting_ends_at_the_deadline_or_when_it_is_cancelled_and_leaves_nothing(publisher, receiver):
    publisher.publish("step_1", weights(1))
    assert receiver.newest() == "step_1"
    for _ in range(20):
        with pytest.raises(DeadlineExceeded, match="newer version than step_1"):
            receiver.wait_newer("step_1", deadline=Deadline.after(0.01))
    assert receiver.newest() == "step_1"  # so all questions have arrived
    assert len(publisher._clerk._questions) <= 1
    cancelled = threading.Event()
    waiting = Running(receiver.wait_newer, "step_1", deadline=Deadline.after(60, cancelled=cancelled))
    time.sleep(0.05)
    cancelled.set()
    with pytest.raises(UpdateCancelled):
        waiting.result(timeout=5)
    publisher.publish("step_2", weights(2))
    assert receiver.newest() == "step_2"  # the late answers to the questions above are not taken for this one's
    assert held(receiver) == in_bytes(weights(2))


def test_a_version_that_is_held_is_not_published_again(publisher, receiver):
    publisher.publish("step_1", weights(1))
    with pytest.raises(VersionExists):
        publisher.publish("step_1", weights(2))
    assert held(receiver) == in_bytes(weights(1))


@pytest.mark.parametrize("slabs", [1, 2, 3])
def test_as_many_versions_are_held_as_there_are_slabs(root, slabs):
    with Publisher(root, slabs=slabs) as publisher:
        receiver = IpcReceiver(root)
        for step in range(6):
            publisher.publish(f"step_{step}", weights(step))
            held_now = [f"step_{one}" for one in range(max(0, step + 1 - slabs), step + 1)]
            assert publisher.versions == held_now
            for version in held_now:
                assert held(receiver, version) == in_bytes(weights(int(version.removeprefix("step_"))))
        receiver.close()


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"bad": torch.empty(4, 4, device="meta")}, WeightcastError),
        ({"bad": object()}, UnsupportedTensor),
        ({"bad": np.array(["text"])}, UnsupportedTensor),
    ],
)
def test_a_publication_that_fails_half_way_leaves_the_newest_as_it_was(publisher, receiver, bad, error):
    publisher.publish("step_1", weights(1))
    publisher.publish("step_2", weights(2))
    for _ in range(3):
        with pytest.raises(error):
            publisher.publish("step_3", weights(3) | bad)
        assert receiver.newest() == "step_2"
        assert held(receiver) == in_bytes(weights(2))
    publisher.publish("step_3", weights(3))
    assert held(receiver) == in_bytes(weights(3))


def test_what_cannot_be_published_is_refused(publisher, root):
    for tensors in ({}, [("a", np.ones(3))]):
        with pytest.raises(InvalidInput):
            publisher.publish("step_1", tensors)
    with pytest.raises(InvalidInput):
        publisher.publish("../step", weights(1))
    for wrong in ({"rank": 2}, {"slabs": 0}, {"threads": 0}, {"bucket_nbytes": 10}, {"stall_s": 0}, {"token": "short"}):
        with pytest.raises(InvalidInput):
            Publisher(root / "other", **wrong)
    with pytest.raises(InvalidInput, match="107 bytes"):
        Publisher(root / ("long" * 30))
    with pytest.raises(InvalidInput, match="must name a directory"):
        Publisher("http://host/dir")
    assert sorted(path.name for path in root.iterdir()) == ["rank-0"]
