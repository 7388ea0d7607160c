"""A version of a store as a depot serves it: every file of it mapped, and looked at before it is sent."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from weightcast.clock import Deadline
from weightcast.errors import InvalidInput, NotFound, PartCorrupt, StorageFailed
from weightcast.tensors.boxes import Box
from weightcast.tensors.flat import Array, empty, from_bytes
from weightcast.wire.manifest import Manifest


def files_of(manifest: Manifest) -> dict[str, int]:
    """The files that a version is made of, and their sizes."""
    files = {part.file: part.nbytes for part in manifest.parts} | {file.file: file.nbytes for file in manifest.files}
    return files if manifest.payload is None else {**files, manifest.payload.file: manifest.payload.nbytes}


class MappedVersion:
    """A holding whose files are mapped. They stay readable when they are removed from the store, until this is let go.

    Pages are not read ahead: a receiver may want few of them, and sending one that is in the page cache costs next to
    nothing. The size of a file is compared with the manifest when it is mapped and again before each block is given out:
    reading a mapping behind the end of its file would kill the process by SIGBUS. A file that is truncated (which nothing
    of ours ever does) while a block of it is being sent makes the kernel refuse to send it; only over TLS, and while
    digests are taken, does the process read the block itself.
    """

    def __init__(self, directory: Path, manifest: Manifest, encoded: bytes) -> None:
        self.manifest = manifest
        self._directory, self._encoded = directory, encoded
        self._files = files_of(manifest)
        self._entries = manifest.by_name()
        self._maps = {file: _map(directory / file, nbytes) for file, nbytes in self._files.items() if nbytes}

    def take_over(self, before: MappedVersion) -> None:
        """Serve the files too that only an earlier manifest of the same state knew: a payload that a fold has replaced."""
        if before.manifest.root_digest == self.manifest.root_digest:
            self._files = {**before.files, **self._files}
            self._maps = {**before._maps, **self._maps}

    @property
    def encoded(self) -> bytes:
        """The manifest as it is sent: sealed."""
        return self._encoded

    @property
    def files(self) -> Mapping[str, int]:
        """The files that the version is made of, and their sizes."""
        return self._files

    def views(self, file: str, start: int, stop: int, *, deadline: Deadline) -> list[memoryview]:  # noqa: ARG002 - all is here
        """The bytes of a range where they lie. Raises `PartCorrupt` if the file has not the size that it must have."""
        nbytes = self._files.get(file)
        if nbytes is None:
            raise NotFound(f"version {self.manifest.version} has no file {file!r}: it has {', '.join(self._files)}.")
        if not 0 <= start <= stop <= nbytes:
            raise InvalidInput(f"{file} of version {self.manifest.version} has {nbytes} bytes: not {start} to {stop}.")
        return [self._range(file, start, stop)] if start < stop else []

    def tensor(self, name: str) -> tuple[Box, Array]:
        """A tensor of a full version where it lies, to be read only."""
        entry = self._entries.get(name)
        if entry is None:
            raise NotFound(f"version {self.manifest.version} has no tensor {name!r}.")
        if self.manifest.kind != "full":
            raise NotFound(f"version {self.manifest.version} is a delta: its tensors do not lie here.")
        box = Box.whole(entry.shape)
        if entry.nbytes == 0:
            return box, empty(entry.spec)
        file = self.manifest.parts[entry.part].file
        return box, from_bytes(self._range(file, entry.offset, entry.offset + entry.nbytes), entry.spec)

    def _range(self, file: str, start: int, stop: int) -> memoryview:
        mapped = self._maps[file]
        found = mapped.size()  # of the file, not of the mapping
        if found != self._files[file]:
            raise PartCorrupt(self._directory / file, f"it has {found} bytes now, not {self._files[file]} as published")
        return memoryview(mapped)[start:stop]


def _map(path: Path, nbytes: int) -> mmap.mmap:
    # O_NONBLOCK: a pipe in the place of a file must not hang the opener; it is refused just below.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise PartCorrupt(path, "the file is missing") from error
    except OSError as error:
        raise StorageFailed("open", path, error) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise PartCorrupt(path, "it is not a regular file")
        if status.st_size != nbytes:
            raise PartCorrupt(path, f"it has {status.st_size} bytes, not {nbytes} as published")
        return mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StorageFailed("map", path, error) from error
    finally:
        os.close(fd)
