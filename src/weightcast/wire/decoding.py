"""Decoding messages, safe in any thread from the first one on."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

from weightcast.tensors.flat import Buffer

_Kind = TypeVar("_Kind")

_lock = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode(data: Buffer | bytes, kind: type[_Kind]) -> _Kind:
    """JSON as a message of this kind. Raises what msgspec does.

    msgspec looks at a class when it is decoded for the first time, and a second thread that comes upon it meanwhile crashes
    the process (0.22). So that happens under a lock, once.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.get(kind) or _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    decoded: _Kind = decoder.decode(data)
    return decoded
