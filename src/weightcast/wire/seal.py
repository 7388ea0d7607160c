"""JSON whose first field is a digest over the file itself, so that a flipped byte anywhere is noticed."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from weightcast.errors import AnyPath, ManifestCorrupt, UnsupportedFormat
from weightcast.tensors.digest import DEFAULT, Hasher, bytes_digest
from weightcast.wire.decoding import decode

_NONE = f"{DEFAULT}:{'0' * 32}".encode()
_START = b'{"seal":"'
_END = len(_START) + len(_NONE)

_Message = TypeVar("_Message", bound=msgspec.Struct)


class _Head(msgspec.Struct):
    """The one field that is read before the format is known."""

    format: int = 1


def seal(message: msgspec.Struct) -> bytes:
    """The bytes of the file: one line, the seal first."""
    unsealed = _START + _NONE + b'",' + msgspec.json.encode(message)[1:] + b"\n"
    return unsealed.replace(_NONE, bytes_digest(unsealed).encode(), 1)


def unseal(data: bytes, path: AnyPath, kind: type[_Message], *, newest: int, oldest: int = 1) -> _Message:
    """Read what `seal` wrote. `path` is only for messages.

    Raises `ManifestCorrupt` if a byte was changed or a field is wrong, `UnsupportedFormat` for a format above `newest` or
    below `oldest`.
    """
    if not data.startswith(_START):
        raise ManifestCorrupt(path, "it does not start with its seal")
    hasher = Hasher(DEFAULT)
    for stretch in (_START, _NONE, data[_END:]):
        hasher.update(stretch)
    if data[len(_START) : _END] != hasher.digest().encode():
        raise ManifestCorrupt(path, "its bytes do not match its seal, so it was changed after it was written")
    try:
        head = decode(data, _Head)
        if head.format > newest:
            raise UnsupportedFormat(
                f"manifest {path} has format {head.format}; this release reads up to {newest}. Upgrade weightcast."
            )
        if head.format < oldest:
            raise UnsupportedFormat(
                f"manifest {path} has format {head.format}; this release needs {oldest} or later. Upgrade what wrote it."
            )
        return decode(data, kind)
    except msgspec.MsgspecError as error:
        raise ManifestCorrupt(path, str(error)) from error
