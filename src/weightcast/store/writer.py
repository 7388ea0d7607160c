"""Writing a full version: tensors go into parts as they arrive."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import TracebackType

import msgspec

from weightcast.errors import InvalidInput
from weightcast.store import layout
from weightcast.store.draft import Contents, Draft
from weightcast.store.files import rename
from weightcast.store.part_series import PartSeries
from weightcast.store.safetensors_file import HEADER_ROOM, header_room_for
from weightcast.tensors.bridges import bridge_for, host_array, spec_of
from weightcast.tensors.spec import TensorSpec
from weightcast.wire.manifest import PartEntry, TensorEntry

NamedTensors = Mapping[str, object] | Iterable[tuple[str, object]]


def survey(tensors: Mapping[str, object]) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """What a mapping holds: the tensors that have bytes of their own, and the names that are tied to them.

    A mapping's tensors are alive together, so names that share memory are the same tensor.
    """
    specs: dict[str, TensorSpec] = {}
    tied: dict[str, str] = {}
    holders: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        spec = spec_of(name, tensor)
        holder = holders.setdefault(bridge_for(tensor).memory_key(tensor), name) if spec.nbytes else name
        if holder == name:
            specs[name] = spec
        else:
            tied[name] = holder
    return specs, tied


class FullWriter:
    """The parts of one version. A context manager: leaving it closes what is open.

    Tensors are written as they come and not kept, so an iterator may reuse its memory. Only small tensors whose size
    would put their successor off its alignment wait, up to 1 MiB of them, for the end of their part.
    """

    def __init__(self, draft: Draft, *, part_nbytes: int) -> None:
        self._draft = draft
        self._series = PartSeries(
            lambda index: draft.directory / layout.unsealed_part_name(index),
            part_nbytes=part_nbytes,
            algorithm=draft.algorithm,
        )
        self._tied: dict[str, str] = {}
        self._names: set[str] = set()

    def add_all(self, tensors: NamedTensors) -> None:
        """Add every tensor of a mapping or an iterator. Tied names of a mapping are recognised and written once."""
        if not isinstance(tensors, Mapping):
            for name, tensor in tensors:
                self.add(name, tensor)
            return
        specs, self._tied = survey(tensors)  # all are checked before the first is written
        self._series.header_room = min(max(HEADER_ROOM, header_room_for(specs.values())), 16 * HEADER_ROOM)
        for name in specs:
            self.add(name, tensors[name])

    def add(self, name: str, tensor: object) -> None:
        """Write one tensor. Its memory may change once this returns."""
        if name in self._names:
            raise InvalidInput(f"tensor {name!r} was given twice for version {self._draft.version}.")
        self._names.add(name)
        self._series.add(spec_of(name, tensor), host_array(name, tensor))

    def finish(self) -> Contents:
        """Give the parts their names and write the index that lists them."""
        self._series.finish()
        if not self._series.entries:
            raise InvalidInput(f"version {self._draft.version} has no tensors: there is nothing to publish.")
        parts, entries = self._name_parts(), tuple(self._series.entries)
        self._draft.write_file(layout.INDEX, index_of(parts, entries))
        return Contents("full", entries, self._tied, parts)

    def __enter__(self) -> FullWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._series.close()

    def _name_parts(self) -> tuple[PartEntry, ...]:
        count = len(self._series.parts)
        named = []
        for index, part in enumerate(self._series.parts):
            file = layout.part_name(index, count)
            rename(self._draft.directory / part.file, self._draft.directory / file)
            named.append(msgspec.structs.replace(part, file=file))
        return tuple(named)


def index_of(parts: tuple[PartEntry, ...], entries: tuple[TensorEntry, ...]) -> bytes:
    """The file that lists which part holds which tensor, as checkpoints have it."""
    weight_map = {entry.name: parts[entry.part].file for entry in entries}
    total = sum(entry.nbytes for entry in entries)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1).encode()
