"""What a depot and its clients say to each other about NIXL: where memory lies, and who still reads it.

The bytes themselves are read by NIXL. These messages go over the HTTP of the depot, with its token and its TLS.
"""

from __future__ import annotations

import msgspec

HOST = -1  # the device of host memory


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of registered memory in the process that serves it. `device` is the number of a GPU, or `HOST`."""

    address: int
    nbytes: int
    device: int = HOST


class GrantQuery(msgspec.Struct, frozen=True):
    """Asks to read a version with NIXL."""

    root_digest: str


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Leave to read a version, for `seconds` unless it is renewed.

    `agent` is another one whenever the depot was started anew, and `metadata` is what NIXL needs to reach it. `regions`
    tells where the bytes lie, one stretch after the other: by file, or by tensor where a trainer lends its own.
    """

    grant: str
    agent: str
    metadata: bytes
    seconds: float
    regions: dict[str, tuple[Region, ...]]


class Renewal(msgspec.Struct, frozen=True):
    """A receiver still reads under a grant, from the agent that it was given by."""

    agent: str


class Standing(msgspec.Struct, frozen=True):
    """A grant is still good: all that was read under it is what it was said to be."""

    agent: str
    seconds: float
