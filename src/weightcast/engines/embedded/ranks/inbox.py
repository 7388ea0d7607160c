"""A rank's end of the channel to the front end: messages in, commands in their order and each once, messages out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.embedded.messages import (
    Acknowledged,
    Action,
    Cancel,
    Command,
    FromRank,
    Submit,
    ToRank,
    front_end_address,
    rank_identity,
)
from weightcast.engines.embedded.settings import RankSettings
from weightcast.errors import ReplicaFailed, WeightcastError

log = logs.get(__name__)

_REMEMBERED = 256  # acknowledgements that can be given again
_LINGER_MS = 500


class Inbox:
    """The rank's socket. A context manager; used by one thread.

    Commands are kept until the step in which all ranks execute them; `execute` runs one and acknowledges it. A command that
    comes again after that is answered with the same acknowledgement.
    """

    def __init__(self, settings: RankSettings) -> None:
        self.rank = settings.rank
        self.executed = 0
        self._context = zmq.Context()  # its own: ending it waits until the last words are out
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, rank_identity(settings.rank))
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.SNDTIMEO, int(settings.engine.collective_timeout_s * 1000))
        self._socket.setsockopt(zmq.SNDHWM, 100_000)
        self._socket.connect(front_end_address(settings.run_dir))
        self._decoder = msgspec.msgpack.Decoder(ToRank)
        self._encoder = msgspec.msgpack.Encoder()
        self._commands: dict[int, Command] = {}
        self._acknowledged: OrderedDict[int, Acknowledged] = OrderedDict()

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For polling together with other sockets."""
        return self._socket

    @property
    def next_command(self) -> int:
        """The id of the command that comes next, or 0 if it has not arrived."""
        following = self.executed + 1
        return following if following in self._commands else 0

    @property
    def next_action(self) -> Action | None:
        """What the command that comes next asks for; None if it has not arrived."""
        command = self._commands.get(self.executed + 1)
        return command.action if command is not None else None

    def send(self, message: FromRank) -> None:
        """To the front end. Raises `ReplicaFailed` if it does not take messages for as long as a collective may last."""
        try:
            self._socket.send(self._encoder.encode(message))
        except zmq.Again:
            raise ReplicaFailed(f"the front end takes no messages from rank {self.rank}.") from None

    def wait(self, seconds: float) -> bool:
        """Whether a message is there, after at most this long."""
        return bool(self._socket.poll(int(seconds * 1000)))

    def receive(self) -> Iterator[Submit | Cancel]:
        """Every request that is there now. Commands are put aside."""
        while True:
            try:
                message = self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except msgspec.DecodeError as error:
                raise ReplicaFailed(f"rank {self.rank} got a message from the front end that is none: {error}") from error
            if isinstance(message, Command):
                self._keep(message)
            else:
                yield message

    def _keep(self, command: Command) -> None:
        known = self._acknowledged.get(command.id)
        if known is not None:
            self.send(known)
        elif command.id > self.executed:
            self._commands[command.id] = command

    def await_command(self, number: int, deadline: Deadline) -> None:
        """Wait until the command has arrived here too: rank 0 had it, so it is on its way."""
        while number not in self._commands:
            deadline.check(f"rank {self.rank}: waiting for command {number}")
            self.wait(min(deadline.remaining(), 1.0))
            for request in self.receive():
                raise ReplicaFailed(f"rank {self.rank} got a {type(request).__name__}, which is for rank 0 alone.")

    def execute(self, number: int, perform: Callable[[Action], Any]) -> Action:
        """Run a command that has arrived, acknowledge it, and say what it was."""
        command = self._commands.pop(number)
        with logs.bound(request_id=command.request_id, update_id=command.update_id):
            try:
                answer = Acknowledged(rank=self.rank, id=number, result=msgspec.to_builtins(perform(command.action)))
            except WeightcastError as error:
                log.debug("command failed", command=type(command.action).__name__, code=error.code, error=error)
                answer = Acknowledged(rank=self.rank, id=number, error=(error.code, str(error)))
        self.executed = number
        self._acknowledged[number] = answer
        while len(self._acknowledged) > _REMEMBERED:
            self._acknowledged.popitem(last=False)
        self.send(answer)
        return command.action

    def close(self) -> None:
        """Close the socket, after waiting at most half a second for what was sent last to go out. Safe twice."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
