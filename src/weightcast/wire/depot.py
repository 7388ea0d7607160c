"""What a depot and its clients say to each other over HTTP. docs/depot.md describes every request and answer.

Bodies are JSON. Bytes of versions travel as they are, as ranges of the files that a version is made of.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from weightcast.tensors.digest import bytes_digest
from weightcast.wire.manifest import FileListing, Manifest, is_digest

PREFIX = "/v1"  # of what a depot answers beside files, which have the paths that they have in a store

# Headers by which the log lines of both ends can be put together.
ID_HEADERS = {"request_id": "X-Request-Id", "update_id": "Weightcast-Update-Id"}


class Failure(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success: the code of an error of ours, and its message."""

    code: str
    message: str


class Newest(msgspec.Struct, frozen=True):
    """The version to take where none is asked for."""

    version: str
    sequence: int
    root_digest: str


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A version that a depot has. One that is not `complete` is on its way here, and what has come can be had.

    Where several publishers share it, `shares` says how many, and the rest is said of the share that is here.
    """

    version: str
    sequence: int
    step: int
    kind: Literal["full", "delta"]
    root_digest: str
    nbytes: int
    base: str | None = None
    complete: bool = True
    shares: int = 1


class Catalogue(msgspec.Struct, frozen=True):
    """Everything that a depot has, in the order of publication."""

    newest: str | None
    versions: tuple[Offer, ...]


class Ack(msgspec.Struct, frozen=True):
    """A receiver tells which version it serves now; an empty version: it serves none any more."""

    receiver: str
    version: str
    root_digest: str


class Acknowledged(msgspec.Struct, frozen=True):
    """A receiver that a depot knows of, and how long ago it was heard of."""

    receiver: str
    version: str
    root_digest: str
    age_s: float


def file_tag(manifest: Manifest | FileListing, file: str) -> str:
    """The ETag of a file: the same bytes have the same tag at every depot. Empty if the manifest does not list it."""
    entry = manifest.listed_files.get(file)
    if entry is None:
        return ""
    if manifest.piece_nbytes:
        return f'"{bytes_digest(entry.pieces)}/{entry.nbytes}"'
    return f'"{manifest.root_digest}/{file}/{getattr(entry, "header_digest", "")}"'


def is_tag(tag: str) -> bool:
    """Whether a tag was made by `file_tag`. Other servers of files have tags of their own."""
    return is_digest(tag.strip('"').partition("/")[0])
