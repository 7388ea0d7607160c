"""`snapshot://`: legacy snapshot files of one rank, read part by part."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from weightcast.clock import Deadline
from weightcast.store.snapshot import DEFAULT_SHARED_DIR, Snapshot, locate, open_snapshot
from weightcast.store.version_file import read_version_file, step_of
from weightcast.tensors.flat import BLOCK_NBYTES, Pieces
from weightcast.tensors.sums import NO_DIGESTS, Digests
from weightcast.transports.prefetch import prefetched, ring
from weightcast.wire.manifest import RANK, RANKS, Manifest, compute_root, entry_of


class SnapshotReceiver:
    """Reads the snapshot of a rank and device id. Foreign files without a manifest of ours have no digests.

    Files that record their version have that one only. Others are whatever version the caller, or the version file beside
    them, says.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        device_id: str,
        shared_dir: Path = DEFAULT_SHARED_DIR,
        ignore_bad_names: bool = False,
    ) -> None:
        self.url = f"snapshot://{directory.absolute()}?id={device_id}"
        self._dir, self._rank, self._device_id = directory, rank, device_id
        self._shared_dir, self._ignore_bad_names = shared_dir, ignore_bad_names
        self._opened: Snapshot | None = None

    def newest(self) -> str:
        """The version that the files record, else the one that the version file beside them names."""
        return self._snapshot().version or read_version_file(self._dir).version

    def manifest(self, version: str, *, deadline: Deadline) -> Manifest:
        """The snapshot as a version: the one that the files record. Files that record none take the one asked for.

        Rank and number of ranks are in the metadata if the files record them.
        """
        deadline.check(f"reading the headers of {self.url}")
        snapshot = self._snapshot()
        recorded, numbers = snapshot.version or version, ((RANK, snapshot.rank), (RANKS, snapshot.ranks))
        digests = {name: Digests(entry.digest, entry.sum) for name, entry in snapshot.entries.items()}
        tensors = tuple(entry_of(spec, digests=digests.get(name, NO_DIGESTS)) for name, spec in snapshot.specs.items())
        return Manifest(
            version=recorded,
            sequence=0,
            step=step_of(recorded),
            kind="full",
            created_s=0.0,
            algorithm=snapshot.algorithm,
            root_digest=compute_root(tensors, snapshot.algorithm),
            parts=(),
            tensors=tensors,
            metadata={key: str(number) for key, number in numbers if number is not None},
        )

    def pieces(self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None) -> Pieces:
        """The bytes file by file, read ahead in a thread."""
        snapshot = self._snapshot()

        def produce() -> Pieces:
            return snapshot.pieces(deadline, names=names, buffers=ring(BLOCK_NBYTES), check=False)

        return prefetched(produce, deadline=deadline, what=f"reading {manifest.version} from {self.url}")

    def close(self) -> None:
        """Forget what was found; files are only open while they are read."""
        self._opened = None

    def _snapshot(self) -> Snapshot:
        if self._opened is None:
            located = locate(
                self._dir,
                rank=self._rank,
                device_id=self._device_id,
                shared_dir=self._shared_dir,
                ignore_bad_names=self._ignore_bad_names,
            )
            self._opened = open_snapshot(located)
        return self._opened
