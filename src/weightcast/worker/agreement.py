"""Ranks that hold a model between them and have no front end agree by an all-reduce of the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightcast.errors import DigestMismatch, InvalidInput, UpdateFailed, WeightcastError
from weightcast.tensors.digest import raw_digest
from weightcast.tensors.sums import Sum
from weightcast.wire.manifest import Manifest
from weightcast.worker.shard_sums import BoxSum

Numbers = NDArray[np.int64]
AllReduce = Callable[[Numbers], Numbers]
"""Adds up an array over all ranks, element by element and modulo 2^64, and returns it. Raises if a rank does not come."""

_WORDS = 5  # that a rank says of itself: whether it is ready, moves and proves, and two of its state


class Agreed(NamedTuple):
    """What the ranks said: whether any of them is going to commit, and whether all of them compared digests."""

    moves: bool
    proved: bool


class Agreement:
    """All ranks go on, or none. Every rank must make the same calls: `agree` in a `round`, or `round` makes up for it."""

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce
        self._expected = False  # whether the other ranks wait for what this one says

    @contextmanager
    def round(self) -> Iterator[None]:
        """What all ranks do at the same time. If it raises before `agree`, the other ranks hear that this one failed."""
        self._expected = True
        try:
            yield
        except Exception:
            if self._expected:
                with suppress(WeightcastError):  # the error that is raised says more
                    self._say(*[False] * _WORDS)
            raise
        finally:
            self._expected = False

    def agree(self, what: str, *, state: str = "", moves: bool = True, proved: bool = True) -> Agreed:
        """Tell the other ranks that this one is ready. Raises `UpdateFailed` if one is not, or means another `state`."""
        words = np.frombuffer(raw_digest(state.encode()), dtype=np.int64)
        ranks, fine, moving, compared, *found = self._say(True, moves, proved, *words).tolist()
        if fine != ranks:
            raise UpdateFailed(
                f"{ranks - fine} of {ranks} ranks failed at {what}, so no rank goes on. Read the errors of those ranks, and "
                "update all ranks again."
            )
        if (words * ranks).tolist() != found:
            raise UpdateFailed(
                f"the ranks do not mean the same weights by {what}: this one means {state}. Give all ranks the same version "
                "and source."
            )
        return Agreed(moves=moving > 0, proved=compared == ranks)

    def check_sums(self, manifest: Manifest, sums: Mapping[str, BoxSum], *, proved: bool) -> None:
        """Compare what all ranks hold together with the sums of a version. Every rank comes to the same result.

        `sums` has what this rank adds to each tensor that the model wants. A tensor may be there several times, if every
        element of it is there as often. Raises `DigestMismatch` with every tensor that is wrong. Unless the version is
        `proved`, and in format 1, only elements are counted.
        """
        own = [sums.get(entry.name, BoxSum()) for entry in manifest.tensors]
        numbers = np.array([(total.one, total.other, elements) for total, elements in own], dtype=np.uint64)
        found = self._add_up(numbers.reshape(-1).view(np.int64)).view(np.uint64).reshape(-1, 3)
        wrong = []
        for entry, (one, other, elements) in zip(manifest.tensors, found.tolist(), strict=True):
            total, size = Sum(one, other), prod(entry.shape)
            copies, rest = divmod(elements, size) if size else (0, 0)
            if rest or (size and not copies and entry.name in sums):
                wrong.append((entry.name, f"{size} elements, once or several times", f"{elements} elements"))
            elif copies and proved and entry.sum and total != Sum.parse(entry.sum).times(copies):
                wrong.append((entry.name, entry.sum, f"{total} of {copies} cop{'y' if copies == 1 else 'ies'}"))
        if wrong:
            raise DigestMismatch(f"version {manifest.version} as the ranks staged it together", wrong)

    def _say(self, *words: bool | np.int64) -> Numbers:
        self._expected = False
        return self._add_up(np.array([1, *words], dtype=np.int64))

    def _add_up(self, numbers: Numbers) -> Numbers:
        try:
            found = np.asarray(self._all_reduce(numbers.copy()))
        except Exception as error:
            raise UpdateFailed(
                f"the ranks could not agree: the all-reduce raised {type(error).__name__}: {error}"
            ) from error
        if found.dtype != np.int64 or found.shape != numbers.shape:
            raise InvalidInput(
                f"all_reduce returned {found.dtype} of shape {found.shape} for int64 of shape {numbers.shape}: it must add "
                "up the array over all ranks and return it."
            )
        return np.ascontiguousarray(found)
