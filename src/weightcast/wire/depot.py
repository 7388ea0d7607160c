"""What a depot and its clients say to each other over HTTP. docs/depot.md describes every request and answer.

Bodies are JSON. Bytes of versions travel as they are, as ranges of the files that a version is made of.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from weightcast.tensors.boxes import Box, Held
from weightcast.wire.manifest import Manifest

PREFIX = "/v1"
PIECE_NBYTES = 4 << 20  # what a relay checks and passes on at once

# Headers of our own, and those by which the log lines of both ends can be put together.
ID_HEADERS = {"request_id": "X-Request-Id", "update_id": "Weightcast-Update-Id"}
QUERY_HEADER = "Weightcast-Query-Digest"  # of the body of a request: if it was changed on the way, it is another question
DIGESTS_HEADER = "Weightcast-Digests-Nbytes"  # how many bytes at the end of an answer are digests of those before


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


class PieceDigests(msgspec.Struct, frozen=True):
    """The digests of a file in pieces of `piece_nbytes`, the last one shorter."""

    algorithm: str
    piece_nbytes: int
    digests: tuple[str, ...]


class BoxOf(msgspec.Struct, frozen=True):
    """A box of a tensor. Its bytes are little-endian, in C order."""

    tensor: str
    box: Box


class BoxQuery(msgspec.Struct, frozen=True):
    """Asks for the bytes of boxes of a version, one after the other, and behind them for the digest of each."""

    root_digest: str
    boxes: tuple[BoxOf, ...]


class HeldQuery(msgspec.Struct, frozen=True):
    """Asks for the digests that parameters of a rank, cut from a version, must have."""

    root_digest: str
    held: tuple[Held, ...]


class HeldDigests(msgspec.Struct, frozen=True):
    """The digests by the names of the parameters."""

    digests: dict[str, str]


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


def file_tag(manifest: Manifest, file: str) -> str:
    """The ETag of a file of a version: the same bytes have the same tag at every depot.

    The root digest says which tensors a version has, and the digest of its header how they lie in a part: the same state may
    have been published twice, in other parts or in another order.
    """
    header = next((part.header_digest for part in manifest.parts if part.file == file), "")
    return f'"{manifest.root_digest}/{file}/{header}"'
