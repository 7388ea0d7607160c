"""What a depot serves: versions that lie in files, or in a publisher's own memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from weightcast.clock import Deadline
from weightcast.depot.exchange import FileRange
from weightcast.wire.depot import Newest, Offer
from weightcast.wire.manifest import FileListing, Manifest


class Holding(Protocol):
    """One version that can be read. It stays as it is while it is held, whatever happens to the shelf."""

    @property
    def manifest(self) -> Manifest | FileListing:
        """What the version is, or what its manifest says of its files."""

    @property
    def encoded(self) -> bytes:
        """The manifest as it is sent: sealed."""

    @property
    def files(self) -> Mapping[str, int]:
        """The files that the version is made of, parts, payload and others, and their sizes."""

    def views(self, file: str, start: int, stop: int, *, deadline: Deadline) -> list[memoryview]:
        """The bytes of a range: where they lie in memory, or read from their file. Waits for bytes on their way here.

        Raises `NotFound` for a file that is not of the version, `InvalidInput` for a range that it does not have.
        """

    def sendable(self, file: str, start: int, stop: int, *, deadline: Deadline) -> Iterable[memoryview | FileRange]:
        """The same bytes for a socket, those that are there as soon as they are. Files are not read. Raises what `views`
        does.
        """


class Shelf(Protocol):
    """All versions of a depot. Any thread may call."""

    def offers(self) -> list[Offer]:
        """What there is, in the order of publication."""

    def newest(self) -> Newest | None:
        """The version to take where none is asked for."""

    def wait_newer(self, after: str, *, deadline: Deadline) -> Newest | None:
        """The newest version once it is another than `after`; None if it is not before the deadline."""

    def holding(self, version: str) -> AbstractContextManager[Holding]:
        """A version, kept for as long as the context lasts. Raises `VersionNotFound`."""

    def close(self) -> None:
        """Let go of everything. Safe twice."""
