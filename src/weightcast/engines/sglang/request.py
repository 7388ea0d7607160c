"""What a caller of SGLang's routes asks for: by a URL, or by a small tensor of bytes."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote

import msgspec

from weightcast.errors import InvalidInput
from weightcast.wire.decoding import decode

FORMAT = "weightcast"
LOADER = "weightcast.engines.sglang.loader.load"


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version (None: the newest of the source), and how to take it.

    `whole` loads every tensor, also those that did not change. `allow_unwritten` takes a version that leaves parameters of
    the model as they are; they are then not part of what is served under its name.
    """

    source: str
    version: str | None = None
    verify_checksum: bool = True
    timeout: float = 180.0
    whole: bool = False
    allow_unwritten: bool = False


def request_from_url(url: str) -> Request:
    """``file:///store#step_7``, ``http://depot:7070#version=step_7&timeout=60``; without a fragment: the newest version."""
    source, _, fragment = url.partition("#")
    if "=" not in fragment:
        return Request(source=source, version=unquote(fragment) or None)
    try:
        fields = dict(parse_qsl(fragment, strict_parsing=True, keep_blank_values=True))
        if fields.get("version") == "":
            raise ValueError("version is empty")
        return msgspec.convert({"source": source, **fields}, Request, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        known = ", ".join(name for name in Request.__struct_fields__ if name != "source")
        raise InvalidInput(
            f"cannot read what {url!r} asks for: {error}. After # goes a version, or some of {known}."
        ) from error


def request_from_bytes(data: bytes) -> Request:
    """What `encode_request` wrote."""
    try:
        return decode(data, Request)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the tensor does not hold a request for a version: {error}.") from error


def encode_request(request: Request) -> bytes:
    """JSON."""
    return msgspec.json.encode(request)
