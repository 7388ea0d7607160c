"""Which box of a tensor is fetched from whom: the intersections of what is wanted with what is held. Pure."""

from __future__ import annotations

import secrets
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from weightcast.tensors.boxes import Box, box_of
from weightcast.tensors.flat import Array, Bytes, flat_bytes

SPLIT_NBYTES = 1 << 20  # what several hold is not divided between them into less: a request costs more than it saves
MAX_PROBLEMS = 100  # that are listed of one tensor: crossing boxes have as many as the square of their number
_MAX_LOOKS = 256  # at a box, to describe what is wrong: without a bound they can double with each dimension


class Place(NamedTuple):
    """Where a box lies: its bytes in C order, from `offset` of a file on."""

    file: str
    offset: int


class PlacedBox(NamedTuple):
    """A box of a tensor, and where it lies: the same bytes at each of these places."""

    box: Box
    places: tuple[Place, ...]


class Fetch(NamedTuple):
    """Bytes to be fetched: a box of the tensor that is wanted at that index, inside of the box `held`.

    The first of the places is the one to read, the others can be read instead.
    """

    wanted: int
    box: Box
    held: Box
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Wanted:
    """A box of a tensor that somebody needs."""

    tensor: str
    box: Box
    itemsize: int


def intersection(one: Box, other: Box) -> Box | None:
    """The elements that both boxes have; None if there are none."""
    starts, sizes = [], []
    for start, size, other_start, other_size in zip(one.start, one.shape, other.start, other.shape, strict=True):
        first, last = max(start, other_start), min(start + size, other_start + other_size)
        if first >= last:
            return None
        starts.append(first)
        sizes.append(last - first)
    return Box(tuple(starts), tuple(sizes))


def overlap(one: Box, other: Box) -> bool:
    """Whether both boxes have an element."""
    return all(
        start < other_start + other_size and other_start < start + size and size and other_size
        for start, size, other_start, other_size in zip(one.start, one.shape, other.start, other.shape, strict=True)
    )


def ends_of(box: Box) -> tuple[int, ...]:
    """Where it ends along each dimension."""
    return tuple(start + size for start, size in zip(box.start, box.shape, strict=True))


def moved(box: Box, origin: tuple[int, ...]) -> Box:
    """The same box seen from inside of one that starts at `origin`."""
    return Box(tuple(start - zero for start, zero in zip(box.start, origin, strict=True)), box.shape)


def plan(
    wanted: Sequence[Wanted], held: Mapping[str, Sequence[PlacedBox]], *, without: Collection[str] = ()
) -> tuple[list[Fetch], list[Fetch]]:
    """What to fetch, each wanted byte exactly once if the held boxes of a tensor cover it exactly once; and what lies only
    in files `without` which it must be done.

    What lies in several files is shared out so that about as many bytes are read of each, large boxes in rows. The same
    input gives the same plan.
    """
    tilings = {name: _Tiling(boxes) for name, boxes in held.items()}
    found = [
        fetch
        for index, one in enumerate(wanted)
        if one.tensor in tilings
        for fetch in tilings[one.tensor].fetches(index, one.box)
    ]
    absent = frozenset(without)
    left = [fetch._replace(places=tuple(place for place in fetch.places if place.file not in absent)) for fetch in found]
    lost = [fetch for fetch, there in zip(found, left, strict=True) if not there.places]
    return _balanced([fetch for fetch in left if fetch.places], wanted), lost


def _balanced(fetches: Sequence[Fetch], wanted: Sequence[Wanted]) -> list[Fetch]:
    """Each fetch with the place first of whose file least is read, the largest that can be chosen first."""
    load: dict[str, int] = defaultdict(int)
    chosen: list[Fetch] = []
    free: list[tuple[int, Fetch]] = []
    for fetch in fetches:
        nbytes = prod(fetch.box.shape) * wanted[fetch.wanted].itemsize
        if len(fetch.places) == 1:
            load[fetch.places[0].file] += nbytes
            chosen.append(fetch)
        else:
            free += _shared(fetch, wanted[fetch.wanted].itemsize)
    for nbytes, fetch in sorted(free, key=lambda item: -item[0]):
        first = min(fetch.places, key=lambda place: (load[place.file], fetch.places.index(place)))
        load[first.file] += nbytes
        chosen.append(fetch._replace(places=(first, *(place for place in fetch.places if place != first))))
    return sorted(chosen, key=lambda fetch: (fetch.wanted, fetch.box.start))


def _shared(fetch: Fetch, itemsize: int) -> Iterator[tuple[int, Fetch]]:
    """A box that lies in several files in parts that can be divided between them, and the bytes of each."""
    nbytes = prod(fetch.box.shape) * itemsize
    share = -(-nbytes // len(fetch.places))
    if share < SPLIT_NBYTES:
        yield nbytes, fetch
        return
    for box in chunks(fetch.box, itemsize, share):
        yield prod(box.shape) * itemsize, fetch._replace(box=box)


def chunks(box: Box, itemsize: int, nbytes: int) -> Iterator[Box]:
    """A box in boxes of at most `nbytes`, or of one element, whose bytes follow one another in C order.

    Each is a run of rows of the box, or, where a row is too long, of the rows of a row.
    """
    total = prod(box.shape) * itemsize
    dim = next((axis for axis, size in enumerate(box.shape) if size > 1), None)
    if total <= nbytes or dim is None:
        yield box
        return
    row = total // box.shape[dim]
    rows = max(1, nbytes // row)
    for at in range(0, box.shape[dim], rows):
        start = (*box.start[:dim], box.start[dim] + at, *box.start[dim + 1 :])
        shape = (*box.shape[:dim], min(rows, box.shape[dim] - at), *box.shape[dim + 1 :])
        yield from chunks(Box(start, shape), itemsize, nbytes)


def flat_boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """The elements `first` to `last` of a tensor, counted in C order, in boxes that lie in one piece each."""
    if first >= last:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    begin, end = -(-first // row), last // row
    if begin > end:  # inside of one row
        yield from _in_row(shape, end, first, last)
        return
    yield from _in_row(shape, begin - 1, first, begin * row)
    if begin < end:
        yield Box((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))
    yield from _in_row(shape, end, end * row, last)


def _in_row(shape: tuple[int, ...], row: int, first: int, last: int) -> Iterator[Box]:
    skip = row * prod(shape[1:])
    for inner in flat_boxes(shape[1:], first - skip, last - skip):
        yield Box((row, *inner.start), (1, *inner.shape))


def read_flat(
    shape: tuple[int, ...],
    itemsize: int,
    held: Sequence[PlacedBox],
    start: int,
    memory: Bytes,
    read: Callable[[Sequence[tuple[Place, Bytes]]], None],
) -> None:
    """Fill a memory with the bytes of a tensor in C order, from byte `start` on, where the tensor lies in boxes.

    `read` is called once: it fills each memory with the bytes that begin at a place.
    """
    first, last = start // itemsize, -(-(start + len(memory)) // itemsize)
    even = len(memory) == (last - first) * itemsize and start == first * itemsize
    out = memory if even else np.empty((last - first) * itemsize, dtype=np.uint8)
    elements = out.view(f"V{itemsize}")
    reads: list[tuple[Place, Bytes]] = []
    apart: list[tuple[Array, Array]] = []  # what does not lie in one piece in the memory
    for part in flat_boxes(shape, first, last):
        array, elements = elements[: prod(part.shape)].reshape(part.shape), elements[prod(part.shape) :]
        for box, places in held:
            common = intersection(box, part)
            if common is None:
                continue
            target = box_of(array, moved(common, part.start))
            block = target if target.flags.c_contiguous else np.empty(common.shape, dtype=array.dtype)
            inside = moved(common, box.start).start
            index = sum(at * prod(box.shape[axis + 1 :]) for axis, at in enumerate(inside))
            reads.append((Place(places[0].file, places[0].offset + index * itemsize), flat_bytes(block)))
            if block is not target:
                apart.append((target, block))
    read(reads)
    for target, block in apart:
        target[...] = block
    if not even:
        memory[:] = out[start - first * itemsize :][: len(memory)]


class _Tiling:
    """Held boxes of one tensor in an order in which those that can meet a box are found without looking at all."""

    def __init__(self, held: Sequence[PlacedBox]) -> None:
        self._held = sorted((one for one in held if prod(one.box.shape)), key=lambda one: one.box.start)
        self._starts = [one.box.start[0] if one.box.start else 0 for one in self._held]
        ends = [ends_of(one.box)[0] if one.box.shape else 1 for one in self._held]
        self._last_ends = list(accumulate(ends, max))  # none up to here ends later

    def fetches(self, index: int, box: Box) -> Iterator[Fetch]:
        begin, end = (box.start[0], box.start[0] + box.shape[0]) if box.start else (0, 1)
        first, last = bisect_right(self._last_ends, begin), bisect_left(self._starts, end)
        for box_held, places in self._held[first:last]:
            common = intersection(box, box_held)
            if common is not None:
                yield Fetch(index, common, box_held, places)


def tiling_problems(shape: tuple[int, ...], boxes: Sequence[Box]) -> list[str]:
    """Where boxes do not cover a tensor exactly once: holes, and parts that lie in more than one of them.

    Boxes without elements count for nothing. Stops after `MAX_PROBLEMS`, or when describing them takes too long.
    """
    outside = [box for box in boxes if not box.fits(shape)]
    if outside:
        return [f"{_written(box)} lies outside of a tensor of shape {list(shape)}" for box in outside[:MAX_PROBLEMS]]
    filled = [box for box in boxes if 0 not in box.shape]
    if 0 in shape or _covers_once(shape, filled):
        return []
    problems = list(dict.fromkeys(islice(_uncovered(shape, filled), MAX_PROBLEMS)))
    return problems or [f"{len(filled)} boxes do not cover shape {list(shape)} exactly once"]


def _covers_once(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether boxes inside of a tensor cover each of its elements exactly once, in time linear in their number.

    Every edge moves to a random place. The volumes of the boxes then add up to that of the tensor if each cell between
    edges lies in one box: the volume of a cell is a product of its random lengths, so cells do not make up for one another.
    Boxes that do not cover it once pass with a probability below 2 ** -120 (Schwartz-Zippel), and cannot be chosen.
    """
    places: list[dict[int, int]] = [defaultdict(lambda: secrets.randbits(128)) for _ in shape]

    def volume(box: Box) -> int:
        edges = zip(places, box.start, ends_of(box), strict=True)
        return prod(place[end] - place[start] for place, start, end in edges)

    return sum(map(volume, boxes)) == volume(Box.whole(shape))


def _uncovered(shape: tuple[int, ...], boxes: Sequence[Box]) -> Iterator[str]:
    """Goes through one dimension after the other, in slabs in which the same boxes lie all the way."""
    left = _MAX_LOOKS * (1 + len(boxes))

    def search(boxes: Sequence[Box], slab: tuple[tuple[int, int], ...]) -> Iterator[str]:
        nonlocal left
        left -= 1 + len(boxes)
        dim = len(slab)
        if len(boxes) == 1 and not any(boxes[0].start[dim:]) and boxes[0].shape[dim:] == shape[dim:]:
            return
        if dim == len(shape) or not boxes:
            where = [*slab, *((0, size) for size in shape[dim:])]
            part = Box(tuple(start for start, _ in where), tuple(end - start for start, end in where))
            yield _nobody(part) if not boxes else _several(part, boxes)
            return
        starts = sorted(boxes, key=lambda box: box.start[dim])
        edges = sorted(
            {0, shape[dim], *(box.start[dim] for box in boxes), *(box.start[dim] + box.shape[dim] for box in boxes)}
        )
        inside: list[Box] = []
        at = 0
        for begin, end in pairwise(edges):
            if left < 0:
                return
            inside = [box for box in inside if box.start[dim] + box.shape[dim] > begin]
            while at < len(starts) and starts[at].start[dim] <= begin:
                inside.append(starts[at])
                at += 1
            yield from search(inside, (*slab, (begin, end)))

    return search(boxes, ())


def _nobody(part: Box) -> str:
    return f"nobody holds {_written(part)}"


def _several(part: Box, boxes: Sequence[Box]) -> str:
    return f"{_written(part)} lies in {' and in '.join(map(_written, boxes))}"


def _written(box: Box) -> str:
    return f"[{', '.join(f'{start}:{end}' for start, end in zip(box.start, ends_of(box), strict=True))}]"
