"""Which bytes of which files go to which memories, and in which order they are told."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from weightcast.errors import InvalidInput
from weightcast.wire.manifest import Manifest, TensorEntry

SMALL_NBYTES = 128 << 10
MAX_GROUP = 64


class Segment(NamedTuple):
    """Bytes of a tensor that lie together in a file, from `at` on, and in the memory that they go to."""

    at: int
    tensor: str
    offset: int
    memory: memoryview


class Arrived(NamedTuple):
    """Bytes of a tensor that lie in their memory now. `stretch` is what they came as part of."""

    tensor: str
    offset: int
    data: memoryview
    stretch: Stretch


@dataclass(frozen=True, eq=False)
class Stretch:
    """Segments that follow one another in a file without a gap, so that any range of them is one request."""

    file: str
    segments: tuple[Segment, ...]
    _starts: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", [segment.at for segment in self.segments])

    @property
    def start(self) -> int:
        """Where it begins in its file."""
        return self._starts[0]

    @property
    def stop(self) -> int:
        """Where it ends."""
        last = self.segments[-1]
        return last.at + len(last.memory)

    def between(self, start: int, stop: int) -> Iterator[Arrived]:
        """The parts of segments that lie in a range of the file."""
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            segment = self.segments[index]
            skip = start - segment.at
            data = segment.memory[skip : skip + stop - start]
            yield Arrived(segment.tensor, segment.offset + skip, data, self)
            start, index = start + len(data), index + 1

    def groups(self, start: int, stop: int) -> Iterator[list[Arrived]]:
        """The same, to be received at once: a large part by itself, and small ones together."""
        group: list[Arrived] = []
        for part in self.between(start, stop):
            if group and (len(part.data) > SMALL_NBYTES or len(group) == MAX_GROUP):
                yield group
                group = []
            group.append(part)
            if len(part.data) > SMALL_NBYTES:
                yield group
                group = []
        if group:
            yield group

    def cut(self, start: int, stop: int, nbytes: int) -> int:
        """Where to end a range of about `nbytes`: between two tensors if possible, so that each comes by one connection."""
        end = min(start + nbytes, stop)
        if end < stop:
            boundary = self._starts[bisect_right(self._starts, end) - 1]
            if boundary - start >= nbytes // 2:
                return boundary
        return end


class InOrder:
    """Holds back what comes before the bytes in front of it: whoever hashes a tensor needs its bytes in order."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._early: dict[str, dict[int, Arrived]] = {}

    def add(self, arrived: Arrived) -> Iterator[Arrived]:
        """All that can be told with this, each tensor from its first byte on."""
        name = arrived.tensor
        early = self._early.setdefault(name, {})
        early[arrived.offset] = arrived
        at = self._next.get(name, 0)
        while (found := early.pop(at, None)) is not None:
            at += len(found.data)
            self._next[name] = at
            yield found
        if not early:
            del self._early[name]


class Place(NamedTuple):
    """Where the bytes of a tensor lie."""

    file: str
    entry: TensorEntry


def places(manifest: Manifest, names: Iterable[str] | None = None) -> list[Place]:
    """The tensors that have bytes, all or the named ones, in the order of the files. Raises `InvalidInput` if one is not
    of the version.
    """
    transfers = manifest.transfers()
    wanted = transfers.keys() if names is None else set(names)
    unknown = sorted(wanted - transfers.keys())
    if unknown:
        raise InvalidInput(f"version {manifest.version} has no {', '.join(unknown)}.")
    if manifest.kind == "delta":
        found = [Place(name, transfers[name]) for name in wanted]
    else:
        found = [Place(manifest.parts[transfers[name].part].file, transfers[name]) for name in wanted]
    order = {part.file: index for index, part in enumerate(manifest.parts)}
    found.sort(key=lambda place: (order.get(place.file, 0), place.entry.offset))
    return [place for place in found if place.entry.nbytes]


def stretches(segments: Iterable[tuple[str, Segment]]) -> list[Stretch]:
    """Segments with their files, in order, with those that are adjacent put together."""
    runs: list[tuple[str, list[Segment]]] = []
    end = 0
    for file, segment in segments:
        if runs and runs[-1][0] == file and end == segment.at:
            runs[-1][1].append(segment)
        else:
            runs.append((file, [segment]))
        end = segment.at + len(segment.memory)
    return [Stretch(file, tuple(run)) for file, run in runs]


def landing_stretches(manifest: Manifest, memories: Mapping[str, memoryview]) -> list[Stretch]:
    """The stretches that fill the memory of each tensor. Raises `InvalidInput` listing all memories that do not fit."""
    wanted = places(manifest, memories)
    sizes = {name: entry.nbytes for name, entry in manifest.transfers().items()}
    wrong = [
        f"{name} has {sizes[name]} bytes, and the memory {memory.nbytes}"
        for name, memory in memories.items()
        if memory.nbytes != sizes[name]
    ]
    wrong += [
        f"the memory for {name} is not flat, contiguous bytes that can be written to"
        for name, memory in memories.items()
        if memory.nbytes and (memory.readonly or memory.ndim != 1 or memory.itemsize != 1 or not memory.c_contiguous)
    ]
    if wrong:
        raise InvalidInput(f"version {manifest.version} cannot be received: {'; '.join(wrong)}.")
    return stretches(
        (place.file, Segment(place.entry.offset, place.entry.name, 0, memories[place.entry.name])) for place in wanted
    )
