"""The digests of a file's pieces, which relays check one by one: worked out when first asked for, and kept."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol, runtime_checkable

from weightcast.clock import Deadline
from weightcast.depot.holding import Holding
from weightcast.errors import DeadlineExceeded
from weightcast.tensors.digest import DEFAULT, Hasher
from weightcast.wire.depot import PIECE_NBYTES, PieceDigests


@runtime_checkable
class KnowsPieces(Protocol):
    """A holding that knows the digests of its pieces by itself: nothing has to be read for them here."""

    def piece_digests(self, file: str, *, deadline: Deadline) -> PieceDigests:
        """The digests of a file. Raises `NotFound` for a file that is not of the version."""


class PieceDigester:
    """Works out each file's digests once, whoever asks, and keeps them for as long as the holding lives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: weakref.WeakKeyDictionary[Holding, dict[str, _Once]] = weakref.WeakKeyDictionary()

    def digests(self, holding: Holding, file: str, *, deadline: Deadline) -> PieceDigests:
        """The digests of one file. Raises `NotFound` for a file that is not of the version."""
        if isinstance(holding, KnowsPieces):
            return holding.piece_digests(file, deadline=deadline)
        holding.views(file, 0, 0, deadline=deadline)  # raises for an unknown one, of which nothing must be kept
        with self._lock:
            once = self._kept.setdefault(holding, {}).setdefault(file, _Once())
        return once.get(holding, file, deadline)


class _Once:
    """The digests of one file: the first to ask works, the others wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: PieceDigests | None = None

    def get(self, holding: Holding, file: str, deadline: Deadline) -> PieceDigests:
        if not self._lock.acquire(timeout=deadline.remaining()):
            raise DeadlineExceeded(f"hashing the pieces of {file}", deadline.seconds)
        try:
            if self._digests is None:
                self._digests = _hashed(holding, file, deadline)
            return self._digests
        finally:
            self._lock.release()


def _hashed(holding: Holding, file: str, deadline: Deadline) -> PieceDigests:
    nbytes, algorithm = holding.files[file], holding.manifest.algorithm or DEFAULT
    digests = []
    for start in range(0, nbytes, PIECE_NBYTES):
        deadline.check(f"hashing the pieces of {file}")
        hasher = Hasher(algorithm)
        for view in holding.views(file, start, min(start + PIECE_NBYTES, nbytes), deadline=deadline):
            hasher.update(view)
        digests.append(hasher.digest())
    return PieceDigests(algorithm, PIECE_NBYTES, tuple(digests))
