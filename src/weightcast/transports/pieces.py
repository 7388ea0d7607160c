"""Ranges of the files of a version, proved as they land: whole pieces are fetched, and a wrong one is fetched again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import DigestMismatch, SourceFailed
from weightcast.tensors.digest import Hasher, algorithm_of
from weightcast.tensors.flat import Bytes
from weightcast.transports.base import MendingReceiver, Range, RangeReceiver
from weightcast.wire.manifest import FilePiece, Manifest

log = logs.get(__name__)

_NAMED = 8  # tensors of a wrong piece that are named
_TRIES = 3  # for a piece: a byte may be flipped on the way


class WrongPieces(DigestMismatch):
    """Pieces of `files` came wrong however often they were fetched."""

    def __init__(self, where: str, pieces: Sequence[tuple[str, str, str]], files: Iterable[str]) -> None:
        self.files = frozenset(files)
        super().__init__(where, pieces)


class PieceMap:
    """Which pieces the files of a version have."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._pieces: dict[str, tuple[list[FilePiece], list[int]]] = {}

    def touching(self, file: str, start: int, stop: int) -> Sequence[FilePiece]:
        """The pieces that have bytes of a range."""
        if file not in self._pieces:
            pieces = self._manifest.pieces(file)
            self._pieces[file] = pieces, [piece.start for piece in pieces]
        pieces, starts = self._pieces[file]
        return pieces[max(0, bisect_right(starts, start) - 1) : bisect_right(starts, stop - 1)] if start < stop else ()


@dataclass(eq=False)
class _Piece:
    """A piece on its way: stretches of it without a gap, each in the memory that it goes to.

    `wanted` are the ranges that it has bytes of; `copies` are bytes that are wanted in a second place too.
    """

    file: str
    piece: FilePiece
    stretches: list[Range] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    copies: list[tuple[Bytes, Bytes]] = field(default_factory=list)
    left: int = 0
    found: str = ""

    def add(self, index: int, start: int, memory: Bytes) -> None:
        """Bytes of it are wanted in a memory. Ranges come in the order in which they start."""
        self.wanted.append(index)
        for one in self.stretches:
            first, last = max(start, one.start), min(start + len(memory), one.start + len(one.memory))
            if first < last:
                self.copies.append((memory[first - start : last - start], one.memory[first - one.start : last - one.start]))
        there = self._end
        if start > there:
            self._fill(start)
        if start + len(memory) > (begin := max(start, there)):
            self.stretches.append(Range(self.file, begin, memory[begin - start :]))

    def close(self) -> None:
        """No more of it is wanted."""
        self._fill(self.piece.stop)
        self.left = len(self.stretches)

    @property
    def _end(self) -> int:
        return self.stretches[-1].start + len(self.stretches[-1].memory) if self.stretches else self.piece.start

    def _fill(self, stop: int) -> None:
        """Add memory for bytes up to `stop` that are fetched only to prove the piece."""
        start = self._end
        if start < stop:
            self.stretches.append(Range(self.file, start, np.empty(stop - start, dtype=np.uint8)))

    def holds(self) -> bool:
        """Whether all of it, which is there, is what it must be."""
        hasher = Hasher(algorithm_of(self.piece.digest))
        for one in self.stretches:
            hasher.update(one.memory.data)
        self.found = hasher.digest()
        if self.found != self.piece.digest:
            return False
        for target, source in self.copies:
            target[:] = source
        return True


def proved_ranges(
    receiver: RangeReceiver,
    manifest: Manifest,
    wanted: Sequence[Range],
    *,
    deadline: Deadline,
    pieces: PieceMap | None = None,
) -> Generator[int, None, None]:
    """Fill each memory, as `RangeReceiver.ranges` does, with bytes that have the digests of the manifest.

    Pieces that are wanted only in part are fetched whole; the rest of them takes memory until the iterator ends. A piece
    that is wrong is fetched again, from elsewhere if the receiver can. Raises `WrongPieces` if it stays so.
    """
    left = [0] * len(wanted)
    coming = _planned(wanted, pieces or PieceMap(manifest), left)
    yield from (index for index, one in enumerate(wanted) if not len(one.memory))
    for turn in range(_TRIES):
        wrong: list[_Piece] = []
        with closing(_received(receiver, manifest, coming, deadline)) as received:
            for one in received:
                if not one.holds():
                    wrong.append(one)
                    continue
                for index in one.wanted:
                    left[index] -= 1
                    if left[index] == 0:
                        yield index
        if not wrong:
            return
        _tell(receiver, manifest, wrong, last=turn + 1 == _TRIES)
        coming = wrong


def mend(receiver: RangeReceiver, manifest: Manifest, wanted: Range, *, deadline: Deadline) -> int:
    """Fetch the pieces of a range again that came wrong; how many bytes those are. Pieces at its ends cannot be proved by
    themselves, so they are fetched again too.
    """
    stop = wanted.start + len(wanted.memory)
    again = []
    for piece in PieceMap(manifest).touching(wanted.file, wanted.start, stop):
        deadline.check(f"looking for what is wrong in {wanted.file}")
        begin, end = max(piece.start, wanted.start), min(piece.stop, stop)
        part = Range(wanted.file, begin, wanted.memory[begin - wanted.start : end - wanted.start])
        one = _Piece(wanted.file, piece, [part])
        if (begin, end) != piece[:2] or not one.holds():
            again.append(part)
    for _ in proved_ranges(receiver, manifest, again, deadline=deadline):
        continue
    return sum(len(part.memory) for part in again)


def _planned(wanted: Sequence[Range], pieces: PieceMap, left: list[int]) -> list[_Piece]:
    coming: dict[tuple[str, int], _Piece] = {}
    for index in sorted(range(len(wanted)), key=lambda index: (wanted[index].file, wanted[index].start)):
        file, start, memory = wanted[index]
        stop = start + len(memory)
        for piece in pieces.touching(file, start, stop):
            one = coming.get((file, piece.start))
            if one is None:
                one = coming[file, piece.start] = _Piece(file, piece)
            begin = max(start, piece.start)
            one.add(index, begin, memory[begin - start : min(stop, piece.stop) - start])
            left[index] += 1
    for one in coming.values():
        one.close()
    return list(coming.values())


def _received(
    receiver: RangeReceiver, manifest: Manifest, coming: Iterable[_Piece], deadline: Deadline
) -> Generator[_Piece, None, None]:
    """Each piece when all of it is there."""
    parts = [(one, stretch) for one in coming for stretch in one.stretches]
    missing = len(parts)
    for one, _ in parts:
        one.left = len(one.stretches)
    with closing(receiver.ranges(manifest, [stretch for _, stretch in parts], deadline=deadline)) as told:
        there: set[int] = set()
        for index in told:
            if index in there or not 0 <= index < len(parts):
                raise SourceFailed(f"{receiver.url} sent range {index} of {len(parts)} twice, or was not asked for it.")
            there.add(index)
            one = parts[index][0]
            one.left, missing = one.left - 1, missing - 1
            if one.left == 0:
                yield one
    if missing:
        raise SourceFailed(
            f"{receiver.url} ended early: {missing} of {len(parts)} ranges of {manifest.version} did not come."
        )


def _tell(receiver: RangeReceiver, manifest: Manifest, wrong: Sequence[_Piece], *, last: bool) -> None:
    for one in wrong:
        log.warning(
            "piece wrong",
            version=manifest.version,
            file=one.file,
            start=one.piece.start,
            stop=one.piece.stop,
            url=receiver.url,
            why="" if last else "it is fetched again",
        )
        if isinstance(receiver, MendingReceiver):
            receiver.doubt(one.file, one.piece.start, one.piece.stop)
    if last:
        listed = [(_described(manifest, one), one.piece.digest, one.found) for one in wrong]
        where = f"version {manifest.version} as received from {receiver.url}"
        raise WrongPieces(where, listed, {one.file for one in wrong})


def _described(manifest: Manifest, one: _Piece) -> str:
    """A piece for a message: where it lies, and of which tensors it has bytes."""
    part = next((index for index, part in enumerate(manifest.parts) if part.file == one.file), None)
    names = [
        entry.name
        for entry in manifest.tensors
        if entry.part == part and entry.offset < one.piece.stop and one.piece.start < entry.offset + entry.nbytes
    ]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    of = f" ({', '.join(names[:_NAMED])}{more})" if names else ""
    return f"bytes {one.piece.start} to {one.piece.stop} of {one.file}{of}"
