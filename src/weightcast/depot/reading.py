"""The tensors of a version that a depot has, read box by box: where they lie, or from the state that a delta leads to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from weightcast.clock import Deadline
from weightcast.delta import Delta, MovedState, move
from weightcast.delta import slice as slice_delta
from weightcast.depot.holding import Holding, Shelf
from weightcast.depot.once import Once
from weightcast.errors import Conflict, DigestMismatch, NotFound
from weightcast.store import layout
from weightcast.store.catalog import Catalog
from weightcast.store.chain import Chain, fold_deltas, resolve
from weightcast.store.part_state import PartState
from weightcast.store.watching import WatchedState
from weightcast.tensors.boxes import Box
from weightcast.tensors.flat import Array, Buffer, Bytes, empty, flat_bytes, from_bytes
from weightcast.tensors.lanes import Lanes, kind_of, lanes_per_element
from weightcast.tensors.placing import Check
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import tensor_hasher
from weightcast.wire.manifest import Manifest, TensorEntry

BLOCK_NBYTES = 4 << 20  # read, hashed and sent at a time
BOUNCE_NBYTES = 1 << 20  # gathered before that: stays in a core's own cache
_WASTE_NBYTES = 64 << 10  # read for nothing in a row, rather than to read each row by itself
_KEPT_STATES = 2  # of delta versions: the changes since their full version are kept, about 6 bytes each
_KEPT_PROOFS = 1 << 16  # tensors that were compared with their digests

Folded = tuple[Chain, Delta]


class Tensors(Protocol):
    """The tensors of one version."""

    manifest: Manifest

    def held(self, entry: TensorEntry) -> Box | None:
        """What there is of a tensor here: all of it, or one box; None if nothing is."""

    def parts(self, entry: TensorEntry, box: Box) -> Iterator[tuple[Box, Array]]:
        """The elements of a box in C order, as arrays of parts of it. An array is valid until the next is asked for."""


class LyingTensors:
    """Tensors of a holding. Those in memory are seen without a copy; those in files are read a few MiB at a time."""

    def __init__(self, holding: Holding, deadline: Deadline) -> None:
        self.manifest = holding.manifest
        self._holding, self._deadline = holding, deadline
        self._entries = {entry.name: entry for entry in holding.manifest.tensors} if holding.in_files else {}

    def held(self, entry: TensorEntry) -> Box | None:
        """What there is of a tensor here."""
        if self._holding.in_files:
            return Box.whole(entry.shape) if self.manifest.parts and entry.name in self._entries else None
        try:
            return self._holding.tensor(entry.name)[0]
        except NotFound:
            return None

    def parts(self, entry: TensorEntry, box: Box) -> Iterator[tuple[Box, Array]]:
        """The box: as one view, or in parts that are read."""
        if self._holding.in_files:
            for part, around in _stretches(entry, box):
                yield part, self._read(entry, around)[_inside(part, around)]
            return
        around, array = self._holding.tensor(entry.name)
        yield box, array[_inside(box, around)]

    def _read(self, entry: TensorEntry, box: Box) -> Array:
        """The elements of a box that lie one after the other."""
        spec = TensorSpec(name=entry.name, dtype=entry.dtype, shape=box.shape)
        if not spec.nbytes:
            return empty(spec)
        place = self._entries[entry.name]  # a delta's entry has none
        start = place.offset + _first(entry, box) * entry.dtype.itemsize
        file = self.manifest.parts[place.part].file
        (view,) = self._holding.views(file, start, start + spec.nbytes, deadline=self._deadline)
        return from_bytes(view, spec)


def _inside(box: Box, around: Box) -> tuple[Any, ...]:
    """The index of a box in an array of the box around it."""
    return (
        *(
            slice(start - first, start - first + size)
            for start, first, size in zip(box.start, around.start, box.shape, strict=True)
        ),
        ...,
    )


def _first(entry: TensorEntry, box: Box) -> int:
    """How many elements lie before the first of a box."""
    return sum(start * prod(entry.shape[axis + 1 :]) for axis, start in enumerate(box.start))


def _stretches(entry: TensorEntry, box: Box) -> Iterator[tuple[Box, Box]]:
    """A box in parts, in C order, each with a box around it whose elements lie one after the other: at most a block.

    Whole rows are read around a part of rows, unless that would read much more than is wanted of each.
    """
    lead = next((axis for axis, size in enumerate(box.shape) if size > 1), None)
    if lead is None or not prod(box.shape):
        yield box, box
        return
    width = entry.dtype.itemsize
    row, used = prod(entry.shape[lead + 1 :]) * width, prod(box.shape[lead + 1 :]) * width
    step = 1 if row - used > _WASTE_NBYTES else max(1, BLOCK_NBYTES // row)
    for at in range(0, box.shape[lead], step):
        start, shape = list(box.start), list(box.shape)
        start[lead], shape[lead] = box.start[lead] + at, min(step, box.shape[lead] - at)
        part = Box(tuple(start), tuple(shape))
        if step == 1:
            yield from _stretches(entry, part)
        else:
            whole = len(box.shape) - lead - 1
            yield part, Box((*start[: lead + 1], *[0] * whole), (*shape[: lead + 1], *entry.shape[lead + 1 :]))


class _Given:
    """A range of one tensor's lanes as a state."""

    def __init__(self, entry: TensorEntry, lanes: Lanes) -> None:
        self.specs = {entry.name: entry.spec}
        self._lanes = lanes

    def lanes(self, name: str, start: int, stop: int) -> Lanes:  # noqa: ARG002 - the one range that is asked for
        return self._lanes


class MovedTensors:
    """Tensors of a delta version: those of the full version that it goes back to, with the changes since applied.

    A few MiB at a time are in memory.
    """

    def __init__(self, manifest: Manifest, full: LyingTensors, changes: Delta) -> None:
        self.manifest = manifest
        self._full, self._changes = full, changes

    def held(self, entry: TensorEntry) -> Box | None:
        """What there is of a tensor here."""
        return self._full.held(entry)

    def parts(self, entry: TensorEntry, box: Box) -> Iterator[tuple[Box, Array]]:
        """The box in parts that are gathered, or as it is."""
        if entry.name not in self._changes.tensors:
            yield from self._full.parts(entry, box)
            return
        width = entry.dtype.itemsize
        bits = np.empty(min(prod(box.shape), max(1, BLOCK_NBYTES // width)), dtype=f"u{width}")
        for part in _divided(box, len(bits)):
            for inner, lying in self._full.parts(entry, part):
                if _is_stretch(entry, inner):
                    yield inner, self._stretch(entry, inner, np.ascontiguousarray(lying))
                    continue
                gathered = bits[: prod(inner.shape)].reshape(inner.shape)
                gathered[...] = lying.view(bits.dtype)
                array = gathered.view(entry.dtype.numpy)
                move({entry.name: array}, slice_delta(self._changes, {entry.name: inner}))
                yield inner, array

    def _stretch(self, entry: TensorEntry, part: Box, lying: Array) -> Array:
        """A part whose elements lie one after the other: its changes do, too, and need not be looked for."""
        kind, lanes = kind_of(entry.dtype), lanes_per_element(entry.dtype)
        first = _first(entry, part)
        state = MovedState(_Given(entry, flat_bytes(lying).view(kind.unsigned)), self._changes)
        found = state.lanes(entry.name, first * lanes, (first + prod(part.shape)) * lanes)
        return found.view(entry.dtype.numpy).reshape(part.shape)


def _is_stretch(entry: TensorEntry, box: Box) -> bool:
    """Whether the elements of a box lie one after the other in its tensor."""
    lead = next((axis for axis, size in enumerate(box.shape) if size > 1), len(box.shape))
    return box.shape[lead + 1 :] == entry.shape[lead + 1 :]


def _divided(box: Box, elements: int) -> Iterator[Box]:
    """A box in parts of at most so many elements, in C order."""
    numel = prod(box.shape)
    if numel <= elements:
        if numel:
            yield box
        return
    axis = next(axis for axis, size in enumerate(box.shape) if size > 1)
    step = max(1, elements // (numel // box.shape[axis]))
    for at in range(0, box.shape[axis], step):
        start, shape = list(box.start), list(box.shape)
        start[axis], shape[axis] = box.start[axis] + at, min(step, box.shape[axis] - at)
        yield from _divided(Box(tuple(start), tuple(shape)), elements)


def byte_blocks(array: Array, bounce: Bytes, check: Check) -> Iterator[memoryview]:
    """The bytes of an array in C order: from where they lie, or gathered in `bounce`, as much as fits at a time.

    A block is valid until the next one is asked for. `check` is called before each, and may raise.
    """
    bits = array.view(f"u{array.dtype.itemsize}")  # integers are copied fastest
    for block in _blocks(bits, BLOCK_NBYTES if array.flags.c_contiguous else len(bounce)):
        check()
        if block.flags.c_contiguous:
            yield flat_bytes(block).data
        else:
            gathered = bounce[: block.nbytes]
            gathered.view(block.dtype).reshape(block.shape)[...] = block
            yield gathered.data


def _blocks(array: Array, nbytes: int) -> Iterator[Array]:
    if array.nbytes <= nbytes:
        if array.nbytes:
            yield array
        return
    rows = nbytes // (array.nbytes // len(array))
    for start in range(0, len(array), max(1, rows)):
        if rows:
            yield array[start : start + rows]
        else:
            yield from _blocks(array[start], nbytes)


class Reading:
    """Opens the tensors of versions, and proves that they are what was published before anything is told of them.

    `store` is where the versions of the shelf lie: the changes of deltas are read from there. Without one they cannot be.
    """

    def __init__(self, shelf: Shelf, store: Path | None, *, threads: int | None = 1) -> None:
        self._shelf = shelf
        self._catalog = Catalog(store) if store is not None else None
        self._threads = threads
        self._folded: Once[str, Folded] = Once(_KEPT_STATES)
        self._proved: Once[tuple[str, str, str], None] = Once(_KEPT_PROOFS)

    @contextmanager
    def tensors(self, holding: Holding, *, deadline: Deadline) -> Iterator[Tensors]:
        """The tensors of a version. Raises `NotFound` if it is a delta whose state cannot be worked out here."""
        manifest = holding.manifest
        if manifest.base is None:
            yield LyingTensors(holding, deadline)
            return
        if self._catalog is None:
            raise NotFound(f"version {manifest.version} is a delta, and this depot has no store to work out its state from.")
        chain, changes = self._walk(self._catalog, manifest, deadline)
        with self._shelf.holding(chain.full.version) as full:
            if full.manifest.root_digest != chain.full.root_digest:
                raise Conflict(
                    f"version {chain.full.version} has other bytes now than those that {manifest.version} is based on."
                )
            yield MovedTensors(manifest, LyingTensors(full, deadline), changes)

    def prove(self, tensors: Tensors, entry: TensorEntry, *, deadline: Deadline) -> None:
        """Compare what there is of a tensor with its digest, once. Raises `DigestMismatch`."""
        what = f"proving {entry.name} of {tensors.manifest.version}"
        key = (tensors.manifest.version, tensors.manifest.root_digest, entry.name)
        self._proved.get(key, lambda: _prove(tensors, entry, deadline, what), deadline=deadline, what=what)

    def _walk(self, catalog: Catalog, manifest: Manifest, deadline: Deadline) -> Folded:
        what = f"working out version {manifest.version}"
        return self._folded.get(
            manifest.root_digest, lambda: self._fold(catalog, manifest, deadline), deadline=deadline, what=what
        )

    def _fold(self, catalog: Catalog, manifest: Manifest, deadline: Deadline) -> Folded:
        """The deltas since the full version as one, from the nearest version on the way whose changes are kept."""
        chain = resolve(catalog, manifest.version)
        if chain.end.root_digest != manifest.root_digest:
            raise Conflict(f"version {manifest.version} in {catalog.path} has other bytes now than this depot serves.")
        start, deltas = None, chain.deltas
        for _, (known, folded) in self._folded.kept():
            split = chain.split(known.end.version)
            on_the_way = split is not None and (split[0].full.root_digest, split[0].end.root_digest) == (
                known.full.root_digest,
                known.end.root_digest,
            )
            if split is not None and on_the_way and len(split[1]) < len(deltas):
                start, deltas = folded, split[1]
        with PartState(layout.version_dir(catalog.path, chain.full.version), chain.full) as parts:
            state = WatchedState(parts, deadline, f"working out version {manifest.version}")
            changes = fold_deltas(catalog.path, deltas, state, start=start, threads=self._threads, deadline=deadline)
        if changes is None:
            raise Conflict(f"version {manifest.version} in {catalog.path} is not the delta any more that this depot serves.")
        return chain, changes


def _prove(tensors: Tensors, entry: TensorEntry, deadline: Deadline, what: str) -> None:
    manifest = tensors.manifest
    box = tensors.held(entry)
    wanted = _promised(manifest, entry, box) if box is not None else ""
    if box is None or not wanted:
        return
    hasher = tensor_hasher(entry.sum_spec, wanted)
    bounce = np.empty(BOUNCE_NBYTES, dtype=np.uint8)
    for block in box_blocks(tensors, entry, box, bounce):
        deadline.check(what)
        hasher.update(block)
    if hasher.digest() != wanted:
        raise DigestMismatch(f"version {manifest.version} as this depot has it", [(entry.name, wanted, hasher.digest())])


def _promised(manifest: Manifest, entry: TensorEntry, box: Box) -> str:
    """The digest that the manifest gives for a box; empty if it gives none."""
    if entry.name in manifest.boxes:
        same = (one.digest for one in manifest.boxes[entry.name] if Box(one.start, one.shape) == box)
        return next(same, "")
    return entry.proof if box == Box.whole(entry.shape) else ""


def box_blocks(tensors: Tensors, entry: TensorEntry, box: Box, bounce: Bytes) -> Iterator[Buffer]:
    """The bytes of a box in C order. A block is valid until the next one is asked for."""

    def check() -> None:
        tensors.held(entry)  # raises if a file below was cut short: reading it then would end the process

    for _, array in tensors.parts(entry, box):
        yield from byte_blocks(array, bounce, check)
