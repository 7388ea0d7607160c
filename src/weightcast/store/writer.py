"""Writing one version: parts as the tensors arrive, the manifest last, by rename."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from weightcast.errors import InvalidInput, WeightcastError
from weightcast.store import layout
from weightcast.store.files import make_dir, remove_dir, rename, replace_synced, sync_dir, write_synced
from weightcast.store.part_series import PartSeries
from weightcast.store.safetensors_file import HEADER_ROOM, header_room_for
from weightcast.tensors.bridges import bridge_for, host_array, spec_of
from weightcast.tensors.digest import Algorithm, bytes_digest
from weightcast.wire.manifest import (
    FileEntry,
    Manifest,
    PartEntry,
    TensorEntry,
    compute_root,
    decode_manifest,
    encode_manifest,
    is_file_name,
)

log = logging.getLogger(__name__)

NamedTensors = Mapping[str, object] | Iterable[tuple[str, object]]


class VersionWriter:
    """One version being written. Until `seal` there is nothing a reader would take for a version.

    Tensors are written as they come and not kept, so an iterator may reuse its memory. Only small tensors whose size
    would put their successor off its alignment wait, up to 1 MiB of them, for the end of their part.
    """

    def __init__(self, store: Path, version: str, *, part_nbytes: int, algorithm: Algorithm) -> None:
        self._store, self._version = store, version
        self._dir = layout.version_dir(store, version)
        self._algorithm = algorithm
        self._series = PartSeries(
            lambda index: self._dir / layout.unsealed_part_name(index), part_nbytes=part_nbytes, algorithm=algorithm
        )
        self._files: list[FileEntry] = []
        self._tied: dict[str, str] = {}
        self._names: set[str] = set()

    def begin(self) -> None:
        """Make the directory, in the place of what an interrupted publish left there."""
        make_dir(layout.versions_dir(self._store))
        if self._dir.is_dir():
            log.warning("publish version=%s removing what an interrupted publish left in %s", self._version, self._dir)
            remove_dir(self._dir)
        make_dir(self._dir)

    def add_all(self, tensors: NamedTensors) -> None:
        """Add every tensor of a mapping or an iterator.

        A mapping's tensors are alive together, so names that share memory are recognised as tied and written once.
        """
        if not isinstance(tensors, Mapping):
            for name, tensor in tensors:
                self.add(name, tensor)
            return
        specs = [spec_of(name, tensor) for name, tensor in tensors.items()]  # all are checked before the first is written
        self._series.header_room = min(max(HEADER_ROOM, header_room_for(specs)), 16 * HEADER_ROOM)
        holders: dict[tuple[object, ...], str] = {}
        for spec, (name, tensor) in zip(specs, tensors.items(), strict=True):
            holder = holders.setdefault(bridge_for(tensor).memory_key(tensor), name) if spec.nbytes else name
            if holder == name:
                self.add(name, tensor)
            else:
                self._take_name(name)
                self._tied[name] = holder

    def add(self, name: str, tensor: object) -> None:
        """Write one tensor. Its memory may change once this returns."""
        self._take_name(name)
        self._series.add(spec_of(name, tensor), host_array(name, tensor))

    def add_file(self, name: str, data: bytes) -> None:
        """Add a small file that travels with the version."""
        if not is_file_name(name) or name in layout.RESERVED or name.endswith(".safetensors"):
            raise InvalidInput(
                f"a file of a version cannot be called {name!r}: use letters, digits and . _ + -, starting with a letter, "
                "digit or _, and none of the names that a version uses itself."
            )
        self._write_file(name, data)

    def _write_file(self, name: str, data: bytes) -> None:
        write_synced(self._dir / name, data)
        self._files.append(FileEntry(file=name, nbytes=len(data), digest=bytes_digest(data, self._algorithm)))

    def seal(self, *, sequence: int, step: int, metadata: Mapping[str, str]) -> Manifest:
        """Make the version exist: after this returns it is whole, named and on the medium."""
        self._series.finish()
        if not self._series.entries:
            raise InvalidInput(f"version {self._version} has no tensors: there is nothing to publish.")
        parts = self._name_parts()
        entries = tuple(self._series.entries)
        self._write_file(layout.INDEX, _index(parts, entries))
        sync_dir(self._dir)
        manifest = Manifest(
            version=self._version,
            sequence=sequence,
            step=step,
            kind="full",
            created_s=time.time(),
            algorithm=self._algorithm,
            root_digest=compute_root(entries, self._algorithm),
            parts=parts,
            tensors=entries,
            files=tuple(self._files),
            tied=self._tied,
            metadata=dict(metadata),
        )
        path = self._dir / layout.MANIFEST
        encoded = encode_manifest(manifest)
        decode_manifest(encoded, path)  # what cannot be read back must never be sealed
        replace_synced(path, encoded)
        return manifest

    def abandon(self) -> None:
        """Remove what was written. A failure to do so is logged: `gc` removes it later."""
        try:
            self._series.close()
            if not self._dir.is_dir():
                return
            (self._dir / layout.MANIFEST).unlink(missing_ok=True)  # first, so that no half of it is ever a version
            sync_dir(self._dir)
            remove_dir(self._dir)
        except (OSError, WeightcastError) as error:
            log.warning("abandon version=%s left garbage in %s: %s", self._version, self._dir, error)

    def _take_name(self, name: str) -> None:
        if name in self._names:
            raise InvalidInput(f"tensor {name!r} was given twice for version {self._version}.")
        self._names.add(name)

    def _name_parts(self) -> tuple[PartEntry, ...]:
        count = len(self._series.parts)
        named = []
        for index, part in enumerate(self._series.parts):
            file = layout.part_name(index, count)
            rename(self._dir / part.file, self._dir / file)
            named.append(msgspec.structs.replace(part, file=file))
        return tuple(named)


def _index(parts: tuple[PartEntry, ...], entries: tuple[TensorEntry, ...]) -> bytes:
    weight_map = {entry.name: parts[entry.part].file for entry in entries}
    total = sum(entry.nbytes for entry in entries)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1).encode()
