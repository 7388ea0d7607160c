"""Safetensors files, read by byte range and written front to back.

The `safetensors` package maps files, and a mapped file that shrinks kills the process that reads it; it also wants all
tensors of a file at once when writing. Here bytes are read and written through bounded buffers instead. What is written
opens with that package and with everything else that reads the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from weightcast.errors import PartCorrupt, UnsupportedTensor
from weightcast.store.byte_file import PooledFile
from weightcast.store.files import FileWriter
from weightcast.tensors.digest import PIECE_NBYTES, Algorithm, PieceHasher, bytes_digest, piece_digests
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array, byte_blocks
from weightcast.tensors.spec import RESERVED_NAME, TensorSpec
from weightcast.tensors.sums import Digests, TensorHasher

MAX_HEADER_NBYTES = 100_000_000  # the limit of the format's reference implementation
HEADER_ROOM = 65_536  # what a streamed part keeps free for its header; data starts on a page


@dataclass(frozen=True)
class Place:
    """A tensor in a file: `offset` counts from the start of the file."""

    spec: TensorSpec
    offset: int


class SafetensorsFile:
    """An open file whose header was checked: no holes, no overlaps, nothing beyond the end.

    `places` is in the order of the data.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = PooledFile(path)
        try:
            self.nbytes = self._file.nbytes
            self.header = self._read_header()
            self.metadata, self.places = _parse_header(path, self.header, self.nbytes)
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> bytes:
        length = int.from_bytes(self._file.read(8, 0), "little")
        if length > min(MAX_HEADER_NBYTES, self.nbytes - 8):
            raise PartCorrupt(self.path, f"it is not a safetensors file: its header claims {length} of {self.nbytes} bytes")
        return self._file.read(8 + length, 0)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes at `offset`, or raise `PartCorrupt` if the file ends before."""
        self._file.read_into(buffer, offset)

    def read_tensor(self, place: Place, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tensor's bytes from `start` on."""
        self._file.read_into(buffer, place.offset + start)

    def close(self) -> None:
        """Close the file. Safe twice."""
        self._file.close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _parse_header(path: Path, header: bytes, file_nbytes: int) -> tuple[dict[str, str], dict[str, Place]]:
    try:
        fields = json.loads(header[8:])
        metadata = {str(key): str(value) for key, value in fields.pop(RESERVED_NAME, {}).items()}
        places = [_parse_place(name, field, len(header)) for name, field in fields.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UnsupportedTensor) as error:
        raise PartCorrupt(path, f"its safetensors header cannot be read: {type(error).__name__}: {error}") from error
    places.sort(key=lambda place: (place.offset, place.spec.nbytes))
    end = len(header)
    for place in places:
        if place.offset != end:
            raise PartCorrupt(path, f"tensor {place.spec.name!r} starts at byte {place.offset}, not at {end}")
        end += place.spec.nbytes
    if end != file_nbytes:
        raise PartCorrupt(path, f"it has {file_nbytes} bytes, but its tensors end at {end}")
    return metadata, {place.spec.name: place for place in places}


def _parse_place(name: str, field: Any, data_start: int) -> Place:
    start, end = field["data_offsets"]
    shape = tuple(field["shape"])
    if len(shape) > 32 or not all(type(size) is int and 0 <= size < 1 << 48 for size in (*shape, start, end)):
        raise ValueError(f"tensor {name!r} has a shape or place that is not made of counts")
    spec = TensorSpec(name=name, dtype=DType(field["dtype"]), shape=shape)
    if end - start != spec.nbytes:
        raise ValueError(f"tensor {name!r} is {spec.describe()} but has {end - start} bytes")
    return Place(spec=spec, offset=data_start + start)


class SafetensorsWriter:
    """A safetensors file written tensor by tensor: room for the header is kept free and filled at the end.

    Metadata is part of the header and may be given when the file is finished.
    """

    def __init__(self, path: Path, algorithm: Algorithm, *, header_room: int = HEADER_ROOM) -> None:
        self.path, self._algorithm = path, algorithm
        self.header_nbytes = header_room
        self.places: list[Place] = []
        self._pieces = PieceHasher(algorithm)
        self._early = bytearray()  # data in the piece that the header ends in, which is hashed when the header is known
        self._early_nbytes = -header_room % PIECE_NBYTES
        self._header_left = header_room - 8 - 4096  # the last page is for the metadata
        self._file = FileWriter(path)
        try:
            self._file.write(bytes(header_room))
        except BaseException:
            self._file.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes written so far, the header's room included."""
        return self._file.position

    def takes(self, spec: TensorSpec) -> bool:
        """Whether the tensor can be next: the header has room for it and it would lie on a multiple of its item size."""
        return _field_nbytes(spec) <= self._header_left and self.nbytes % spec.dtype.itemsize == 0

    def append(self, spec: TensorSpec, array: Array, summed_as: str = "") -> tuple[Place, Digests]:
        """Write one tensor; its digests are taken from the very blocks that are written."""
        place = Place(spec=spec, offset=self.nbytes)
        hasher = TensorHasher(replace(spec, name=summed_as or spec.name), self._algorithm)
        for block in byte_blocks(array):
            hasher.update(block.data)
            early = block.data[: self._early_nbytes - len(self._early)]
            self._early += early
            self._pieces.update(block.data[len(early) :])
            self._file.write(block.data)
        self.places.append(place)
        self._header_left -= _field_nbytes(spec)
        return place, hasher.finish()

    def finish(self, metadata: Mapping[str, str]) -> tuple[str, bytes]:
        """Write the header, wait until the file is on the medium, close it; the digests of the header and of all pieces."""
        header = encoded_header(self.path, self.places, self.header_nbytes, metadata)
        self._file.rewrite(header, 0)
        self._file.sync()
        self._file.close()
        first = piece_digests(header + self._early, self._algorithm)
        return bytes_digest(header, self._algorithm), first + self._pieces.digests()

    def close(self) -> None:
        """Close the file, finished or not. Safe twice."""
        self._file.close()


def encoded_header(path: Path, places: Iterable[Place], nbytes: int, metadata: Mapping[str, str]) -> bytes:
    """The first `nbytes` of a file in which tensors lie at these places. `path` is only for messages."""
    fields: dict[str, Any] = {RESERVED_NAME: dict(metadata)}
    for place in places:
        start = place.offset - nbytes
        fields[place.spec.name] = {
            "dtype": place.spec.dtype.value,
            "shape": list(place.spec.shape),
            "data_offsets": [start, start + place.spec.nbytes],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    room = nbytes - 8
    if len(text) > room:
        raise UnsupportedTensor(f"the header of {path} needs {len(text)} bytes and has {room}: shorten the metadata.")
    return room.to_bytes(8, "little") + text.ljust(room)


def _field_nbytes(spec: TensorSpec) -> int:
    """At most what one tensor adds to the header."""
    return len(json.dumps(spec.name)) + 21 * len(spec.shape) + 100


def header_room_for(specs: Iterable[TensorSpec]) -> int:
    """A header size, in whole pages, that surely takes these tensors."""
    needed = 8 + 4096 + sum(_field_nbytes(spec) for spec in specs)
    return -(-needed // 4096) * 4096
