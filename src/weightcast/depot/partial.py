"""A version on its way into a store: read by others while it comes, proved when it is whole, and sealed then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.depot.exchange import FileRange
from weightcast.depot.partial_file import PartialFile, check_room, remove_strays
from weightcast.depot.partial_pieces import Piece, Pieces, Run, check_digests
from weightcast.depot.partial_proof import FileProof, Wrong, files_of, stretches_of
from weightcast.errors import InvalidInput, ManifestCorrupt, NotFound, SourceFailed, WeightcastError
from weightcast.store import layout
from weightcast.store.files import make_dir, remove_file, replace_synced, sync_dir
from weightcast.store.version_file import put_back_version_file, raw_version_file, write_version_file
from weightcast.tensors.boxes import Box
from weightcast.tensors.digest import DEFAULT, algorithm_of, bytes_digest
from weightcast.tensors.flat import Array, from_bytes
from weightcast.wire.depot import Offer, PieceDigests
from weightcast.wire.manifest import Manifest, decode_manifest, encode_manifest

log = logs.get(__name__)

TENSOR_WAIT_S = 60.0  # a tensor is asked for without a deadline
_LOOK_S = 0.3  # how late a reader that waits notices that it was cancelled


class PartialVersion:
    """A holding that fills. Its files lie where those of a sealed version do, but there is no manifest: to a store this is
    garbage, which `gc` removes, until `seal`. Any thread may call; `open` and `seal` want the store's lock to be held.

    Whoever fetches takes pieces and says what came; a piece can be read by others as soon as it has its digest.
    """

    in_files = True

    def __init__(self, store: Path, manifest: Manifest) -> None:
        self.manifest, self.encoded = manifest, encode_manifest(manifest)
        self.files: Mapping[str, int] = files_of(manifest)
        self._store, self._directory = store, layout.version_dir(store, manifest.version)
        self._changed = threading.Condition()
        self._pieces = Pieces(self.files)
        self._opened: dict[str, PartialFile] = {}
        self._stretches = stretches_of(manifest)
        self._proofs: dict[str, FileProof] = {}
        self._proving = threading.Lock()
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
            self._begin_proof(name)
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

    def sendable(self, file: str, start: int, stop: int, *, deadline: Deadline) -> list[FileRange]:
        """The range of the file, once it is there. Raises `SourceFailed` if the version is given up."""
        if not 0 <= start <= stop <= self._size(file):
            raise InvalidInput(
                f"{file} of version {self.manifest.version} has {self.files[file]} bytes: no {start} to {stop}."
            )
        self._wait(lambda: file in self._opened and self._pieces.there(file, start, stop), file, deadline)
        return [self._opened[file].range(start, stop)] if stop > start else []

    def piece_digests(self, file: str, *, deadline: Deadline) -> PieceDigests:
        """What the source says that the digests of a file's pieces are."""
        if self._size(file) == 0:
            return PieceDigests(self.manifest.algorithm or DEFAULT, 1, ())
        self._wait(lambda: file in self._pieces.digests, file, deadline)
        return self._pieces.digests[file]

    def tensor(self, name: str) -> tuple[Box, Array]:
        """A tensor of a full version, once it is there."""
        entry = self.manifest.by_name().get(name) if self.manifest.parts else None
        if entry is None:
            raise NotFound(f"version {self.manifest.version} has no tensor {name[:200]!r} that lies here.")
        file = self.manifest.parts[entry.part].file
        stop = entry.offset + entry.nbytes
        views = self.views(file, entry.offset, stop, deadline=Deadline.after(TENSOR_WAIT_S))
        return Box.whole(entry.shape), from_bytes(views[0] if views else b"", entry.spec)

    def _size(self, file: str) -> int:
        if file not in self.files:
            raise NotFound(f"version {self.manifest.version} has no file {file[:200]!r}: it has {', '.join(self.files)}.")
        return self.files[file]

    def _wait(self, ready: Callable[[], bool], file: str, deadline: Deadline) -> None:
        with self._changed:
            while True:
                if self._error is not None:
                    raise SourceFailed(
                        f"version {self.manifest.version} was given up on its way here: {self._error}"
                    ) from self._error
                if ready():
                    return
                deadline.check(f"waiting for {file} of version {self.manifest.version}, which is on its way here,")
                self._changed.wait(min(_LOOK_S, deadline.remaining()))

    # -- fetching --------------------------------------------------------------------------------------------------------

    def expect(self, file: str, digests: PieceDigests) -> None:
        """The digests that a file's pieces must have. Pieces that an earlier try left and that have them are there.

        Other digests than before are for when nothing is being fetched: the file is proved anew.
        """
        check_digests(file, self.files[file], digests)
        opened, right = self._opened[file], set()
        if opened.existed or file in self._pieces.digests:
            for index, digest in enumerate(digests.digests):
                start = index * digests.piece_nbytes
                stop = min(start + digests.piece_nbytes, opened.nbytes)
                if bytes_digest(opened.range(start, stop).read(), algorithm_of(digest)) == digest:
                    right.add(index)
        self._begin_proof(file)  # not under the other lock: `_advance` takes the two in the other order
        with self._changed:
            for piece in self._pieces.expect(file, digests):
                if piece.index in right:
                    self._pieces.right(piece)
            self._changed.notify_all()

    def take(self, choose: Callable[[Piece], int | None], *, most: int = 1) -> Run | None:
        """What to fetch next and from where, if there is anything that can be; see `Pieces.take`."""
        with self._changed:
            return self._pieces.take(choose, most=most)

    def came(self, piece: Piece, data: memoryview, source: int) -> bool:
        """A piece came: whether it is right. Then it is written, and others can have it.

        Raises `StorageFailed` if there is no room for it.
        """
        right = bytes_digest(data, algorithm_of(piece.digest)) == piece.digest
        if right:
            self._opened[piece.file].write(piece.start, data)
        with self._changed:
            if right:
                self._pieces.right(piece)
            else:
                self._pieces.wrong(piece, source)
            self._changed.notify_all()
        if right:
            self._advance(piece.file)
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
        """What is not there, of the files whose digests are known."""
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

    # -- proving and sealing ---------------------------------------------------------------------------------------------

    def _begin_proof(self, file: str) -> None:
        opened = self._opened[file]
        with self._proving:
            self._proofs[file] = FileProof(
                self._stretches[file],
                lambda start, stop: opened.range(start, stop).read(),
                self.manifest.algorithm or DEFAULT,
            )

    def _advance(self, file: str) -> None:
        """Take the digests of what has come so far, unless another thread is just doing it."""
        if self._proving.acquire(blocking=False):
            try:
                with self._changed:
                    front = self._pieces.front(file)
                self._proofs[file].advance(front)
            finally:
                self._proving.release()

    def prove(self) -> dict[str, list[Wrong]]:
        """Compare everything with the manifest, once it is whole: what is wrong in which file. Most was hashed before."""
        with self._proving:
            for file, nbytes in self.files.items():
                self._proofs[file].advance(nbytes)
            return {file: proof.wrong for file, proof in self._proofs.items() if proof.wrong or not proof.done}

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
