"""zstd frames whose decoded size is known beforehand. The only place that compresses."""

from __future__ import annotations

import threading
from functools import cache

import zstandard

from weightcast.errors import DeltaCorrupt
from weightcast.tensors.flat import Buffer

MAX_RATIO = 1 << 15  # a block of a zstd frame takes at least 4 bytes and decodes to at most 128 KiB
MAX_WINDOW = 1 << 23  # of a frame that is not decoded in one go, which is a damaged one
LEVEL = 1  # measured on real deltas: higher levels gain 1 to 3 % and cost several times as much


class _Contexts(threading.local):
    """Those of one thread: to make them takes longer than to use them on a small frame."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)


@cache
def _own() -> _Contexts:
    return _Contexts()


def compress(data: Buffer) -> bytes:
    """One frame that records the size of its contents."""
    return _own().compressor.compress(data)


def decompress(data: Buffer, nbytes: int, what: str) -> bytes:
    """The contents of a frame, which must have exactly `nbytes`: nothing is reserved before that is checked."""
    stated = stated_nbytes(data, what)
    if stated != nbytes:
        raise DeltaCorrupt(f"{what} would decode to {stated} bytes, not {nbytes}")
    if nbytes > MAX_RATIO * len(data):
        raise DeltaCorrupt(f"{what} has {len(data)} bytes, which cannot decode to {nbytes}")
    job = _own().decompressor
    try:
        if nbytes:
            return job.decompress(data, max_output_size=nbytes, allow_extra_data=False)
        empty = job.decompressobj()  # the call above does not look at what follows the head of an empty frame
        if empty.decompress(data) or not empty.eof or empty.unused_data:
            raise DeltaCorrupt(f"{what} is not one empty frame")
        return b""
    except zstandard.ZstdError as error:
        raise DeltaCorrupt(f"{what} cannot be decompressed: {error}") from error


def stated_nbytes(data: Buffer, what: str) -> int:
    """The size that a frame says its contents have."""
    try:
        stated = zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        raise DeltaCorrupt(f"{what} is not a zstd frame: {error}") from error
    if stated < 0 or bytes(data[:4]) != zstandard.FRAME_HEADER:  # a frame to skip would pass for an empty one
        raise DeltaCorrupt(f"{what} does not say how large its contents are")
    return stated
