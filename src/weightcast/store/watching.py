"""Reading that stops at a deadline."""

from __future__ import annotations

from collections.abc import Mapping

from weightcast.clock import Deadline
from weightcast.delta import State
from weightcast.tensors.lanes import Lanes
from weightcast.tensors.spec import TensorSpec


class WatchedState:
    """A state that is not read any more after the deadline. Decoding a delta reads its base as it goes, so it stops too."""

    def __init__(self, state: State, deadline: Deadline, what: str) -> None:
        self._state, self._deadline, self._what = state, deadline, what

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor."""
        return self._state.specs

    def lanes(self, name: str, start: int, stop: int) -> Lanes:
        """A range of a tensor's lanes."""
        self._deadline.check(self._what)
        return self._state.lanes(name, start, stop)
