"""The tensors of a version, one whole tensor at a time, each proved: from a transport's pieces or from a state."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from weightcast.clock import Deadline
from weightcast.delta import State
from weightcast.delta.lanes import kind_of, lane_count
from weightcast.errors import DigestMismatch, InvalidInput, SourceFailed
from weightcast.tensors.digest import DEFAULT, Algorithm, Hasher
from weightcast.tensors.flat import BLOCK_NBYTES, Array, Bytes, Piece, byte_blocks, flat_bytes
from weightcast.transports.base import Receiver, StateReceiver
from weightcast.wire.manifest import Manifest, TensorEntry
from weightcast.worker.staging import Coverage, received

Progress = Callable[[int, int], None]
Wholes = Generator[tuple[TensorEntry, Array | None], None, None]
Arrivals = Generator[tuple[Piece, bool], None, None]

_TELL_NBYTES = 4 << 20


class Tally:
    """Bytes that came, told to somebody every few MiB and at the end."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.nbytes = 0
        self._total, self._progress, self._told = total, progress, 0

    def add(self, nbytes: int) -> None:
        """So many bytes more."""
        self.nbytes += nbytes
        if self.nbytes - self._told >= _TELL_NBYTES or (self.nbytes >= self._total and self.nbytes > self._told):
            self._told = self.nbytes
            self._progress(self.nbytes, self._total)


def untold(total: int = 0) -> Tally:
    """A tally that nobody wants to hear of."""
    return Tally(total, lambda _done, _total: None)


@dataclass(frozen=True)
class Run:
    """Bytes of a tensor, from `start` on, that are wanted just as they are, and the memory they are wanted in."""

    start: int
    memory: Bytes

    def take(self, data: Bytes, offset: int) -> None:
        """Copy what is wanted of a piece that begins at `offset` of the tensor."""
        first, last = max(offset, self.start), min(offset + len(data), self.start + len(self.memory))
        if first < last:
            self.memory[first - self.start : last - self.start] = data[first - offset : last - offset]


class Takers(Protocol):
    """Whoever the tensors are for."""

    def runs(self, entry: TensorEntry) -> list[Run] | None:
        """The runs of bytes that are wanted of a tensor; None if it must come whole."""

    def bounce(self, entry: TensorEntry) -> Bytes:
        """Memory, at least of the tensor's size, that it can be put together in."""

    def give_back(self, memory: Bytes) -> None:
        """`bounce` memory that is not needed any more."""


@dataclass(frozen=True)
class Origin:
    """A version at a source. A full one comes in pieces; a delta is read as the state that it leads to."""

    receiver: Receiver
    manifest: Manifest

    def check_readable(self) -> None:
        """Raise `InvalidInput` if the version is a delta and the source cannot work out what it leads to."""
        if self.manifest.base is not None and not isinstance(self.receiver, StateReceiver):
            raise InvalidInput(
                f"version {self.manifest.version} is a delta, and {self.receiver.url} cannot work out the slices of it that "
                "a rank holds. Give the store itself as source (file:///store), or publish a full version: weightcast "
                "publish --mode full."
            )

    def wholes(
        self, entries: Mapping[str, TensorEntry], takers: Takers, *, checksum: bool, deadline: Deadline, tally: Tally
    ) -> Wholes:
        """Each of these tensors once, when it is complete: whole, in memory that is borrowed until the next one is asked
        for; or None if all its takers wanted were runs of bytes, which they have by then.

        With `checksum`, one that differs from its digest is left out, and the iterator ends in `DigestMismatch`, which
        lists them all. Close it when leaving early.
        """
        self.check_readable()
        proof = _Proof(self, checksum=checksum)
        for entry in entries.values():  # nothing is sent for a tensor without elements
            if entry.nbytes == 0 and proof.holds(entry, proof.hasher()):
                yield entry, np.empty(entry.shape, dtype=entry.dtype.numpy)
        if self.manifest.base is not None and isinstance(self.receiver, StateReceiver):
            with self.receiver.opened_state(self.manifest, deadline=deadline) as state:
                yield from _arrivals(_read(state, entries, deadline), entries, takers, proof, deadline, tally)
        else:
            pieces = received(self.receiver, self.manifest, Coverage(entries), deadline)
            yield from _arrivals(pieces, entries, takers, proof, deadline, tally)
        proof.conclude()


class _Proof:
    """Compares whole tensors with their digests and remembers those that are wrong."""

    def __init__(self, origin: Origin, *, checksum: bool) -> None:
        self._where = f"version {origin.manifest.version} as received from {origin.receiver.url}"
        self._algorithm = (origin.manifest.algorithm or DEFAULT) if checksum else None
        self._wrong: list[tuple[str, str, str]] = []

    def hasher(self) -> Hasher | None:
        """What the bytes of one tensor are to be shown to; None if nobody checks."""
        return Hasher(self._algorithm) if self._algorithm else None

    def holds(self, entry: TensorEntry, hasher: Hasher | None) -> bool:
        """Whether the bytes that the hasher saw are those of the tensor."""
        found = hasher.digest() if hasher else entry.digest
        if found != entry.digest:
            self._wrong.append((entry.name, entry.digest, found))
        return found == entry.digest

    def conclude(self) -> None:
        if self._wrong:
            raise DigestMismatch(self._where, self._wrong)


class _Arriving:
    """One tensor on its way. Its bytes are hashed as they come, while they are in the cache, if they come in order.

    They are kept whole only where somebody needs them whole: a taker, or the hasher once a piece came out of order.
    """

    def __init__(self, entry: TensorEntry, takers: Takers, hasher: Hasher | None) -> None:
        self._entry, self._takers, self._hasher = entry, takers, hasher
        self._runs = takers.runs(entry)
        self._whole = takers.bounce(entry) if self._runs is None else None
        self._hashed = 0

    def add(self, piece: Piece) -> None:
        data = np.frombuffer(piece.data, dtype=np.uint8)
        if self._hasher is not None and piece.offset == self._hashed:
            self._hasher.update(piece.data)
            self._hashed += len(data)
        elif self._hasher is not None and self._whole is None:
            self._whole = self._takers.bounce(self._entry)
        if self._whole is not None:
            self._whole[piece.offset : piece.offset + len(data)] = data
        for run in self._runs or ():
            run.take(data, piece.offset)

    def hasher(self, deadline: Deadline) -> Hasher | None:
        """The hasher when it has seen everything, whatever order it came in."""
        if self._hasher is not None and self._whole is not None:
            for block in byte_blocks(self._whole[self._hashed : self._entry.nbytes], nbytes=4 * BLOCK_NBYTES):
                self._hasher.update(block.data)
                deadline.check(f"hashing {self._entry.name}")
        return self._hasher

    def array(self) -> Array | None:
        """The whole tensor, if a taker needs it so."""
        if self._whole is None or self._runs is not None:
            return None
        return self._whole[: self._entry.nbytes].view(self._entry.dtype.numpy).reshape(self._entry.shape)

    def close(self) -> None:
        """Give back the memory for the whole tensor."""
        whole, self._whole = self._whole, None
        if whole is not None:
            self._takers.give_back(whole)


def _arrivals(
    pieces: Arrivals, entries: Mapping[str, TensorEntry], takers: Takers, proof: _Proof, deadline: Deadline, tally: Tally
) -> Wholes:
    arriving: dict[str, _Arriving] = {}
    try:
        with closing(pieces):
            for piece, complete in pieces:
                if piece.tensor not in arriving:
                    arriving[piece.tensor] = _Arriving(entries[piece.tensor], takers, proof.hasher())
                one = arriving[piece.tensor]
                one.add(piece)
                tally.add(len(piece.data))
                if complete:
                    if proof.holds(entries[piece.tensor], one.hasher(deadline)):
                        yield entries[piece.tensor], one.array()
                    arriving.pop(piece.tensor).close()
    finally:
        for one in arriving.values():
            one.close()


def _read(state: State, entries: Mapping[str, TensorEntry], deadline: Deadline) -> Arrivals:
    """The bytes of a state as if a transport had sent them."""
    for entry in entries.values():
        if state.specs.get(entry.name) != entry.spec:
            raise SourceFailed(f"the source has no tensor {entry.name!r} that is {entry.spec.describe()}.")
        width, lanes = kind_of(entry.dtype).nbytes, lane_count(entry.spec)
        step = BLOCK_NBYTES // width
        for start in range(0, lanes, step):
            deadline.check(f"reading {entry.name} of the new state")
            stop = min(start + step, lanes)
            data = flat_bytes(state.lanes(entry.name, start, stop)).data
            yield Piece(entry.name, start * width, data), stop == lanes


def watched_digest(array: Array, algorithm: Algorithm, check: Callable[[], None]) -> str:
    """The digest of an array; `check` is called every few milliseconds and may raise."""
    hasher = Hasher(algorithm)
    for block in byte_blocks(array, nbytes=4 * BLOCK_NBYTES):
        hasher.update(block.data)
        check()
    return hasher.digest()
