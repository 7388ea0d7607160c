"""Deltas on their way into a model: as a source gave them, and decoded along what the model holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import prod

import numpy as np

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.delta import ArrayState, Delta, MovedState, State, fold, move
from weightcast.delta.container import Block, Chunk, Table, frame_of, head_of, read_table
from weightcast.delta.decoder import decode_chunks
from weightcast.delta.runs import Run, assemble, slice_chains, slice_runs
from weightcast.delta.sparse import TensorDelta, check_specs, fold_tensors
from weightcast.delta.states import block_lanes
from weightcast.errors import DeadlineExceeded, DeltaCorrupt, UpdateCancelled, WeightcastError
from weightcast.tensors.box_plan import intersection, overlap
from weightcast.tensors.boxes import Box, Held, Placement, box_of
from weightcast.tensors.digest import DEFAULT
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array, Bytes
from weightcast.tensors.kernels import kernels
from weightcast.tensors.lanes import Lanes, kind_of, lanes_per_element
from weightcast.tensors.spec import TensorSpec
from weightcast.transports.base import Provider, Range, RangeReceiver, Receiver, packing_use
from weightcast.transports.pieces import proved_ranges
from weightcast.wire.manifest import Manifest, PayloadEntry, chosen_payloads
from weightcast.worker.fit import Plan
from weightcast.worker.staging import Staging

log = logs.get(__name__)

Parameters = Callable[[], Mapping[str, Array]]

_HOLES_NBYTES = 16 << 10  # so much between chunks may be fetched with them, as a request costs more,
_HOLES_SHARE = 0.05  # or this share of what is wanted


class Unaligned(Exception):
    """A rank cannot decode its part of a delta along what it holds, and says why."""


def live_state(plan: Plan) -> ArrayState:
    """What the model holds, under the names that a version has for it."""
    return ArrayState(
        {entry.name: landing.slot.live() for landing in plan.landings for entry in (landing.entry, *landing.same)}
    )


@dataclass(frozen=True)
class Payload:
    """A packed delta of a publisher in memory, of which only `chunks` need be there."""

    view: memoryview
    table: Table
    chunks: tuple[Chunk, ...]
    rank: int = 0


@dataclass(frozen=True)
class Packed:
    """The packed deltas that together lead to a version, and what was fetched of them."""

    payloads: tuple[Payload, ...]
    wanted: _Wanted
    nbytes: int

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors of the version."""
        return self.wanted.specs

    @property
    def needs_no_base(self) -> bool:
        """Whether it can be decoded without the state it starts on."""
        return all(one.table.packing == "gaps" for one in self.payloads)

    def runs(self, old: Callable[[Block], Lanes] | None, *, threads: int | None = None) -> list[Run]:
        """All changes that were fetched."""
        found: list[Run] = []
        for one in self.payloads:
            takes = partial(self.wanted.needs, rank=one.rank) if self.wanted.elsewhere else None
            found += decode_chunks(one.view, one.table, one.chunks, old, takes=takes, threads=threads)
        return found

    @property
    def chunks(self) -> Iterator[Chunk]:
        """All that were fetched."""
        return (chunk for one in self.payloads for chunk in one.chunks)

    def divided(self, group: Callable[[str], str]) -> dict[str, Packed]:
        """The chunks of each group of tensors; all tensors of a chunk must be in one."""
        found: dict[str, dict[int, list[Chunk]]] = {}
        for number, one in enumerate(self.payloads):
            for chunk in one.chunks:
                found.setdefault(group(chunk.blocks[0].tensor), {}).setdefault(number, []).append(chunk)
        return {
            name: replace(
                self, payloads=tuple(replace(self.payloads[number], chunks=tuple(some)) for number, some in parts.items())
            )
            for name, parts in found.items()
        }

    def along(self, state: State | None, *, threads: int | None = None) -> Delta:
        """All changes, as a delta of whole tensors."""
        old = None if state is None else lambda block: block_lanes(state, block)
        return Delta(self.specs, assemble(self.specs, self.runs(old, threads=threads)))


@dataclass(frozen=True)
class DeltaChain:
    """Deltas that follow one another: packed, or, from a provider, worked out beforehand."""

    packed: tuple[Packed, ...] = ()
    ready: tuple[Delta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.packed or self.ready)

    @property
    def nbytes(self) -> int:
        """Bytes that were fetched."""
        return sum(one.nbytes for one in self.packed)

    @property
    def needs_no_base(self) -> bool:
        """Whether it can be decoded without the state it starts on."""
        return all(one.needs_no_base for one in self.packed)

    def fits(self, plan: Plan, manifest: Manifest) -> bool:
        """Whether it can be decoded along a model that holds the version it starts on. A model that ignores tensors of the
        version can follow only a packing that needs no base.
        """
        return self.needs_no_base or _holds_all(plan, manifest)

    def along(self, plan: Plan, manifest: Manifest) -> Delta:
        """All of it as one delta, decoded along the live weights, which hold the version that the first is based on."""
        folded, entries = self._folded(plan, manifest), plan.entries
        touched = folded.tensors.keys() & entries.keys()
        check_specs({name: folded.tensors[name].spec for name in touched}, {name: entries[name].spec for name in touched})
        return folded

    def _folded(self, plan: Plan, manifest: Manifest) -> Delta:
        if self.ready:
            return fold(*self.ready)
        if self.needs_no_base or not _holds_all(plan, manifest):
            return fold(*(one.along(None) for one in self.packed))
        state = live_state(plan)  # a copy of the whole model, if that is not in host memory
        folded = self.packed[0].along(state)
        for one in self.packed[1:]:
            folded = fold(folded, one.along(MovedState(state, folded)))
        return folded

    def sliced(self, held: Sequence[Held], live: Parameters | None, check: Callable[[], None]) -> Delta:
        """What the parameters of a rank take of all of it. In the caller's thread, as it runs beside an engine.

        `live` gives the parameters as they are now, which hold the version that the first delta is based on. Raises
        `Unaligned` if chunks that are needed are packed along more of the base than the rank holds.
        """
        if self.needs_no_base:
            return slice_chains(self.packed[-1].specs, self._decoded(check), held)
        if live is None:
            raise Unaligned("it is packed as 'classes', and the parameters are not in host memory")
        rank = _RankBase(held, live(), self.packed[-1].specs)
        rank.register(block for one in self.packed for chunk in one.chunks for block in chunk.blocks)
        for one in self.packed:
            rank.add(one.runs(rank.lanes, threads=1))
            check()
        return slice_runs(self.packed[-1].specs, rank.runs(), held)

    def _decoded(self, check: Callable[[], None]) -> Iterator[Iterator[list[Run]]]:
        """The changes of each delta. Tensors that share no chunk come one after the other, so that what is folded is little
        enough for the cache.
        """
        for part in _apart(self.packed):
            yield (one.runs(None, threads=1) for one in part)
            check()

    def move(self, arrays: Mapping[str, Array], version: str, deadline: Deadline) -> None:
        """Bring private arrays from the version that the first is based on to the last, `version`."""
        for one in self.packed:
            move(arrays, one.along(ArrayState(arrays)))
            deadline.check(f"decoding the deltas to {version}")
        for delta in self.ready:
            move(arrays, delta)


def _apart(chain: Sequence[Packed]) -> Sequence[Sequence[Packed]]:
    """Deltas that follow one another, divided by groups of tensors that share no chunk in any of them."""
    if len(chain) < 2:
        return [chain]
    leaders: dict[str, str] = {}

    def leader(name: str) -> str:
        while leaders.setdefault(name, name) != name:
            name = leaders[name]
        return name

    for blocks in {tuple(block.tensor for block in chunk.blocks) for one in chain for chunk in one.chunks}:
        for name in blocks[1:]:
            leaders[leader(name)] = leader(blocks[0])
    groups: dict[str, list[Packed]] = {}
    for one in chain:
        for name, some in one.divided(leader).items():
            groups.setdefault(name, []).append(some)
    return list(groups.values())


# -- fetching ------------------------------------------------------------------------------------------------------


def fetched_chain(
    receiver: Receiver,
    deltas: Sequence[Manifest],
    *,
    checksum: bool,
    deadline: Deadline,
    held: Sequence[Held] | None = None,
) -> DeltaChain:
    """The deltas, as published unless that is declined. A rank needs no more than the chunks with boxes of `held`."""
    if isinstance(receiver, Provider):
        return DeltaChain(ready=tuple(receiver.changes(manifest) for manifest in deltas))
    return DeltaChain(tuple(_fetched(receiver, manifest.as_delta(), held, checksum, deadline) for manifest in deltas))


@dataclass(frozen=True)
class _Wanted:
    """What is needed of a delta: all of it, or, for a rank, what its boxes have of it."""

    specs: Mapping[str, TensorSpec]
    boxes: Mapping[str, tuple[Box, ...]] | None
    elsewhere: Mapping[tuple[int, str], tuple[Box, ...]]

    @classmethod
    def of(cls, manifest: Manifest, held: Sequence[Held] | None) -> _Wanted:
        boxes: dict[str, tuple[Box, ...]] = {}
        for one in held or ():
            for placement in one.placements:
                boxes[placement.source] = (*boxes.get(placement.source, ()), placement.box)
        specs = {entry.name: entry.spec for entry in manifest.tensors}
        return cls(specs, None if held is None else boxes, manifest.counted_elsewhere())

    def chunks(self, table: Table, rank: int) -> tuple[Chunk, ...]:
        """The chunks of a publisher's payload that are needed, and do not count from another publisher's."""
        return tuple(chunk for chunk in table.chunks if any(self.needs(block, rank) for block in chunk.blocks))

    def needs(self, block: Block, rank: int) -> bool:
        """The same of one block."""
        name, spec = block.tensor, self.specs[block.tensor]
        if self.elsewhere and block.meets(spec, self.elsewhere.get((rank, name), ())):
            return False
        return self.boxes is None or block.meets(spec, self.boxes.get(name, ()))


def _fetched(
    receiver: Receiver, manifest: Manifest, held: Sequence[Held] | None, checksum: bool, deadline: Deadline
) -> Packed:
    wanted = _Wanted.of(manifest, held)
    payloads, nbytes = [], 0
    for entry in chosen_payloads(manifest, packing_use(receiver)):
        found = None
        if held is not None and isinstance(receiver, RangeReceiver) and entry.seal and checksum:
            found = _fetch_parts(receiver, manifest, entry, wanted, deadline)
        payload, size = found or _fetch_whole(receiver, manifest, entry, wanted, checksum, deadline)
        payloads.append(payload)
        nbytes += size
    return Packed(tuple(payloads), wanted, nbytes)


def _fetch_whole(
    receiver: Receiver, manifest: Manifest, entry: PayloadEntry, wanted: _Wanted, checksum: bool, deadline: Deadline
) -> tuple[Payload, int]:
    if isinstance(receiver, RangeReceiver):
        memory = np.empty(entry.nbytes, dtype=np.uint8)
        ranges = [Range(entry.file, 0, memory)]
        fetch = proved_ranges if checksum else type(receiver).ranges
        with closing(fetch(receiver, manifest, ranges, deadline=deadline)) as told:
            deque(told, maxlen=0)
        view = memory.data
    else:
        staging = Staging({entry.file: manifest.transfers()[entry.file]})
        staging.fill(receiver, manifest, deadline)
        view = staging.verify(manifest, checksum=checksum, deadline=deadline).arrays[entry.file].data
    table = _table(view, wanted.specs)
    return Payload(view, table, wanted.chunks(table, entry.part), entry.part), entry.nbytes


def _fetch_parts(
    receiver: RangeReceiver, manifest: Manifest, entry: PayloadEntry, wanted: _Wanted, deadline: Deadline
) -> tuple[Payload, int] | None:
    """The table of a payload and the chunks that are needed, proved. None if they came wrong: then it is fetched whole."""
    memory = np.empty(entry.nbytes, dtype=np.uint8)  # what is not fetched is never touched, and takes no room
    head = head_of(entry.packing or "gaps")
    memory[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    fetched = _fill(receiver, manifest, entry, memory, [(entry.table, entry.nbytes)], deadline)
    try:
        table = _table(memory.data, wanted.specs)
        if (table.seal.hex(), table.packing) != (entry.seal, entry.packing):
            raise DeltaCorrupt("its table is not the one that was published")
        chunks = wanted.chunks(table, entry.part)
        fetched += _fill(receiver, manifest, entry, memory, _ranges(chunks), deadline)
        for chunk in chunks:
            frame_of(memory.data, chunk)
    except (DeadlineExceeded, UpdateCancelled):
        raise
    except WeightcastError as error:
        log.warning("delta fetched whole", version=manifest.version, source=receiver.url, error=error)
        return None
    return Payload(memory.data, table, chunks, entry.part), fetched


def _fill(
    receiver: RangeReceiver,
    manifest: Manifest,
    entry: PayloadEntry,
    memory: Bytes,
    ranges: Sequence[tuple[int, int]],
    deadline: Deadline,
) -> int:
    wanted = [Range(entry.file, start, memory[start:stop]) for start, stop in ranges]
    proved = manifest.algorithm != DEFAULT  # else the digests of chunks, which are always of that kind, are proof enough
    fetch = proved_ranges if proved else type(receiver).ranges
    with closing(fetch(receiver, manifest, wanted, deadline=deadline)) as told:
        there = set(told)
    if there != set(range(len(wanted))):
        raise DeltaCorrupt(f"{len(wanted) - len(there)} range(s) of {entry.file} did not come")
    return sum(stop - start for start, stop in ranges)


def _ranges(chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    """The bytes that chunks lie in. Some that lie between are fetched with them, the shortest gaps first."""
    in_order = sorted(chunks, key=lambda chunk: chunk.offset)
    room = max(_HOLES_NBYTES, int(_HOLES_SHARE * sum(chunk.nbytes for chunk in chunks)))
    passed: set[int] = set()
    gaps = [
        (after.offset - before.offset - before.nbytes, number) for number, (before, after) in enumerate(pairwise(in_order))
    ]
    for nbytes, number in sorted(gaps):
        if nbytes > room:
            break
        room -= nbytes
        passed.add(number)
    ranges: list[tuple[int, int]] = []
    for number, chunk in enumerate(in_order):
        start, stop = chunk.offset, chunk.offset + chunk.nbytes
        if number - 1 in passed:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return ranges


def _table(view: memoryview, specs: Mapping[str, TensorSpec]) -> Table:
    """The table of a packed delta, which may be about some of these tensors."""
    table = read_table(view, specs)
    check_specs(table.specs, {name: specs[name] for name in table.specs if name in specs})
    return table


def _holds_all(plan: Plan, manifest: Manifest) -> bool:
    held = {entry.name for landing in plan.landings for entry in (landing.entry, *landing.same)}
    return held == {entry.name for entry in manifest.tensors}


# -- `classes` along the boxes of a rank ---------------------------------------------------------------------------


@dataclass
class _BlockBase:
    """A block as all deltas of a chain have it, where it lies, and the changes that were added to it."""

    block: Block
    bounds: Box
    changes: TensorDelta | None = None

    def overlaps(self, other: _BlockBase) -> bool:
        """Whether both may have a lane of their tensor. In one box the lanes tell, as blocks may share a row."""
        one, two = self.block, other.block
        if one.box == two.box:
            return one.start < two.start + two.lanes and two.start < one.start + one.lanes
        return overlap(self.bounds, other.bounds)


@dataclass
class _RankBase:
    """What a rank holds, read block by block as packed deltas have it, and the changes that were added to it."""

    held: Sequence[Held]
    live: Mapping[str, Array]
    specs: Mapping[str, TensorSpec]
    blocks: dict[str, dict[tuple[Box | None, int], _BlockBase]] = field(default_factory=dict)

    def register(self, blocks: Iterable[Block]) -> None:
        """Take in which blocks deltas have, before their changes. Raises `Unaligned` if two overlap and are not the same."""
        for block in blocks:
            known, place = self.blocks.setdefault(block.tensor, {}), (block.box, block.start)
            if place in known and known[place].block.lanes == block.lanes:
                continue
            new = _BlockBase(block, block.bounds(self.specs[block.tensor]))
            if any(map(new.overlaps, known.values())):
                raise Unaligned(f"{block.tensor} is cut in another way than in the delta before")
            known[place] = new

    def lanes(self, block: Block) -> Lanes:
        """The lanes of a block, with all that was added."""
        spec = self.specs[block.tensor]
        known = self.blocks[block.tensor][block.box, block.start]
        found, before = self._read(block, spec, known.bounds), known.changes
        if before is None:
            return found
        moved = found.copy()
        indices = np.arange(block.lanes, dtype=np.uint32) if before.indices is None else before.indices
        kernels().scatter(moved, indices, kernels().moved(found, indices, before.steps, kind_of(spec.dtype))[1])
        return moved

    def add(self, runs: Sequence[Run]) -> None:
        """Changes that follow what is here."""
        for run in runs:
            one, dtype = self.blocks[run.tensor][run.box, run.start], DType(f"I{8 * run.steps.itemsize}")
            spec = TensorSpec(run.tensor, dtype, (one.block.lanes,))  # of lanes: a block may end inside of an element
            after = TensorDelta(spec, run.indices, run.steps)
            one.changes = after if one.changes is None else fold_tensors([one.changes, after])

    def runs(self) -> Iterator[Run]:
        """All that was added."""
        for known in self.blocks.values():
            for one in known.values():
                if one.changes is not None:
                    yield Run(one.block.tensor, one.block.start, one.changes.indices, one.changes.steps, one.block.box)

    def _read(self, block: Block, spec: TensorSpec, bounds: Box) -> Lanes:
        skip = block.start % max(1, prod(bounds.shape[1:]) * lanes_per_element(spec.dtype))  # of the first row
        for one in self.held:
            for placement in one.placements:
                if placement.source == block.tensor and intersection(bounds, placement.box) == bounds:
                    array = box_of(_in_place(self.live[one.spec.name], placement), _moved(bounds, placement.box))
                    lanes = np.ascontiguousarray(array).reshape(-1).view(kind_of(spec.dtype).unsigned)
                    return lanes[skip : skip + block.lanes]
        raise Unaligned(f"the rank does not hold all of a chunk, which has {bounds} of {block.tensor}")


def _moved(box: Box, inside: Box) -> Box:
    return Box(tuple(a - b for a, b in zip(box.start, inside.start, strict=True)), box.shape)


def _in_place(array: Array, placement: Placement) -> Array:
    """The elements of a placement where they lie in a parameter, in the orientation of the version."""
    extra = len(placement.at) - len(placement.box.shape)
    view = box_of(array, placement.target)
    view = view.reshape(view.shape[extra:])
    return view.T if placement.transposed else view
