"""The bytes of a packed delta: a head, frames, a table that says what is in them, and a tail that leads to the table.

docs/delta-format.md describes every byte. Reading believes nothing: sizes, places and digests are checked here, contents
of frames by whoever unpacks them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from weightcast.delta.zstd import compress, decompress
from weightcast.errors import DeltaCorrupt, InvalidInput, UnsupportedFormat
from weightcast.tensors.digest import raw_digest
from weightcast.tensors.dtypes import DType
from weightcast.tensors.lanes import kind_of, lane_count
from weightcast.tensors.spec import TensorSpec
from weightcast.wire.manifest import is_digest

Packing = Literal["gaps", "classes"]
Form = Literal["sparse", "dense", "raw"]
PACKINGS: tuple[Packing, ...] = get_args(Packing)
FORMS: tuple[Form, ...] = get_args(Form)

MAGIC = b"wcdelta\n"
FORMAT = 2  # 1 had no names to sum tensors under
MAX_CHUNK_LANES = 1 << 24
MAX_TABLE_NBYTES = 1 << 28
MAX_TABLE_RATIO = 1024  # how far a table may shrink; one about 36,000 tensors of which none changes shrinks to a 62nd
BLOCK_LANES = 1 << 16  # a tensor is not divided into many smaller blocks than this
MAX_TEXT_NBYTES = 0xFFFF

_HEAD = struct.Struct("<8sHBB4x")  # magic, format, packing, 0
_TAIL = struct.Struct("<QII16s8s")  # table offset, table bytes, table bytes when decoded, digest, magic
_DIGEST_NBYTES = 16
_BLOCK_NBYTES = 4 + 1 + 8 + _DIGEST_NBYTES + 4 + 8 + 4 + 4  # what a chunk of one block takes in the table


@dataclass(frozen=True)
class Block:
    """A run of lanes of one tensor, and how many of them change."""

    tensor: str
    start: int
    lanes: int
    changes: int


@dataclass(frozen=True)
class Chunk:
    """One frame: what it holds, in which form, and where it lies."""

    form: Form
    blocks: tuple[Block, ...]
    offset: int
    nbytes: int
    digest: bytes


@dataclass(frozen=True)
class Table:
    """What is in a packed delta. Blocks that are in no chunk do not change.

    `summed_as` has the names that tensors are summed under for the roots, where these are not their own.
    """

    packing: Packing
    base_root: str
    new_root: str
    specs: Mapping[str, TensorSpec]
    chunks: tuple[Chunk, ...]
    summed_as: Mapping[str, str] = field(default_factory=dict)


@dataclass
class ContainerWriter:
    """Writes a packed delta front to back: frames as they come, the table last."""

    write: Callable[[bytes], object]
    packing: Packing
    nbytes: int = 0
    chunks: list[Chunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._put(_HEAD.pack(MAGIC, FORMAT, PACKINGS.index(self.packing), 0))

    def add(self, form: Form, blocks: tuple[Block, ...], frame: bytes) -> None:
        """Write one frame."""
        self.chunks.append(Chunk(form, blocks, self.nbytes, len(frame), raw_digest(frame)))
        self._put(frame)

    def finish(
        self,
        specs: Mapping[str, TensorSpec],
        *,
        base_root: str,
        new_root: str,
        summed_as: Mapping[str, str] | None = None,
    ) -> Table:
        """Write the table and the tail."""
        _check_roots(base_root, new_root)
        table = Table(self.packing, base_root, new_root, specs, tuple(self.chunks), summed_as or {})
        raw = _table_bytes(table)
        packed = compress(raw)
        offset = self.nbytes
        head = _HEAD.pack(MAGIC, FORMAT, PACKINGS.index(self.packing), 0)
        self._put(packed)
        self._put(_TAIL.pack(offset, len(packed), len(raw), _seal(head, packed, offset, len(raw)), MAGIC))
        return table

    def _put(self, data: bytes) -> None:
        self.write(data)
        self.nbytes += len(data)


def read_table(data: memoryview, specs: Mapping[str, TensorSpec] | None = None) -> Table:
    """The table of a packed delta, every place and count in it checked. Raises `DeltaCorrupt`, or `UnsupportedFormat`.

    `specs` are the tensors that it should be about. They bound how large the table may be, before it is unpacked; without
    them, its packed size does.
    """
    if len(data) < _HEAD.size + _TAIL.size:
        raise DeltaCorrupt(f"it has {len(data)} bytes, which is too short for one")
    magic, number, packing, _ = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise DeltaCorrupt("it does not begin like one")
    if not 1 <= number <= FORMAT:
        raise UnsupportedFormat(f"the delta has format {number}; this release reads up to {FORMAT}. Upgrade weightcast.")
    check_table(data, specs)
    offset, packed_nbytes, raw_nbytes, seal, magic = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    if magic != MAGIC or offset < _HEAD.size or offset + packed_nbytes + _TAIL.size != len(data):
        raise DeltaCorrupt("its end is not where it should be: it was cut short or something was appended")
    packed = bytes(data[offset : offset + packed_nbytes])
    if seal != _seal(bytes(data[: _HEAD.size]), packed, offset, raw_nbytes):
        raise DeltaCorrupt("its table does not match its digest")
    if packing >= len(PACKINGS):
        raise DeltaCorrupt(f"packing {packing} is not known")
    raw = decompress(packed, raw_nbytes, "the table")
    try:
        table = _parse_table(_Reader(raw), PACKINGS[packing], number)
    except (struct.error, UnicodeDecodeError, ValueError, InvalidInput, IndexError) as error:
        raise DeltaCorrupt(f"its table cannot be read: {error}") from error
    _check_places(table, end=offset)
    return table


def packing_of(data: memoryview) -> Packing:
    """How a packed delta is packed, told by its head alone. Raises `DeltaCorrupt`."""
    magic, packing = _HEAD.unpack_from(data)[0:3:2] if len(data) >= _HEAD.size else (b"", 0)
    if magic != MAGIC or packing >= len(PACKINGS):
        raise DeltaCorrupt("it does not begin like one")
    return PACKINGS[int(packing)]


def check_table(data: memoryview, specs: Mapping[str, TensorSpec] | None) -> None:
    """Refuse a packed delta whose table is larger than one about these tensors can be. Nothing is unpacked."""
    if len(data) < _HEAD.size + _TAIL.size:
        raise DeltaCorrupt(f"it has {len(data)} bytes, which is too short for one")
    _, packed_nbytes, raw_nbytes, _, _ = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    if specs is None:
        most = min(max(1 << 20, MAX_TABLE_RATIO * packed_nbytes), MAX_TABLE_NBYTES)
    else:
        most = min(_most_table_nbytes(specs), MAX_TABLE_NBYTES)
    if raw_nbytes > most:
        raise DeltaCorrupt(f"it has a table of {raw_nbytes} bytes, where its tensors take at most {most}")


def _most_table_nbytes(specs: Mapping[str, TensorSpec]) -> int:
    """Twice what a table about these tensors takes if each of their blocks has a chunk, and a little."""
    texts = sum(2 * len(spec.name.encode()) + 8 * len(spec.shape) + 16 for spec in specs.values())
    blocks = sum(1 + lane_count(spec) // BLOCK_LANES for spec in specs.values())
    return (64 << 10) + 2 * (texts + blocks * _BLOCK_NBYTES)


def frame_of(data: memoryview, chunk: Chunk) -> memoryview:
    """The frame of a chunk, compared with its digest."""
    frame = data[chunk.offset : chunk.offset + chunk.nbytes]
    if raw_digest(frame) != chunk.digest:
        raise DeltaCorrupt(f"the frame at byte {chunk.offset} does not match its digest")
    return frame


def _check_roots(*roots: str) -> None:
    """Raise `InvalidInput` for a root that is neither empty nor a digest."""
    for root in filter(None, roots):
        if not is_digest(root):
            raise InvalidInput(f"{root[:80]!r} is not a root digest.")


def _seal(head: bytes, packed: bytes, offset: int, raw_nbytes: int) -> bytes:
    return raw_digest(head + packed + struct.pack("<QII", offset, len(packed), raw_nbytes))


# -- the table -----------------------------------------------------------------------------------------------------


def _table_bytes(table: Table) -> bytes:
    numbers = {name: index for index, name in enumerate(table.specs)}
    blocks = [block for chunk in table.chunks for block in chunk.blocks]
    columns = [
        np.array([len(chunk.blocks) for chunk in table.chunks], dtype="<u4"),
        np.array([FORMS.index(chunk.form) for chunk in table.chunks], dtype="u1"),
        np.array([chunk.nbytes for chunk in table.chunks], dtype="<u8"),
        np.array([numbers[block.tensor] for block in blocks], dtype="<u4"),
        np.array([block.start for block in blocks], dtype="<u8"),
        np.array([block.lanes for block in blocks], dtype="<u4"),
        np.array([block.changes for block in blocks], dtype="<u4"),
    ]
    parts = [_text(table.base_root), _text(table.new_root), struct.pack("<I", len(table.specs))]
    for spec in table.specs.values():
        parts += [_text(spec.name), _text(spec.dtype), struct.pack(f"<B{len(spec.shape)}Q", len(spec.shape), *spec.shape)]
        parts.append(_text(table.summed_as.get(spec.name, "")))
    parts += [struct.pack("<I", len(table.chunks)), *(column.tobytes() for column in columns)]
    return b"".join([*parts, *(chunk.digest for chunk in table.chunks)])


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) > MAX_TEXT_NBYTES:
        raise InvalidInput(f"a name of {len(data)} bytes is too long for a delta: {text[:40]!r}…")
    return struct.pack("<H", len(data)) + data


class _Reader:
    """Takes values off the front of a buffer. What is not there is an error, and never memory reserved."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, nbytes: int) -> bytes:
        if nbytes > len(self._data) - self._at:
            raise ValueError("it ends too early")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def text(self) -> str:
        return self.take(self.number("<H")).decode()

    def column(self, dtype: str, count: int) -> NDArray[np.int64]:
        data = np.frombuffer(self.take(np.dtype(dtype).itemsize * count), dtype=dtype)
        if len(data) and int(data.max()) >> 62:
            raise ValueError(f"{int(data.max())} is too large")
        return data.astype(np.int64)

    def check_end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes are left over")


def _parse_table(reader: _Reader, packing: Packing, number: int) -> Table:
    base_root, new_root = reader.text(), reader.text()
    _check_roots(base_root, new_root)
    specs: dict[str, TensorSpec] = {}
    summed_as: dict[str, str] = {}
    for _ in range(reader.number("<I")):
        spec = TensorSpec(
            name=reader.text(),
            dtype=DType(reader.text()),
            shape=tuple(reader.number("<Q") for _ in range(reader.number("<B"))),
        )
        if spec.name in specs or spec.nbytes >> 62:
            raise ValueError(f"tensor {spec.name!r} is listed twice, or larger than any memory")
        specs[spec.name] = spec
        other = reader.text() if number > 1 else ""
        if other:
            summed_as[spec.name] = TensorSpec(name=other, dtype=spec.dtype, shape=spec.shape).name
    count = reader.number("<I")
    sizes, forms, nbytes = reader.column("<u4", count), reader.column("u1", count), reader.column("<u8", count)
    total = int(sizes.sum())
    tensors, starts = reader.column("<u4", total), reader.column("<u8", total)
    lanes, changes = reader.column("<u4", total), reader.column("<u4", total)
    _check_blocks(list(specs.values()), sizes, tensors, starts, lanes, changes)
    names = list(specs)
    blocks = [
        Block(names[tensor], start, size, changed)
        for tensor, start, size, changed in zip(
            tensors.tolist(), starts.tolist(), lanes.tolist(), changes.tolist(), strict=True
        )
    ]
    chunks, offset, first = [], _HEAD.size, 0
    for size, form, length in zip(sizes.tolist(), forms.tolist(), nbytes.tolist(), strict=True):
        digest = reader.take(_DIGEST_NBYTES)
        chunks.append(Chunk(FORMS[form], tuple(blocks[first : first + size]), offset, length, digest))
        offset, first = offset + length, first + size
    reader.check_end()
    return Table(packing, base_root, new_root, specs, tuple(chunks), summed_as)


def _check_blocks(
    specs: list[TensorSpec],
    sizes: NDArray[np.int64],
    tensors: NDArray[np.int64],
    starts: NDArray[np.int64],
    lanes: NDArray[np.int64],
    changes: NDArray[np.int64],
) -> None:
    """Raise `ValueError` unless blocks lie inside of their tensors and apart. Before there is an object for each of them."""
    if not sizes.all():
        raise ValueError("a chunk has no blocks")
    if not len(tensors):
        return
    if int(tensors.max()) >= len(specs):
        raise ValueError(f"a block belongs to tensor {int(tensors.max())} of {len(specs)}")
    ends = starts + lanes
    room = np.array([lane_count(spec) for spec in specs], dtype=np.int64)
    impossible = np.flatnonzero((changes < 1) | (changes > lanes) | (ends > room[tensors]))
    if len(impossible):
        raise ValueError(f"a block of {specs[tensors[impossible[0]]].name!r} is impossible")
    order = np.lexsort((starts, tensors))
    tensors, starts, ends = tensors[order], starts[order], ends[order]
    overlapping = np.flatnonzero((tensors[1:] == tensors[:-1]) & (starts[1:] < ends[:-1]))
    if len(overlapping):
        raise ValueError(f"blocks of {specs[tensors[overlapping[0]]].name!r} overlap")


def _check_places(table: Table, *, end: int) -> None:
    """Frames fill the space before the table; chunks are not too large, and their blocks are of a kind."""
    problems = list(_place_problems(table, end))
    if problems:
        raise DeltaCorrupt("; ".join(problems[:8]))


def _place_problems(table: Table, end: int) -> Iterator[str]:
    last = table.chunks[-1].offset + table.chunks[-1].nbytes if table.chunks else _HEAD.size
    if last != end:
        yield f"its frames end at byte {last}, its table begins at {end}"
    for number, chunk in enumerate(table.chunks):
        if chunk.form != "sparse" and len(chunk.blocks) != 1:
            yield f"chunk {number} ({chunk.form}) has {len(chunk.blocks)} blocks"
        if sum(block.lanes for block in chunk.blocks) > MAX_CHUNK_LANES:
            yield f"chunk {number} has more than {MAX_CHUNK_LANES} lanes"
        if len({kind_of(table.specs[block.tensor].dtype) for block in chunk.blocks}) > 1:
            yield f"chunk {number} mixes kinds of lanes"
