"""Lines to the keeper of a host copy: nobody waits for ever, and no stranger holds up the others."""

import errno
import itertools
import os
import socket
import struct
import threading

import pytest
from depot_stand import eventually
from host_copies import WAIT_S, Running, anything, bits, bring, keepers, published, stage, state, wanted

from weightcast.clock import Deadline
from weightcast.engines.host import answering
from weightcast.engines.host.copy import HostCopy
from weightcast.engines.host.line import address_of
from weightcast.errors import (
    DeadlineExceeded,
    ManifestCorrupt,
    SourceFailed,
    UpdateCancelled,
    UpdateFailed,
    WeightcastError,
)
from weightcast.wire.manifest import encode_manifest

NAMES = itertools.count()


@pytest.fixture
def store(tmp_path_factory):
    return published(tmp_path_factory.mktemp("shared") / "store")


@pytest.fixture
def name():
    return f"line-{os.getpid()}-{next(NAMES)}"


@pytest.fixture
def share(name):
    with keepers(name) as make:
        yield make


@pytest.fixture
def keeper(share, store):
    """A rank that keeps the copy, with step_0."""
    one = share()
    bring(one, store, 0)
    return one


def soon(seconds=WAIT_S, **options):
    return Deadline.after(seconds, **options)


# -- waiting -------------------------------------------------------------------------------------------------------


@pytest.fixture
def stuck(share, store):
    """A keeper that looks at step_1 until it is let go."""
    looks, go_on = threading.Event(), threading.Event()

    def look(manifest):
        if manifest.version == "step_1":
            looks.set()
            assert go_on.wait(WAIT_S)

    one = share(look)
    bring(one, store, 0)
    yield one, looks, go_on
    go_on.set()


def test_a_follower_that_waits_gives_up_in_time_or_when_it_is_told(stuck, share, store):
    _, looks, go_on = stuck
    follower, stop = share(), threading.Event()
    with pytest.raises(DeadlineExceeded):
        follower.stage(wanted(store, 1), fits=anything, deadline=soon(0.05))
    looks.clear()
    waiting = Running(follower.stage, wanted(store, 1), fits=anything, deadline=soon(60, cancelled=stop))
    stop.set()
    with pytest.raises(UpdateCancelled):
        waiting.result()
    go_on.set()
    assert bits(stage(follower, store, 1).arrays) == bits(state(1))


def test_a_rank_that_waits_can_be_closed_and_the_keeper_can_commit_meanwhile(stuck, share, store):
    keeper, looks, go_on = stuck
    follower = share()
    mine = stage(keeper, store, 3)
    waiting = Running(stage, follower, store, 1)
    assert looks.wait(WAIT_S)
    follower.abandon(mine)
    follower.close()
    keeper.commit(mine)
    assert not waiting.over
    go_on.set()
    his = waiting.result()
    assert (bits(his.arrays), his.former_manifest.version) == (bits(state(1)), "step_3")


def test_closing_the_keeper_ends_the_waiting_of_others(stuck, share, store):
    keeper, looks, go_on = stuck
    follower = share()
    waiting = Running(stage, follower, store, 1)
    assert looks.wait(WAIT_S)
    keeper.close()
    with pytest.raises(SourceFailed, match="went away"):
        waiting.result()
    go_on.set()
    assert bits(stage(follower, store, 1).arrays) == bits(state(1))


# -- strangers -----------------------------------------------------------------------------------------------------


def connected(name):
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(WAIT_S)
    line.connect(address_of(name))
    return line


QUESTIONS = {
    "nothing": b"",
    "half a length": b"\x01\x02",
    "a huge length": struct.pack("<Q", 1 << 60),
    "half a question": struct.pack("<Q", 1000) + b'{"source"',
    "no JSON": struct.pack("<Q", 7) + b"garbage",
    "another message": struct.pack("<Q", 13) + b'{"version":1}',
    "a negative time": struct.pack("<Q", 68) + b'{"source":"/x","version":null,"verify_checksum":true,"timeout":-1.0}',
}


def test_strangers_hold_up_nobody(keeper, share, store, name, monkeypatch):
    monkeypatch.setattr(answering, "_QUESTION_S", 1.0)
    lines = [connected(name) for _ in range(3) for _ in QUESTIONS]
    for line, question in zip(lines, 3 * list(QUESTIONS.values()), strict=True):
        line.sendall(question)
    follower = share()
    staged = follower.stage(wanted(store, 3), fits=anything, deadline=soon(10))
    assert bits(staged.arrays) == bits(state(3))
    for line in lines:  # and they are not borne with for ever
        while line.recv(1 << 16):
            continue
        line.close()
    follower.commit(staged)
    eventually(lambda: not keeper._keeper._lines, "the end of all lines")


@pytest.mark.parametrize("question", ["a huge length", "no JSON", "another message"])
def test_a_question_that_cannot_be_right_ends_the_line_at_once(keeper, name, question, monkeypatch):
    monkeypatch.setattr(answering, "_QUESTION_S", 10 * WAIT_S)
    with connected(name) as line:
        line.sendall(QUESTIONS[question])
        assert line.recv(1) == b""


def framed(*messages):
    return b"".join(struct.pack("<Q", len(message)) + message for message in messages)


ANSWERS = {
    "nothing": (b"", SourceFailed, "went away"),
    "half a length": (b"\x01\x02", SourceFailed, "went away"),
    "half a message": (framed(b"{}" * 100)[:100], SourceFailed, "went away"),
    "a huge length": (struct.pack("<Q", 1 << 60), SourceFailed, "longer than"),
    "no JSON": (framed(b"garbage"), SourceFailed, "no sense"),
    "slabs without memory": (framed(b'{"slabs":[1]}'), SourceFailed, "no sense"),
    "no manifest": (framed(b"{}", b"", b""), SourceFailed, "told of nothing"),
    "a false manifest": (framed(b"{}", b"{}", b"{}"), ManifestCorrupt, "the host copy"),
    "tensors that lie nowhere": (None, SourceFailed, "no sense"),
    "an error of no kind": (framed(b'{"code":"?","message":"no luck"}'), WeightcastError, "no luck"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_keeper_that_makes_no_sense_is_an_error_that_says_so(share, store, name, answer):
    data, error, text = ANSWERS[answer]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.settimeout(WAIT_S)
        listener.bind(address_of(name))
        listener.listen()
        asking = Running(stage, share(), store, 0)
        line, _ = listener.accept()
        with line:
            (nbytes,) = struct.unpack("<Q", line.recv(8, socket.MSG_WAITALL))
            line.recv(nbytes, socket.MSG_WAITALL)
            line.sendall(framed(b"{}", encode_manifest(store.manifest("step_0")), b"") if data is None else data)
    with pytest.raises(error, match=text):
        asking.result()


@pytest.mark.parametrize("backlog", [None, 0])
def test_nobody_waits_for_ever_to_be_let_in(share, store, name, backlog):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address_of(name))
        if backlog is not None:
            listener.listen(backlog)
        lines = [connected(name)] if backlog is not None else []
        with pytest.raises(DeadlineExceeded):
            share().stage(wanted(store, 0), fits=anything, deadline=soon(0.1))
        for line in lines:
            line.close()


def test_a_keeper_without_descriptors_hears_them_later(keeper, share, store, monkeypatch):
    """As when the process has too many files open."""
    accept, refusals = socket.socket.accept, iter([OSError(errno.EMFILE, "too many")] * 3)

    def refuse(self):
        for error in refusals:
            raise error
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", refuse)
    for number in (1, 2, 3):
        assert bits(stage(share(), store, number).arrays) == bits(state(number))


def test_a_tensor_outside_of_shared_memory_is_an_error_and_not_a_crash(share, store):
    keeper = share(make_copy=lambda _: HostCopy(name="engine"))
    bring(keeper, store, 0)
    with pytest.raises(UpdateFailed, match="shared memory"):
        stage(share(), store, 1)
