"""A version on its way into a store: read by others while it comes, and sealed when it is whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.depot.exchange import FileRange
from weightcast.depot.partial_file import PartialFile, check_room, remove_strays
from weightcast.depot.partial_pieces import Piece, Pieces, Run
from weightcast.errors import InvalidInput, ManifestCorrupt, NotFound, SourceFailed, WeightcastError
from weightcast.store import layout
from weightcast.store.files import make_dir, remove_file, replace_synced, sync_dir
from weightcast.store.version_file import put_back_version_file, raw_version_file, write_version_file
from weightcast.tensors.digest import Hasher, algorithm_of
from weightcast.tensors.flat import BLOCK_NBYTES
from weightcast.wire.depot import Offer
from weightcast.wire.manifest import Manifest, decode_manifest, encode_manifest

log = logs.get(__name__)

_LOOK_S = 0.3  # how late a reader that waits notices that it was cancelled


class PartialVersion:
    """A holding that fills. Its files lie where those of a sealed version do, but there is no manifest: to a store this is
    garbage, which `gc` removes, until `seal`. Any thread may call; `open` and `seal` want the store's lock to be held.

    Whoever fetches takes pieces and says what came; a piece can be read by others as soon as it has its digest.
    """

    def __init__(self, store: Path, manifest: Manifest) -> None:
        self.manifest, self.encoded = manifest, encode_manifest(manifest)
        self.files: Mapping[str, int] = {file: entry.nbytes for file, entry in manifest.listed_files.items()}
        self._store, self._directory = store, layout.version_dir(store, manifest.version)
        self._changed = threading.Condition()
        self._pieces = Pieces(manifest)
        self._opened: dict[str, PartialFile] = {}
        self._error: WeightcastError | None = None
        self.complete = False

    def open(self) -> None:
        """Make the files, or go on with those that an earlier try left. Raises `StorageFailed`."""
        path = self._directory / layout.MANIFEST
        decode_manifest(self.encoded, path)  # what cannot be read back must never be sealed
        if layout.MANIFEST in self.files:
            raise ManifestCorrupt(path, "it is listed as a file of its own version")
        make_dir(layout.versions_dir(self._store))
        make_dir(self._directory)
        remove_strays(self._directory, set(self.files))
        for name, nbytes in self.files.items():
            self._opened[name] = PartialFile(self._directory / name, nbytes)
        check_room(self._directory, self._opened.values())
        with self._changed:
            self._changed.notify_all()

    @property
    def offer(self) -> Offer:
        """What is said of it in a catalogue."""
        manifest = self.manifest
        return Offer(
            version=manifest.version,
            sequence=manifest.sequence,
            step=manifest.step,
            kind=manifest.kind,
            root_digest=manifest.root_digest,
            nbytes=manifest.nbytes,
            base=manifest.base.version if manifest.base is not None else None,
            complete=self.complete,
        )

    # -- reading ---------------------------------------------------------------------------------------------------------

    def views(self, file: str, start: int, stop: int, *, deadline: Deadline) -> list[memoryview]:
        """The bytes of a range, read once they are there. Raises `SourceFailed` if the version is given up."""
        return [block.read() for block in self.sendable(file, start, stop, deadline=deadline)]

    def sendable(self, file: str, start: int, stop: int, *, deadline: Deadline) -> Iterator[FileRange]:
        """The range of the file, as its pieces come. Raises `SourceFailed` if the version is given up."""
        if not 0 <= start <= stop <= self._size(file):
            raise InvalidInput(
                f"{file} of version {self.manifest.version} has {self.files[file]} bytes: no {start} to {stop}."
            )
        while start < stop:
            reach = self._wait(file, start, stop, deadline)
            yield self._opened[file].range(start, reach)
            start = reach

    def _size(self, file: str) -> int:
        if file not in self.files:
            raise NotFound(f"version {self.manifest.version} has no file {file[:200]!r}: it has {', '.join(self.files)}.")
        return self.files[file]

    def _wait(self, file: str, start: int, stop: int, deadline: Deadline) -> int:
        """Wait until the first bytes of a range are there; up to where they are."""
        with self._changed:
            while True:
                if self._error is not None:
                    raise SourceFailed(
                        f"version {self.manifest.version} was given up on its way here: {self._error}"
                    ) from self._error
                reach = self._pieces.reach(file, start, stop) if file in self._opened else start
                if reach > start:
                    return reach
                deadline.check(f"waiting for {file} of version {self.manifest.version}, which is on its way here,")
                self._changed.wait(min(_LOOK_S, deadline.remaining()))

    # -- fetching --------------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Find the pieces that an earlier try left. Those of a file can be taken as soon as it was looked at."""
        for file in self.files:
            opened = self._opened[file]
            right = [piece for piece in self._pieces.of(file) if _is_right(opened, piece)] if opened.existed else []
            with self._changed:
                for piece in right:
                    self._pieces.right(piece)
                self._pieces.begin(file)
                self._changed.notify_all()

    def take(self, choose: Callable[[Piece], int | None], *, most_nbytes: int = 0) -> Run | None:
        """What to fetch next and from where, if there is anything that can be; see `Pieces.take`."""
        with self._changed:
            return self._pieces.take(choose, most_nbytes=most_nbytes)

    def write(self, file: str, start: int, data: memoryview) -> None:
        """Bytes of a piece that was taken came. Raises `StorageFailed` if there is no room for them."""
        self._opened[file].write(start, data)

    def came(self, piece: Piece, digest: str, source: int) -> bool:
        """A piece was written, and its bytes have this digest: whether it is right. Then others can have it."""
        right = digest == piece.digest
        with self._changed:
            if right:
                self._pieces.right(piece)
            else:
                self._pieces.wrong(piece, source)
            self._changed.notify_all()
        return right

    def dropped(self, pieces: Sequence[Piece]) -> None:
        """Pieces that were taken did not come."""
        with self._changed:
            self._pieces.dropped(pieces)
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until something changes, for so long at most."""
        with self._changed:
            self._changed.wait(seconds)

    def missing(self) -> list[Piece]:
        """What is not there, of the files that were looked at."""
        with self._changed:
            return self._pieces.missing()

    @property
    def whole(self) -> bool:
        """Whether every piece is there."""
        with self._changed:
            return self._pieces.whole

    @property
    def pieces_there(self) -> int:
        """How many pieces are there."""
        return self._pieces.count

    def give_up(self, error: WeightcastError) -> None:
        """It will not come: whoever waits for a byte of it is told so."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self.close()

    def close(self) -> None:
        """Close the files. What is held of them stays readable."""
        for file in self._opened.values():
            file.close()

    # -- sealing ---------------------------------------------------------------------------------------------------------

    def seal(self, *, newest: bool) -> None:
        """Make it a version of the store, whole and on the medium, and the newest one if it is. The store is as before if
        this raises; what was fetched stays for the next try.
        """
        began, manifest = time.monotonic(), self.manifest
        for file in self._opened.values():
            file.sync()
        sync_dir(self._directory)
        before, path = raw_version_file(self._store), self._directory / layout.MANIFEST
        try:
            replace_synced(path, self.encoded)
            if newest:
                write_version_file(self._store, version=manifest.version, step=manifest.step)
        except BaseException:
            if put_back_version_file(self._store, before):  # else it names the new version, which must then stay
                remove_file(path)
            raise
        self.complete = True
        self.close()
        log.debug("version sealed", version=manifest.version, store=self._store, ms=logs.ms(time.monotonic() - began))


def _is_right(file: PartialFile, piece: Piece) -> bool:
    hasher = Hasher(algorithm_of(piece.digest))
    for start in range(piece.start, piece.stop, BLOCK_NBYTES):
        hasher.update(file.range(start, min(start + BLOCK_NBYTES, piece.stop)).read())
    return hasher.digest() == piece.digest
