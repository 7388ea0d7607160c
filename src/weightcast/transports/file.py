"""`file://`: versions read from a store on a local or mounted file system, part by part."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from weightcast.clock import Deadline
from weightcast.delta import Delta, State
from weightcast.errors import SourceFailed
from weightcast.store import layout
from weightcast.store.byte_file import ByteFile
from weightcast.store.catalog import Catalog
from weightcast.store.chain import Chain, fold_deltas, moved, resolve
from weightcast.store.part_state import PartState
from weightcast.store.payload import payload_pieces
from weightcast.store.reader import VersionReader
from weightcast.store.store import Store
from weightcast.store.watching import WatchedState
from weightcast.tensors.flat import BLOCK_NBYTES, Pieces
from weightcast.transports.base import Range
from weightcast.transports.prefetch import prefetched, ring
from weightcast.wire.manifest import Manifest


@dataclass(frozen=True)
class _Walked:
    """The deltas from a full version to another as one, kept so that the next call goes on from there."""

    full_root: str
    version: str
    root: str
    folded: Delta


class FileReceiver:
    """Reads a store. Memory: four blocks of 4 MiB, whatever the size of the version.

    Once `opened_state` followed deltas, also the changes since the full version, about 6 bytes each for 16-bit elements,
    until it is closed: so no delta is decoded twice. It decodes in the caller's thread alone, beside a serving engine.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._catalog = Catalog(store.path)
        self._walked: _Walked | None = None
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
            if manifest.kind == "full":
                with VersionReader(directory, manifest) as reader:
                    yield from reader.pieces(deadline, names=names, buffers=ring(BLOCK_NBYTES), check=False)
            else:
                yield from payload_pieces(directory, manifest, deadline, ring(BLOCK_NBYTES), names)

        return prefetched(produce, deadline=deadline, what=f"reading {manifest.version} from {self.url}")

    def ranges(self, manifest: Manifest, wanted: Sequence[Range], *, deadline: Deadline) -> Generator[int, None, None]:
        """Read each range; tells the index of each that is there. Nothing is verified."""
        directory = layout.version_dir(self._store.path, manifest.version)
        order = sorted(range(len(wanted)), key=lambda index: wanted[index][:2])
        for file, indices in groupby(order, key=lambda index: wanted[index].file):
            with ByteFile(directory / file) as opened:
                for index in indices:
                    deadline.check(f"reading {manifest.version} from {self.url}")
                    opened.read_into(wanted[index].memory.data, wanted[index].start)
                    yield index

    @contextmanager
    def opened_state(self, manifest: Manifest, *, deadline: Deadline) -> Iterator[State]:
        """The whole state that a version is, deltas applied, read as it is asked for. Nothing is proved by it.

        Raises `SourceFailed` if the store has other bytes under the version's name, `BaseVersionMismatch` or
        `VersionNotFound` if a base is not what it was or is gone.
        """
        chain = resolve(self._catalog, manifest.version)
        if chain.end.root_digest != manifest.root_digest:
            raise SourceFailed(
                f"{self.url} has version {manifest.version} with root digest {chain.end.root_digest} now, and "
                f"{manifest.root_digest} was asked for. Nothing was changed."
            )
        with self._opened(chain, deadline) as parts:
            yield moved(parts, self._walk(chain, parts, deadline))

    def close(self) -> None:
        """Forget decoded deltas. No file stays open between calls."""
        self._walked = None

    @contextmanager
    def _opened(self, chain: Chain, deadline: Deadline) -> Iterator[State]:
        """The full version that a chain begins with."""
        with PartState(layout.version_dir(self._store.path, chain.full.version), chain.full) as parts:
            yield WatchedState(parts, deadline, f"reading {chain.end.version} from {self.url}")

    def _walk(self, chain: Chain, parts: State, deadline: Deadline) -> Delta | None:
        """The deltas of a chain as one, from where the last walk ended if that is on the way."""
        start, deltas = None, chain.deltas
        kept = self._walked
        split = chain.split(kept.version) if kept is not None and kept.full_root == chain.full.root_digest else None
        if kept is not None and split is not None and split[0].end.root_digest == kept.root:
            start, deltas = kept.folded, split[1]
        folded = fold_deltas(self._store.path, deltas, parts, start=start, threads=1, deadline=deadline)
        if folded is not None:
            self._walked = _Walked(chain.full.root_digest, chain.end.version, chain.end.root_digest, folded)
        return folded
