"""The tensors of a version, one whole tensor at a time, each proved: from a transport's pieces or from a state."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from weightcast.clock import Deadline
from weightcast.delta import State
from weightcast.errors import DigestMismatch, InvalidInput, SourceFailed
from weightcast.tensors.flat import BLOCK_NBYTES, Array, Bytes, Piece, flat_bytes
from weightcast.tensors.lanes import kind_of, lane_count
from weightcast.transports.base import MappedReceiver, RangeReceiver, Receiver, StateReceiver
from weightcast.wire.manifest import Manifest, TensorEntry
from weightcast.worker.hashing import COPY_NBYTES, RunningDigest
from weightcast.worker.sealing import Expected
from weightcast.worker.staging import Coverage, mapped, received

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


@dataclass(frozen=True)
class Origin:
    """A version at a source. A full one comes in pieces; a delta is read as the state that it leads to."""

    receiver: Receiver
    manifest: Manifest

    @property
    def ranges(self) -> RangeReceiver | None:
        """The receiver, if ranges of the files that the version is made of can be fetched."""
        placed = self.manifest.parts or self.manifest.shares
        return self.receiver if isinstance(self.receiver, RangeReceiver) and placed and self.manifest.sealed else None

    def check_readable(self) -> None:
        """Raise `InvalidInput` if the version is a delta and the source cannot work out what it leads to."""
        if self.manifest.kind == "delta" and not isinstance(self.receiver, StateReceiver):
            raise InvalidInput(
                f"version {self.manifest.version} is a delta, and {self.receiver.url} cannot work out the slices of it that "
                "a rank holds. Give the store itself as source (file:///store), or publish a full version: weightcast "
                "publish --mode full."
            )

    def wholes(
        self, entries: Mapping[str, TensorEntry], takers: Takers, *, proof: Proof, deadline: Deadline, tally: Tally
    ) -> Wholes:
        """Each of these tensors once, when it is complete: whole, in memory that is borrowed until the next one is asked
        for; or None if all its takers wanted were runs of bytes, which they have by then.

        One that differs from its digest is left out, and the iterator ends in `DigestMismatch`, which lists them all. It
        does not end well before the source has confirmed what it lent. Close it when leaving early.
        """
        self.check_readable()
        arrivals = _Arrivals(entries, takers, proof, deadline, tally)
        for entry in entries.values():  # nothing is sent for a tensor without elements
            if entry.nbytes == 0 and proof.holds(entry, proof.running(entry), None, deadline):
                yield entry, np.empty(entry.shape, dtype=entry.dtype.numpy)
        if self.manifest.kind == "delta" and isinstance(self.receiver, StateReceiver):
            with self.receiver.opened_state(self.manifest, deadline=deadline) as state:
                yield from arrivals.of(_read(state, entries, deadline))
        elif isinstance(self.receiver, MappedReceiver) and self.receiver.holds(self.manifest):
            with mapped(self.receiver, self.manifest, entries, deadline) as lying:
                yield from arrivals.of(_walk(lying, deadline), lying)
        else:
            yield from arrivals.of(received(self.receiver, self.manifest, Coverage(entries), deadline))
        proof.conclude()


class Proof:
    """Compares the whole tensors of a version with their digests and remembers those that are wrong.

    Without `checksum` nothing is compared, and `unproved` has the digests of the whole tensors as they came, so that others
    can compare them. `hashed` false leaves those out too.
    """

    def __init__(self, origin: Origin, *, checksum: bool, hashed: bool = True) -> None:
        self._where = f"version {origin.manifest.version} as received from {origin.receiver.url}"
        self._hashed = checksum or hashed
        self.checksum = checksum
        self.unproved: dict[str, str] = {}
        self._expected = Expected(origin.receiver, origin.manifest)
        self._wrong: list[tuple[str, str, str]] = []
        self._unknown: dict[str, TensorEntry] = {}

    def running(self, entry: TensorEntry) -> RunningDigest | None:
        """What the bytes of one tensor are to be shown to; None if nobody checks."""
        return RunningDigest(entry) if self._hashed else None

    def note(self, piece: Piece) -> None:
        """A piece came, which may carry the digest of its tensor."""
        self._expected.note(piece)

    def holds(self, entry: TensorEntry, running: RunningDigest | None, memory: Bytes | None, deadline: Deadline) -> bool:
        """Whether a tensor that is complete is what it must be. `memory` holds it, if not all was hashed as it came."""
        if running is None:
            return True
        found = running.finish(memory, partial(deadline.check, f"hashing {entry.name}"))
        if not self.checksum:
            self.unproved[entry.name] = found
            return True
        wanted = self._expected.digest(entry)
        if not wanted and not self._expected.sealed:
            self._unknown[entry.name] = entry
        elif found != wanted:
            self._wrong.append((entry.name, wanted, found))
        return found == wanted

    def conclude(self) -> None:
        """Raise `DigestMismatch` listing all that were wrong, or `SourceFailed` if digests never came."""
        if self._wrong:
            raise DigestMismatch(self._where, self._wrong)
        self._expected.complete(self._unknown)

    def seal(self, entries: Mapping[str, TensorEntry], deadline: Deadline) -> Manifest:
        """The manifest with the digests of what has come, which that of a live stream has only afterwards."""
        return self._expected.seal(entries, deadline)


class _Arriving:
    """One tensor on its way. Its bytes are hashed as they come, while they are in the cache, if they come in order.

    They are kept whole only where somebody needs them whole: a taker, or the hasher once a piece came out of order. `lying`
    is all of it where the source has it: then nothing has to be kept.
    """

    def __init__(self, entry: TensorEntry, takers: Takers, running: RunningDigest | None, lying: Bytes | None) -> None:
        self._entry, self._takers, self._running, self._lying = entry, takers, running, lying
        self._runs = takers.runs(entry)
        self._kept = takers.bounce(entry) if self._runs is None and lying is None else None

    def add(self, piece: Piece) -> None:
        data = np.frombuffer(piece.data, dtype=np.uint8)
        in_order = self._running is None or self._running.add(piece.offset, piece.data)
        if not in_order and self._kept is None:
            self._kept = self._takers.bounce(self._entry)
        if self._kept is not None:
            self._kept[piece.offset : piece.offset + len(data)] = data
        for run in self._runs or ():
            run.take(data, piece.offset)

    def holds(self, proof: Proof, deadline: Deadline) -> bool:
        """Whether it is what it must be, now that everything has come."""
        return proof.holds(self._entry, self._running, self._whole, deadline)

    @property
    def _whole(self) -> Bytes | None:
        return self._kept[: self._entry.nbytes] if self._kept is not None else self._lying

    def array(self) -> Array | None:
        """The whole tensor, if a taker needs it so."""
        if self._whole is None or self._runs is not None:
            return None
        return self._whole.view(self._entry.dtype.numpy).reshape(self._entry.shape)


@dataclass(frozen=True)
class _Arrivals:
    """The tensors that are on their way to their takers."""

    entries: Mapping[str, TensorEntry]
    takers: Takers
    proof: Proof
    deadline: Deadline
    tally: Tally

    def of(self, pieces: Arrivals, lying: Mapping[str, Bytes] | None = None) -> Wholes:
        """Each tensor when its last piece is here, if it is what it must be."""
        arriving: dict[str, _Arriving] = {}
        with closing(pieces):
            for piece, complete in pieces:
                name = piece.tensor
                self.proof.note(piece)
                if name not in arriving:
                    there = None if lying is None else lying[name]
                    arriving[name] = _Arriving(
                        self.entries[name], self.takers, self.proof.running(self.entries[name]), there
                    )
                arriving[name].add(piece)
                self.tally.add(len(piece.data))
                if complete:
                    one = arriving.pop(name)
                    if one.holds(self.proof, self.deadline):
                        yield self.entries[name], one.array()
                    del one  # its memory is for the next one


def _walk(lying: Mapping[str, Bytes], deadline: Deadline) -> Arrivals:
    """Tensors that are here as if a transport had sent them, in pieces that fit into the cache."""
    for name, flat in lying.items():
        for start in range(0, len(flat), COPY_NBYTES):
            deadline.check(f"reading {name} where it lies")
            block = flat[start : start + COPY_NBYTES]
            yield Piece(name, start, block.data), start + len(block) == len(flat)


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
