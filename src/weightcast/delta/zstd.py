"""zstd frames whose decoded size is known beforehand. The only place that compresses."""

from __future__ import annotations

import zstandard

from weightcast.errors import DeltaCorrupt
from weightcast.tensors.flat import Buffer

LEVEL = 1  # measured on real deltas: higher levels gain 1 to 3 % and cost several times as much


def compress(data: Buffer) -> bytes:
    """One frame that records the size of its contents."""
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(data)


def decompress(data: Buffer, nbytes: int, what: str) -> bytes:
    """The contents of a frame, which must have exactly `nbytes`: nothing is reserved before that is checked."""
    try:
        stated = zstandard.frame_content_size(data)
        if stated != nbytes:
            raise DeltaCorrupt(f"{what} would decode to {stated} bytes, not {nbytes}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaCorrupt(f"{what} cannot be decompressed: {error}") from error


def stated_nbytes(data: Buffer, what: str) -> int:
    """The size that a frame says its contents have."""
    try:
        return zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        raise DeltaCorrupt(f"{what} is not a zstd frame: {error}") from error
