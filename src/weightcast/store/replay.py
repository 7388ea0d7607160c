"""The tensors that a packed delta was made from, got back from its base and its bytes, a few at a time.

An iterator can be consumed only once. Where it turns out in the middle that no delta can be published, what it gave so
far is taken from here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

from weightcast.delta import MovedState, State, decode
from weightcast.delta.container import Chunk, ContainerWriter, Table
from weightcast.store.byte_file import ByteFile
from weightcast.tensors.flat import Array, empty, flat_bytes
from weightcast.tensors.lanes import Lanes, lane_count
from weightcast.tensors.spec import TensorSpec

_BLOCK_LANES = 1 << 20


def replayed(path: Path, table: Table, base: State) -> Generator[tuple[str, Array], None, None]:
    """Every tensor of a packed delta as it was encoded, bit for bit, in fresh memory.

    Memory: the tensors that share a chunk, which is one large tensor and at most 8 million elements of small ones. Closing
    the iterator closes the file.
    """
    with ByteFile(path) as file:
        for specs, chunks in _groups(table):
            part = _Part(base, specs)
            state = MovedState(part, decode(_container(file, table, specs, chunks), part)) if chunks else part
            for name, spec in specs.items():
                yield name, _array(state, spec)


class _Part:
    """Some tensors of a state."""

    def __init__(self, state: State, specs: Mapping[str, TensorSpec]) -> None:
        self._state, self.specs = state, specs

    def lanes(self, name: str, start: int, stop: int) -> Lanes:
        return self._state.lanes(name, start, stop)


def _groups(table: Table) -> Iterator[tuple[dict[str, TensorSpec], list[Chunk]]]:
    """The smallest sets of tensors that share no chunk with others, each with its chunks."""
    leader = {name: name for name in table.specs}

    def find(name: str) -> str:
        while leader[name] != name:
            leader[name] = name = leader[leader[name]]
        return name

    for chunk in table.chunks:
        for block in chunk.blocks:
            leader[find(block.tensor)] = find(chunk.blocks[0].tensor)
    groups: dict[str, tuple[dict[str, TensorSpec], list[Chunk]]] = {}
    for name, spec in table.specs.items():
        groups.setdefault(find(name), ({}, []))[0][name] = spec
    for chunk in table.chunks:
        groups[find(chunk.blocks[0].tensor)][1].append(chunk)
    yield from groups.values()


def _container(file: ByteFile, table: Table, specs: Mapping[str, TensorSpec], chunks: list[Chunk]) -> bytes:
    """A packed delta of these chunks only."""
    pieces: list[bytes] = []
    container = ContainerWriter(pieces.append, table.packing)
    for chunk in chunks:
        container.add(chunk.form, chunk.blocks, file.read(chunk.nbytes, chunk.offset))
    container.finish(specs, base_root="", new_root="")
    return b"".join(pieces)


def _array(state: State, spec: TensorSpec) -> Array:
    array = empty(spec)
    rest = flat_bytes(array)
    lanes = lane_count(spec)
    for start in range(0, lanes, _BLOCK_LANES):
        block = flat_bytes(state.lanes(spec.name, start, min(start + _BLOCK_LANES, lanes)))
        rest[: len(block)] = block
        rest = rest[len(block) :]
    return array
