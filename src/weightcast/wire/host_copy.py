"""What processes of one host tell each other about versions that one of them holds in memory for all."""

from __future__ import annotations

import msgspec


class StageAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Stage a version (None: the newest of the source), and tell where it lies. `timeout` is in seconds."""

    source: str
    version: str | None
    verify_checksum: bool
    timeout: float


class Lying(msgspec.Struct, frozen=True, kw_only=True):
    """Where a tensor lies: the slab, by its place in the list, and the offset in it."""

    slab: int
    offset: int


class StageTold(msgspec.Struct, frozen=True, kw_only=True):
    """A version that lies verified in shared memory, and the one that was committed before it. A `code` is that of an error.

    `slabs` are the sizes of the pieces of shared memory whose descriptors come with the message, in their order. Two more
    messages follow unless it is an error: the sealed manifests of both versions, nothing for one that is not there. The
    memory of the first is left alone until whoever asked hangs up. If it was written over the other one, `former` is empty,
    and any byte that the asker sends is answered with the journal of what was written.
    """

    code: str | None = None
    message: str = ""
    slabs: tuple[int, ...] = ()
    tensors: dict[str, Lying] = {}
    former: dict[str, Lying] = {}
