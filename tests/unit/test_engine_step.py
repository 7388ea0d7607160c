"""The step message: a batch that goes through it comes out the same, and so does the signal that rides on it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightcast.engines.embedded.batch import Batch
from weightcast.engines.embedded.ranks import step as steps
from weightcast.engines.embedded.ranks.step import INLINE, PARK, Step, StepChannel, Work


class Wire:
    """Two ends of a broadcast in one process: what rank 0 sends, in order, is what the other rank gets."""

    size = 2

    def __init__(self):
        self.sent = []
        self.receiving = False

    def broadcast(self, message):
        if self.receiving:
            message.copy_(self.sent.pop(0))
        else:
            self.sent.append(message.clone())


def carried(step):
    wire = Wire()
    StepChannel(wire, "cpu").send(step)
    wire.receiving = True
    received = StepChannel(wire, "cpu").receive()
    assert not wire.sent
    return received


def assert_same(left, right):
    assert (left.signal, left.work) == (right.signal, right.work)
    if left.batch is None:
        assert right.batch is None
        return
    for name in ("tokens", "positions", "slots", "tables", "rows"):
        assert torch.equal(getattr(left.batch, name), getattr(right.batch, name)), name
    assert left.batch.starts == right.batch.starts
    assert left.batch.lengths == right.batch.lengths
    assert (left.batch.replay is None) == (right.batch.replay is None)
    if left.batch.replay is not None:
        assert torch.equal(left.batch.replay, right.batch.replay)


@st.composite
def batches(draw):
    counts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    width, total = draw(st.integers(1, 90)), sum(counts)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    routes = draw(st.none() | st.tuples(st.integers(1, 4), st.integers(1, 3)))
    return Batch(
        tokens=torch.randint(0, 2**31 - 1, (total,), generator=generator),
        positions=torch.randint(0, 2**20, (total,), generator=generator),
        slots=torch.randint(0, 2**31 - 1, (total,), generator=generator),
        starts=tuple(starts),
        lengths=tuple(count + draw(st.integers(0, 1000)) for count in counts),
        tables=torch.randint(0, 2**31 - 1, (len(counts), width), generator=generator),
        rows=torch.arange(total)[torch.rand(total, generator=generator) < 0.5],
        replay=None if routes is None else torch.randint(-1, 128, (total, *routes), generator=generator),
    )


@given(batches(), st.sampled_from([Work.MAIN, Work.DRAFT]), st.integers(0, 2**31 - 1))
def test_a_step_arrives_as_it_was_sent(batch, work, signal):
    step = Step(signal=signal, work=work, batch=batch)
    assert_same(step, carried(step))


@pytest.mark.parametrize("signal", [PARK, 0, 7])
def test_a_signal_travels_without_a_batch(signal):
    assert carried(Step(signal=signal)) == Step(signal=signal)


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_a_message_around_the_size_of_one_broadcast_arrives_whole(spare):
    tokens = (INLINE - steps._HEADER - 2 - 1 - 1) // 3  # three numbers per token; starts, lengths and one block beside
    width = INLINE + spare - steps._HEADER - 3 * tokens - 3
    batch = Batch(
        tokens=torch.arange(tokens), positions=torch.arange(tokens), slots=torch.arange(tokens),
        starts=(0, tokens), lengths=(tokens,), tables=torch.arange(width)[None], rows=torch.tensor([], dtype=torch.int64),
    )  # fmt: skip
    assert len(steps._pack(Step(batch=batch, work=Work.MAIN))) == INLINE + spare
    assert_same(Step(batch=batch, work=Work.MAIN), carried(Step(batch=batch, work=Work.MAIN)))


def test_a_received_batch_is_not_changed_by_the_next_step():
    wire = Wire()
    sender, receiver = StepChannel(wire, "cpu"), StepChannel(wire, "cpu")
    batches = [
        Batch(
            tokens=torch.tensor([number]), positions=torch.tensor([number]), slots=torch.tensor([number]), starts=(0, 1),
            lengths=(number,), tables=torch.tensor([[number]]), rows=torch.tensor([0]),
        )
        for number in (5, 9)
    ]  # fmt: skip
    for batch in batches:
        sender.send(Step(work=Work.MAIN, batch=batch))
    wire.receiving = True
    first = receiver.receive()
    receiver.receive()
    assert_same(Step(work=Work.MAIN, batch=batches[0]), first)
