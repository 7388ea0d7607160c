"""Tokens into text, one at a time: no half characters come out, and each token costs the same."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_CONTEXT = 4  # tokens before the new one: decoders treat the first token, and some pairs, in a special way


class Detokenizer(Protocol):
    """The text of one answer while its tokens come in."""

    def feed(self, token: int) -> str:
        """The text that this token completes. May be empty: a character can take several tokens."""

    def finish(self) -> str:
        """What is left at the end of the answer. Bytes that are no character come out as U+FFFD."""


class ByteDetokenizer:
    """For byte-level tokenizers, where every token is a string of bytes."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._bytes_of(token))

    def finish(self) -> str:
        """U+FFFD if the answer ends within a character."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other tokenizers: decodes a few tokens with and without the newest, and takes the difference.

    Tokens that stand for one byte (`byte_of` knows them) are put together into characters first; all others are whole text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], byte_of: Callable[[int], bytes | None]) -> None:
        self._decode = decode
        self._byte_of = byte_of
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._context: list[int] = []

    def feed(self, token: int) -> str:
        """The text that this token adds, as far as it is known to be whole."""
        byte = self._byte_of(token)
        tokens = [*self._context, token]
        if byte is not None:
            text = self._bytes.decode(byte)
        else:
            text = self._bytes.decode(b"", final=True) + self._decode(tokens)[len(self._decode(self._context)) :]
        self._context = tokens[-_CONTEXT:]
        return text

    def finish(self) -> str:
        """U+FFFD if the answer ends within a character."""
        return self._bytes.decode(b"", final=True)
