"""What every transport offers to the side that receives."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from weightcast.clock import Deadline
from weightcast.delta import Delta, State
from weightcast.tensors.flat import Array, Pieces
from weightcast.wire.manifest import Manifest


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

    def folded(self, deltas: Sequence[Manifest], *, deadline: Deadline) -> Delta:
        """Delta versions that follow one another as one delta in its sparse form, decoded along the base they start on."""
