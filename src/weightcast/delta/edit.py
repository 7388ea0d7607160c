"""An edit: a delta worked out against the memory it will be written to, as old and new values at indices.

Writing values is idempotent where adding steps is not. So an edit that was interrupted anywhere, by an exception or, with
its journal on a medium, by the death of the process, can be finished or undone, as often as it takes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from weightcast.delta.memory import LaneMemory, check_indices
from weightcast.delta.sparse import Delta, TensorDelta, check_specs
from weightcast.errors import DeltaCorrupt, InvalidInput
from weightcast.tensors.digest import raw_digest
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Buffer
from weightcast.tensors.kernels import Indices
from weightcast.tensors.lanes import Lanes, index_dtype, kind_of, lane_count
from weightcast.tensors.spec import TensorSpec
from weightcast.wire.decoding import decode

Memories = Mapping[str, LaneMemory]

_MAGIC = b"wcedit1\n"
_HEAD = struct.Struct("<8sQ16s")


@dataclass(frozen=True)
class TensorEdit:
    """What is written to one tensor: `indices` None for all lanes."""

    spec: TensorSpec
    indices: Indices | None
    before: Lanes
    after: Lanes


class _Entry(msgspec.Struct, frozen=True):
    name: str
    dtype: DType
    shape: tuple[int, ...]
    changes: int
    whole: bool


@dataclass(frozen=True)
class Edit:
    """Old and new values of everything that a delta changes. `finish` and `undo` may be called in any order, repeatedly."""

    tensors: tuple[TensorEdit, ...]

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(
            edit.before.nbytes + edit.after.nbytes + (edit.indices.nbytes if edit.indices is not None else 0)
            for edit in self.tensors
        )

    def finish(self, memories: Memories) -> None:
        """Write every new value."""
        self._check(memories)
        for edit in self.tensors:
            memories[edit.spec.name].write(edit.indices, edit.after)

    def undo(self, memories: Memories) -> None:
        """Write every old value."""
        self._check(memories)
        for edit in self.tensors:
            memories[edit.spec.name].write(edit.indices, edit.before)

    def _check(self, memories: Memories) -> None:
        """Refuse other tensors than those it was made for: a journal may be read where another model is held."""
        wanted = {edit.spec.name: edit.spec for edit in self.tensors}
        check_specs(wanted, {name: memories[name].spec for name in wanted.keys() & memories.keys()})

    def to_journal(self) -> bytes:
        """The edit as bytes, for a medium that outlives this process."""
        entries = [
            _Entry(edit.spec.name, edit.spec.dtype, edit.spec.shape, len(edit.after), edit.indices is None)
            for edit in self.tensors
        ]
        table = msgspec.json.encode(entries)
        arrays: list[bytes] = []
        for edit in self.tensors:
            arrays += [edit.indices.tobytes()] if edit.indices is not None else []
            arrays += [edit.before.tobytes(), edit.after.tobytes()]
        body = b"".join([table, *arrays])
        return _HEAD.pack(_MAGIC, len(table), raw_digest(body)) + body

    @classmethod
    def from_journal(cls, data: Buffer) -> Edit:
        """The opposite of `to_journal`. A journal that is cut short or damaged raises `DeltaCorrupt`."""
        view = memoryview(data)
        if len(view) < _HEAD.size:
            raise DeltaCorrupt(f"its journal has {len(view)} bytes")
        magic, table_nbytes, digest = _HEAD.unpack_from(view)
        body = view[_HEAD.size :]
        if magic != _MAGIC or digest != raw_digest(body) or table_nbytes > len(body):
            raise DeltaCorrupt("its journal does not match its digest")
        try:
            entries = decode(body[:table_nbytes], list[_Entry])
        except msgspec.DecodeError as error:
            raise DeltaCorrupt(f"its journal cannot be read: {error}") from error
        arrays = _Arrays(body[table_nbytes:])
        try:
            edit = cls(tuple(_edit_from(entry, arrays) for entry in entries))
        except InvalidInput as error:
            raise DeltaCorrupt(f"its journal cannot be used: {error}") from error
        arrays.check_end()
        return edit


class _Arrays:
    def __init__(self, data: memoryview) -> None:
        self._data = data

    def take(self, dtype: np.dtype[Any], count: int) -> Any:
        nbytes = dtype.itemsize * count
        if nbytes > len(self._data):
            raise DeltaCorrupt("its journal ends too early")
        taken, self._data = self._data[:nbytes], self._data[nbytes:]
        return np.frombuffer(taken, dtype=dtype)

    def check_end(self) -> None:
        if len(self._data):
            raise DeltaCorrupt(f"its journal has {len(self._data)} bytes left over")


def _edit_from(entry: _Entry, arrays: _Arrays) -> TensorEdit:
    spec = TensorSpec(name=entry.name, dtype=entry.dtype, shape=entry.shape)
    unsigned, lanes = kind_of(spec.dtype).unsigned, lane_count(spec)
    if not 0 <= entry.changes <= lanes or (entry.whole and entry.changes != lanes):
        raise DeltaCorrupt(f"its journal has {entry.changes} values for the {lanes} lanes of {spec.name!r}")
    indices = None if entry.whole else arrays.take(index_dtype(lanes), entry.changes)
    if indices is not None:
        check_indices(spec, indices)
    return TensorEdit(spec, indices, arrays.take(unsigned, entry.changes), arrays.take(unsigned, entry.changes))


def prepare(memories: Memories, delta: Delta) -> Edit:
    """Work a delta out against the memory that holds its base. Reads only."""
    check_specs(delta.specs, {name: memory.spec for name, memory in memories.items()})
    return Edit(tuple(edit_tensor(memories[name], tensor) for name, tensor in delta.tensors.items()))


def edit_tensor(memory: LaneMemory, tensor: TensorDelta) -> TensorEdit:
    """The same for one tensor."""
    if tensor.indices is not None:
        check_indices(tensor.spec, tensor.indices)
    return TensorEdit(tensor.spec, tensor.indices, *memory.moved(tensor.indices, tensor.steps))


def move_tensor(memory: LaneMemory, tensor: TensorDelta) -> None:
    """Write the new values at once, with nothing kept: for memory that nobody uses and that is proved afterwards."""
    memory.write(tensor.indices, edit_tensor(memory, tensor).after)
