"""Writing a full version: tensors go into parts as they arrive."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Protocol, cast

import msgspec
import numpy as np

from weightcast.errors import InvalidInput
from weightcast.store import layout
from weightcast.store.draft import Contents, Draft
from weightcast.store.files import rename
from weightcast.store.part_series import PartSeries
from weightcast.store.safetensors_file import HEADER_ROOM, header_room_for
from weightcast.tensors.bridges import Converted, bridge_for, framework_of, host_array, spec_of
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import flat_bytes
from weightcast.tensors.lanes import check_finite
from weightcast.tensors.placing import converts
from weightcast.tensors.spec import TensorSpec, bare_names, check_distinct
from weightcast.wire.manifest import PartEntry, TensorEntry, summed_names

NamedTensors = Mapping[str, object] | Iterable[tuple[str, object]]


class HasStateDict(Protocol):
    """A module."""

    def state_dict(self) -> Mapping[str, object]:
        """Its tensors by name."""


@dataclass(frozen=True)
class PublishAs:
    """The names and dtypes that tensors are published under, where these are not their own.

    `dtype` is for tensors of F64, F32, F16 and BF16; those whose published names match a pattern of `keep_dtype` stay as
    they are, and so does any other dtype. `strip_wrappers` removes what wrappers of modules put into names.
    """

    dtype: DType | None = None
    keep_dtype: tuple[str, ...] = ()
    strip_wrappers: bool = False

    @classmethod
    def of(cls, dtype: str | None, keep_dtype: Sequence[str], *, strip_wrappers: bool) -> PublishAs:
        """From what a caller gave. Refuses dtypes that nothing can be converted to."""
        choices = [one for one in DType if converts(one, DType.F32)]
        if dtype is not None and dtype not in choices:
            raise InvalidInput(f"nothing can be published as dtype {dtype!r}: choose one of {', '.join(choices)}.")
        if isinstance(keep_dtype, str):
            raise InvalidInput(f"keep_dtype must be a list of patterns, not {keep_dtype!r}.")
        return cls(None if dtype is None else DType(dtype), tuple(keep_dtype), strip_wrappers)

    def named(self, tensors: NamedTensors | HasStateDict, version: str) -> NamedTensors:
        """The tensors under the names that they are published under. A module is taken for its `state_dict()`.

        Of an iterator the first name says whether all begin with `module.`; if they do not, it ends in `InvalidInput`.
        """
        given = _as_named(tensors)
        if not self.strip_wrappers:
            return given
        if not isinstance(given, Mapping):
            return _stripped(given, version)
        bare = bare_names(given)
        check_distinct(bare, f"version {version}")
        return {bare[name]: tensor for name, tensor in given.items()}

    def converted(self, tensors: NamedTensors) -> NamedTensors:
        """The tensors in the dtypes that they are published in, each converted when it is read."""
        if self.dtype is None:
            return tensors
        if isinstance(tensors, Mapping):
            return {name: self.tensor(name, tensor) for name, tensor in tensors.items()}
        return ((name, self.tensor(name, tensor)) for name, tensor in tensors)

    def tensor(self, name: str, tensor: object) -> object:
        """One tensor in the dtype that it is published in."""
        if self.dtype is None or any(fnmatchcase(name, pattern) for pattern in self.keep_dtype):
            return tensor
        dtype = spec_of(name, tensor).dtype
        return Converted(name, tensor, self.dtype) if dtype != self.dtype and converts(dtype, self.dtype) else tensor


def _as_named(tensors: object) -> NamedTensors:
    state_dict = getattr(tensors, "state_dict", None)
    if framework_of(tensors) is not None and callable(state_dict):
        tensors = state_dict()
    if not isinstance(tensors, Iterable) or isinstance(tensors, str | bytes):
        raise InvalidInput(
            f"an object of type {type(tensors).__qualname__} cannot be published: give a mapping of names and tensors, an "
            "iterator of such pairs, or a module. Store.publish_checkpoint takes a directory."
        )
    return cast("NamedTensors", tensors)


def _stripped(tensors: Iterable[tuple[str, object]], version: str) -> Iterator[tuple[str, object]]:
    first: str | None = None
    for name, tensor in tensors:
        first = name if first is None else first
        bare = bare_names([first, name])
        if bare[first] != bare_names([first])[first]:
            raise InvalidInput(
                f"the names of version {version} cannot be stripped of their wrappers: {first} begins with 'module.', and "
                f"{name} does not. Give a mapping, or the names as they should be."
            )
        yield bare[name], tensor


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

    def __init__(self, draft: Draft, *, part_nbytes: int, finite: bool = False) -> None:
        self._draft, self._finite = draft, finite
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
        self._series.summed_as = summed_names(self._tied)
        self._series.header_room = min(max(HEADER_ROOM, header_room_for(specs.values())), 16 * HEADER_ROOM)
        for name in specs:
            self.add(name, tensors[name])

    def add(self, name: str, tensor: object) -> None:
        """Write one tensor. Its memory may change once this returns."""
        if name in self._names:
            raise InvalidInput(f"tensor {name!r} was given twice for version {self._draft.version}.")
        self._names.add(name)
        spec, array = spec_of(name, tensor), host_array(name, tensor)
        if self._finite:
            check_finite(spec, flat_bytes(np.ascontiguousarray(array)))
        self._series.add(spec, array)

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
