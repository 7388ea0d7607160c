"""Where shared memory lies, and how it gets from one process to another. Nothing above this seam knows of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, Protocol

import msgspec

Kind = Literal["memfd", "cuda"]


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """What another process opens a memory by.

    `id` is unique in the process that exported it. `memfd`: the descriptor itself comes over the lifeline, asked for by
    that id. `cuda`: `data` is the IPC handle and `device` the UUID of the GPU, since the numbers of devices differ between
    processes.
    """

    kind: Kind
    id: int
    nbytes: int
    data: bytes = b""
    device: str = ""


# Gives the file descriptor of an exported memory, to be closed by whoever asked.
Descriptor = Callable[[Handle], int]


class Memory(Protocol):
    """Some bytes on a device, seen by at least one other process. Closing it twice is fine."""

    nbytes: int

    def close(self) -> None:
        """Let go of it. Host memory stays mapped for as long as a view of it is in use."""


class Block(Protocol):
    """The next bytes of a tensor, wherever that lies. Valid until the next block of the tensor is asked for."""

    nbytes: int

    def part(self, start: int, stop: int) -> Block:
        """Some of them."""


class Device(Protocol):
    """One kind of memory. Any thread may call; two threads never write to the same bytes."""

    kind: Kind

    def allocate(self, nbytes: int) -> Memory:
        """New memory, every page of it touched, for this process to write to. `StorageFailed` if there is not enough."""

    def export(self, memory: Memory) -> Handle:
        """What other processes open it by. It must live until the last of them has said that it is done."""

    def open(self, handle: Handle, descriptor: Descriptor) -> Memory:
        """The memory that another process exported, to be read only. Raises `SourceFailed` if that cannot be."""

    def blocks(self, name: str, tensor: object) -> Iterator[Block]:
        """The bytes of a tensor in C order, in blocks that fit into a cache. Strided tensors are gathered on the way."""

    def copy(self, block: Block, memory: Memory, offset: int) -> None:
        """Put a block into a memory. It may still be under way when this returns: see `synchronise`."""

    def synchronise(self) -> None:
        """Wait until everything that was copied is there, for other processes too."""

    def read(self, memory: Memory, start: int, stop: int) -> memoryview:
        """Bytes of a memory for the host to read: in place where it can, otherwise a copy that is valid until the next read
        by the same thread.
        """
