"""The queue between a producer and a consumer: bounded, cancellable, honest about errors, gone afterwards."""

import threading
import time

import pytest

from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, InvalidInput, SourceFailed
from weightcast.tensors.flat import Piece
from weightcast.transports.prefetch import prefetched, ring


def alive():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def numbered(count, log=None):
    for i in range(count):
        if log is not None:
            log.append(i)
        yield Piece("t", i, memoryview(b"x"))


def test_pieces_come_in_order_and_the_thread_ends():
    assert [piece.offset for piece in prefetched(lambda: numbered(100), deadline=Deadline.after(10), what="w")] == list(
        range(100)
    )
    assert not alive()


def test_the_producer_never_runs_further_ahead_than_the_ring_allows():
    log = []
    pieces = prefetched(lambda: numbered(50, log), deadline=Deadline.after(10), what="w", depth=2)
    for i, _ in enumerate(pieces):
        time.sleep(0.005)
        assert len(log) <= i + 1 + 3  # one consumed, two waiting, one being filled
    assert len(log) == 50


def test_a_buffer_is_not_overwritten_while_its_piece_is_in_use():
    buffers = ring(4, depth=2)
    assert len(buffers) == 4

    def produce():
        for i in range(200):
            buffer = buffers[i % len(buffers)]
            buffer[:] = i.to_bytes(4, "little")
            yield Piece("t", i, buffer)

    for piece in prefetched(produce, deadline=Deadline.after(10), what="w", depth=2):
        if piece.offset % 7 == 0:
            time.sleep(0.002)
        assert int.from_bytes(piece.data, "little") == piece.offset


def test_an_error_of_the_producer_is_raised_in_the_consumer_after_what_came_before():
    def produce():
        yield from numbered(3)
        raise SourceFailed("it broke")

    got = []
    with pytest.raises(SourceFailed, match="it broke"):
        got.extend(prefetched(produce, deadline=Deadline.after(10), what="w"))
    assert len(got) == 3
    assert not alive()


def test_closing_early_stops_and_closes_the_producer():
    closed = threading.Event()

    def produce():
        try:
            yield from numbered(10**9)
        finally:
            closed.set()

    pieces = prefetched(produce, deadline=Deadline.after(10), what="w")
    next(pieces)
    pieces.close()
    assert closed.is_set()
    assert not alive()


def test_a_stalled_producer_ends_in_a_deadline_that_names_the_work():
    gate = threading.Event()

    def produce():
        yield from numbered(1)
        gate.wait(30)

    pieces = prefetched(produce, deadline=Deadline.after(0.2), what="reading step_1")
    next(pieces)
    threading.Timer(0.6, gate.set).start()
    with pytest.raises(DeadlineExceeded, match="reading step_1"):
        next(pieces)
    assert not alive()


def test_a_negative_or_senseless_timeout_is_refused():
    for seconds in (-1, float("nan")):
        with pytest.raises(InvalidInput):
            Deadline.after(seconds)
