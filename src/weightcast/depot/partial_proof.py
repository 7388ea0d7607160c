"""Proving the files of a version while they come: every digest of its manifest, taken front to back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weightcast.tensors.digest import Algorithm, Hasher
from weightcast.tensors.flat import BLOCK_NBYTES
from weightcast.wire.manifest import Manifest


@dataclass(frozen=True)
class Stretch:
    """Bytes of a file that have a digest in the manifest: a header, a tensor, a payload, a small file."""

    name: str
    start: int
    stop: int
    digest: str


@dataclass(frozen=True)
class Wrong:
    """A stretch that does not have its digest."""

    stretch: Stretch
    found: str


def files_of(manifest: Manifest) -> dict[str, int]:
    """The files that a version is made of and their sizes, in the order in which they are fetched: small ones first."""
    payload = [manifest.payload] if manifest.payload is not None else []
    small = {file.file: file.nbytes for file in (*manifest.files, *payload)}
    return small | {part.file: part.nbytes for part in manifest.parts}


def stretches_of(manifest: Manifest) -> dict[str, list[Stretch]]:
    """What the manifest says of each file, front to back and without a gap."""
    payload = [manifest.payload] if manifest.payload is not None else []
    stretches = {file.file: [Stretch(file.file, 0, file.nbytes, file.digest)] for file in (*manifest.files, *payload)}
    for part in manifest.parts:
        stretches[part.file] = [Stretch(f"header of {part.file}", 0, part.header_nbytes, part.header_digest)]
    in_order = sorted(manifest.tensors, key=lambda entry: (entry.offset, entry.nbytes))
    for entry in in_order if manifest.parts else ():
        stop = entry.offset + entry.nbytes
        stretches[manifest.parts[entry.part].file].append(Stretch(entry.name, entry.offset, stop, entry.digest))
    return stretches


class FileProof:
    """Takes the digests of one file's stretches as its bytes come. One thread at a time."""

    def __init__(self, stretches: list[Stretch], read: Callable[[int, int], memoryview], algorithm: Algorithm) -> None:
        self._stretches, self._read, self._algorithm = stretches, read, algorithm
        self._next, self._position = 0, 0
        self._hasher = Hasher(algorithm)
        self.wrong: list[Wrong] = []

    @property
    def done(self) -> bool:
        """Whether every stretch was compared."""
        return self._next == len(self._stretches)

    def advance(self, front: int) -> None:
        """Take in the bytes before `front`: they are there."""
        while not self.done and self._position <= front:
            stretch = self._stretches[self._next]
            stop = min(stretch.stop, front, self._position + BLOCK_NBYTES)
            if stop > self._position:
                self._hasher.update(self._read(self._position, stop))
            self._position = stop
            if stop == stretch.stop:
                self._compare(stretch)
            elif stop == front:
                return

    def _compare(self, stretch: Stretch) -> None:
        found = self._hasher.digest()
        if found != stretch.digest:
            self.wrong.append(Wrong(stretch, found))
        self._next += 1
        self._hasher = Hasher(self._algorithm)
