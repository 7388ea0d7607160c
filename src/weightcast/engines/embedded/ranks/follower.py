"""The other ranks: they do what the steps of rank 0 say, and nothing on their own."""

from __future__ import annotations

from typing import Any

import zmq

from weightcast.clock import Deadline
from weightcast.engines.embedded.messages import Action, Describe
from weightcast.engines.embedded.ranks.inbox import Inbox
from weightcast.engines.embedded.ranks.rank import Rank
from weightcast.engines.embedded.ranks.step import PARK, Work
from weightcast.engines.embedded.ranks.wake import WakeReceiver
from weightcast.errors import ReplicaFailed

_IDLE_MS = 1000


class Follower:
    """The main loop of a rank other than 0. Parked, it waits on its sockets; awake, it receives step after step."""

    def __init__(self, rank: Rank, inbox: Inbox, wake: WakeReceiver) -> None:
        self._rank, self._inbox, self._wake = rank, inbox, wake

    def run(self) -> None:
        """Serve until a `Shutdown` was executed."""
        poller = zmq.Poller()
        poller.register(self._inbox.socket, zmq.POLLIN)
        poller.register(self._wake.socket, zmq.POLLIN)
        while not self._rank.leaving:
            poller.poll(_IDLE_MS)
            self._take_commands()
            if self._wake.woken():
                self._follow()
                self._rank.vitals.busy = False

    def _follow(self) -> None:
        while not self._rank.leaving:
            # Between two steps rank 0 may be long at choosing tokens. If it hangs, its own signs of life say so.
            self._rank.vitals.busy = False
            step = self._rank.channel.receive()
            self._rank.vitals.busy = True
            if step.signal == PARK:
                return
            if step.batch is not None:
                self._rank.steps += step.work is Work.MAIN
                self._rank.runner.forward(step.work, step.batch)
            if step.signal:
                self._inbox.await_command(step.signal, Deadline.after(self._rank.settings.engine.collective_timeout_s))
                self._rank.execute(step.signal, self._inbox, self._perform)

    def _take_commands(self) -> None:
        self._rank.vitals.tick()
        for request in self._inbox.receive():
            raise ReplicaFailed(f"rank {self._inbox.rank} got a {type(request).__name__}, which is for rank 0 alone.")

    def _perform(self, number: int, action: Action) -> Any:
        if isinstance(action, Describe):
            return self._rank.describe({}, commands=self._inbox.executed)
        return self._rank.perform(number, action)
