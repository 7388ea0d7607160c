"""What every transport offers to the side that receives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from weightcast.clock import Deadline
from weightcast.delta import Delta, State
from weightcast.errors import SourceFailed
from weightcast.tensors.flat import Array, Bytes, Pieces
from weightcast.wire.manifest import Manifest, Packing

DeltaUse = Literal["never", "auto", "always"]


def delta_use(receiver: object) -> DeltaUse:
    """Whether updates build on what a model holds: the option `deltas` of the source. `auto` where it was not given."""
    chosen: DeltaUse = getattr(receiver, "deltas", "auto")
    return chosen


def packing_use(receiver: object) -> Packing:
    """Which packing of a delta is taken where there are both: the option `packing` of the source."""
    chosen: Packing = getattr(receiver, "packing", "gaps")
    return chosen


@runtime_checkable
class Receiver(Protocol):
    """The engine's end of one transport. It knows versions and bytes, not models."""

    url: str

    def newest(self) -> str:
        """The version to take when none is asked for. Raises `VersionNotSet` if the source cannot tell."""

    def manifest(self, version: str, *, deadline: Deadline) -> Manifest:
        """What the version is. Not `sealed` for a live stream: then it is asked for again once all pieces have come."""

    def pieces(self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None) -> Pieces:
        """Every byte of the version (or of the named tensors) once, in any order, or raise.

        A piece is borrowed: valid until the next one is asked for. Closing the iterator cancels the transfer. Nothing is
        verified here: whoever writes the bytes somewhere checks them there.
        """

    def close(self) -> None:
        """Release files, sockets, memory and threads. Safe twice, and safe after a failure."""


@runtime_checkable
class Provider(Receiver, Protocol):
    """A receiver that has worked a version out in memory beforehand: nothing is left to be moved."""

    def arrays(self, manifest: Manifest) -> Mapping[str, Array]:
        """The tensors of a full version, to be kept or changed by the caller."""

    def changes(self, manifest: Manifest) -> Delta:
        """The delta that leads from the base of a delta version to it."""


@runtime_checkable
class MappedReceiver(Receiver, Protocol):
    """A receiver whose full versions may lie in memory that other processes share: nothing has to be sent, only copied.

    It is connected and has memory mapped, so it is worth keeping from one update to the next. It must be dropped after an
    error: that is how it lets go of everything.
    """

    def holds(self, manifest: Manifest) -> bool:
        """Whether `mapped` can give the version. If not it is a live stream, which comes once, in pieces."""

    def mapped(
        self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None
    ) -> AbstractContextManager[Mapping[str, Array]]:
        """The tensors of a version where they lie, in any order and by any number of threads, to be read and never written.

        The arrays must not be used after the context. Leaving it without an error asks the source whether it kept them all
        the time, and raises `SourceFailed` if not: what was read may then be of another version.
        """


@runtime_checkable
class StateReceiver(Receiver, Protocol):
    """A receiver that can read any range of a version, deltas applied: what ranks that hold only slices need."""

    def opened_state(self, manifest: Manifest, *, deadline: Deadline) -> AbstractContextManager[State]:
        """The whole state that a version is, read as it is asked for. Nothing is proved by it."""


class Landed(NamedTuple):
    """Bytes of a tensor, or of a box, that lie now where they were wanted."""

    name: str
    offset: int
    nbytes: int


Follow = Callable[[memoryview], object]


class Witness:
    """Looks at bytes as they land; this one at none. Any number of threads may call it."""

    def follow(self, name: str, offset: int) -> Follow | None:  # noqa: ARG002 - what others need
        """What the thread that receives the bytes of a tensor from `offset` on has to call with all of them, in order and
        chunk by chunk, while they are in its cache. None if it does not matter.
        """
        return None

    def landed(self, landed: Landed, *, followed: bool = False) -> None:
        """Bytes are there, all of which were followed, or none."""


UNSEEN = Witness()


@runtime_checkable
class LandingReceiver(Receiver, Protocol):
    """A receiver that writes bytes straight to where the caller wants them, in any order, several at a time."""

    def landings(
        self, manifest: Manifest, memories: Mapping[str, Bytes], *, deadline: Deadline, witness: Witness = UNSEEN
    ) -> Generator[Landed, None, None]:
        """Fill each memory with the bytes of the transfer of that name (a tensor's, or the payload's of a delta).

        Every byte is told once, when it is there; nothing is verified. The iterator ends when all are, or raises. Closing it
        cancels the rest. The `witness` sees the same bytes before they are told, in the threads that receive them: whoever
        hashes them there, while they are in the cache, reads them for nothing.

        As long as anything may still be written to a memory, also after an error, the receiver keeps a reference to it: so
        memory that nobody else refers to can be used again as soon as the receiver lets go of it.
        """


class Range(NamedTuple):
    """Bytes of a file of a version, from `start` on, and the memory that they go to."""

    file: str
    start: int
    memory: Bytes


@runtime_checkable
class RangeReceiver(Receiver, Protocol):
    """A receiver that can fetch any range of any file of a version."""

    def ranges(self, manifest: Manifest, wanted: Sequence[Range], *, deadline: Deadline) -> Generator[int, None, None]:
        """Fill each memory; tells the index of each that is there. Nothing is verified: see `pieces.proved_ranges`.

        Memory is kept referred to as by `landings`.
        """


@runtime_checkable
class MendingReceiver(RangeReceiver, Protocol):
    """A receiver with several sources of the same bytes."""

    def doubt(self, file: str, start: int, stop: int) -> None:
        """Bytes of a file came wrong: when they are asked for again, they come from somebody else if there is anybody."""


class FilesFailed(SourceFailed):
    """Some files of a version cannot be had, and others can."""

    def __init__(self, message: str, files: Collection[str]) -> None:
        self.files = frozenset(files)
        super().__init__(message)


@runtime_checkable
class AcknowledgingReceiver(Receiver, Protocol):
    """A receiver whose source wants to know who serves what: it keeps the bases that deltas are made on."""

    def acknowledge(self, manifest: Manifest, receiver: str, *, deadline: Deadline) -> None:
        """Tell that `receiver` serves a version now. A source that cannot be reached is no error: it is only logged."""
