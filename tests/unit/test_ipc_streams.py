"""Versions that are streamed through two buckets, and several trainer ranks: everything in one process."""

import os
import threading
import time

import numpy as np
import pytest
import torch
from ipc_pairs import BUCKET_NBYTES, Running, held, in_bytes, mappings, streamed, until, weights, within

from weightcast.errors import (
    DeadlineExceeded,
    InvalidInput,
    ReceiversLost,
    SourceFailed,
    VersionNotFound,
    WeightcastError,
    WrongState,
)
from weightcast.publish.publisher import Publisher
from weightcast.tensors.sums import is_sum
from weightcast.transports.ipc import reading
from weightcast.transports.ipc.receiver import IpcReceiver


@pytest.fixture
def publisher(root):
    with Publisher(root, bucket_nbytes=BUCKET_NBYTES, hold_s=10, stall_s=0.5) as one:
        yield one


@pytest.fixture
def receivers(root):
    made = []

    def make():
        made.append(IpcReceiver(root))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("bucket_nbytes", [4096, 5000, 1 << 20])
def test_every_kind_of_tensor_comes_through_buckets_of_any_size(root, receivers, bucket_nbytes):
    embedding = torch.arange(300, dtype=torch.bfloat16)
    arrays = weights(1)
    with Publisher(root, bucket_nbytes=bucket_nbytes) as publisher:
        streaming = Running(publisher.stream, "step_1", {**arrays, "embed": embedding, "head": embedding}, timeout=20)
        found = streamed(receivers(), "step_1")
        publication = streaming.result()
    assert found == in_bytes(arrays) | {"embed": embedding.view(torch.int16).numpy().tobytes()}
    assert (publication.manifest.tied, len(publication.taken)) == ({"head": "embed"}, 1)


def test_a_stream_has_sums_and_the_root_digest_of_the_same_tensors_held(publisher, receivers):
    memory = np.arange(5000, dtype=np.float32)
    tensors = {"tied": memory, "first": memory, **weights(1)}
    taking = Running(streamed, receivers(), "step_1")
    sealed = publisher.stream("step_1", tensors, timeout=20).manifest
    taking.result()
    assert all(is_sum(entry.sum) and not entry.digest for entry in sealed.tensors)
    assert {entry.name: entry.summed_as for entry in sealed.tensors if entry.summed_as} == {"tied": "first"}
    assert publisher.publish("step_2", tensors).manifest.root_digest == sealed.root_digest


def test_several_receivers_get_the_same_stream_and_then_the_next(publisher, receivers):
    here, before = [receivers() for _ in range(3)], set(mappings())
    for step in range(3):
        taking = [Running(streamed, one, f"step_{step}") for one in here]
        publication = publisher.stream(f"step_{step}", weights(step), receivers=3, timeout=20)
        publication.wait(timeout=10)
        assert [one.result() for one in taking] == [in_bytes(weights(step))] * 3
        assert (len(publication.taken), publication.dropped) == (3, [])
    assert len(set(mappings()) - before) == 1  # the buckets are the same all the time


def test_an_iterator_may_use_the_same_memory_for_every_tensor(publisher, receivers):
    like = {f"layer.{number}": torch.empty(300, 100, device="meta") for number in range(8)}

    def gathered():
        buffer = np.empty((300, 100), np.float32)
        for number, name in enumerate(like):
            buffer[...] = np.random.default_rng(number).standard_normal((300, 100))
            yield name, buffer
            buffer[...] = -1

    taking = Running(streamed, receivers(), "step_1")
    publisher.stream("step_1", gathered(), like=like, timeout=20).wait(timeout=10)
    expected = [np.random.default_rng(number).standard_normal((300, 100)).astype(np.float32) for number in range(8)]
    assert taking.result() == {f"layer.{number}": array.tobytes() for number, array in enumerate(expected)}


def test_tensors_that_change_right_after_stream_change_nothing_that_is_read(publisher, receivers):
    receiver = receivers()
    for step in range(5):
        trainer = {name: np.array(array) for name, array in weights(step).items()}
        taking = Running(streamed, receiver, f"step_{step}", at_piece=lambda _: time.sleep(0.002))
        publication = publisher.stream(f"step_{step}", trainer, timeout=20)
        while not publication.taken and not publication.dropped:
            for array in trainer.values():
                array[...] = 77
        assert taking.result() == in_bytes(weights(step))


@pytest.mark.parametrize("last", [False, True])
def test_a_receiver_that_dawdles_over_a_bucket_is_dropped_and_never_gets_mixed_bytes(publisher, receivers, last):
    """Also over the last bucket, which is filled again only by the next stream; and without comparing any digest."""
    slow, peer = receivers(), receivers()
    arrays = weights(1)
    go_on, there = threading.Event(), threading.Event()

    def dawdle():
        deadline = within()
        slow.wait_newer(None, deadline=deadline)
        for piece in slow.pieces(slow.manifest("step_1", deadline=deadline), deadline=deadline):
            if (piece.tensor == "last" if last else piece.offset > 0) and not there.is_set():
                before = bytes(piece.data)
                there.set()
                go_on.wait(20)
                changed.append(before != bytes(piece.data))

    changed = []
    dawdling, taking = Running(dawdle), Running(streamed, peer, "step_1")
    publication = publisher.stream("step_1", arrays, receivers=2, timeout=20)
    assert taking.result() == in_bytes(arrays)
    there.wait(10)
    for step in (2, 3):
        taking = Running(streamed, peer, f"step_{step}")
        publisher.stream(f"step_{step}", weights(step), timeout=20)
        assert taking.result() == in_bytes(weights(step))
    go_on.set()
    with pytest.raises(SourceFailed, match="ended for this receiver"):
        dawdling.result()
    assert changed == [True]
    assert (len(publication.taken), len(publication.dropped)) == (1, 1)
    with pytest.raises(ReceiversLost, match=r"0\.5 s"):
        publication.wait(timeout=5)
    taking = Running(streamed, slow, "step_4")  # it is usable at once
    publisher.stream("step_4", weights(4), timeout=20)
    assert taking.result() == in_bytes(weights(4))


def test_a_receiver_that_comes_late_is_refused(publisher, receivers):
    early, late = receivers(), receivers()
    refused = []

    def come_late(number):
        if number == 3:
            with pytest.raises(SourceFailed, match="has begun without this receiver"):
                streamed(late, "step_1")
            refused.append(True)

    taking = Running(streamed, early, "step_1", at_piece=come_late)
    publisher.stream("step_1", weights(1, count=20), timeout=20).wait(timeout=10)
    taking.result()
    assert refused == [True]
    manifest = late.manifest("step_1", deadline=within())
    assert manifest.sealed
    assert not late.holds(manifest)
    with pytest.raises(VersionNotFound):
        list(late.pieces(manifest, deadline=within()))


def test_a_stream_cannot_be_mapped(publisher, receivers):
    receiver = receivers()

    def look():
        receiver.wait_newer(None, deadline=within())
        manifest = receiver.manifest("step_1", deadline=within())
        with pytest.raises(InvalidInput, match="cannot be mapped"), receiver.mapped(manifest, deadline=within()):
            pass

    looking = Running(look)
    with pytest.raises(DeadlineExceeded, match="0 of 1 receiver"):
        publisher.stream("step_1", weights(1), timeout=0.3)
    looking.result()


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ([("a", np.zeros(9, np.float32))], "did not come: b"),
        ([("a", np.zeros(9, np.float32)), ("c", np.zeros(9, np.float32))], "'c' of step_2 comes twice, or was not"),
        ([("a", np.zeros(9, np.float32)), ("a", np.zeros(9, np.float32))], "'a' of step_2 comes twice"),
        ([("a", np.zeros(8, np.float32))], "F32"),
        ([("a", np.zeros(9, np.float32)), ("b", torch.empty(9, device="meta"))], "meta"),
    ],
)
def test_a_stream_that_fails_half_way_is_an_error_on_both_sides_and_is_not_the_newest(publisher, receivers, tensors, told):
    receiver = receivers()
    publisher.publish("step_1", weights(1))
    like = {"a": np.zeros(9, np.float32), "b": np.zeros(9, np.float32)}
    taking = Running(streamed, receiver, "step_2")
    with pytest.raises(WeightcastError, match=told):
        publisher.stream("step_2", iter(tensors), like=like, timeout=20)
    with pytest.raises(SourceFailed, match="could not go on"):
        taking.result()
    assert receiver.newest() == "step_1"
    assert held(receiver) == in_bytes(weights(1))
    with pytest.raises(VersionNotFound):
        receiver.manifest("step_2", deadline=within())
    taking = Running(streamed, receiver, "step_2")
    publisher.stream("step_2", weights(2), timeout=20).wait(timeout=10)
    assert taking.result() == in_bytes(weights(2))


def test_a_stream_that_nobody_opens_ends_at_its_deadline(publisher, receivers):
    with pytest.raises(DeadlineExceeded, match=r"0 of 2 receiver\(s\) came"):
        publisher.stream("step_1", weights(1), receivers=2, timeout=0.1)
    with pytest.raises(InvalidInput):
        publisher.stream("step_1", weights(1), receivers=0)
    with pytest.raises(InvalidInput, match="like="):
        publisher.stream("step_1", iter(weights(1).items()))
    taking = Running(streamed, receivers(), "step_1")
    publisher.stream("step_1", weights(1), timeout=20)
    assert taking.result() == in_bytes(weights(1))


def test_a_receiver_that_gives_up_is_not_waited_for(publisher, receivers):
    quitter, peer = receivers(), receivers()

    def give_up(before=None):
        version = quitter.wait_newer(before, deadline=within())
        pieces = quitter.pieces(quitter.manifest(version, deadline=within()), deadline=within())
        next(pieces)
        pieces.close()

    giving_up, taking = Running(give_up), Running(streamed, peer, "step_1")
    publication = publisher.stream("step_1", weights(1, count=20), receivers=2, timeout=20)
    giving_up.result()
    assert taking.result() == in_bytes(weights(1, count=20))
    until(lambda: len(publication.dropped) == len(publication.taken) == 1)
    assert "gave up" in publication.dropped[0]
    giving_up = Running(give_up, "step_1")
    with pytest.raises(ReceiversLost):
        publisher.stream("step_2", weights(1, count=20), timeout=20)
    giving_up.result()


def test_closing_while_a_stream_waits_or_runs_ends_it_at_once(root, receivers):
    publisher = Publisher(root, stall_s=5)
    streaming = Running(publisher.stream, "step_1", weights(1), timeout=60)
    time.sleep(0.05)
    publisher.close()
    with pytest.raises(WrongState):
        streaming.result(timeout=2)
    publisher, there, go_on = Publisher(root, bucket_nbytes=4096, stall_s=5), threading.Event(), threading.Event()
    taking = Running(streamed, receivers(), "step_1", at_piece=lambda _: there.set() or go_on.wait(10))
    streaming = Running(publisher.stream, "step_1", weights(1), timeout=60)
    there.wait(10)
    publisher.close()
    with pytest.raises(WeightcastError):
        streaming.result(timeout=2)
    go_on.set()
    with pytest.raises(SourceFailed):
        taking.result(timeout=5)
    assert not root.exists()


def test_closing_after_a_stream_lets_its_receivers_end(root, receivers):
    with Publisher(root, bucket_nbytes=BUCKET_NBYTES) as publisher:
        taking = Running(streamed, receivers(), "step_1", at_piece=lambda _: time.sleep(0.01))
        publisher.stream("step_1", weights(1), timeout=20)
    assert taking.result() == in_bytes(weights(1))


def test_held_and_streamed_versions_go_together(publisher, receivers):
    receiver = receivers()
    for step in range(4):
        publisher.publish(f"held_{step}", weights(step))
        taking = Running(streamed, receiver, f"live_{step}")
        publisher.stream(f"live_{step}", weights(10 + step), timeout=20)
        assert taking.result() == in_bytes(weights(10 + step))
        assert receiver.newest() == f"live_{step}"
        assert held(receiver, f"held_{step}") == in_bytes(weights(step))


# -- trainer ranks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(root):
    here = [Publisher(root, rank=rank, ranks=2, bucket_nbytes=BUCKET_NBYTES, stall_s=0.3, hold_s=5) for rank in (0, 1)]
    yield here
    for one in here:
        one.close()
    assert not root.exists()


def of_rank(rank, seed):
    return {f"rank{rank}.{name}": array for name, array in weights(seed + rank).items()}


def test_trainer_ranks_publish_one_version_together(ranks, receivers):
    receiver = receivers()
    ranks[0].publish("step_1", of_rank(0, 1))
    with pytest.raises(VersionNotFound):
        receiver.manifest("step_1", deadline=within())
    ranks[1].publish("step_1", of_rank(1, 1))
    assert held(receiver, "step_1") == in_bytes(of_rank(0, 1) | of_rank(1, 1))
    manifest = receiver.manifest("step_1", deadline=within())
    found = {}
    for piece in receiver.pieces(manifest, deadline=within()):
        found[piece.tensor] = found.get(piece.tensor, b"") + bytes(piece.data)
    assert found == {name: data for name, data in in_bytes(of_rank(0, 1) | of_rank(1, 1)).items() if data}


def test_the_newest_is_what_all_trainer_ranks_have(ranks, receivers):
    receiver = receivers()
    for rank in (0, 1):
        ranks[rank].publish("step_1", of_rank(rank, 1))
    for ahead in (0, 1):
        ranks[ahead].publish(f"step_{2 + ahead}", of_rank(ahead, 2))
        assert receiver.newest() == f"step_{1 + ahead}"
        waiting = Running(receiver.wait_newer, f"step_{1 + ahead}", deadline=within())
        time.sleep(0.05)
        assert waiting.is_alive()
        ranks[1 - ahead].publish(f"step_{2 + ahead}", of_rank(1 - ahead, 2))
        assert waiting.result() == f"step_{2 + ahead}"


def test_tensors_that_two_trainer_ranks_have_are_all_named(ranks, receivers):
    for rank in (0, 1):
        ranks[rank].publish("step_1", of_rank(rank, 1) | {"both": np.ones(3), "norm": np.ones(4)})
    with pytest.raises(SourceFailed) as failed:
        receivers().manifest("step_1", deadline=within())
    assert "'both' is listed 2 times" in str(failed.value)
    assert "'norm' is listed 2 times" in str(failed.value)


def test_trainer_ranks_stream_at_their_own_pace(ranks, receivers):
    """One of them is slower than the other one's `stall_s`, bucket for bucket."""
    receiver = receivers()

    def slowly(tensors):
        for name, tensor in tensors.items():
            time.sleep(0.4 if "layer" in name else 0)
            yield name, tensor

    streaming = [
        Running(ranks[0].stream, "step_1", of_rank(0, 1), timeout=20),
        Running(ranks[1].stream, "step_1", slowly(of_rank(1, 1)), like=of_rank(1, 1), timeout=20),
    ]
    assert streamed(receiver, "step_1") == in_bytes(of_rank(0, 1) | of_rank(1, 1))
    assert [len(one.result().taken) for one in streaming] == [1, 1]


def test_a_trainer_rank_that_ends_is_an_error_while_another_is_waited_for(ranks, receivers, root):
    receiver = receivers()
    waiting = Running(receiver.wait_newer, None, deadline=within(60))
    until(lambda: ranks[1].receivers == ranks[0].receivers == 1)
    ranks[1].close()
    with pytest.raises(SourceFailed, match="died while"):
        waiting.result(timeout=5)
    ranks[0].publish("step_1", of_rank(0, 1))
    with pytest.raises(SourceFailed, match=r"no publisher at .*rank-1"):
        receiver.newest()
    with Publisher(root, rank=1, ranks=2) as again:
        again.publish("step_1", of_rank(1, 1))
        assert held(receiver) == in_bytes(of_rank(0, 1) | of_rank(1, 1))


def test_trainer_ranks_that_disagree_about_their_number_are_refused(root, receivers):
    with (
        Publisher(root, rank=0, ranks=2),
        Publisher(root, rank=1, ranks=3),
        pytest.raises(SourceFailed, match="rank 1 of 3"),
    ):
        receivers().newest()


def test_a_receiver_that_hangs_up_right_after_the_last_piece_counts(publisher, root, monkeypatch):
    """Its last message must not be overtaken by the end of its connection: here the publisher sees both at once."""
    decode = reading.decode_description

    def slowly(*args):
        busy = threading.Event()
        holding = Running(hold, busy)
        assert busy.wait(10)
        held_up.append(holding)
        return decode(*args)

    def hold(busy):
        with publisher._changed:
            os.eventfd_write(publisher._desk._wake, 1)  # its thread has looked, and waits for this one
            time.sleep(0.1)
            busy.set()
            time.sleep(0.2)

    def read_and_close():
        receiver = IpcReceiver(root)
        streamed(receiver, "step_1")
        receiver.close()

    held_up = []
    monkeypatch.setattr(reading, "decode_description", slowly)
    ending = Running(read_and_close)
    publication = publisher.stream("step_1", weights(1), timeout=20)
    publication.wait(timeout=10)
    ending.result()
    assert held_up
    assert (len(publication.taken), publication.dropped) == (1, [])
