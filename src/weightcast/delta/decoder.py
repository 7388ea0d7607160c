"""From a packed delta back to its sparse form. Nothing in the input is believed, and nothing outside is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, compress

import numpy as np

from weightcast.delta.container import Block, Chunk, Table, frame_of, read_table
from weightcast.delta.encoder import default_threads
from weightcast.delta.planes import unpack_planes, unpack_raw
from weightcast.delta.runs import Run, assemble
from weightcast.delta.sparse import Delta, check_specs, fold
from weightcast.delta.states import MovedState, State, as_state, block_lanes
from weightcast.delta.streams import Groups, unpack_groups
from weightcast.errors import DeltaCorrupt, InvalidInput
from weightcast.tensors.flat import Buffer
from weightcast.tensors.kernels import ENDLESS, NO_ROOM, Backend, ClassWalk, Kernels, kernels
from weightcast.tensors.lanes import Lanes, kind_of
from weightcast.tensors.spec import TensorSpec

OldLanes = Callable[[Block], Lanes]


def decode(
    data: Buffer,
    base: Mapping[str, object] | State | None = None,
    *,
    specs: Mapping[str, TensorSpec] | None = None,
    threads: int | None = None,
    backend: Backend | None = None,
) -> Delta:
    """The sparse form of a packed delta. `classes` needs the base, which is only read.

    Without a base, give the `specs` of the tensors that the delta must be about. A delta about other tensors is refused
    before it is unpacked; without specs, a small delta can take any amount of memory.

    Raises `DeltaCorrupt` for anything that contradicts itself or the base, and `DeltaDoesNotFit` for another base. That the
    bytes of the base are the right ones is for the caller to check, by `base_root`. Memory: about 6 bytes per change for
    16-bit elements.
    """
    view = memoryview(data)
    state = as_state(base) if base is not None else None
    expected = specs if state is None else state.specs
    table = read_table(view, expected)
    if expected is not None:
        check_specs(table.specs, expected)
    if state is None and table.packing == "classes" and any(chunk.form == "sparse" for chunk in table.chunks):
        raise InvalidInput("a delta packed as 'classes' decodes along its base: pass base=….")
    old = None if state is None else partial(block_lanes, state)
    runs = decode_chunks(view, table, table.chunks, old, threads=threads, backend=backend)
    return Delta(table.specs, assemble(table.specs, runs), table.base_root, table.new_root, table.summed_as)


def decode_payloads(
    payloads: Sequence[Buffer],
    base: State | None = None,
    *,
    specs: Mapping[str, TensorSpec],
    threads: int | None = None,
    takes: Callable[[int, Block], bool] | None = None,
) -> Delta:
    """The sparse form of packed deltas that together lead from one state to another, each for some tensors or boxes of it.

    One that leads there alone tells the roots; several do not know them. `takes` says whether the changes of a block are
    taken from the payload with this index, where several payloads have them.
    """
    old = None if base is None else partial(block_lanes, base)
    runs: list[Run] = []
    tables = [read_table(memoryview(data), specs) for data in payloads]
    for index, (data, table) in enumerate(zip(payloads, tables, strict=True)):
        check_specs(table.specs, {name: specs[name] for name in table.specs if name in specs})
        own = None if takes is None else partial(takes, index)
        runs += decode_chunks(memoryview(data), table, table.chunks, old, takes=own, threads=threads)
    first = tables[0]
    roots = (first.base_root, first.new_root) if len(tables) == 1 else ("", "")
    return Delta(specs, assemble(specs, runs), *roots, first.summed_as)


def decode_chunks(
    view: memoryview,
    table: Table,
    chunks: Sequence[Chunk],
    old: OldLanes | None,
    *,
    takes: Callable[[Block], bool] | None = None,
    threads: int | None = None,
    backend: Backend | None = None,
) -> list[Run]:
    """The changes of some chunks of a packed delta, or of those of their blocks that `takes` chooses. `old` gives the lanes
    of a block in the base, which `classes` needs.
    """
    job = _ChunkDecoder(view, table, old, kernels(backend))
    count = default_threads() if threads is None else threads
    if count > 1 and len(chunks) > 1:
        with ThreadPoolExecutor(count, thread_name_prefix="delta-decode") as pool:
            runs = list(chain(*pool.map(job.decode, chunks)))
    else:
        runs = list(chain(*map(job.decode, chunks)))
    if takes is None:
        return runs
    return list(compress(runs, (takes(block) for chunk in chunks for block in chunk.blocks)))


def decode_chain(
    payloads: Sequence[Buffer],
    base: Mapping[str, object] | State,
    *,
    threads: int | None = None,
    backend: Backend | None = None,
) -> Delta:
    """Packed deltas that follow one another, as one delta from `base` to the end of the last."""
    if not payloads:
        raise InvalidInput("an empty chain of deltas leads nowhere.")
    state = as_state(base)
    folded = decode(payloads[0], state, threads=threads, backend=backend)
    for payload in payloads[1:]:
        folded = fold(folded, decode(payload, MovedState(state, folded), threads=threads, backend=backend))
    return folded


class _ChunkDecoder:
    def __init__(self, view: memoryview, table: Table, old: OldLanes | None, kernels: Kernels) -> None:
        self._view, self._table, self._old, self._kernels = view, table, old, kernels

    def decode(self, chunk: Chunk) -> list[Run]:
        frame = frame_of(self._view, chunk)
        kind = kind_of(self._table.specs[chunk.blocks[0].tensor].dtype)
        if chunk.form != "sparse":
            block = chunk.blocks[0]
            unpack = unpack_planes if chunk.form == "dense" else unpack_raw
            steps = unpack(frame, lanes=block.lanes, width=kind.nbytes)
            if int(np.count_nonzero(steps)) != block.changes:
                raise DeltaCorrupt(f"a {chunk.form} block of {block.tensor!r} does not have {block.changes} changes")
            return [Run(block.tensor, block.start, None, steps, block.box)]
        by_class = self._table.packing == "classes"
        groups = unpack_groups(
            frame,
            groups=kind.classes if by_class else len(chunk.blocks),
            changes=sum(block.changes for block in chunk.blocks),
            kind=kind,
            kernels=self._kernels,
            room=NO_ROOM if by_class else np.array([block.lanes for block in chunk.blocks], dtype=np.int64),
        )
        return self._by_class(chunk, groups) if by_class else _by_block(chunk, groups)

    def _by_class(self, chunk: Chunk, groups: Groups) -> list[Run]:
        if self._old is None:
            raise InvalidInput("a delta packed as 'classes' decodes along its base: pass base=….")
        kind = kind_of(self._table.specs[chunk.blocks[0].tensor].dtype)
        starts = np.concatenate([[0], np.cumsum(groups.counts)[:-1]])
        gaps = np.full(len(groups.gaps) + kind.classes, ENDLESS, dtype=np.uint32)
        for name in np.flatnonzero(groups.counts).tolist():  # the gaps of each class, and one that never ends
            first, count = int(starts[name]), int(groups.counts[name])
            gaps[first + name : first + name + count] = groups.gaps[first : first + count]
        walk = ClassWalk(starts + np.arange(kind.classes), gaps)
        runs = []
        for block in chunk.blocks:
            try:
                indices, order = self._kernels.find_by_class(self._old(block), kind, gaps, walk, block.changes)
            except ValueError as error:
                raise DeltaCorrupt(f"{block.tensor!r} does not match its base: {error}") from error
            runs.append(Run(block.tensor, block.start, indices, groups.steps[order], block.box))
        return runs


def _by_block(chunk: Chunk, groups: Groups) -> list[Run]:
    if groups.counts.tolist() != [block.changes for block in chunk.blocks]:
        raise DeltaCorrupt("the groups of a chunk do not have as many changes as its blocks")
    runs, first = [], 0
    for block in chunk.blocks:
        last = first + block.changes
        runs.append(Run(block.tensor, block.start, groups.gaps[first:last], groups.steps[first:last], block.box))
        first = last
    return runs
