"""Boxes of tensors as ranges of the files that a version is made of: of parts, or of what several publishers share."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from math import prod
from typing import NamedTuple, Protocol

import numpy as np

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import DigestMismatch, InvalidInput, SourceFailed, WeightcastError, rebuilt
from weightcast.tensors.box_plan import Fetch, Wanted, chunks, moved, plan
from weightcast.tensors.boxes import Box, box_of
from weightcast.tensors.flat import Array, Bytes, Piece, Pieces, flat_bytes
from weightcast.transports.base import FilesFailed, Landed, Range, RangeReceiver, Witness
from weightcast.transports.pieces import PieceMap, WrongPieces, proved_ranges
from weightcast.transports.prefetch import prefetched, ring
from weightcast.wire.manifest import Manifest, TensorEntry

log = logs.get(__name__)

BLOCK_NBYTES = 8 << 20  # read at a time where bytes do not go straight to their place
WINDOW_NBYTES = 64 << 20  # of memory beside that where bytes are wanted
_HOLE_NBYTES = 256 << 10  # read for nothing in a row, rather than to read each row by itself


class BoxTaker(Protocol):
    """Somebody who wants a box of a tensor."""

    tensor: str
    box: Box

    def memory(self, part: Box) -> Bytes | None:
        """The memory where the bytes of a part of the box, in C order, go as they are; None if they must be placed."""

    def place(self, part: Box, array: Array) -> None:
        """A part of the box is here: in its memory, if there is one. The array is valid only during the call."""


class MemoryTaker:
    """Wants a box of a tensor in a memory."""

    def __init__(self, entry: TensorEntry, box: Box, memory: Bytes) -> None:
        self.tensor, self.box, self.bytes = entry.name, box, memory
        nbytes = prod(box.shape) * entry.dtype.itemsize
        if len(memory) != nbytes:
            raise InvalidInput(f"{box} of {entry.name!r} has {nbytes} bytes, and its memory {len(memory)}.")
        self._array = memory.view(f"u{entry.dtype.itemsize}").reshape(box.shape)

    def memory(self, part: Box) -> Bytes | None:
        """Where a part lies in the memory, if it lies there in one piece."""
        there = box_of(self._array, moved(part, self.box.start))
        return flat_bytes(there) if there.flags.c_contiguous else None

    def place(self, part: Box, array: Array) -> None:
        """Copy a part that does not lie there yet."""
        there = box_of(self._array, moved(part, self.box.start))
        if there.ctypes.data != array.ctypes.data:
            there[...] = array.view(there.dtype)


class _Block(NamedTuple):
    """Bytes of a file that have a part of a box: `around` is the box of all elements that they are."""

    taker: int
    part: Box
    around: Box
    file: str
    start: int
    nbytes: int


def fetch_boxes(
    receiver: RangeReceiver, manifest: Manifest, takers: Sequence[BoxTaker], *, proved: bool, deadline: Deadline
) -> Generator[int, None, None]:
    """Give each taker its box of a full version; tells the index of each that has all of it.

    `proved`: every byte is compared with the digests of the manifest before it counts. What several publishers hold comes
    from all of them in equal parts, and from the others if one fails. Memory: that of the takers, and about
    `WINDOW_NBYTES`; in format 1 also that of the tensors that are cut.
    """
    entries, pieces = manifest.by_name(), PieceMap(manifest)
    failed: dict[str, WeightcastError] = {}
    coming = {index: prod(taker.box.shape) for index, taker in enumerate(takers)}  # elements that are not there
    yield from (index for index, elements in coming.items() if not elements)
    while coming := {index: prod(takers[index].box.shape) for index, elements in coming.items() if elements}:
        blocks = _planned(manifest, {index: takers[index] for index in coming}, failed)
        try:
            for window in _windows(blocks, takers, pieces, apart=bool(manifest.shares)):
                ranges = [Range(one.file, one.start, _memory(one, takers)) for one in window]
                told = (
                    proved_ranges(receiver, manifest, ranges, deadline=deadline, pieces=pieces)
                    if proved
                    else receiver.ranges(manifest, ranges, deadline=deadline)
                )
                with closing(told):
                    for number in told:
                        one, memory = window[number], ranges[number].memory
                        taker = takers[one.taker]
                        array = memory.view(entries[taker.tensor].dtype.numpy).reshape(one.around.shape)
                        taker.place(one.part, box_of(array, moved(one.part, one.around.start)))
                        coming[one.taker] -= prod(one.part.shape)
                        if coming[one.taker] == 0:
                            yield one.taker
            if any(coming.values()):
                raise SourceFailed(f"{receiver.url} ended early: not all boxes of {manifest.version} came.")
        except (FilesFailed, WrongPieces) as error:
            if not manifest.shares or not error.files - failed.keys():
                raise
            log.warning("share failed", version=manifest.version, files=sorted(error.files), url=receiver.url, error=error)
            told_of = rebuilt(error.code, str(error))  # what was raised knows the frames that it passed, and so the memories
            failed |= dict.fromkeys(error.files, told_of)


def box_landings(
    receiver: RangeReceiver, manifest: Manifest, memories: Mapping[str, Bytes], *, deadline: Deadline, witness: Witness
) -> Generator[Landed, None, None]:
    """Fill each memory with the tensor of that name. Tells of a tensor when all of it is there, proved."""
    entries = manifest.by_name()
    takers = [MemoryTaker(entries[name], Box.whole(entries[name].shape), memory) for name, memory in memories.items()]
    with closing(fetch_boxes(receiver, manifest, takers, proved=True, deadline=deadline)) as told:
        for index in told:
            landed = Landed(takers[index].tensor, 0, entries[takers[index].tensor].nbytes)
            if landed.nbytes:
                witness.landed(landed)
                yield landed


def box_pieces(
    receiver: RangeReceiver,
    manifest: Manifest,
    names: Collection[str] | None,
    *,
    bucket_nbytes: int,
    prefetch: int,
    deadline: Deadline,
) -> Pieces:
    """Every byte of a full version (or of the named tensors) once, proved. Memory: `prefetch` + 2 buckets."""
    chosen = [entry for entry in manifest.tensors if names is None or entry.name in names]

    def produce() -> Pieces:
        buckets = ring(bucket_nbytes, prefetch)
        for number, bucket in enumerate(_buckets(chosen, bucket_nbytes)):
            memory = np.frombuffer(buckets[number % len(buckets)], dtype=np.uint8)
            takers, starts, at = [], [], 0
            for entry, box, start, nbytes in bucket:
                takers.append(MemoryTaker(entry, box, memory[at : at + nbytes]))
                starts.append(start)
                at += nbytes
            with closing(fetch_boxes(receiver, manifest, takers, proved=True, deadline=deadline)) as told:
                for index in told:
                    yield Piece(takers[index].tensor, starts[index], takers[index].bytes.data)

    return prefetched(produce, deadline=deadline, what=f"receiving {manifest.version} from {receiver.url}", depth=prefetch)


def _buckets(entries: Sequence[TensorEntry], nbytes: int) -> Iterator[list[tuple[TensorEntry, Box, int, int]]]:
    """All bytes of tensors in boxes that lie in one piece, as many together as fit into a bucket; with their offsets."""
    bucket: list[tuple[TensorEntry, Box, int, int]] = []
    room = nbytes
    for entry in entries:
        at = 0
        for box in chunks(Box.whole(entry.shape), entry.dtype.itemsize, nbytes):
            size = prod(box.shape) * entry.dtype.itemsize
            if size == 0:
                continue
            if size > room:
                yield bucket
                bucket, room = [], nbytes
            bucket.append((entry, box, at, size))
            at, room = at + size, room - size
    if bucket:
        yield bucket


def _planned(
    manifest: Manifest, takers: Mapping[int, BoxTaker], failed: Mapping[str, WeightcastError]
) -> list[_Block]:  # fmt: skip
    """What to read for all boxes, in the order in which it lies. Raises if some of it lies only in files that failed."""
    entries, numbers = manifest.by_name(), list(takers)
    wanted = [Wanted(one.tensor, one.box, entries[one.tensor].dtype.itemsize) for one in takers.values()]
    held = {one.tensor: manifest.places(entries[one.tensor]) for one in takers.values()}
    fetches, lost = plan(wanted, held, without=failed)
    if lost:
        files = sorted({place.file for fetch in lost for place in fetch.places})
        names = sorted({wanted[fetch.wanted].tensor for fetch in lost})
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        error = failed[files[0]]
        if isinstance(error, DigestMismatch):
            raise rebuilt(error.code, str(error))
        raise SourceFailed(
            f"{', '.join(files)} failed, and no other publisher holds these boxes of {listed}: {error}"
        ) from error
    blocks = [
        one
        for fetch in fetches
        for one in _blocks(fetch, entries[wanted[fetch.wanted].tensor], numbers[fetch.wanted], takers[numbers[fetch.wanted]])
    ]
    return sorted(blocks, key=lambda one: (one.file, one.start))


def _blocks(fetch: Fetch, entry: TensorEntry, number: int, taker: BoxTaker) -> Iterator[_Block]:
    """What to read for a box: it lies in one that is held."""
    shape, width, place = fetch.held.shape, entry.dtype.itemsize, fetch.places[0]
    inside = moved(fetch.box, fetch.held.start)
    for part, around in _stretches(shape, inside, width, whole=taker.memory(fetch.box) is not None):
        first = sum(start * prod(shape[axis + 1 :]) for axis, start in enumerate(around.start))
        yield _Block(
            number,
            _back(part, fetch.held.start),
            _back(around, fetch.held.start),
            place.file,
            place.offset + first * width,
            prod(around.shape) * width,
        )


def _back(box: Box, origin: tuple[int, ...]) -> Box:
    return Box(tuple(start + zero for start, zero in zip(box.start, origin, strict=True)), box.shape)


def _stretches(shape: tuple[int, ...], box: Box, width: int, *, whole: bool) -> Iterator[tuple[Box, Box]]:
    """A box in parts, in C order, each with a box around it whose elements lie one after the other: at most a block.

    Whole rows are read around a part of rows, unless that would read much more than is wanted of each. `whole`: what lies
    in one piece need not be divided.
    """
    lead = next((axis for axis, size in enumerate(box.shape) if size > 1), None)
    if lead is None or (whole and box.shape[lead + 1 :] == shape[lead + 1 :]):
        yield box, box
        return
    row, used = prod(shape[lead + 1 :]) * width, prod(box.shape[lead + 1 :]) * width
    apart = row - used > _HOLE_NBYTES
    step = 1 if apart else max(1, BLOCK_NBYTES // row)
    for at in range(0, box.shape[lead], step):
        start, size = list(box.start), list(box.shape)
        start[lead], size[lead] = box.start[lead] + at, min(step, box.shape[lead] - at)
        part = Box(tuple(start), tuple(size))
        if apart or row > BLOCK_NBYTES:
            yield from _stretches(shape, part, width, whole=whole)
        else:
            inner = len(box.shape) - lead - 1
            yield part, Box((*start[: lead + 1], *[0] * inner), (*size[: lead + 1], *shape[lead + 1 :]))


def _is_direct(one: _Block, takers: Sequence[BoxTaker]) -> bool:
    return one.part == one.around and takers[one.taker].memory(one.part) is not None


def _memory(one: _Block, takers: Sequence[BoxTaker]) -> Bytes:
    own = takers[one.taker].memory(one.part) if one.part == one.around else None
    return np.empty(one.nbytes, dtype=np.uint8) if own is None else own


def _windows(
    blocks: Sequence[_Block], takers: Sequence[BoxTaker], pieces: PieceMap, *, apart: bool
) -> Iterator[list[_Block]]:
    """Blocks that are read together, so that what does not go straight to its place fits into `WINDOW_NBYTES`.

    `apart`: the files are read from different hosts, all of them at the same time.
    """
    queues: dict[str, deque[_Block]] = defaultdict(deque)
    for one in blocks:
        queues[one.file if apart else ""].append(one)
    room = WINDOW_NBYTES // max(1, len(queues))
    while any(queues.values()):
        window: list[_Block] = []
        for queue in queues.values():
            used, file, end = 0, "", 0
            while queue and used < room:
                one = queue.popleft()
                window.append(one)
                touched = pieces.touching(one.file, one.start, one.start + one.nbytes)
                begin = max(touched[0].start, end) if one.file == file else touched[0].start
                own = one.nbytes if _is_direct(one, takers) else 0
                used += max(0, touched[-1].stop - begin - own)
                file, end = one.file, touched[-1].stop
        yield window
