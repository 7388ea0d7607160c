"""What the parts of a replica see of each other."""

from __future__ import annotations

from typing import Protocol

from weightcast.engines.embedded.replica.answers import Answers
from weightcast.engines.embedded.replica.gate import Gate
from weightcast.engines.embedded.replica.run import Run
from weightcast.engines.embedded.settings import EngineSettings
from weightcast.engines.states import Operation, ReplicaState


class Host(Protocol):
    """The replica: its requests, its ranks and its state."""

    settings: EngineSettings
    answers: Answers
    gate: Gate

    @property
    def state(self) -> ReplicaState:
        """The state at this moment."""

    @property
    def resting(self) -> ReplicaState:
        """The last resting state: what an update began in."""

    @property
    def run(self) -> Run:
        """The ranks that run now. Raises `NotReady` if there are none."""

    def allow(self, operation: Operation) -> None:
        """Raise unless the operation may be asked for now."""

    def turn(self, state: ReplicaState, reason: str) -> None:
        """Go to another state."""

    def rest(self) -> None:
        """Go to the resting state that follows from what is in memory."""

    def fail(self, reason: str) -> None:
        """No whole version is in memory: serve nothing, and say so to all who wait."""

    def open_gate(self) -> None:
        """Let requests through to the ranks again."""
