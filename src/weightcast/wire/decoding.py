"""Decoding messages, safe in any thread from the first one on, and URLs."""

from __future__ import annotations

import threading
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from weightcast.errors import InvalidInput
from weightcast.tensors.flat import Buffer

_Kind = TypeVar("_Kind")

_lock = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode(data: Buffer | bytes, kind: type[_Kind]) -> _Kind:
    """JSON as a message of this kind. Raises `msgspec.DecodeError` for everything that is none, whatever is wrong with it.

    msgspec looks at a class when it is decoded for the first time, and a second thread that comes upon it meanwhile crashes
    the process (0.22). So that happens under a lock, once.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.get(kind) or _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    try:
        decoded: _Kind = decoder.decode(data)
    except (UnicodeError, RecursionError) as error:  # bytes that are no text, and what is nested too deep
        raise msgspec.DecodeError(str(error)) from error
    return decoded


def is_count(text: str) -> bool:
    """Whether a text is a number of up to 18 digits, which `int` can be given."""
    return text.isascii() and text.isdigit() and len(text) <= 18


def split_url(url: str) -> SplitResult:
    """The parts of a URL. Raises `InvalidInput` where `urlsplit` raises `ValueError`."""
    try:
        return urlsplit(url)
    except ValueError as error:
        raise InvalidInput(f"{url[:200]!r} is not a URL: {error}.") from error
