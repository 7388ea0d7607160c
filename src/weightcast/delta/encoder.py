"""From two states to a packed delta: block by block, on several threads, in bounded memory."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import NamedTuple

import numpy as np

from weightcast.delta.container import Block, ContainerWriter, Form, Table
from weightcast.delta.grouping import ByBlock, ByClass, Changed, Grouping, changed_in
from weightcast.delta.planes import pack_planes, pack_raw
from weightcast.delta.runs import Run, assemble, out_of_box
from weightcast.delta.slicing import WHOLE, Place, Slicing
from weightcast.delta.sparse import Delta, TensorDelta, check_specs
from weightcast.delta.states import CHUNK_LANES, State, as_state, rows_box
from weightcast.delta.streams import pack_groups
from weightcast.errors import InvalidInput
from weightcast.tensors.box_plan import moved
from weightcast.tensors.boxes import Box, box_of
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array, flat_bytes
from weightcast.tensors.kernels import Backend, Summing, kernels
from weightcast.tensors.lanes import LaneKind, Lanes, index_dtype, kind_of, lane_count, lanes_per_element
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import Sum, box_sum, change_sum, range_sum, root_of_sums, summing
from weightcast.wire.manifest import Packing

_PENDING_LANES = 8 * CHUNK_LANES  # that wait in chunks which are not full yet
_DENSE_SHARE = 3  # below every third lane changed, sparse was cheapest in all that was measured
_DENSE_LANES = 4096  # smaller blocks stay in their chunk: a frame of their own costs more than it saves

LaneReader = Callable[[int, int], Lanes]


def encode(
    base: Mapping[str, object] | State,
    new: Mapping[str, object] | State,
    *,
    packing: Packing = "classes",
    slicing: Slicing = WHOLE,
    threads: int | None = None,
    backend: Backend | None = None,
    base_root: str | None = None,
    new_root: str | None = None,
) -> bytes:
    """The packed delta from one state to another: mappings of NumPy, torch or Paddle tensors with the same names and kinds.

    `classes` is the smaller packing and is decoded along the base; `gaps` decodes without any. With a `slicing`, ranks that
    hold slices need only their part, of the delta and of the base. The root digests of the two states are computed unless
    given. Nothing in the result depends on the number of threads or the backend.
    """
    old_state, new_state = as_state(base), as_state(new)
    check_specs(old_state.specs, new_state.specs)
    pieces: list[bytes] = []
    with Encoder(pieces.append, packing=packing, slicing=slicing, threads=threads, backend=backend) as encoder:
        for name, spec in old_state.specs.items():
            encoder.add(spec, _reader(old_state, name), _reader(new_state, name))
        encoder.flush()
        if new_root is None:
            new_root = root_of_sums((spec, str(encoder.sums[name])) for name, spec in old_state.specs.items())
        if base_root is None:
            before = ((spec, str(encoder.sums[name] - encoder.grown[name])) for name, spec in old_state.specs.items())
            base_root = root_of_sums(before)
        encoder.finish(base_root=base_root, new_root=new_root)
    return b"".join(pieces)


def pack(
    delta: Delta,
    *,
    packing: Packing = "gaps",
    slicing: Slicing = WHOLE,
    base: Mapping[str, object] | State | None = None,
    threads: int | None = None,
    backend: Backend | None = None,
) -> bytes:
    """A delta in sparse form as packed bytes. `classes` needs the base."""
    if packing == "classes" and base is None:
        raise InvalidInput("packing 'classes' counts along the base: pass base=…, or use packing='gaps'.")
    state = as_state(base) if base is not None else None
    if state is not None:
        check_specs(delta.specs, state.specs)
    pieces: list[bytes] = []
    with Encoder(pieces.append, packing=packing, slicing=slicing, threads=threads, backend=backend) as encoder:
        for name, spec in delta.specs.items():
            tensor = delta.tensors.get(name)
            encoder.summed_as |= {name: delta.summed_as[name]} if name in delta.summed_as else {}
            if tensor is not None:
                encoder.add_known(tensor, _reader(state, name) if state is not None else None)
            else:
                encoder.add_unchanged(spec)
        encoder.finish(base_root=delta.base_root, new_root=delta.new_root)
    return b"".join(pieces)


def default_threads() -> int:
    """As many as this process may use, but no more than memory bandwidth feeds."""
    return min(4, len(os.sched_getaffinity(0)))


def _reader(state: State, name: str) -> LaneReader:
    return lambda start, stop: state.lanes(name, start, stop)


@dataclass(frozen=True)
class _Pending:
    """A block that waits in its chunk: `changed` and `old` are called by the thread that encodes the chunk."""

    tensor: str
    start: int
    lanes: int
    box: Box | None
    changed: Callable[[Grouping, Lanes | None, Summing | None], Changed]
    old: Callable[[], Lanes] | None


_Frame = tuple[Form, tuple[Block, ...], bytes]


class _Encoded(NamedTuple):
    """A chunk: its frames, its changes if they are collected, and what its blocks add to `Encoder.sums` and `grown`."""

    frames: list[_Frame]
    runs: list[Run]
    sums: list[tuple[str, Sum, Sum]]


class _Key(NamedTuple):
    """What blocks must have in common to share a chunk: the ranks that hold them, and the kind of their lanes."""

    part: tuple[str, int, int]
    kind: LaneKind


@dataclass
class _OpenChunk:
    blocks: list[_Pending] = field(default_factory=list)
    lanes: int = 0


class TooManyChanges(Exception):
    """More lanes change than an encoder was to write."""


class Encoder:
    """Packs tensors one after another. Memory: what was written, two chunks for each thread, and eight that are not full.

    Tensors share chunks, so that a delta of many small ones costs no more than one of a few; with a `slicing`, only slices
    that the same ranks hold do. The changes are also kept in sparse form, for `delta`, as long as that takes no more than
    `collect_nbytes`. Any call raises `TooManyChanges` once more than `most_changes` were written. A context manager: leaving
    it stops the threads.

    After `flush`, `sums` has the sum of each tensor that was compared with its base, and `grown` by how much its changes
    make the sum of the base grow: if base and `grown` do not add up to it, the base was not what its sum says.
    """

    def __init__(
        self,
        write: Callable[[bytes], object],
        *,
        packing: Packing,
        slicing: Slicing = WHOLE,
        threads: int | None = None,
        backend: Backend | None = None,
        collect_nbytes: int = 0,
        most_changes: float = math.inf,
    ) -> None:
        self.changes = 0  # that were written so far
        self.sums: dict[str, Sum] = {}
        self.grown: dict[str, Sum] = {}
        self.summed_as: dict[str, str] = {}
        self._most_changes = most_changes
        self._kernels = kernels(backend)
        self._packing, self._slicing = packing, slicing
        self._runs: list[Run] | None = [] if collect_nbytes else None
        self._room = collect_nbytes
        self._threads = default_threads() if threads is None else threads
        self._container = ContainerWriter(write, packing)
        self._specs: dict[str, TensorSpec] = {}
        self._sum_specs: dict[str, TensorSpec] = {}
        self._open: dict[_Key, _OpenChunk] = {}
        self._pending = 0  # lanes of the blocks in these
        self._jobs: deque[Future[_Encoded]] = deque()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="delta-encode") if self._threads > 1 else None

    @property
    def nbytes(self) -> int:
        """Bytes written so far."""
        return self._container.nbytes

    def add(
        self, spec: TensorSpec, old: LaneReader, new: LaneReader, *, borrowed: bool = False, summed_as: str | None = None
    ) -> None:
        """Compare a tensor with its base. `borrowed`: what `new` returns may change once this call is over.

        `old` is called by any thread, up to `flush`. `summed_as` is the name to sum it under, if not its own.
        """
        kind = self._take(spec)
        if summed_as is not None:
            self.summed_as[spec.name] = summed_as
        self._sum_specs[spec.name] = spec if summed_as is None else replace(spec, name=summed_as)
        self.sums[spec.name] = self.grown[spec.name] = Sum()
        rows: tuple[int, int, LaneReader, LaneReader] | None = None
        for place in self._slicing.places(spec):
            if rows is None or rows[:2] != place[1:3]:
                before = old if place.box is None else partial(_given, old(place.start, place.stop))  # columns share rows
                after = partial(_given, new(place.start, place.stop).copy()) if borrowed else new
                rows = (place.start, place.stop, before, after)
            then, now = (partial(_read_inside, spec, place, read) for read in rows[2:])
            self._put(_Key(place.part, kind), _pending(spec, place, partial(_scanned, now), then))

    def add_box(self, spec: TensorSpec, box: Box, old: Array, new: Array, *, summed: TensorSpec) -> None:
        """Compare a box of a tensor with its base, both in memory that stays as it is until `flush`. Only `grown` has it.

        `summed` is the tensor as it is summed.
        """
        kind = self._take(spec)
        self._sum_specs[spec.name], self.grown[spec.name] = summed, Sum()
        for part, inner in self._slicing.boxes(spec, box):
            where = moved(inner, box.start)
            before, after = (partial(_lanes_of, array, where, spec.dtype) for array in (old, new))
            lanes = math.prod(inner.shape) * lanes_per_element(spec.dtype)
            rows = inner.shape[1:] == spec.shape[1:]
            start = inner.start[0] * (lanes // inner.shape[0]) if rows and spec.shape else 0
            pending = _Pending(spec.name, start, lanes, None if rows else inner, partial(_scanned, after), before)
            self._put(_Key(part, kind), pending)

    def add_known(self, tensor: TensorDelta, old: LaneReader | None) -> None:
        """Pack changes that are known already. `classes` needs the base's lanes."""
        kind = self._take(tensor.spec)
        for place in self._slicing.places(tensor.spec):
            before = partial(_read_inside, tensor.spec, place, old) if old is not None else None
            known = partial(_known, tensor, place)
            self._put(_Key(place.part, kind), _pending(tensor.spec, place, known, before))

    def add_unchanged(self, spec: TensorSpec) -> None:
        """A tensor that is as in the base."""
        kind = self._take(spec)
        nothing = Changed(np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=kind.signed))
        for place in self._slicing.places(spec):  # they take room in a chunk as they do in `add`: equal bytes
            self._put(_Key(place.part, kind), _pending(spec, place, lambda *_: nothing, None))

    def flush(self) -> None:
        """Encode and write everything that was added."""
        for key in sorted(self._open, key=lambda key: (key.part[2], key.part[0])):  # what one rank needs lies together
            self._close_chunk(key)
        while self._jobs:
            self._write(self._jobs.popleft())

    def finish(self, *, base_root: str, new_root: str) -> Table:
        """Write what is open, and the table. The delta is complete with it."""
        self.flush()
        return self._container.finish(self._specs, base_root=base_root, new_root=new_root, summed_as=self.summed_as)

    def delta(self, *, base_root: str, new_root: str) -> Delta | None:
        """What was encoded, in sparse form, after `finish`; None if that was not to be kept, or was too much."""
        if self._runs is None:
            return None
        return Delta(self._specs, assemble(self._specs, self._runs), base_root, new_root, self.summed_as)

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _take(self, spec: TensorSpec) -> LaneKind:
        if spec.name in self._specs:
            raise InvalidInput(f"tensor {spec.name!r} was given twice.")
        self._specs[spec.name] = spec
        return kind_of(spec.dtype)

    def _put(self, key: _Key, block: _Pending) -> None:
        chunk = self._open.setdefault(key, _OpenChunk())
        if chunk.lanes + block.lanes > CHUNK_LANES:
            self._close_chunk(key)
            chunk = self._open[key] = _OpenChunk()
        chunk.blocks.append(block)
        chunk.lanes += block.lanes
        self._pending += block.lanes
        if self._pending > _PENDING_LANES:
            self._close_chunk(max(self._open, key=lambda one: self._open[one].lanes))

    def _close_chunk(self, key: _Key) -> None:
        chunk = self._open.pop(key)
        self._pending -= chunk.lanes
        if self._pool is None:
            done: Future[_Encoded] = Future()
            done.set_result(self._encode_chunk(key.kind, chunk.blocks))
            self._write(done)
            return
        while len(self._jobs) >= 2 * self._threads:
            self._write(self._jobs.popleft())
        self._jobs.append(self._pool.submit(self._encode_chunk, key.kind, chunk.blocks))

    def _write(self, job: Future[_Encoded]) -> None:
        encoded = job.result()
        for frame in encoded.frames:
            self._container.add(*frame)
            self.changes += sum(block.changes for block in frame[1])
        for name, total, grown in encoded.sums:
            self.grown[name] += grown
            if name in self.sums:
                self.sums[name] += total
        if self.changes > self._most_changes:
            raise TooManyChanges
        if self._runs is not None:
            self._runs += encoded.runs
            self._room -= sum(run.nbytes for run in encoded.runs)
            if self._room < 0:
                self._runs = None

    def _encode_chunk(self, kind: LaneKind, pending: list[_Pending]) -> _Encoded:
        """The frames of a chunk: one for all blocks that stay sparse, one for each that does not."""
        frames: list[_Frame] = []
        sparse: list[Block] = []
        runs: list[Run] = []
        sums: list[tuple[str, Sum, Sum]] = []
        groups: Grouping = (ByClass if self._packing == "classes" else ByBlock)(kind, self._kernels)
        for block in pending:
            old = block.old() if block.old is not None else None
            changed = block.changed(groups, old, self._summing(block))
            if old is not None and changed.new is not None:
                sums.append(self._sum(block, old, changed.new, changed))
            if not len(changed.indices):
                continue
            if self._runs is not None:
                runs.append(Run(block.tensor, block.start, changed.indices, changed.steps, block.box))
            described = Block(block.tensor, block.start, block.lanes, len(changed.indices), block.box)
            other = self._dense_frame(changed, block.lanes, kind)
            if other is not None:
                frames.append((other[0], (described,), other[1]))
            else:
                sparse.append(described)
                groups.add(old, changed)
        if sparse:
            frames.insert(0, ("sparse", tuple(sparse), pack_groups(groups.grouped(), self._kernels)))
        return _Encoded(frames, runs, sums)

    def _summing(self, block: _Pending) -> Summing | None:
        """How a block is summed while it is compared; None if its lanes do not follow one another in the tensor."""
        spec = self._sum_specs.get(block.tensor)
        if block.box is not None or spec is None:
            return None
        return summing(spec, block.start, whole=block.tensor in self.sums)

    def _sum(self, block: _Pending, old: Lanes, new: Lanes, found: Changed) -> tuple[str, Sum, Sum]:
        """What a block that was compared adds to the sum of its tensor, and to its growth."""
        if found.sums is not None:
            return block.tensor, *found.sums
        spec, total, changed = self._sum_specs[block.tensor], Sum(), found.indices
        wide, wanted = index_dtype(lane_count(spec)), block.tensor in self.sums
        if block.box is None:
            total = range_sum(spec, block.start * new.itemsize, flat_bytes(new)) if wanted else total
            places = changed + wide.type(block.start)
        else:
            array = new.view(spec.dtype.numpy).reshape(block.box.shape)
            total = box_sum(spec, block.box, array) if wanted else total
            places = np.empty(len(changed), dtype=wide)
            out_of_box(spec, block.box, changed, 0, out=places)
        return block.tensor, total, change_sum(spec, places, old.take(changed), new.take(changed))

    def _dense_frame(self, changed: Changed, lanes: int, kind: LaneKind) -> tuple[Form, bytes] | None:
        """The frame of a block that is cheaper with a step for every lane; None if it is not."""
        if lanes < _DENSE_LANES or len(changed.indices) * _DENSE_SHARE <= lanes:
            return None
        steps = np.zeros(lanes, dtype=kind.signed)
        steps[changed.indices] = changed.steps
        alone = ByBlock(kind, self._kernels)
        alone.add(None, changed)
        sparse_nbytes = len(pack_groups(alone.grouped(), self._kernels))
        planes = pack_planes(steps)
        if min(len(planes), steps.nbytes) >= sparse_nbytes:
            return None
        return ("dense", planes) if len(planes) < steps.nbytes else ("raw", pack_raw(steps))


def _pending(
    spec: TensorSpec,
    place: Place,
    changed: Callable[[Grouping, Lanes | None, Summing | None], Changed],
    old: Callable[[], Lanes] | None,
) -> _Pending:
    if place.box is None:
        return _Pending(spec.name, place.start, place.stop - place.start, None, changed, old)
    lanes = math.prod(place.box.shape) * lanes_per_element(spec.dtype)
    return _Pending(spec.name, 0, lanes, place.box, changed, old)


def _lanes_of(array: Array, box: Box, dtype: DType) -> Lanes:
    """The lanes of a box of an array: a view where they lie together."""
    inside = array if box.shape == array.shape else box_of(array, box)
    return flat_bytes(np.ascontiguousarray(inside)).view(kind_of(dtype).unsigned)


def _read_inside(spec: TensorSpec, place: Place, read: LaneReader) -> Lanes:
    """The lanes of a block, from those of its rows."""
    rows = read(place.start, place.stop)
    return rows if place.box is None else rows_box(spec, place.box, rows)


def _given(lanes: Lanes, start: int, stop: int) -> Lanes:  # noqa: ARG001 - it is that range
    return lanes


def _scanned(new: Callable[[], Lanes], groups: Grouping, old: Lanes | None, how: Summing | None) -> Changed:
    if old is None:
        raise InvalidInput("there is no base to compare with.")
    return groups.scan(old, new(), how)


def _known(tensor: TensorDelta, place: Place, *_: object) -> Changed:
    return changed_in(tensor, place)
