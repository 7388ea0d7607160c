"""Receiving a version: every byte exactly once, then proved against the manifest."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, DigestMismatch, SourceFailed, UpdateCancelled, WeightcastError
from weightcast.tensors.flat import Array, Bytes, Piece, empty, flat_bytes
from weightcast.transports.base import LandingReceiver, MappedReceiver, Range, RangeReceiver, Receiver
from weightcast.transports.pieces import mend
from weightcast.wire.manifest import Manifest, TensorEntry
from weightcast.worker.buffers import Buffers
from weightcast.worker.hashing import (
    Check,
    LandedDigest,
    LandedDigests,
    RunningDigest,
    copy_all,
    copy_hashed,
)
from weightcast.worker.sealing import Expected

log = logs.get(__name__)


@dataclass(frozen=True)
class Verified:
    """Staged tensors whose every byte arrived and, unless the caller declined, matched its digest.

    Only `Staging.verify` makes one; committing takes nothing else. `digests` are of the bytes as staged.
    """

    arrays: Mapping[str, Array]
    digests: Mapping[str, str]


class Coverage:
    """Which bytes of each tensor have come. A byte that comes twice, or lies outside, is the source's mistake."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._entries = entries
        self._seen: dict[str, list[tuple[int, int]]] = {name: [] for name in entries}
        self.nbytes = 0

    @property
    def names(self) -> Collection[str]:
        """The tensors to cover."""
        return self._entries.keys()

    def add(self, name: str, start: int, nbytes: int) -> bool:
        """Count bytes of a tensor in; True when it is complete with them."""
        entry, end = self._entries.get(name), start + nbytes
        if entry is None:
            raise SourceFailed(f"the source sent tensor {name!r}, which nobody asked for.")
        if start < 0 or end > entry.nbytes:
            raise SourceFailed(f"the source sent bytes {start} to {end} of {name!r}, which has {entry.nbytes}.")
        seen = self._seen[name]
        at = bisect_right(seen, (start, end))
        if (at > 0 and seen[at - 1][1] > start) or (at < len(seen) and seen[at][0] < end):
            raise SourceFailed(f"the source sent bytes {start} to {end} of {name!r} twice.")
        seen.insert(at, (start, end))
        if at + 1 < len(seen) and seen[at + 1][0] == end:
            seen[at : at + 2] = [(start, seen[at + 1][1])]
        if at > 0 and seen[at - 1][1] == start:
            seen[at - 1 : at + 1] = [(seen[at - 1][0], seen[at][1])]
        self.nbytes += nbytes
        return seen == [(0, entry.nbytes)]

    def check_complete(self) -> None:
        """Raise `SourceFailed` listing every tensor that did not come whole."""
        short = [
            f"{name} ({sum(end - start for start, end in self._seen[name])} of {entry.nbytes} bytes)"
            for name, entry in self._entries.items()
            if entry.nbytes and self._seen[name] != [(0, entry.nbytes)]
        ]
        if short:
            raise SourceFailed(f"the source ended early; {len(short)} tensor(s) are not complete: {', '.join(short)}.")


def received(
    receiver: Receiver, manifest: Manifest, coverage: Coverage, deadline: Deadline
) -> Generator[tuple[Piece, bool], None, None]:
    """The pieces of the tensors to cover, each with whether it completes its tensor. Ends only when all are complete.

    Close it when leaving early: the transport stops then, and not when the garbage collector comes by.
    """
    wanted = coverage.names if len(coverage.names) < len(manifest.transfers()) else None
    with closing(receiver.pieces(manifest, deadline=deadline, names=wanted)) as pieces:
        for piece in pieces:
            yield piece, coverage.add(piece.tensor, piece.offset, len(piece.data))
            del piece  # the sender may have use for its memory
            deadline.check(f"receiving {manifest.version} from {receiver.url}")
    coverage.check_complete()


class Staging:
    """Host memory for the tensors of one update, filled while the model goes on serving."""

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        arrays: Mapping[str, Array] | None = None,
        *,
        buffers: Buffers | None = None,
    ) -> None:
        """`arrays` are tensors that are here already and only have to be proved. Memory comes from `buffers`, if given."""
        self._entries = entries
        make = empty if buffers is None else buffers.take
        self.arrays = dict(arrays) if arrays is not None else {name: make(entry.spec) for name, entry in entries.items()}
        self._flat: dict[str, Bytes] = {name: flat_bytes(array) for name, array in self.arrays.items()}
        self._running: dict[str, RunningDigest] = {}
        self._expected: Expected | None = None
        self._mender: RangeReceiver | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self._entries.values())

    def fill(self, receiver: Receiver, manifest: Manifest, deadline: Deadline, *, threads: int = 1) -> None:
        """Receive everything. The source may reuse its buffers at once: the bytes are copied here, and hashed where they
        were copied to, while they are in the cache. `threads` copy what lies in shared memory.
        """
        self._expected = expected = Expected(receiver, manifest)
        self._running = running = {name: RunningDigest(entry) for name, entry in self._entries.items()}
        check = partial(deadline.check, f"receiving {manifest.version} from {receiver.url}")
        if isinstance(receiver, MappedReceiver) and receiver.holds(manifest):
            with mapped(receiver, manifest, self._entries, deadline) as sources:
                copy_all(sources, self._flat, running, check, threads)
            return
        if isinstance(receiver, LandingReceiver):
            self._mender = receiver if isinstance(receiver, RangeReceiver) and not manifest.shares else None
            self._land(receiver, manifest, deadline)
            return
        with closing(received(receiver, manifest, Coverage(self._entries), deadline)) as pieces:
            for piece, _ in pieces:
                expected.note(piece)
                data, name = np.frombuffer(piece.data, dtype=np.uint8), piece.tensor
                copy_hashed(data, self._flat[name], piece.offset, running[name], check)

    def _land(self, receiver: LandingReceiver, manifest: Manifest, deadline: Deadline) -> None:
        """Let the source write the bytes here itself; they are hashed as they come, by whoever receives them."""
        memories = {name: flat for name, flat in self._flat.items() if len(flat)}
        digests = LandedDigests({name: LandedDigest(flat, self._running[name]) for name, flat in memories.items()})
        coverage = Coverage(self._entries)
        with closing(receiver.landings(manifest, memories, deadline=deadline, witness=digests)) as landings:
            for landed in landings:
                coverage.add(*landed)
        coverage.check_complete()

    def verify(self, manifest: Manifest, *, checksum: bool, deadline: Deadline | None = None) -> Verified:
        """Prove the bytes as they lie in staging memory. Without `checksum` their digests are only taken.

        What was hashed as it came is not read again. A source that can send again what came wrong is asked to, once.
        """
        deadline = deadline or Deadline.after(math.inf)
        check = partial(deadline.check, f"verifying {manifest.version}")
        digests: dict[str, str] = {}
        for name, flat in self._flat.items():
            running = self._running.pop(name, None) or RunningDigest(self._entries[name])
            digests[name] = running.finish(flat, check)
            check()
        if checksum:
            entries = self._entries if self._expected is None else self._expected.complete(self._entries)
            digests |= self._mended(manifest, entries, digests, deadline, check)
            check_digests(f"version {manifest.version} as received", entries, digests)
        return Verified(arrays=self.arrays, digests=digests)

    def _mended(
        self,
        manifest: Manifest,
        entries: Mapping[str, TensorEntry],
        digests: Mapping[str, str],
        deadline: Deadline,
        check: Check,
    ) -> dict[str, str]:
        """The digests of tensors that came wrong, after parts of them were fetched again."""
        again: dict[str, str] = {}
        mender = self._mender
        if mender is None:
            return again
        for name in [name for name, digest in digests.items() if digest != entries[name].proof]:
            memory, entry = self._flat[name], entries[name]
            file = name if manifest.kind == "delta" else manifest.parts[entry.part].file
            try:
                nbytes = mend(mender, manifest, Range(file, entry.offset, memory), deadline=deadline)
            except (DeadlineExceeded, UpdateCancelled):
                raise
            except WeightcastError as error:  # then it stays wrong, and that is raised
                log.warning("mend failed", version=manifest.version, tensor=name, error=error)
                continue
            again[name] = RunningDigest(entries[name]).finish(memory, check)
            log.warning(
                "tensor mended",
                version=manifest.version,
                tensor=name,
                nbytes=nbytes,
                right=again[name] == entries[name].proof,
            )
        return again

    def seal(self, manifest: Manifest, deadline: Deadline) -> Manifest:
        """The manifest of what was filled in, with all digests: that of a stream is complete only afterwards."""
        return manifest if self._expected is None else self._expected.seal(self._entries, deadline)


@contextmanager
def mapped(
    receiver: MappedReceiver, manifest: Manifest, entries: Mapping[str, TensorEntry], deadline: Deadline
) -> Iterator[dict[str, Bytes]]:
    """The bytes of tensors where they lie, by name; those without any are left out. `SourceFailed` lists what is wrong."""
    wanted = {name: entry for name, entry in entries.items() if entry.nbytes}
    names = wanted.keys() if len(entries) < len(manifest.transfers()) else None
    with receiver.mapped(manifest, deadline=deadline, names=names) as arrays:
        _check_given(wanted, arrays, receiver.url)
        yield {name: flat_bytes(arrays[name]) for name in wanted}


def provided(entries: Mapping[str, TensorEntry], arrays: Mapping[str, Array], url: str) -> Staging:
    """Tensors that a provider has in memory, as they are. `SourceFailed` lists all that differ from their entries."""
    _check_given(entries, arrays, url, writeable=True)
    return Staging(entries, {name: arrays[name] for name in entries})


def _check_given(
    entries: Mapping[str, TensorEntry], arrays: Mapping[str, Array], url: str, *, writeable: bool = False
) -> None:
    wrong = []
    for name, entry in entries.items():
        array = arrays.get(name)
        if array is None:
            wrong.append(f"{name} is missing")
        elif (array.dtype, array.shape) != (entry.dtype.numpy, entry.shape):
            wrong.append(f"{name} is {array.dtype}{list(array.shape)}, not {entry.spec.describe()}")
        elif not array.flags.c_contiguous or (writeable and not array.flags.writeable):
            wrong.append(f"{name} is not contiguous or cannot be written to")
    if wrong:
        raise SourceFailed(f"{url} gave other tensors than its manifest says: {'; '.join(wrong)}.")


def check_digests(where: str, entries: Mapping[str, TensorEntry], found: Mapping[str, str]) -> None:
    """Raise `DigestMismatch` listing every tensor whose digest differs from its entry."""
    wrong = [(name, entry.proof, found[name]) for name, entry in entries.items() if found[name] != entry.proof]
    if wrong:
        raise DigestMismatch(where, wrong)
