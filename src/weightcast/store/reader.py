"""Reading one sealed version by byte range, through bounded buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from weightcast.clock import Deadline
from weightcast.errors import PartCorrupt
from weightcast.store.safetensors_file import SafetensorsFile
from weightcast.store.streaming import Proof, Readable, Readables, stream_arrays, stream_pieces
from weightcast.tensors.digest import bytes_digest
from weightcast.tensors.flat import Array, Pieces, empty, flat_bytes
from weightcast.tensors.spec import TensorSpec
from weightcast.wire.manifest import Manifest, PartEntry, TensorEntry


class VersionReader:
    """The parts of a version. A part is checked against the manifest when it is opened; one is open at a time."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._dir, self.manifest = directory, manifest
        self._file: SafetensorsFile | None = None
        self._index = -1
        self._places: list[set[tuple[TensorSpec, int]]] = [set() for _ in manifest.parts]
        for entry in manifest.tensors:
            self._places[entry.part].add((entry.spec, entry.offset))

    def open_part(self, index: int) -> SafetensorsFile:
        """The file of a part, with its size, header and the place of its tensors proved."""
        if self._file is None or self._index != index:
            self.close()
            self._file, self._index = self._checked(index, self.manifest.parts[index]), index
        return self._file

    def _checked(self, index: int, part: PartEntry) -> SafetensorsFile:
        path = self._dir / part.file
        file = SafetensorsFile(path)
        try:
            if file.nbytes != part.nbytes:
                raise PartCorrupt(path, f"it has {file.nbytes} bytes, the manifest says {part.nbytes}")
            if self.manifest.algorithm and bytes_digest(file.header, self.manifest.algorithm) != part.header_digest:
                raise PartCorrupt(path, "its header is not the one that was published")
            if {(place.spec, place.offset) for place in file.places.values()} != self._places[index]:
                raise PartCorrupt(path, "its header lists other tensors than the manifest")
        except BaseException:
            file.close()
            raise
        return file

    def in_order(self) -> list[TensorEntry]:
        """The tensors in the order they lie on the medium."""
        return sorted(self.manifest.tensors, key=lambda entry: (entry.part, entry.offset, entry.nbytes))

    def read_into(self, entry: TensorEntry, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tensor's bytes from `start` on."""
        self.open_part(entry.part).read_into(buffer, entry.offset + start)

    def load_all(self) -> dict[str, Array]:
        """Every tensor in fresh memory, all digests checked; tied names share one array."""
        arrays: dict[str, Array] = {}
        proof = self._proof(check=True)
        for entry in self.in_order():
            array = arrays[entry.name] = empty(entry.spec)
            buffer = flat_bytes(array).data
            self.read_into(entry, 0, buffer)
            proof.update(buffer)
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
        """Every byte of the version (or of the named tensors) once, in the order it lies on the medium.

        The pieces rotate through `buffers` (default: one), so a piece is valid until its buffer comes round again. With
        `check`, the iterator ends in `DigestMismatch` if tensors differed from their digests; it lists all of them.
        """
        what = f"reading version {self.manifest.version} from {self._dir}"
        return stream_pieces(self._readables(names), self._proof(check=check), deadline, what=what, buffers=buffers)

    def _readables(self, names: Collection[str] | None) -> Readables:
        for entry in self.in_order():
            if names is None or entry.name in names:
                yield Readable(entry.spec, partial(self.read_into, entry))

    def _proof(self, *, check: bool) -> Proof:
        digests = {entry.name: entry.digest for entry in self.manifest.tensors}
        return Proof(str(self._dir), digests, self.manifest.algorithm if check else None)

    def close(self) -> None:
        """Close the open part. Safe twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> VersionReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
