"""`file://`: versions read from a store on a local or mounted file system, part by part."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from weightcast.clock import Deadline
from weightcast.store import layout
from weightcast.store.payload import payload_pieces
from weightcast.store.reader import VersionReader
from weightcast.store.store import Store
from weightcast.tensors.flat import BLOCK_NBYTES, Pieces
from weightcast.transports.prefetch import prefetched, ring
from weightcast.wire.manifest import Manifest


class FileReceiver:
    """Reads a store. Memory: four blocks of 4 MiB, whatever the size of the version."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.url = f"file://{store.path.absolute()}"

    @classmethod
    def open(cls, path: Path) -> FileReceiver:
        """A receiver for the store in a directory."""
        return cls(Store(path))

    def newest(self) -> str:
        """The version that version.yaml names."""
        return self._store.newest()

    def manifest(self, version: str, *, deadline: Deadline) -> Manifest:
        """The sealed manifest of a version."""
        deadline.check(f"reading the manifest of {version} from {self.url}")
        return self._store.manifest(version)

    def pieces(self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None) -> Pieces:
        """The bytes in the order they lie on the medium, read ahead in a thread: of the parts, or of a delta's payload."""
        directory = layout.version_dir(self._store.path, manifest.version)

        def produce() -> Pieces:
            if manifest.payload is None:
                with VersionReader(directory, manifest) as reader:
                    yield from reader.pieces(deadline, names=names, buffers=ring(BLOCK_NBYTES), check=False)
            elif names is None or manifest.payload.file in names:
                yield from payload_pieces(directory, manifest, deadline, ring(BLOCK_NBYTES))

        return prefetched(produce, deadline=deadline, what=f"reading {manifest.version} from {self.url}")

    def close(self) -> None:
        """Nothing stays open between calls."""
