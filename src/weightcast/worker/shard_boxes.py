"""Parameters of a rank put together from boxes that the source cuts: nothing else has to cross the network."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

from weightcast.clock import Deadline
from weightcast.errors import SourceFailed
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.flat import Array, Bytes, flat_bytes
from weightcast.tensors.placing import Check, landing, place
from weightcast.tensors.spec import TensorSpec
from weightcast.transports.base import BoxReceiver
from weightcast.wire.depot import BoxOf
from weightcast.wire.manifest import TensorEntry
from weightcast.worker.buffers import Buffers
from weightcast.worker.shard_layout import padded
from weightcast.worker.shard_stream import Origin, Proof, Tally

_GROUP_NBYTES = 256 << 20  # of parameters that are asked for at once: bounds the boxes that wait to be placed

Parameters = Generator[tuple[Held, Array], None, None]
_Key = tuple[str, Box]


def boxes_nbytes(origin: Origin, held: Sequence[Held]) -> int:
    """How many bytes have to be fetched for these parameters; a box that several of them have is fetched once."""
    entries = origin.manifest.by_name()
    return sum(_box_nbytes(entries[source], box) for source, box in {key for one in held for key in _keys(one)})


def fetched(
    origin: Origin,
    receiver: BoxReceiver,
    held: Sequence[Held],
    buffers: Buffers,
    *,
    proof: Proof,
    deadline: Deadline,
    tally: Tally,
) -> Parameters:
    """Each parameter once, complete, in memory from `buffers` that is the caller's from then on.

    A box is compared with the digest that the source has of it, or, if it is a whole tensor, with that of the version. A
    parameter with a box that is wrong is left out, and the iterator ends in `DigestMismatch`, which lists them all.
    """
    check = partial(deadline.check, f"fetching {origin.manifest.version} from {origin.receiver.url}")
    for group in _groups(held):
        coming = _Group(origin, group, buffers, check)
        for one in coming.without_boxes():
            yield one, coming.memories.pop(one.spec.name)
        for box, digest in coming.told(origin, receiver, deadline):
            tally.add(len(box.memory))
            if proof.box_holds(box.name, box.memory, box.digest or digest, check):
                yield from coming.place(box)
    proof.conclude()


def _groups(held: Sequence[Held]) -> Iterator[list[Held]]:
    group: list[Held] = []
    for one in held:
        group.append(one)
        if sum(other.spec.nbytes for other in group) >= _GROUP_NBYTES:
            yield group
            group = []
    if group:
        yield group


@dataclass
class _Wanted:
    """A box on its way. It is written where it belongs if it can lie there as it is, else placed from `memory` when it is
    here: `takers` are the places that it must be copied to. `digest` is known if it is a whole tensor of a version.
    """

    query: BoxOf
    memory: Bytes
    spec: TensorSpec
    digest: str
    owners: list[Held] = field(default_factory=list)
    takers: list[tuple[Held, Placement]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.query.tensor} [{list(self.query.box.start)} + {list(self.query.box.shape)}]"

    def array(self) -> Array:
        """The box as a tensor of its own."""
        return self.memory.view(self.spec.dtype.numpy).reshape(self.spec.shape)


class _Group:
    """Some parameters that are fetched together."""

    def __init__(self, origin: Origin, held: Sequence[Held], buffers: Buffers, check: Check) -> None:
        self._entries = origin.manifest.by_name()
        self._whole_digests = not origin.manifest.boxes
        self._held, self._buffers, self._check = held, buffers, check
        self.memories = {one.spec.name: buffers.take(one.spec, zeroed=padded(one)) for one in held}
        self._to_come = {one.spec.name: len(_keys(one)) for one in held}
        found: dict[_Key, _Wanted] = {}
        for one in held:
            for placement in one.placements:
                if prod(placement.box.shape):
                    self._want(found, one, placement)
        self.wanted = list(found.values())

    def without_boxes(self) -> Iterator[Held]:
        """Parameters that nothing has to be fetched for: padding, or no elements at all."""
        return (one for one in self._held if not self._to_come[one.spec.name])

    def told(self, origin: Origin, receiver: BoxReceiver, deadline: Deadline) -> Iterator[tuple[_Wanted, str]]:
        """Each box when it is here, with the digest that the source has of it. Ends only when all are."""
        missing = dict(enumerate(self.wanted))
        asked = [(one.query, one.memory) for one in self.wanted]
        with closing(receiver.boxes(origin.manifest, asked, deadline=deadline)) as told:
            for index, digest in told:
                if index not in missing:
                    raise SourceFailed(f"{receiver.url} sent box {index} of {len(asked)} twice, or nobody asked for it.")
                yield missing.pop(index), digest
        if missing:
            lacking = ", ".join(one.name for one in missing.values())
            raise SourceFailed(f"{receiver.url} ended early; {len(missing)} box(es) did not come: {lacking}.")

    def place(self, wanted: _Wanted) -> Iterator[tuple[Held, Array]]:
        """A box is here: copy it to where else it belongs; gives out the parameters that are complete then."""
        for one, placement in wanted.takers:
            whole = replace(placement, box=Box.whole(placement.box.shape))
            place(wanted.array(), self.memories[one.spec.name], whole, self._check)
        for one in wanted.owners:
            name = one.spec.name
            self._to_come[name] -= 1
            if self._to_come[name] == 0:
                yield one, self.memories.pop(name)

    def _want(self, found: dict[_Key, _Wanted], one: Held, placement: Placement) -> None:
        entry = self._entries[placement.source]
        key = (placement.source, placement.box)
        there = landing(self.memories[one.spec.name], placement)
        fits = not placement.transposed and there.dtype == entry.dtype.numpy and there.flags.c_contiguous
        wanted = found.get(key)
        if wanted is None:
            spec = TensorSpec(placement.source, entry.dtype, placement.box.shape)
            memory = flat_bytes(there if fits else self._buffers.take(spec))
            whole = self._whole_digests and placement.box == Box.whole(entry.shape)
            query = BoxOf(entry.name, placement.box)
            wanted = found[key] = _Wanted(query, memory, spec, entry.digest if whole else "")
        else:
            fits = False  # it comes to another place, and is copied from there
        if not fits:
            wanted.takers.append((one, placement))
        if all(owner is not one for owner in wanted.owners):
            wanted.owners.append(one)


def _keys(one: Held) -> set[_Key]:
    """The boxes of a parameter that have elements."""
    return {(placement.source, placement.box) for placement in one.placements if prod(placement.box.shape)}


def _box_nbytes(entry: TensorEntry, box: Box) -> int:
    return prod(box.shape) * entry.dtype.itemsize
