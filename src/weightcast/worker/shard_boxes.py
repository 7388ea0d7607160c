"""Parameters of a rank put together from ranges of files: little else has to cross the network."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import prod

from weightcast.clock import Deadline
from weightcast.tensors.box_plan import intersection
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.flat import Array, Bytes, flat_bytes
from weightcast.tensors.placing import Check, landing, place
from weightcast.tensors.sums import Sum, add_up, box_sum
from weightcast.transports.base import RangeReceiver
from weightcast.transports.boxes import fetch_boxes
from weightcast.wire.manifest import TensorEntry
from weightcast.worker.buffers import Buffers
from weightcast.worker.shard_layout import padded
from weightcast.worker.shard_stream import Origin, Tally
from weightcast.worker.shard_sums import ConvertedSums, is_converted

GROUP_NBYTES = 256 << 20  # of parameters that are asked for at once
STREAMED_NBYTES = 32 << 20  # the same where memory is short: each is given away before the next are asked for

Parameters = Generator[tuple[Held, Array], None, None]
_Key = tuple[str, Box]


def boxes_nbytes(origin: Origin, held: Sequence[Held]) -> int:
    """How many bytes have to be fetched for these parameters; a box that several of them have is fetched once."""
    entries = origin.manifest.by_name()
    return sum(_box_nbytes(entries[source], box) for source, box in {key for one in held for key in _keys(one)})


def fetched(
    origin: Origin,
    receiver: RangeReceiver,
    held: Sequence[Held],
    buffers: Buffers,
    *,
    proved: bool,
    deadline: Deadline,
    tally: Tally,
    converted: ConvertedSums,
    group_nbytes: int = GROUP_NBYTES,
) -> Parameters:
    """Each parameter once, complete, in memory from `buffers` that is the caller's from then on.

    `proved`: every byte that comes is compared with the digests of the version's pieces. About `group_nbytes` of
    parameters are asked for at once. `converted` takes in the sums of boxes that are converted.
    """
    check = partial(deadline.check, f"fetching {origin.manifest.version} from {origin.receiver.url}")
    for group in _groups(held, group_nbytes):
        coming = _Group(origin, group, buffers, check)
        for one in coming.without_boxes():
            yield one, coming.memories.pop(one.spec.name)
        wanted = coming.wanted
        with closing(fetch_boxes(receiver, origin.manifest, wanted, proved=proved, deadline=deadline)) as told:
            for index in told:
                tally.add(wanted[index].nbytes)
                converted |= wanted[index].converted_sum()
                yield from coming.complete(wanted[index])


def _groups(held: Sequence[Held], nbytes: int) -> Iterator[list[Held]]:
    group: list[Held] = []
    for one in held:
        group.append(one)
        if sum(other.spec.nbytes for other in group) >= nbytes:
            yield group
            group = []
    if group:
        yield group


class _Wanted:
    """A box on its way to the parameters that have it. It is written where the first of them has it, if it can lie there as
    it is, and copied from there to the others.
    """

    def __init__(self, entry: TensorEntry, box: Box, memories: Mapping[str, Array], check: Check) -> None:
        self.tensor, self.box = entry.name, box
        self._entry, self._memories, self._check = entry, memories, check
        self._sums: dict[Box, Sum] = {}
        self.nbytes = prod(box.shape) * entry.dtype.itemsize
        self.takers: list[tuple[Held, Placement]] = []

    def memory(self, part: Box) -> Bytes | None:
        """The memory of the first parameter, if a part of the box lies there as it comes."""
        one, placement = self.takers[0]
        if placement.transposed or is_converted(one, self._entry):
            return None
        there = landing(self._memories[one.spec.name], _part_of(placement, part))
        return flat_bytes(there) if there.flags.c_contiguous else None

    def place(self, part: Box, array: Array) -> None:
        """Copy a part to where it does not lie yet."""
        own = self.memory(part)
        lies = own is not None and own.ctypes.data == array.ctypes.data
        for number, (one, placement) in enumerate(self.takers):
            if number or not lies:
                whole = replace(_part_of(placement, part), box=Box.whole(part.shape))
                place(array, self._memories[one.spec.name], whole, self._check)
        if self._is_converted:
            # A box that is fetched anew from other publishers comes in other parts, which take the place of those before.
            kept = {other: total for other, total in self._sums.items() if intersection(other, part) is None}
            self._sums = {**kept, part: box_sum(self._entry.sum_spec, part, array, self._check)}

    @property
    def _is_converted(self) -> bool:
        return any(is_converted(one, self._entry) for one, _ in self.takers)

    def converted_sum(self) -> ConvertedSums:
        """The sum of the box, if a parameter converts it. Not before all of it is in its place."""
        return {(self.tensor, self.box): add_up(self._sums.values())} if self._is_converted else {}


def _part_of(placement: Placement, part: Box) -> Placement:
    """Where a part of a box goes."""
    offsets = [start - first for start, first in zip(part.start, placement.box.start, strict=True)]
    if placement.transposed:
        offsets.reverse()
    extra = len(placement.at) - len(offsets)
    at = tuple(start + offset for start, offset in zip(placement.at, [0] * extra + offsets, strict=True))
    return replace(placement, box=part, at=at)


class _Group:
    """Some parameters that are fetched together."""

    def __init__(self, origin: Origin, held: Sequence[Held], buffers: Buffers, check: Check) -> None:
        self._held = held
        self.memories = {one.spec.name: buffers.take(one.spec, zeroed=padded(one)) for one in held}
        self._to_come = {one.spec.name: len(_keys(one)) for one in held}
        entries, found = origin.manifest.by_name(), dict[_Key, _Wanted]()
        for one in held:
            for placement in one.placements:
                key = (placement.source, placement.box)
                if prod(placement.box.shape):
                    if key not in found:
                        found[key] = _Wanted(entries[placement.source], placement.box, self.memories, check)
                    found[key].takers.append((one, placement))
        self.wanted = list(found.values())

    def without_boxes(self) -> Iterator[Held]:
        """Parameters that nothing has to be fetched for: padding, or no elements at all."""
        return (one for one in self._held if not self._to_come[one.spec.name])

    def complete(self, wanted: _Wanted) -> Iterator[tuple[Held, Array]]:
        """A box is in its place; gives out the parameters that are complete then."""
        for name, one in {one.spec.name: one for one, _ in wanted.takers}.items():
            self._to_come[name] -= 1
            if self._to_come[name] == 0:
                yield one, self.memories.pop(name)


def _keys(one: Held) -> set[_Key]:
    """The boxes of a parameter that have elements."""
    return {(placement.source, placement.box) for placement in one.placements if prod(placement.box.shape)}


def _box_nbytes(entry: TensorEntry, box: Box) -> int:
    return prod(box.shape) * entry.dtype.itemsize
