"""The bytes of a packed delta: a head, frames, a table that says what is in them, and a tail that leads to the table.

docs/delta-format.md describes every byte. Reading believes nothing: sizes, places and digests are checked here, contents
of frames by whoever unpacks them.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from weightcast.delta.zstd import compress, decompress
from weightcast.errors import DeltaCorrupt, InvalidInput, UnsupportedFormat
from weightcast.tensors.box_plan import overlap
from weightcast.tensors.boxes import Box
from weightcast.tensors.digest import raw_digest
from weightcast.tensors.dtypes import DType
from weightcast.tensors.lanes import kind_of, lane_count, lanes_per_element
from weightcast.tensors.spec import TensorSpec
from weightcast.wire.manifest import Packing, is_digest

Form = Literal["sparse", "dense", "raw"]
PACKINGS: tuple[Packing, ...] = get_args(Packing)
FORMS: tuple[Form, ...] = get_args(Form)

MAGIC = b"wcdelta\n"
FORMAT = 2  # 1 had no names to sum tensors under, and no boxes
MAX_CHUNK_LANES = 1 << 24
MAX_TABLE_NBYTES = 1 << 28
_ANY_TABLE_NBYTES = 1 << 18  # a table of this size is no burden, whatever it is about
MAX_TABLE_RATIO = 1024  # how far a table may shrink; one about 36,000 tensors of which none changes shrinks to a 62nd
BLOCK_LANES = 1 << 16  # a tensor is not divided into many smaller blocks than this,
MAX_SLICES = 64  # except that one of SLICED_NBYTES or more may be cut into so many slices
SLICED_NBYTES = 256  # small, as a rank that holds slices of a tensor decodes along these
MAX_TEXT_NBYTES = 0xFFFF

_HEAD = struct.Struct("<8sHBB4x")  # magic, format, packing, 0
_TAIL = struct.Struct("<QII16s8s")  # table offset, table bytes, table bytes when decoded, digest, magic
_DIGEST_NBYTES = 16
_KEPT_NBYTES = 16 << 20  # of lists of tensors that are kept for the next delta
_BLOCK_NBYTES = 4 + 1 + 8 + _DIGEST_NBYTES + 4 + 4 + 8 + 4 + 4  # what a chunk of one block takes in the table


class Block(NamedTuple):
    """A run of lanes of one tensor, or of one box of it in the box's own C order, and how many of them change."""

    tensor: str
    start: int
    lanes: int
    changes: int
    box: Box | None = None

    def bounds(self, spec: TensorSpec) -> Box:
        """The smallest box of its tensor that it lies in, if the tensor has rows."""
        return _bounds(self.start, self.lanes, self.box, spec)

    def meets(self, spec: TensorSpec, boxes: tuple[Box, ...]) -> bool:
        """Whether its rows have something of one of these boxes of its tensor."""
        return bool(boxes) and _meets(self.bounds(spec), boxes)


@lru_cache(maxsize=1 << 14)  # deltas that follow one another are cut alike
def _bounds(start: int, lanes: int, box: Box | None, spec: TensorSpec) -> Box:
    inside = box or Box.whole(spec.shape)
    if not spec.shape:
        return inside
    row = math.prod(inside.shape[1:]) * lanes_per_element(spec.dtype)
    first, last = start // row, -(-(start + lanes) // row)
    return Box((inside.start[0] + first, *inside.start[1:]), (last - first, *inside.shape[1:]))


@lru_cache(maxsize=1 << 14)
def _meets(bounds: Box, boxes: tuple[Box, ...]) -> bool:
    return any(overlap(bounds, box) for box in boxes)


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

    `summed_as` has the names that tensors are summed under for the roots, where these are not their own. `offset` is where
    the table begins in the delta, and `seal` covers all of the delta but its frames.
    """

    packing: Packing
    base_root: str
    new_root: str
    specs: Mapping[str, TensorSpec]
    chunks: tuple[Chunk, ...]
    summed_as: Mapping[str, str] = field(default_factory=dict)
    offset: int = 0
    seal: bytes = b""


@dataclass
class ContainerWriter:
    """Writes a packed delta front to back: frames as they come, the table last."""

    write: Callable[[bytes], object]
    packing: Packing
    nbytes: int = 0
    chunks: list[Chunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._put(head_of(self.packing))

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
        table = Table(self.packing, base_root, new_root, specs, tuple(self.chunks), summed_as or {}, self.nbytes)
        raw = _table_bytes(table)
        packed = compress(raw)
        seal = _seal(head_of(self.packing), packed, table.offset, len(raw))
        self._put(packed)
        self._put(_TAIL.pack(table.offset, len(packed), len(raw), seal, MAGIC))
        return replace(table, seal=seal)

    def _put(self, data: bytes) -> None:
        self.write(data)
        self.nbytes += len(data)


def head_of(packing: Packing) -> bytes:
    """The first bytes of a delta, up to its first frame."""
    return _HEAD.pack(MAGIC, FORMAT, PACKINGS.index(packing), 0)


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
    return replace(table, offset=offset, seal=seal)


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
    if raw_nbytes <= _ANY_TABLE_NBYTES:
        return
    if specs is None:
        most = min(max(1 << 20, MAX_TABLE_RATIO * packed_nbytes), MAX_TABLE_NBYTES)
    else:
        most = min(_most_table_nbytes(specs), MAX_TABLE_NBYTES)
    if raw_nbytes > most:
        raise DeltaCorrupt(f"it has a table of {raw_nbytes} bytes, where its tensors take at most {most}")


def _most_table_nbytes(specs: Mapping[str, TensorSpec]) -> int:
    """Twice what a table about these tensors takes if each of their blocks has a chunk and a box, and a little."""
    texts = sum(2 * len(spec.name.encode()) + 8 * len(spec.shape) + 20 for spec in specs.values())
    blocks = sum(_most_blocks(spec) * (_BLOCK_NBYTES + 16 * len(spec.shape)) for spec in specs.values())
    return _ANY_TABLE_NBYTES + 2 * (texts + blocks)


def _most_blocks(spec: TensorSpec) -> int:
    return 1 + lane_count(spec) // BLOCK_LANES + (MAX_SLICES if spec.nbytes >= SLICED_NBYTES else 0)


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
    boxes: dict[str, dict[Box, int]] = {}  # counted from 1: 0 is the whole tensor
    for block in blocks:
        if block.box is not None:
            listed = boxes.setdefault(block.tensor, {})
            listed.setdefault(block.box, len(listed) + 1)
    columns = [
        np.array([len(chunk.blocks) for chunk in table.chunks], dtype="<u4"),
        np.array([FORMS.index(chunk.form) for chunk in table.chunks], dtype="u1"),
        np.array([chunk.nbytes for chunk in table.chunks], dtype="<u8"),
        np.array([numbers[block.tensor] for block in blocks], dtype="<u4"),
        np.array([boxes[block.tensor][block.box] if block.box else 0 for block in blocks], dtype="<u4"),
        np.array([block.start for block in blocks], dtype="<u8"),
        np.array([block.lanes for block in blocks], dtype="<u4"),
        np.array([block.changes for block in blocks], dtype="<u4"),
    ]
    parts = [_text(table.base_root), _text(table.new_root), struct.pack("<I", len(table.specs))]
    for spec in table.specs.values():
        parts += [_text(spec.name), _text(spec.dtype), struct.pack(f"<B{len(spec.shape)}Q", len(spec.shape), *spec.shape)]
        parts.append(_text(table.summed_as.get(spec.name, "")))
        listed = boxes.get(spec.name, {})
        parts.append(struct.pack("<I", len(listed)))
        parts += [struct.pack(f"<{2 * len(spec.shape)}Q", *box.start, *box.shape) for box in listed]
    parts += [struct.pack("<I", len(table.chunks)), *(column.tobytes() for column in columns)]
    return b"".join([*parts, *(chunk.digest for chunk in table.chunks)])


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) > MAX_TEXT_NBYTES:
        raise InvalidInput(f"a name of {len(data)} bytes is too long for a delta: {text[:40]!r}…")
    return struct.pack("<H", len(data)) + data


_Boxes = NDArray[np.int64]  # of a tensor: for each the starts and the lengths along all dimensions
_NO_BOXES: _Boxes = np.zeros((0, 2, 0), dtype=np.int64)
_U16 = struct.Struct("<H").unpack_from


class _Reader:
    """Takes values off the front of a buffer. What is not there is an error, and never memory reserved."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, nbytes: int) -> bytes:
        if nbytes > self.left:
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

    def tensor(self, number: int) -> tuple[TensorSpec, str, _Boxes]:
        """A tensor, the name that it is summed under if that is another, and its boxes, in a delta of format `number`.

        There is no object for each box before all blocks were checked.
        """
        data, at = self._data, self._at
        dims = at + 4 + _U16(data, at)[0]
        dims += _U16(data, dims - 2)[0]
        end = dims + 1 + 8 * data[dims]
        if number > 1:
            end += 2 + _U16(data, end)[0]
        spec, summed_as = _tensor_of(self.take(end - at))
        count = self.number("<I") if number > 1 else 0
        if not count:
            return spec, summed_as, _NO_BOXES
        if not spec.shape:
            raise ValueError("a tensor without dimensions has boxes")
        shape = np.array(spec.shape, dtype=np.int64)
        numbers = self.column("<u8", 2 * count * len(shape)).reshape(count, 2, len(shape))
        starts, lengths = numbers[:, 0], numbers[:, 1]
        if not lengths.all() or (starts + lengths > shape).any():
            raise ValueError("a box does not lie inside of its tensor, or is empty")
        return spec, summed_as, numbers

    def pass_over(self, data: bytes) -> bool:
        """Go on behind these bytes, if they come next."""
        comes = self._data.startswith(data, self._at)
        self._at += len(data) if comes else 0
        return comes

    def since(self, at: int) -> bytes:
        """What was taken since `at` bytes were left."""
        return self._data[len(self._data) - at : self._at]

    def check_end(self) -> None:
        if self.left:
            raise ValueError(f"{self.left} bytes are left over")


@lru_cache(maxsize=1 << 14)  # deltas that follow one another are about the same tensors
def _tensor_of(packed: bytes) -> tuple[TensorSpec, str]:
    """A tensor as the table lists it, and the name that it is summed under if that is another."""
    reader = _Reader(packed)
    name, dtype = reader.text(), DType(reader.text())
    spec = TensorSpec(name, dtype, tuple(reader.number("<Q") for _ in range(reader.number("<B"))))
    if max((spec.nbytes, *spec.shape)) >> 62:
        raise ValueError(f"tensor {spec.name!r} is larger than any memory")
    other = reader.text() if reader.left else ""
    if other:
        TensorSpec(other, dtype, spec.shape)  # refuses what is no name
    return spec, other


@dataclass
class _Listed:
    """The tensors that a table lists, with their boxes, and the bytes that say so in a delta of format `number`.

    `made` has an object for each box, behind None for the whole tensor, once the blocks of a table were checked.
    """

    number: int
    specs: dict[str, TensorSpec]
    summed_as: dict[str, str]
    boxes: list[_Boxes]
    data: bytes = b""
    made: list[list[Box | None]] = field(default_factory=list)

    @classmethod
    def read(cls, reader: _Reader, number: int) -> _Listed:
        began, found = reader.left, cls(number, {}, {}, [])
        for _ in range(reader.number("<I")):
            spec, other, boxes = reader.tensor(number)
            if spec.name in found.specs:
                raise ValueError(f"tensor {spec.name!r} is listed twice")
            found.specs[spec.name] = spec
            if other:
                found.summed_as[spec.name] = other
            found.boxes.append(boxes)
        found.data = reader.since(began)
        return found

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Of each tensor: itself, and its boxes."""
        return np.array(list(map(len, self.boxes)), dtype=np.int64) + 1

    @cached_property
    def room(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The lanes of tensors and boxes, which are counted through, so that one number stands for both; and the number of
        each tensor.
        """
        first = np.cumsum(self.counts) - self.counts
        room = np.empty(int(self.counts.sum()), dtype=np.int64)
        room[first] = list(map(lane_count, self.specs.values()))
        for at, spec, some in zip(first.tolist(), self.specs.values(), self.boxes, strict=True):
            if len(some):
                room[at + 1 : at + 1 + len(some)] = some[:, 1].prod(axis=1) * lanes_per_element(spec.dtype)
        return first, room

    def make_boxes(self) -> None:
        self.made = [[None, *(Box(tuple(a), tuple(b)) for a, b in boxes.tolist())] for boxes in self.boxes]


_recent: deque[_Listed] = deque(maxlen=4)  # deltas that follow one another list the same tensors


def _parse_table(reader: _Reader, packing: Packing, number: int) -> Table:
    base_root, new_root = reader.text(), reader.text()
    _check_roots(base_root, new_root)
    listed = next((one for one in tuple(_recent) if one.number == number and reader.pass_over(one.data)), None)
    known = listed is not None
    if listed is None:
        listed = _Listed.read(reader, number)
    count = reader.number("<I")
    sizes, forms, nbytes = reader.column("<u4", count), reader.column("u1", count), reader.column("<u8", count)
    total = int(sizes.sum())
    tensors = reader.column("<u4", total)
    inside = reader.column("<u4", total) if number > 1 else np.zeros_like(tensors)
    starts, lanes, changes = reader.column("<u8", total), reader.column("<u4", total), reader.column("<u4", total)
    _check_blocks(listed, sizes, tensors, inside, starts, lanes, changes)
    if not known:
        listed.make_boxes()
        if len(listed.data) <= _KEPT_NBYTES:
            _recent.append(listed)
    names, made = list(listed.specs), listed.made
    blocks = [
        Block(names[tensor], start, size, changed, made[tensor][box])
        for tensor, box, start, size, changed in zip(
            tensors.tolist(), inside.tolist(), starts.tolist(), lanes.tolist(), changes.tolist(), strict=True
        )
    ]
    chunks, offset, first = [], _HEAD.size, 0
    for size, form, length in zip(sizes.tolist(), forms.tolist(), nbytes.tolist(), strict=True):
        digest = reader.take(_DIGEST_NBYTES)
        chunks.append(Chunk(FORMS[form], tuple(blocks[first : first + size]), offset, length, digest))
        offset, first = offset + length, first + size
    reader.check_end()
    return Table(packing, base_root, new_root, listed.specs, tuple(chunks), listed.summed_as)


def _check_blocks(
    listed: _Listed,
    sizes: NDArray[np.int64],
    tensors: NDArray[np.int64],
    inside: NDArray[np.int64],
    starts: NDArray[np.int64],
    lanes: NDArray[np.int64],
    changes: NDArray[np.int64],
) -> None:
    """Raise `ValueError` unless blocks lie inside of their tensors or boxes, and apart in each of these.

    Before there is an object for each of them. That boxes lie apart is noticed when their changes are put together; here
    only that blocks have no more lanes together than their tensor, so that this takes no more memory than it does.
    """
    names, counts = list(listed.specs), listed.counts
    if not sizes.all():
        raise ValueError("a chunk has no blocks")
    if int(counts.sum()) - len(counts) > len(tensors):
        raise ValueError("there are more boxes than blocks")
    if not len(tensors):
        return
    if int(tensors.max()) >= len(names):
        raise ValueError(f"a block belongs to tensor {int(tensors.max())} of {len(names)}")
    if (inside >= counts[tensors]).any():
        raise ValueError("a block belongs to a box that is not listed")
    first, room = listed.room
    owners = first[tensors] + inside
    ends = starts + lanes
    impossible = np.flatnonzero((changes < 1) | (changes > lanes) | (ends > room[owners]))
    if len(impossible):
        raise ValueError(f"a block of {names[tensors[impossible[0]]]!r} is impossible")
    together = np.zeros(len(names), dtype=np.int64)
    np.add.at(together, tensors, lanes)
    crowded = np.flatnonzero(together > room[first])
    if len(crowded):
        raise ValueError(f"blocks of {names[crowded[0]]!r} overlap")
    order = np.lexsort((starts, owners))
    owners, starts, ends = owners[order], starts[order], ends[order]
    overlapping = np.flatnonzero((owners[1:] == owners[:-1]) & (starts[1:] < ends[:-1]))
    if len(overlapping):
        raise ValueError(f"blocks of {names[tensors[order][overlapping[0]]]!r} overlap")


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
        if len({kind_of(dtype) for dtype in {table.specs[block.tensor].dtype for block in chunk.blocks}}) > 1:
            yield f"chunk {number} mixes kinds of lanes"
