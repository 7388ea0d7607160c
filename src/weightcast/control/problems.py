"""Everything that is wrong with a request, collected so that the caller learns all of it at once; and how long answers get.

A caller may send what has a million things wrong with it. Lists in an answer have at most `LISTED` entries and one more that
counts the others; texts are clipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weightcast.errors import InvalidInput, Mismatch

LISTED = 100
MESSAGE_LENGTH = 8000
_PARAM_LENGTH = 200
_PROBLEM_LENGTH = 1000


def clipped(text: str, length: int = MESSAGE_LENGTH) -> str:
    """The text, or its beginning and how much is missing."""
    return text if len(text) <= length else f"{text[:length]}… ({len(text) - length} more characters)"


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong: with which parameter, and what. The entry that counts the others has no parameter."""

    param: str | None
    message: str


class Problems:
    """A list that grows while a request is read."""

    def __init__(self) -> None:
        self._first: list[Problem] = []
        self._count = 0

    @property
    def found(self) -> list[Problem]:
        """The first of them, and how many more there are."""
        more = self._count - len(self._first)
        return [*self._first, Problem(None, f"and {more} more")] if more else list(self._first)

    def add(self, param: str, message: str) -> None:
        """One more."""
        self._count += 1
        if len(self._first) < LISTED:
            self._first.append(Problem(clipped(param, _PARAM_LENGTH), clipped(message, _PROBLEM_LENGTH)))

    def check(self) -> None:
        """Raise `InvalidInput` with all of them, if there are any."""
        if self._count:
            listed = "; ".join(f"{one.param}: {one.message}" if one.param is not None else one.message for one in self.found)
            count = f"{self._count} problems" if self._count > 1 else "a problem"
            raise InvalidInput(f"the request has {count}. {listed}.")


def mismatch_problems(mismatches: Sequence[Mismatch]) -> list[Problem]:
    """The ways in which a version does not fit, as problems."""
    problems = Problems()
    for one in mismatches:
        problems.add(one.name, f"{one.kind}: {one.detail}")
    return problems.found
