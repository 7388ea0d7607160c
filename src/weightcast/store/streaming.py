"""Tensors on a medium, given out in pieces or one by one, with their digests checked as the bytes go by."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

from weightcast.clock import Deadline
from weightcast.errors import DigestMismatch
from weightcast.tensors.digest import Hasher
from weightcast.tensors.flat import BLOCK_NBYTES, Array, Piece, Pieces, from_bytes
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import RunningSum, tensor_hasher
from weightcast.wire.manifest import TensorEntry


class Readable(NamedTuple):
    """A tensor whose bytes can be read: `read(start, buffer)` fills the buffer from byte `start` of the tensor on."""

    spec: TensorSpec
    read: Callable[[int, memoryview], None]


Readables = Generator[Readable, None, None]


class Proof:
    """Compares tensors with the digests or sums of their entries as their bytes go by. Others are not checked."""

    def __init__(self, where: str, entries: Iterable[TensorEntry]) -> None:
        self._where = where
        self._entries = {entry.name: entry for entry in entries if entry.proof}
        self._wrong: list[tuple[str, str, str]] = []
        self._hasher: Hasher | RunningSum | None = None

    def begin(self, name: str) -> None:
        """The bytes of a tensor come now, in order."""
        entry = self._entries.get(name)
        self._hasher = tensor_hasher(entry.sum_spec, entry.proof) if entry else None

    def update(self, data: memoryview) -> None:
        """Take in the next bytes of the present tensor."""
        if self._hasher:
            self._hasher.update(data)

    def close(self, name: str) -> None:
        """The present tensor is whole."""
        if self._hasher:
            found = self._hasher.digest()
            if found != self._entries[name].proof:
                self._wrong.append((name, self._entries[name].proof, found))

    def conclude(self) -> None:
        """Raise `DigestMismatch` listing every tensor that was wrong."""
        if self._wrong:
            raise DigestMismatch(self._where, self._wrong)


def stream_pieces(
    tensors: Readables, proof: Proof, deadline: Deadline, *, what: str, buffers: Sequence[memoryview] | None
) -> Pieces:
    """Every byte once, rotating through `buffers` (default: one); a piece is valid until its buffer comes round again.

    If digests were wrong, the iterator ends in `DigestMismatch`, which lists them all.
    """
    ring = buffers if buffers is not None else [memoryview(bytearray(BLOCK_NBYTES))]
    turn = 0
    with closing(tensors):
        for spec, read in tensors:
            start = 0
            proof.begin(spec.name)
            while start < spec.nbytes:
                deadline.check(what)
                buffer = ring[turn % len(ring)][: spec.nbytes - start]
                read(start, buffer)
                proof.update(buffer)
                yield Piece(spec.name, start, buffer)
                start += len(buffer)
                turn += 1
            proof.close(spec.name)
    proof.conclude()


def stream_arrays(tensors: Readables, proof: Proof) -> Iterator[tuple[str, Array]]:
    """Every tensor whole. An array is borrowed: valid until the next one is asked for. Memory: the largest so far."""
    memory = bytearray()
    with closing(tensors):
        for spec, read in tensors:
            if len(memory) < spec.nbytes:
                memory = bytearray(spec.nbytes)
            buffer = memoryview(memory)[: spec.nbytes]
            read(0, buffer)
            proof.begin(spec.name)
            proof.update(buffer)
            proof.close(spec.name)
            yield spec.name, from_bytes(buffer, spec)
    proof.conclude()
