"""A version on its way into the store: a directory that is filled, and the manifest last, by rename."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weightcast import logs
from weightcast.delta import Delta
from weightcast.errors import InvalidInput, WeightcastError
from weightcast.store import layout
from weightcast.store.files import make_dir, remove_dir, replace_synced, sync_dir, write_synced
from weightcast.tensors.digest import PIECE_NBYTES, Algorithm
from weightcast.wire.manifest import (
    BaseRef,
    FileEntry,
    Manifest,
    PartEntry,
    PayloadEntry,
    TensorEntry,
    compute_root,
    decode_manifest,
    encode_manifest,
    file_entry,
    is_file_name,
)

log = logs.get(__name__)


@dataclass(frozen=True)
class Contents:
    """What was written for a version: the tensors it has, and the parts or payloads that hold them."""

    kind: Literal["full", "delta"]
    tensors: tuple[TensorEntry, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[PartEntry, ...] = ()
    base: BaseRef | None = None
    payloads: tuple[PayloadEntry, ...] = ()
    density: float = 1.0  # the share of the state that was written
    delta: Delta | None = None  # what the payloads hold


class Draft:
    """The directory of one version being written. Until `seal` there is nothing a reader would take for a version."""

    def __init__(self, store: Path, version: str, algorithm: Algorithm) -> None:
        self._store = store
        self.version, self.algorithm = version, algorithm
        self.directory = layout.version_dir(store, version)
        self._files: list[FileEntry] = []

    def begin(self) -> None:
        """Make the directory, in the place of what an interrupted publish left there."""
        make_dir(layout.versions_dir(self._store))
        if self.directory.is_dir():
            log.warning(
                "leftovers removed", version=self.version, path=self.directory, why="an interrupted publish left them"
            )
            remove_dir(self.directory)
        make_dir(self.directory)

    def add_file(self, name: str, data: bytes) -> None:
        """Add a small file of the publisher's that travels with the version."""
        if not is_file_name(name) or layout.is_reserved(name):
            raise InvalidInput(
                f"a file of a version cannot be called {name!r}: use letters, digits and . _ + -, starting with a letter, "
                "digit or _, and none of the names that a version uses itself."
            )
        self.write_file(name, data)

    def write_file(self, name: str, data: bytes) -> None:
        """Add a small file."""
        write_synced(self.directory / name, data)
        self._files.append(file_entry(name, data, self.algorithm))

    def seal(self, contents: Contents, *, sequence: int, step: int, metadata: Mapping[str, str]) -> Manifest:
        """Make the version exist: after this returns it is whole, named and on the medium."""
        sync_dir(self.directory)
        manifest = Manifest(
            version=self.version,
            sequence=sequence,
            step=step,
            kind=contents.kind,
            created_s=time.time(),
            algorithm=self.algorithm,
            root_digest=compute_root(contents.tensors, self.algorithm),
            parts=contents.parts,
            tensors=contents.tensors,
            files=tuple(self._files),
            tied=dict(contents.tied),
            base=contents.base,
            metadata=dict(metadata),
            payloads=contents.payloads,
            piece_nbytes=PIECE_NBYTES,
        )
        path = self.directory / layout.MANIFEST
        encoded = encode_manifest(manifest)
        decode_manifest(encoded, path)  # what cannot be read back must never be sealed
        replace_synced(path, encoded)
        return manifest

    def abandon(self) -> None:
        """Remove what was written. A failure to do so is logged: `gc` removes it later."""
        try:
            if not self.directory.is_dir():
                return
            (self.directory / layout.MANIFEST).unlink(missing_ok=True)  # first, so that no half of it is ever a version
            sync_dir(self.directory)
            remove_dir(self.directory)
        except (OSError, WeightcastError) as error:
            log.warning("files left", version=self.version, path=self.directory, error=error)
