"""Who gets nothing from a publisher: strangers, those without the token, and those who talk nonsense."""

import json
import os
import random
import socket
import stat
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
import zmq
from ipc_pairs import Running, held, in_bytes, streamed, until, weights, within

from weightcast.errors import InvalidInput, SourceFailed
from weightcast.publish import desk as desks
from weightcast.publish.publisher import Publisher
from weightcast.transports.ipc import messages
from weightcast.transports.ipc.lifeline import Lifeline
from weightcast.transports.ipc.messages import (
    MAX_QUESTION_NBYTES,
    Ask,
    Describe,
    Done,
    Failure,
    Hello,
    Open,
    Welcome,
    encode,
)
from weightcast.transports.ipc.place import Place
from weightcast.transports.ipc.receiver import IpcReceiver
from weightcast.transports.registry import open_receiver

SILENCE_MS = 150  # nothing came, and nothing will


@pytest.fixture
def publisher(root):
    with Publisher(root, stall_s=5) as one:
        one.publish("step_1", weights(1))
        yield one


@pytest.fixture
def works(publisher, root):
    """Whatever was done to it, the publisher is still there for those who have a right to it."""
    yield
    receiver = IpcReceiver(root)
    assert held(receiver, "step_1") == in_bytes(weights(1))
    streaming = Running(publisher.stream, "step_2", weights(2), timeout=10)
    assert streamed(receiver, "step_2") == in_bytes(weights(2))
    streaming.result()
    receiver.close()


@pytest.fixture
def dealer(publisher, root):
    """A socket for messages by hand."""
    with zmq.Context() as context:
        made = []

        def connect():
            one = context.socket(zmq.DEALER)
            one.setsockopt(zmq.LINGER, 0)
            one.connect(Place.of_rank(root, 0).control)
            made.append(one)
            return one

        yield connect
        for one in made:
            one.close()


def answer_to(one, *said):
    for message in said:
        one.send(message if isinstance(message, bytes) else encode(message))
    return messages.decode_from_publisher(one.recv()) if one.poll(SILENCE_MS) else None


def hello(root, **changes):
    fields = {"protocol": messages.PROTOCOL, "token": Place.of_rank(root, 0).read_token(), "pid": 1, **changes}
    return Hello(**fields)


def test_directory_sockets_and_token_are_the_users_alone(publisher, root):
    old = os.umask(0)
    try:
        with Publisher(root, rank=1, ranks=2):
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (root / "rank-1").iterdir()}
            assert stat.S_IMODE((root / "rank-1").stat().st_mode) == 0o700
    finally:
        os.umask(old)
    assert modes["token"] == modes["lifeline.sock"] == modes["owns-root"] == 0o600
    assert stat.S_IMODE(root.stat().st_mode) == stat.S_IMODE((root / "rank-0").stat().st_mode) == 0o700
    assert not {"token.new"} & modes.keys()


def test_a_directory_that_is_open_to_others_is_not_used(root):
    (root / "rank-0").mkdir(parents=True)
    (root / "rank-0").chmod(0o755)
    with pytest.raises(InvalidInput, match="open to others"):
        Publisher(root)
    assert not list((root / "rank-0").iterdir())


def test_a_symbolic_link_is_not_followed(root, tmp_path):
    root.mkdir()
    (root / "rank-0").symlink_to(tmp_path)
    with pytest.raises(Exception, match="make the directory of a publisher"):
        Publisher(root)
    with pytest.raises(SourceFailed, match="cannot be looked into"):
        IpcReceiver(root).newest()


def test_a_wrong_token_gets_nothing(publisher, root, works):
    for token in ("0" * 64, "", "x" * 4000, "ä" * 20):
        receiver = IpcReceiver(root, token=token)
        with pytest.raises(InvalidInput, match="token is wrong"):
            receiver.newest()
        receiver.close()
    until(lambda: publisher.receivers == 0)


def test_a_token_of_ones_own_can_be_kept_elsewhere(root, tmp_path):
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    with Publisher(root, token="0123456789abcdef") as publisher:
        publisher.publish("step_1", weights(1))
        receiver = open_receiver(f"{publisher.url}?token_file={tmp_path / 'secret'}", rank=0)
        assert held(receiver) == in_bytes(weights(1))
        receiver.close()
        (tmp_path / "secret").write_text("another one, and wrong")
        receiver = open_receiver(f"{publisher.url}?token_file={tmp_path / 'secret'}", rank=0)
        with pytest.raises(InvalidInput, match="token is wrong"):
            receiver.newest()
        receiver.close()


def test_without_a_hello_there_is_no_answer_to_anything(root, dealer, works):
    for message in (Ask(epoch=1), Describe(epoch=2, version="step_1"), Done(epoch=3)):
        assert answer_to(dealer(), message) is None


def test_after_a_wrong_hello_there_is_no_answer_to_anything(root, dealer, works):
    one = dealer()
    refused = answer_to(one, hello(root, token="f" * 64))
    assert isinstance(refused, Failure)
    assert "step_1" not in str(refused)
    opening = Open(epoch=2, version="step_1", root_digest="x")
    assert answer_to(one, Ask(epoch=1), opening, Describe(epoch=3, version="step_1")) is None


def test_another_protocol_is_refused_with_both_numbers(root, dealer, works):
    refused = answer_to(dealer(), hello(root, protocol=99))
    assert isinstance(refused, Failure)
    assert "protocol 2, the receiver 99" in refused.message


def test_without_a_lifeline_there_is_no_answer_to_anything(root, dealer, works):
    one = dealer()
    assert isinstance(answer_to(one, hello(root)), Welcome)
    assert answer_to(one, Ask(epoch=1), Describe(epoch=2, version="step_1")) is None


def test_a_second_hello_does_not_give_a_second_secret(root, dealer, works):
    one = dealer()
    assert isinstance(answer_to(one, hello(root)), Welcome)
    assert isinstance(answer_to(one, hello(root)), Failure)


@pytest.mark.parametrize("secret", [b"x" * 16, b"", struct.pack("<q", 1), b"y" * 300])
def test_a_lifeline_with_a_wrong_secret_gets_nothing(root, dealer, works, secret):
    welcome = answer_to(dealer(), hello(root))
    assert isinstance(welcome, Welcome)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(str(Place.of_rank(root, 0).lifeline))
        line.settimeout(10)
        line.send(secret)
        data, passed, _, _ = socket.recv_fds(line, 100, 4)
        assert (data, passed) == (b"", [])


def test_a_secret_ties_one_lifeline_only(publisher, root, dealer, works):
    welcome = answer_to(dealer(), hello(root))
    lifelines = [Lifeline(Place.of_rank(root, 0).lifeline) for _ in range(2)]
    lifelines[0].take_up(welcome.session, deadline=within())
    with pytest.raises(SourceFailed, match="hung up"):
        lifelines[1].take_up(welcome.session, deadline=within())
    with pytest.raises(SourceFailed, match="no more"):
        lifelines[0].descriptor(999, deadline=within())
    os.close(lifelines[0].descriptor(publisher._clerk.shelf.memories[-1].handle.id, deadline=within()))
    for one in lifelines:
        one.close()


def test_those_who_call_and_say_nothing_are_dropped(publisher, root, dealer, works, monkeypatch):
    monkeypatch.setattr(desks, "_GREETED_S", 0.05)
    monkeypatch.setattr(desks, "_TICK_MS", 20)
    one = dealer()
    lifeline = Lifeline(Place.of_rank(root, 0).lifeline)
    welcome = answer_to(one, hello(root))
    until(lambda: lifeline.hung_up() and not publisher._desk._sessions)
    lifeline.close()
    lifeline = Lifeline(Place.of_rank(root, 0).lifeline)
    with pytest.raises(SourceFailed, match="hung up"):
        lifeline.take_up(welcome.session, deadline=within())
    lifeline.close()
    monkeypatch.undo()


def test_nonsense_does_not_hurt_the_publisher(publisher, root, dealer, works):
    rng, one = random.Random(5), dealer()
    good = [encode(message) for message in (hello(root, token="no"), Ask(epoch=1), Open(version="v", root_digest="r"))]
    for number in range(300):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        one.send_multipart([bytes(data)] if number % 3 else [bytes(data), b"more"])
    one.send_multipart([b""])
    one.send(b"\x91" * 60000)
    one.send(encode(Ask(epoch=1))[:-1] + b"\x91" * 60000)
    one.send(b"\x82\xa4type\xa3ask\xa3new" + b"\x91" * 60000 + b"\xc0")  # deep in a field that nobody knows
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.connect(str(Place.of_rank(root, 0).path / "control.sock"))
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    one.send(b"", copy=True)
    time.sleep(0.05)


def test_a_message_that_is_too_large_ends_the_connection_of_its_sender(publisher, root, dealer, works):
    one = dealer()
    one.send(b"\xc1" * (MAX_QUESTION_NBYTES + 1))
    one.send(b"\xc1" * (64 << 20))
    assert answer_to(dealer(), hello(root, token="wrong" * 4)) is not None


def test_nonsense_of_a_receiver_that_has_a_right_to_be_there_hurts_only_itself(publisher, root, works):
    receiver = IpcReceiver(root)
    manifest = receiver.manifest("step_1", deadline=within())
    attachment = receiver._attached[0]
    wrong = [
        messages.Ack(epoch=1, sequence=7), Done(epoch=77), messages.Cancel(epoch=5), Hello(protocol=1, token="", pid=0),
        Open(epoch=9, version="../..", root_digest=""), Open(epoch=9, version="step_1", root_digest="x", described=-1),
        Describe(epoch=9, version="\0"), Ask(epoch=-1, after="\0"),
    ]  # fmt: skip
    for message in wrong * 3:
        attachment.send(message)
    attachment.lifeline._socket.send(b"odd")
    attachment.lifeline._socket.send(struct.pack("<q", -1))
    with receiver.mapped(manifest, deadline=within()) as arrays:
        found = {name: array.tobytes() for name, array in arrays.items()}
    assert found == in_bytes(weights(1))
    receiver.close()


_STRANGER = """
import json, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
got = []
for name, kind in (("lifeline.sock", socket.SOCK_SEQPACKET), ("control.sock", socket.SOCK_STREAM)):
    with socket.socket(socket.AF_UNIX, kind) as one:
        one.settimeout(10)
        try:
            one.connect(os.path.join(sys.argv[1], name))
            one.send(bytes.fromhex(sys.argv[2]))
            got.append(len(one.recv(100)) if name.startswith("lifeline") else "connected")
        except OSError as error:
            got.append(type(error).__name__)
try:
    got.append(open(os.path.join(sys.argv[1], "token")).read())
except OSError as error:
    got.append(type(error).__name__)
print(json.dumps(got))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("opened", [False, True])
def test_another_user_is_refused(publisher, root, dealer, works, opened):
    """By the file system; and by the publisher itself where the directory was opened to all. Even if he knows a secret."""
    secret = answer_to(dealer(), hello(root)).session.hex()
    root.parent.chmod(0o755)
    if opened:
        for path in (root, root / "rank-0", root / "rank-0" / "lifeline.sock"):
            path.chmod(0o777)
    place = root / "rank-0"
    ran = subprocess.run(
        [sys.executable, "-c", _STRANGER, place, secret], capture_output=True, text=True, timeout=30, check=True
    )
    line, control, token = json.loads(ran.stdout)
    assert token == "PermissionError"
    if opened:
        assert line in (0, "ConnectionResetError", "BrokenPipeError")
    else:
        assert (line, control) == ("PermissionError", "PermissionError")
    assert publisher.receivers == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_what_another_user_publishes_is_not_taken(root):
    """Somebody made the directory before our trainer could."""
    (root / "rank-0").mkdir(parents=True, mode=0o755)
    (root / "rank-0" / "token").write_text("0" * 64)
    for path in (root.parent, root, root / "rank-0"):
        path.chmod(0o755)
    program = (
        "import os, sys; from weightcast.transports.ipc.receiver import IpcReceiver; from pathlib import Path\n"
        "os.setuid(65534)\n"
        "try: IpcReceiver(Path(sys.argv[1])).newest()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    ran = subprocess.run([sys.executable, "-c", program, root], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.startswith("SourceFailed")
    assert "belongs to user 0" in ran.stdout
    assert (root / "rank-0" / "token").exists()


_FOREIGN = """
import os, sys
import numpy as np
from weightcast.publish.publisher import Publisher
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with Publisher(sys.argv[1]) as publisher:
    publisher.publish("step_1", {"w": np.ones(4, dtype=np.float32)})
    print("published", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def foreign(root):
    """A publisher of another user, in a directory of its own."""
    root.mkdir(parents=True)
    os.chown(root, 65534, 65534)
    root.parent.chmod(0o755)
    command = [sys.executable, "-c", _FOREIGN, root]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "published\n"
        yield child
        child.stdin.close()
        assert child.wait(30) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("owner", [65534, 0])
def test_root_takes_nothing_from_another_user_unless_it_is_named(foreign, root, owner):
    """By the owner of the directory; and by the process that answers, where the directory is root's."""
    os.chown(root / "rank-0", owner, owner)
    for url in (f"ipc://{root}", f"ipc://{root}?uid=65533"):
        receiver = open_receiver(url, rank=0)
        with pytest.raises(SourceFailed, match=r"user 65534.*\?uid=65534"):
            receiver.newest()
        receiver.close()
    assert (root / "rank-0" / "token").exists()
    receiver = open_receiver(f"ipc://{root}?uid=65534", rank=0)
    assert held(receiver, "step_1") == {"w": np.ones(4, dtype=np.float32).tobytes()}
    receiver.close()
    os.chown(root / "rank-0", 65534, 65534)


@pytest.mark.parametrize("uid", ["root", "-1", "1.5", "9" * 30])
def test_a_user_that_is_no_number_is_refused(root, uid):
    with pytest.raises(InvalidInput, match="uid="):
        open_receiver(f"ipc://{root}?uid={uid}", rank=0)
