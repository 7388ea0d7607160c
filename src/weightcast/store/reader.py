"""Reading one version by byte range, through bounded buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from weightcast.clock import Deadline
from weightcast.errors import PartCorrupt
from weightcast.store.byte_file import ByteFile
from weightcast.store.safetensors_file import SafetensorsFile
from weightcast.store.streaming import Proof, Readable, Readables, stream_arrays, stream_pieces
from weightcast.tensors.box_plan import Place, read_flat
from weightcast.tensors.digest import bytes_digest
from weightcast.tensors.flat import BLOCK_NBYTES, Array, Bytes, Pieces, empty, flat_bytes
from weightcast.wire.manifest import Manifest, TensorEntry


class Reader(ABC):
    """A version opened for reading; a context manager. One thread at a time."""

    def __init__(self, where: str, manifest: Manifest) -> None:
        self._where, self.manifest = where, manifest

    @abstractmethod
    def in_order(self) -> list[TensorEntry]:
        """The tensors in the order they are cheapest to read."""

    @abstractmethod
    def read_into(self, entry: TensorEntry, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tensor's bytes from `start` on."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open. Safe twice."""

    def load_all(self) -> dict[str, Array]:
        """Every tensor in fresh memory, all digests checked; tied names share one array."""
        arrays: dict[str, Array] = {}
        proof = self._proof(check=True)
        for entry in self.in_order():
            array = arrays[entry.name] = empty(entry.spec)
            buffer = flat_bytes(array).data
            proof.begin(entry.name)
            for start in range(0, entry.nbytes, BLOCK_NBYTES):
                block = buffer[start : start + BLOCK_NBYTES]
                self.read_into(entry, start, block)
                proof.update(block)
            proof.close(entry.name)
        proof.conclude()
        return arrays | {name: arrays[holder] for name, holder in self.manifest.tied.items()}

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Every tensor under every name it has, one at a time; an array is valid until the next one is asked for."""
        tied: dict[str, list[str]] = {}
        for name, holder in self.manifest.tied.items():
            tied.setdefault(holder, []).append(name)
        for name, array in stream_arrays(self._readables(None), self._proof(check=True)):
            for one in (name, *tied.get(name, ())):
                yield one, array

    def pieces(
        self,
        deadline: Deadline,
        *,
        names: Collection[str] | None = None,
        buffers: Sequence[memoryview] | None = None,
        check: bool = True,
    ) -> Pieces:
        """Every byte of the version (or of the named tensors) once, in the order that is cheapest to read.

        The pieces rotate through `buffers` (default: one), so a piece is valid until its buffer comes round again. With
        `check`, the iterator ends in `DigestMismatch` if tensors differed from their digests; it lists all of them.
        """
        what = f"reading version {self.manifest.version} from {self._where}"
        return stream_pieces(self._readables(names), self._proof(check=check), deadline, what=what, buffers=buffers)

    def _readables(self, names: Collection[str] | None) -> Readables:
        for entry in self.in_order():
            if names is None or entry.name in names:
                yield Readable(entry.spec, partial(self.read_into, entry))

    def _proof(self, *, check: bool) -> Proof:
        return Proof(self._where, self.manifest.tensors if check else ())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class VersionReader(Reader):
    """The parts of a full version. A part is checked against the manifest when it is opened; one is open at a time.

    The files of a version that several publishers share are all open.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        super().__init__(str(directory), manifest)
        self._dir = directory
        self._file: SafetensorsFile | None = None
        self._index = -1
        self._shares: ShareFiles | None = None
        self._by_part = entries_by_part(manifest)

    def open_part(self, index: int) -> SafetensorsFile:
        """The file of a part, with its size, header and the place of its tensors proved."""
        if self._file is None or self._index != index:
            self.close()
            self._file, self._index = checked_part(self._dir, self.manifest, index, self._by_part[index]), index
        return self._file

    def in_order(self) -> list[TensorEntry]:
        """The tensors in the order they lie on the medium."""
        return sorted(self.manifest.tensors, key=lambda entry: (entry.part, entry.offset, entry.nbytes))

    def read_into(self, entry: TensorEntry, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tensor's bytes from `start` on."""
        if not self.manifest.shares:
            self.open_part(entry.part).read_into(buffer, entry.offset + start)
            return
        if self._shares is None:
            self._shares = ShareFiles(self._dir, self.manifest)
        self._shares.read_into(entry, start, buffer)

    def close(self) -> None:
        """Close what is open. Safe twice."""
        if self._shares is not None:
            self._shares.close()
            self._shares = None
        if self._file is not None:
            self._file.close()
            self._file = None


class ShareFiles:
    """The files of a version that several publishers share, opened, with their sizes checked. Any thread may read."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._manifest = manifest
        with ExitStack() as opening:
            self._files = {
                share.file: opening.enter_context(sized_file(directory / share.file, share.nbytes))
                for share in manifest.shares
            }
            self._open = opening.pop_all()

    def read_into(self, entry: TensorEntry, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tensor's bytes from `start` on."""
        memory = np.frombuffer(buffer, dtype=np.uint8)
        read_flat(entry.shape, entry.dtype.itemsize, self._manifest.places(entry), start, memory, self._read)

    def _read(self, wanted: Sequence[tuple[Place, Bytes]]) -> None:
        for place, memory in wanted:
            self._files[place.file].read_into(memory.data, place.offset)

    def close(self) -> None:
        """Close all files. Safe twice."""
        self._open.close()


def sized_file(path: Path, nbytes: int) -> ByteFile:
    """Open a file and check its size."""
    file = ByteFile(path)
    if file.nbytes != nbytes:
        file.close()
        raise PartCorrupt(path, f"it has {file.nbytes} bytes, the manifest says {nbytes}")
    return file


def entries_by_part(manifest: Manifest) -> list[list[TensorEntry]]:
    """The tensors of each part."""
    by_part: list[list[TensorEntry]] = [[] for _ in manifest.parts]
    for entry in manifest.tensors if manifest.parts else ():
        by_part[entry.part].append(entry)
    return by_part


def checked_part(directory: Path, manifest: Manifest, index: int, entries: list[TensorEntry]) -> SafetensorsFile:
    """Open a part and prove its size, its header and the places of its tensors."""
    part = manifest.parts[index]
    path = directory / part.file
    file = SafetensorsFile(path)
    try:
        if file.nbytes != part.nbytes:
            raise PartCorrupt(path, f"it has {file.nbytes} bytes, the manifest says {part.nbytes}")
        if manifest.algorithm and bytes_digest(file.header, manifest.algorithm) != part.header_digest:
            raise PartCorrupt(path, "its header is not the one that was published")
        places = {(place.spec, place.offset) for place in file.places.values()}
        if places != {(entry.spec, entry.offset) for entry in entries}:
            raise PartCorrupt(path, "its header lists other tensors than the manifest")
    except BaseException:
        file.close()
        raise
    return file
