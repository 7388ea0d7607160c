"""The messages of `ipc://`, the descriptions in them, and the lifeline, each by itself."""

import os
import random
import socket
import threading

import msgspec
import pytest
from msgspec.structs import replace

from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, SourceFailed, WeightcastError
from weightcast.tensors.digest import DEFAULT, bytes_digest
from weightcast.tensors.dtypes import DType
from weightcast.tensors.sums import range_sum
from weightcast.transports.ipc import messages
from weightcast.transports.ipc.descriptions import decode_description, encode_description, merged
from weightcast.transports.ipc.device import Handle
from weightcast.transports.ipc.lifeline import Lifeline, Line, Listener, wanted_memory
from weightcast.transports.ipc.messages import decode_from_publisher, decode_from_receiver, encode
from weightcast.wire.manifest import Manifest, TensorEntry, compute_root

FROM_RECEIVERS = [
    messages.Hello(protocol=1, token="t" * 64, pid=7),
    messages.Ask(epoch=1, after=None),
    messages.Ask(epoch=2, after="step_1"),
    messages.Describe(epoch=3, version="step_1"),
    messages.Open(epoch=4, version="step_1", root_digest="", described=3),
    messages.Ack(epoch=4, sequence=9),
    messages.Done(epoch=4),
    messages.Cancel(epoch=4),
]
FROM_PUBLISHERS = [
    messages.Welcome(protocol=1, session=b"\0" * 16, rank=0, ranks=2),
    messages.Listing(epoch=1, newest="", versions=()),
    messages.Description(epoch=3, manifest=b"...", held=True),
    messages.Layout(epoch=4, memory=Handle(kind="memfd", id=1, nbytes=5), memories=(1, 2)),
    messages.Ready(epoch=4, sequence=9, spans=(messages.Span(0, 1, 2, 3), messages.Span(1, 0, 0, 7, "sum:00"))),
    messages.End(epoch=4, manifest=b"..."),
    messages.Failure(epoch=4, code="source_failed", message="why", known=("step_1",)),
]


def entry(name="a", nbytes=8, **changes):
    """A tensor of a held version, whose proof is its sum."""
    whole = TensorEntry(name=name, dtype=DType.U8, shape=(nbytes,), part=0, offset=0, nbytes=nbytes, digest="")
    return replace(whole, **{"sum": str(range_sum(whole.sum_spec, 0, bytes(nbytes))), **changes})


def manifest(*tensors, sealed=True, **changes):
    whole = Manifest(
        version="step_1", sequence=1, step=1, kind="full", created_s=0.0, algorithm=DEFAULT, root_digest="", parts=(),
        tensors=tensors,
    )  # fmt: skip
    return replace(whole, **{"root_digest": compute_root(tensors, DEFAULT) if sealed else "", **changes})


@pytest.mark.parametrize("message", FROM_RECEIVERS, ids=lambda one: type(one).__name__)
def test_messages_of_receivers_come_back_as_they_were(message):
    assert decode_from_receiver(encode(message)) == message
    with pytest.raises(msgspec.ValidationError):
        decode_from_publisher(encode(message))


@pytest.mark.parametrize("message", FROM_PUBLISHERS, ids=lambda one: type(one).__name__)
def test_messages_of_publishers_come_back_as_they_were(message):
    assert decode_from_publisher(encode(message)) == message
    with pytest.raises(msgspec.ValidationError):
        decode_from_receiver(encode(message))


def test_a_message_with_fields_of_a_later_release_is_understood():
    fields = msgspec.msgpack.decode(encode(messages.Done(epoch=4))) | {"new": [1, 2]}
    assert decode_from_receiver(msgspec.msgpack.encode(fields)) == messages.Done(epoch=4)


def test_damaged_messages_are_refused_by_errors_that_both_sides_expect():
    rng = random.Random(7)
    for message in (*FROM_RECEIVERS, *FROM_PUBLISHERS):
        decode = decode_from_receiver if message in FROM_RECEIVERS else decode_from_publisher
        data = encode(message)
        for _ in range(200):
            damaged = bytearray(data[: rng.randrange(len(data) + 1)])
            for _ in range(rng.randrange(3)):
                if damaged:
                    damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            try:
                decode(bytes(damaged))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue


def test_a_description_comes_back_as_it_was():
    sealed = manifest(entry("a"), entry("b", nbytes=0), tied={"c": "a"})
    assert decode_description(encode_description(sealed), "here") == sealed
    by_bytes = manifest(entry("a", digest=bytes_digest(bytes(8), DEFAULT)), entry("b", nbytes=0))
    assert decode_description(encode_description(by_bytes), "here") == by_bytes
    live = manifest(entry("a", sum=""), entry("b", nbytes=0), sealed=False)
    assert decode_description(encode_description(live), "here") == live


def test_everything_that_is_wrong_with_a_description_is_said():
    twice = (entry("a"), entry("a"), entry("b", offset=-1), entry("c", nbytes=3, shape=(4,)))
    unproved = (entry("e", sum=""), entry("f", sum="sum:12"), entry("g", digest="blake3:" + "0" * 64))
    bad = replace(manifest(sealed=False), tensors=(*twice, *unproved), tied={"d": "nowhere"}, root_digest="sums:" + "0" * 32)
    with pytest.raises(SourceFailed) as failed:
        decode_description(encode_description(bad), "here")
    problems = ["'a' is listed 2 times", "'b' starts at -1", "'c' is", "'d' is tied to 'nowhere'", "root digest"]
    problems += ["'e' has sum ''", "'f' has sum 'sum:12'", "'g' has digest 'blake3:"]
    for told in problems:
        assert told in str(failed.value)


@pytest.mark.parametrize(
    "wrong",
    [
        manifest(entry("a", sum=""), sealed=False, root_digest="sums:" + "0" * 32),
        manifest(entry("a"), root_digest="sums:" + "0" * 32),
        manifest(entry("a"), kind="delta"),
        manifest(entry("a"), version="../a"),
        manifest(entry("a"), algorithm=None),
    ],
)
def test_a_description_that_is_none_is_refused(wrong):
    with pytest.raises(WeightcastError):
        decode_description(encode_description(wrong), "here")
    with pytest.raises(SourceFailed, match="cannot be read"):
        decode_description(encode_description(wrong)[:-3], "here")


def test_trainer_ranks_that_contradict_each_other_are_refused_with_every_name():
    first, second = manifest(entry("a"), entry("b"), entry("c")), manifest(entry("b"), entry("d"), tied={"c": "d"})
    with pytest.raises(SourceFailed) as failed:
        merged([first, second], "ipc:///here")
    assert "'b' is listed 2 times" in str(failed.value)
    assert "'c' is listed 2 times" in str(failed.value)
    assert "'a'" not in str(failed.value)
    with pytest.raises(SourceFailed, match="rank 1 uses"):
        merged([first, manifest(entry("z"), algorithm="blake3")], "ipc:///here")


def test_trainer_ranks_together_are_one_version():
    whole = merged([manifest(entry("a")), manifest(entry("b"), tied={"c": "b"})], "ipc:///here")
    assert [(one.name, one.part) for one in whole.tensors] == [("a", 0), ("b", 1)]
    assert (whole.tied, whole.root_digest) == ({"c": "b"}, compute_root(whole.tensors, DEFAULT))
    assert not merged([manifest(entry("a")), manifest(entry("b", sum=""), sealed=False)], "ipc:///here").sealed


# -- the lifeline ------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    listener = Listener(tmp_path.relative_to(tmp_path) / "lifeline.sock")
    opened = [listener]

    def connect():
        lifeline = Lifeline(tmp_path.relative_to(tmp_path) / "lifeline.sock")
        line = listener.accept()
        opened.extend([lifeline, line])
        return lifeline, line

    yield connect
    for one in opened:
        one.close()


def pipe_end():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_a_descriptor_that_comes_late_is_not_taken_for_another(lines):
    lifeline, line = lines()
    with pytest.raises(DeadlineExceeded):
        lifeline.descriptor(1, deadline=Deadline.after(0.05))
    before = len(os.listdir("/proc/self/fd"))
    wrong, right = pipe_end(), os.open("/", os.O_RDONLY)
    first = line.receive()
    line.grant(first, wrong)

    def answer():
        while (question := line.receive()) is None:
            pass
        line.grant(question, right)

    answering = threading.Thread(target=answer)
    answering.start()
    got = lifeline.descriptor(2, deadline=Deadline.after(10))
    answering.join()
    assert os.path.samestat(os.fstat(got), os.fstat(right))
    assert wanted_memory(first) == 1
    for descriptor in (wrong, right, got):
        os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == before  # the late one was closed too


def test_a_refusal_and_a_hang_up_are_errors_at_once(lines):
    lifeline, line = lines()
    refusing = threading.Thread(target=lambda: line.refuse(_asked(line)))
    refusing.start()
    with pytest.raises(SourceFailed, match="no more"):
        lifeline.descriptor(1, deadline=Deadline.after(10))
    refusing.join()
    assert not lifeline.hung_up()
    line.close()
    assert lifeline.hung_up()
    with pytest.raises(SourceFailed, match="hung up"):
        lifeline.descriptor(1, deadline=Deadline.after(10))


def _asked(line):
    while (question := line.receive()) is None:
        pass
    return question


def test_a_line_whose_receiver_is_gone_can_be_answered_without_harm(lines):
    lifeline, line = lines()
    lifeline.close()
    assert line.receive() == b""
    assert not line.grant(b"12345678")
    assert not line.refuse(b"12345678")
    assert line.fileno() >= 0  # whoever polls it closes it


def test_a_grant_without_a_descriptor_is_an_error(lines):
    lifeline, line = lines()
    granting = threading.Thread(target=lambda: line.grant(_asked(line)))
    granting.start()
    with pytest.raises(SourceFailed, match="no descriptor"):
        lifeline.descriptor(1, deadline=Deadline.after(10))
    granting.join()


def test_a_receiver_that_never_reads_cannot_make_its_publisher_wait():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    line = Line(ours)
    answers = [line.grant(b"12345678") for _ in range(5000)]
    assert answers[0]
    assert not answers[-1]
    line.close()
    theirs.close()
