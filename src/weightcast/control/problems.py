"""Everything that is wrong with a request, collected so that the caller learns all of it at once."""

from __future__ import annotations

import msgspec

from weightcast.errors import InvalidInput


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong: with which parameter, and what."""

    param: str
    message: str


class Problems:
    """A list that grows while a request is read."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, param: str, message: str) -> None:
        """One more."""
        self.found.append(Problem(param, message))

    def check(self) -> None:
        """Raise `InvalidInput` with all of them, if there are any."""
        if self.found:
            listed = "; ".join(f"{problem.param}: {problem.message}" for problem in self.found)
            count = f"{len(self.found)} problems" if len(self.found) > 1 else "a problem"
            raise InvalidInput(f"the request has {count}. {listed}.")
