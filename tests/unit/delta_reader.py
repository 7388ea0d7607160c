"""A second reader of packed deltas, written from docs/delta-format.md and the rule of sums in docs/format.md alone.

It is slow, obvious, and without weightcast.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import slow_sums
import xxhash
import zstandard

MAGIC = b"wcdelta\n"
FORMS = ["sparse", "dense", "raw"]
ITEM_NBYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
FLOATS = {  # dtype: shift and mask of the class; these have a sign bit and a magnitude
    "F8_E4M3": (3, 0xF), "F8_E5M2": (2, 0x1F), "F16": (10, 0x1F), "BF16": (7, 0xFF), "F32": (23, 0xFF), "C64": (23, 0xFF),
}  # fmt: skip


class Bad(ValueError):
    """The bytes are not what the page says."""


def require(condition: object, problem: str) -> None:
    if not condition:
        raise Bad(problem)


@dataclass(frozen=True)
class Kind:
    """How lanes of some dtypes are read."""

    nbytes: int
    signed_magnitude: bool
    shift: int
    mask: int

    @classmethod
    def of(cls, dtype: str) -> Kind:
        return cls(min(4, ITEM_NBYTES[dtype]), dtype in FLOATS, *FLOATS.get(dtype, (0, 0)))

    def map(self, lane: int) -> int:
        sign = 1 << (8 * self.nbytes - 1)
        return lane ^ (sign - 1) if self.signed_magnitude and lane & sign else lane

    def moved(self, old: int, step: int) -> int:
        return self.map((self.map(old) + step) % (1 << (8 * self.nbytes)))

    def class_of(self, lane: int) -> int:
        return (lane >> self.shift) & self.mask


@dataclass
class Box:
    """A rectangular part of a tensor: its first index and its length along each dimension."""

    start: list[int]
    shape: list[int]


@dataclass
class Tensor:
    """A tensor of the table."""

    name: str
    dtype: str
    shape: list[int]
    summed_as: str
    boxes: list[Box] = field(default_factory=list)

    @property
    def kind(self) -> Kind:
        return Kind.of(self.dtype)

    @property
    def lanes_per_element(self) -> int:
        return ITEM_NBYTES[self.dtype] // self.kind.nbytes

    @property
    def lanes(self) -> int:
        return math.prod(self.shape) * self.lanes_per_element


@dataclass
class Block:
    """Consecutive lanes of a tensor or of a box of it, and how many of them change. Boxes are counted from 1."""

    tensor: Tensor
    box: int
    start: int
    lanes: int
    changes: int

    def check(self) -> None:
        require(self.box <= len(self.tensor.boxes), "a block of a box that is not listed")
        inside = self.tensor.boxes[self.box - 1].shape if self.box else self.tensor.shape
        require(
            1 <= self.changes <= self.lanes and self.start + self.lanes <= math.prod(inside) * self.tensor.lanes_per_element,
            "a block is impossible",
        )

    def place(self, lane: int) -> int:
        """Where in the tensor a lane is that was counted in the box of this block."""
        if not self.box:
            return lane
        box = self.tensor.boxes[self.box - 1]
        element, half = divmod(lane, self.tensor.lanes_per_element)
        at, stride = 0, 1
        for first, length, size in reversed(list(zip(box.start, box.shape, self.tensor.shape, strict=True))):
            element, index = divmod(element, length)
            at += (first + index) * stride
            stride *= size
        return at * self.tensor.lanes_per_element + half


@dataclass
class Chunk:
    """A frame and the blocks that are in it."""

    form: str
    blocks: list[Block]
    frame: bytes


@dataclass
class Table:
    """What the table says, frames included."""

    packing: int
    base_root: str
    new_root: str
    tensors: list[Tensor] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


class Bytes:
    """Takes values off the front."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, count: int) -> bytes:
        require(count <= len(self.data), "it ends too early")
        taken, self.data = self.data[:count], self.data[count:]
        return taken

    def numbers(self, code: str, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}")))

    def number(self, code: str) -> int:
        return self.numbers(code, 1)[0]

    def text(self) -> str:
        return self.take(self.number("H")).decode()


def digest(data: bytes) -> bytes:
    return xxhash.xxh3_128(data).digest()


def unzstd(data: bytes, nbytes: int | None = None) -> bytes:
    stated = zstandard.frame_content_size(data)
    require(stated >= 0 and nbytes in (None, stated), f"a zstd frame states {stated} bytes, not {nbytes}")
    job = zstandard.ZstdDecompressor().decompressobj()
    contents = job.decompress(data)
    require(job.eof and not job.unused_data and len(contents) == stated, "not exactly one zstd frame")
    return contents


def read_table(data: bytes) -> Table:
    head, tail = data[:16], data[-40:]
    magic, number, packing = struct.unpack("<8sHB5x", head)
    require(magic == MAGIC and number in (1, 2) and packing in (0, 1), "not a delta of format 1 or 2")
    start, stored, decoded, seal, magic = struct.unpack("<QII16s8s", tail)
    require(magic == MAGIC and start + stored + 40 == len(data), "it does not end where it should")
    packed = data[start : start + stored]
    require(seal == digest(head + packed + tail[:16]), "the seal is wrong")
    source = Bytes(unzstd(packed, decoded))
    table = Table(packing, source.text(), source.text())
    for _ in range(source.number("I")):
        name, dtype = source.text(), source.text()
        shape = list(source.numbers("Q", source.number("B")))
        summed_as = source.text() if number > 1 else ""
        boxes = list(take_boxes(source, shape)) if number > 1 else []
        table.tensors.append(Tensor(name, dtype, shape, summed_as or name, boxes))
    chunks = source.number("I")
    counts, forms, sizes = source.numbers("I", chunks), source.numbers("B", chunks), source.numbers("Q", chunks)
    blocks = sum(counts)
    owners = [table.tensors[owner] for owner in source.numbers("I", blocks)]
    inside = source.numbers("I", blocks) if number > 1 else [0] * blocks
    starts, lanes, changes = source.numbers("Q", blocks), source.numbers("I", blocks), source.numbers("I", blocks)
    every = [Block(*fields) for fields in zip(owners, inside, starts, lanes, changes, strict=True)]
    for block in every:
        block.check()
    coming = iter(every)
    at = 16
    for count, form, size in zip(counts, forms, sizes, strict=True):
        frame = data[at : at + size]
        require(digest(frame) == source.take(16), "a frame does not match its digest")
        table.chunks.append(Chunk(FORMS[form], [next(coming) for _ in range(count)], frame))
        at += size
    require(at == start and not source.data, "frames or columns do not fill their space")
    return table


def take_boxes(source: Bytes, shape: list[int]) -> Iterator[Box]:
    for _ in range(source.number("I")):
        box = Box(list(source.numbers("Q", len(shape))), list(source.numbers("Q", len(shape))))
        inside = [first + length <= size for first, length, size in zip(box.start, box.shape, shape, strict=True)]
        require(shape and all(box.shape) and all(inside), "a box is empty, or does not lie inside of its tensor")
        yield box


def take_bits(data: bytes, widths: list[int]) -> list[int]:
    """Numbers of so many bits each, the lowest bit of the first byte first."""
    every = int.from_bytes(data, "little")
    require(len(data) == (sum(widths) + 7) // 8 and every >> sum(widths) == 0, "too few low bits, or too many")
    taken = []
    for width in widths:
        taken.append(every & ((1 << width) - 1))
        every >>= width
    return taken


def take_numbers(symbols: bytes, shifts: list[int], bits: bytes) -> list[int]:
    widths, floors = [], []
    for symbol, shift in zip(symbols, shifts, strict=True):
        require(symbol < 240, "not a symbol")
        width = shift if symbol < 16 else (symbol - 16) // 8 + 1 + shift
        widths.append(width)
        floors.append((symbol if symbol < 16 else 8 + (symbol - 16) % 8) << width)
    numbers = [floor + low for floor, low in zip(floors, take_bits(bits, widths), strict=True)]
    require(all(number < 1 << 32 for number in numbers), "a number is too large")
    return numbers


def un_zigzag(value: int) -> int:
    return value // 2 if value % 2 == 0 else -(value + 1) // 2


def take_groups(data: bytes, groups: int) -> list[tuple[int, int]]:
    """The count and the shift of each group."""
    source = Bytes(unzstd(data))
    entries = []
    for _ in range(groups):
        count = place = 0
        while True:
            byte = source.number("B")
            count += (byte & 0x7F) << place
            place += 7
            if byte < 0x80:
                break
        entries.append((count, source.number("B") if count else 0))
    require(not source.data, "the group table is too long")
    return entries


def take_sparse(frame: bytes, groups: int, bits: int) -> list[list[tuple[int, int]]]:
    """For each group its changes, as gap and step."""
    source = Bytes(frame)
    changes, *sizes = source.numbers("I", 7)
    table, gap_symbols, gap_bits, steps, large_symbols, large_bits = [source.take(size) for size in sizes]
    require(not source.data, "the streams do not fill the frame")
    entries = take_groups(table, groups)
    require(sum(count for count, _ in entries) == changes, "groups do not add up")
    shifts = [shift for count, shift in entries for _ in range(count)]
    gaps = take_numbers(unzstd(gap_symbols, changes), shifts, gap_bits)
    nibbles = [half for byte in unzstd(steps, (changes + 1) // 2) for half in (byte & 15, byte >> 4)]
    require(not any(nibbles[changes:]), "the last half byte is not 0")
    escaped = nibbles[:changes].count(15)
    large = iter(take_numbers(unzstd(large_symbols, escaped), [0] * escaped, large_bits))
    values = [half if half < 15 else 15 + next(large) for half in nibbles[:changes]]
    require(all(value <= (1 << bits) - 2 for value in values), "a step is too wide")
    both = iter(zip(gaps, [un_zigzag(value + 1) for value in values], strict=True))
    return [[next(both) for _ in range(count)] for count, _ in entries]


def take_steps(chunk: Chunk, nbytes: int) -> list[int]:
    """A step for each lane of a dense or raw chunk."""
    lanes = chunk.blocks[0].lanes
    if chunk.form == "raw":
        return list(struct.unpack(f"<{lanes}{' bh i'[nbytes]}", chunk.frame))
    source = Bytes(chunk.frame)
    planes = [unzstd(source.take(size), lanes) for size in source.numbers("I", nbytes)]
    require(not source.data, "the planes do not fill the frame")
    return [un_zigzag(int.from_bytes(bytes(plane[lane] for plane in planes), "little")) for lane in range(lanes)]


Change = tuple[Block, int, int]  # block, lane of its tensor (not of its box), step


def changes_by_block(chunk: Chunk) -> Iterator[Change]:
    kind = chunk.blocks[0].tensor.kind
    groups = take_sparse(chunk.frame, len(chunk.blocks), 8 * kind.nbytes)
    for block, group in zip(chunk.blocks, groups, strict=True):
        lane = block.start - 1
        for gap, step in group:
            lane += 1 + gap
            require(lane < block.start + block.lanes, "a change lies outside of its block")
            yield block, block.place(lane), step


def changes_by_class(chunk: Chunk, base: dict[str, list[int]]) -> Iterator[Change]:
    kind = chunk.blocks[0].tensor.kind
    coming = [iter(group) for group in take_sparse(chunk.frame, kind.mask + 1, 8 * kind.nbytes)]
    endless = (1 << 40, 0)
    ahead = [list(next(group, endless)) for group in coming]
    for block in chunk.blocks:
        for lane in map(block.place, range(block.start, block.start + block.lanes)):
            own = kind.class_of(base[block.tensor.name][lane])
            if ahead[own][0] == 0:
                yield block, lane, ahead[own][1]
                ahead[own] = list(next(coming[own], endless))
            else:
                ahead[own][0] -= 1


def changes_of(chunk: Chunk, packing: int, base: dict[str, list[int]]) -> Iterator[Change]:
    if chunk.form == "sparse":
        yield from changes_by_class(chunk, base) if packing == 1 else changes_by_block(chunk)
        return
    (block,) = chunk.blocks
    for at, step in enumerate(take_steps(chunk, block.tensor.kind.nbytes)):
        if step:
            yield block, block.place(block.start + at), step


def root_of(tensors: list[Tensor], state: dict[str, bytes], label: str) -> str:
    """The root of a state as its label says: over sums, or, in older deltas, over digests of bytes."""
    if label == "sums":
        kinds = {tensor.name: (tensor.summed_as, tensor.dtype, tensor.shape) for tensor in tensors}
        return slow_sums.root((*kind, slow_sums.tensor_sum(*kind, state[name])) for name, kind in kinds.items())
    require(label == "xxh3-128", "this reader knows sums and one algorithm")
    whole = xxhash.xxh3_128()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        shape = ",".join(map(str, tensor.shape))
        own = f"xxh3-128:{xxhash.xxh3_128(state[tensor.name]).hexdigest()}"
        for text in (tensor.name, tensor.dtype, shape, own):
            whole.update(struct.pack("<Q", len(text.encode())) + text.encode())
    return f"xxh3-128:{whole.hexdigest()}"


def read(data: bytes, base: dict[str, bytes]) -> dict[str, bytes]:
    """The new state, from a packed delta and its base."""
    table = read_table(data)
    require({tensor.name for tensor in table.tensors} == base.keys(), "the base has other tensors")
    if table.base_root:
        require(root_of(table.tensors, base, table.base_root.partition(":")[0]) == table.base_root, "another base")
    codes = {tensor.name: f"<{tensor.lanes}{' BH I'[tensor.kind.nbytes]}" for tensor in table.tensors}
    old = {name: list(struct.unpack(codes[name], contents)) for name, contents in base.items()}
    new = {name: list(lanes) for name, lanes in old.items()}
    changed = set()
    for chunk in table.chunks:
        require(len({block.tensor.kind for block in chunk.blocks}) == 1, "a chunk mixes kinds")
        found = [0] * len(chunk.blocks)
        for block, lane, step in changes_of(chunk, table.packing, old):
            require((block.tensor.name, lane) not in changed, "a lane changes twice: blocks overlap")
            changed.add((block.tensor.name, lane))
            found[next(at for at, one in enumerate(chunk.blocks) if one is block)] += 1
            new[block.tensor.name][lane] = block.tensor.kind.moved(old[block.tensor.name][lane], step)
        require(found == [block.changes for block in chunk.blocks], "a block has more or fewer changes than it should")
    state = {name: struct.pack(codes[name], *lanes) for name, lanes in new.items()}
    if table.new_root:
        require(root_of(table.tensors, state, table.new_root.partition(":")[0]) == table.new_root, "another state came out")
    return state
