"""Commands reach a rank in their order, are executed once each, and are acknowledged as often as it is asked."""

import msgspec
import pytest
import zmq

from weightcast.clock import Deadline
from weightcast.engines.embedded.messages import (
    Acknowledged,
    Cancel,
    ClearCache,
    Command,
    Describe,
    FromRank,
    Shutdown,
    front_end_address,
    rank_identity,
)
from weightcast.engines.embedded.ranks.inbox import Inbox
from weightcast.engines.embedded.settings import EngineSettings, RankSettings
from weightcast.errors import DeadlineExceeded, InvalidInput, ReplicaFailed


class FrontEnd:
    """The other end of a rank's socket."""

    def __init__(self, run_dir):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(front_end_address(run_dir))

    def send(self, message, raw=False):
        data = message if raw else msgspec.msgpack.encode(message)
        self.socket.send_multipart([rank_identity(1), data])

    def receive(self):
        assert self.socket.poll(5000), "the rank sent nothing"
        _, data = self.socket.recv_multipart()
        return msgspec.msgpack.decode(data, type=FromRank)

    def quiet(self):
        return not self.socket.poll(100)

    def close(self):
        self.socket.close()
        self.context.term()


@pytest.fixture
def run_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def front_end(run_dir):
    end = FrontEnd(run_dir)
    yield end
    end.close()


@pytest.fixture
def inbox(run_dir, front_end):
    settings = RankSettings(engine=EngineSettings(model_dir="unused", ranks=2), rank=1, run_dir=str(run_dir), parent_pid=1)
    with Inbox(settings) as box:
        box.send(Acknowledged(rank=1, id=0))  # the router knows a rank from its first message on
        front_end.receive()
        yield box


def arrive(inbox, count=1):
    """Wait until the rank has taken messages, and give the requests among them."""
    requests = []
    for _ in range(count):
        assert inbox.wait(5), "no message arrived"
        requests += inbox.receive()
    return requests


def test_a_command_is_executed_once_and_acknowledged_again_when_it_comes_again(inbox, front_end):
    executed = []
    front_end.send(Command(id=1, action=Describe()))
    arrive(inbox)
    assert inbox.next_command == 1
    inbox.execute(1, lambda action: executed.append(action) or {"answer": 42})
    first = front_end.receive()
    front_end.send(Command(id=1, action=Describe()))
    arrive(inbox)
    assert inbox.next_command == 0
    assert front_end.receive() == first == Acknowledged(rank=1, id=1, result={"answer": 42})
    assert executed == [Describe()]


def test_a_command_that_comes_twice_before_its_step_is_executed_once(inbox, front_end):
    for _ in range(2):
        front_end.send(Command(id=1, action=ClearCache()))
        arrive(inbox)
    inbox.execute(1, lambda _: None)
    assert inbox.next_command == 0
    front_end.receive()
    assert front_end.quiet()


def test_commands_wait_for_those_before_them(inbox, front_end):
    front_end.send(Command(id=2, action=Shutdown()))
    arrive(inbox)
    assert inbox.next_command == 0
    front_end.send(Command(id=1, action=ClearCache()))
    arrive(inbox)
    assert inbox.next_command == 1
    assert inbox.execute(1, lambda _: None) == ClearCache()
    assert inbox.next_command == 2
    assert inbox.execute(2, lambda _: None) == Shutdown()


def test_a_command_that_fails_is_acknowledged_with_its_error_and_not_tried_again(inbox, front_end):
    front_end.send(Command(id=1, action=ClearCache()))
    arrive(inbox)

    def refuse(action):
        raise InvalidInput("not now")

    inbox.execute(1, refuse)
    assert front_end.receive() == Acknowledged(rank=1, id=1, error=("invalid_input", "not now"))
    assert inbox.next_command == 0


def test_waiting_for_a_command_ends_when_it_arrives_or_at_the_deadline(inbox, front_end):
    with pytest.raises(DeadlineExceeded, match="command 1"):
        inbox.await_command(1, Deadline.after(0.05))
    front_end.send(Command(id=1, action=Describe()))
    inbox.await_command(1, Deadline.after(5))
    assert inbox.next_command == 1


def test_a_request_to_a_rank_that_only_follows_is_an_error(inbox, front_end):
    front_end.send(Cancel(id="a"))
    with pytest.raises(ReplicaFailed, match="rank 0 alone"):
        inbox.await_command(1, Deadline.after(5))


def test_requests_come_through_in_order(inbox, front_end):
    for name in "abc":
        front_end.send(Cancel(id=name))
    got = []
    while len(got) < 3:
        got += arrive(inbox)
    assert [request.id for request in got] == ["a", "b", "c"]


@pytest.mark.parametrize("data", [b"", b"\x00", b"garbage", msgspec.msgpack.encode({"type": "Explode"})])
def test_a_message_that_is_none_is_an_error_of_ours(inbox, front_end, data):
    front_end.send(data, raw=True)
    assert inbox.wait(5)
    with pytest.raises(ReplicaFailed, match="that is none"):
        list(inbox.receive())


def test_acknowledgements_that_can_be_repeated_are_bounded(inbox, front_end, monkeypatch):
    monkeypatch.setattr("weightcast.engines.embedded.ranks.inbox._REMEMBERED", 2)
    for number in (1, 2, 3):
        front_end.send(Command(id=number, action=ClearCache()))
        arrive(inbox)
        inbox.execute(number, lambda _: None)
        front_end.receive()
    front_end.send(Command(id=1, action=ClearCache()))  # forgotten, but still known to be done
    arrive(inbox)
    assert inbox.next_command == 0
    assert not inbox._commands
    assert front_end.quiet()
