"""What every transport offers to the side that receives."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from weightcast.clock import Deadline
from weightcast.tensors.flat import Pieces
from weightcast.wire.manifest import Manifest


@runtime_checkable
class Receiver(Protocol):
    """The engine's end of one transport. It knows versions and bytes, not models."""

    url: str

    def newest(self) -> str:
        """The version to take when none is asked for. Raises `VersionNotSet` if the source cannot tell."""

    def manifest(self, version: str, *, deadline: Deadline) -> Manifest:
        """What the version is."""

    def pieces(self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None) -> Pieces:
        """Every byte of the version (or of the named tensors) once, in any order, or raise.

        A piece is borrowed: valid until the next one is asked for. Closing the iterator cancels the transfer. Nothing is
        verified here: whoever writes the bytes somewhere checks them there.
        """

    def close(self) -> None:
        """Release files, sockets, memory and threads. Safe twice, and safe after a failure."""
