"""The frames of dense and raw chunks: a step for every lane of one block."""

from __future__ import annotations

import struct

import numpy as np

from weightcast.delta.zstd import compress, decompress
from weightcast.errors import DeltaCorrupt
from weightcast.tensors.lanes import SIGNED, UNSIGNED, Steps, from_zigzag, to_zigzag


def pack_planes(steps: Steps) -> bytes:
    """Zigzag steps, split into their lowest bytes, second bytes and so on, each plane compressed."""
    width = steps.itemsize
    zigzag = to_zigzag(steps).view(np.uint8).reshape(-1, width)
    planes = [compress(np.ascontiguousarray(zigzag[:, place]).data) for place in range(width)]
    return b"".join([struct.pack(f"<{width}I", *map(len, planes)), *planes])


def unpack_planes(frame: memoryview, *, lanes: int, width: int) -> Steps:
    """The opposite of `pack_planes`."""
    head = struct.Struct(f"<{width}I")
    if len(frame) < head.size or head.size + sum(head.unpack_from(frame)) != len(frame):
        raise DeltaCorrupt(f"the planes of a dense chunk do not fill its {len(frame)} bytes")
    zigzag = np.empty((lanes, width), dtype=np.uint8)
    start = head.size
    for place, size in enumerate(head.unpack_from(frame)):
        plane = decompress(frame[start : start + size], lanes, f"plane {place} of a dense chunk")
        zigzag[:, place] = np.frombuffer(plane, dtype=np.uint8)
        start += size
    return from_zigzag(zigzag.reshape(-1).view(UNSIGNED[width]))


def pack_raw(steps: Steps) -> bytes:
    """The steps as they are."""
    return steps.tobytes()


def unpack_raw(frame: memoryview, *, lanes: int, width: int) -> Steps:
    """The opposite of `pack_raw`; a copy, as the frame is the caller's to reuse."""
    if len(frame) != lanes * width:
        raise DeltaCorrupt(f"a raw chunk of {lanes} lanes has {len(frame)} bytes, not {lanes * width}")
    return np.frombuffer(frame, dtype=SIGNED[width]).copy()
