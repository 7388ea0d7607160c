"""A packed delta taken apart, changed, and sealed again so that all its digests are right. Imports nothing of weightcast."""

import struct
from dataclasses import dataclass, field

import delta_reader
import xxhash
import zstandard


def zipped(data):
    return zstandard.ZstdCompressor(level=1).compress(data)


def text(data):
    data = data if isinstance(data, bytes) else data.encode()
    return struct.pack("<H", len(data)) + data


@dataclass
class Forged:
    """The table as it is written, column by column, and the frames."""

    packing: int
    roots: list
    tensors: list  # name, dtype, shape
    counts: list
    forms: list
    owners: list
    starts: list
    lanes: list
    changes: list
    frames: list
    sizes: list | None = None  # those of the frames
    inside: list | None = None  # the numbers of the boxes that blocks are in; 0, the whole tensor, for all
    boxes: dict = field(default_factory=dict)  # by the number of their tensor: start and shape of each
    claims: dict = field(default_factory=dict)  # numbers that differ from what is there

    @classmethod
    def of(cls, packed):
        table = delta_reader.read_table(packed)
        numbers = {tensor.name: number for number, tensor in enumerate(table.tensors)}
        blocks = [block for chunk in table.chunks for block in chunk.blocks]
        return cls(
            packing=table.packing,
            roots=[table.base_root, table.new_root],
            tensors=[[tensor.name, tensor.dtype, tensor.shape] for tensor in table.tensors],
            counts=[len(chunk.blocks) for chunk in table.chunks],
            forms=[delta_reader.FORMS.index(chunk.form) for chunk in table.chunks],
            owners=[numbers[block.tensor.name] for block in blocks],
            starts=[block.start for block in blocks],
            lanes=[block.lanes for block in blocks],
            changes=[block.changes for block in blocks],
            frames=[chunk.frame for chunk in table.chunks],
            inside=[block.box for block in blocks],
            boxes={at: [[one.start, one.shape] for one in tensor.boxes] for at, tensor in enumerate(table.tensors)},
        )

    def table(self):
        parts = [text(root) for root in self.roots] + [struct.pack("<I", self.claims.get("tensors", len(self.tensors)))]
        for at, (name, dtype, shape) in enumerate(self.tensors):
            parts += [text(name), text(dtype), struct.pack(f"<B{len(shape)}Q", len(shape), *shape), text("")]
            boxes = self.boxes.get(at, [])
            parts.append(struct.pack("<I", self.claims.get(f"boxes of {at}", len(boxes))))
            parts += [struct.pack(f"<{len(start) + len(size)}Q", *start, *size) for start, size in boxes]
        sizes = [len(frame) for frame in self.frames] if self.sizes is None else self.sizes
        parts.append(struct.pack("<I", self.claims.get("chunks", len(self.counts))))
        inside = [0] * len(self.owners) if self.inside is None else self.inside
        for code, column in (
            ("I", self.counts), ("B", self.forms), ("Q", sizes), ("I", self.owners), ("I", inside), ("Q", self.starts),
            ("I", self.lanes), ("I", self.changes),
        ):  # fmt: skip
            parts.append(struct.pack(f"<{len(column)}{code}", *column))
        return b"".join([*parts, *(xxhash.xxh3_128(frame).digest() for frame in self.frames)])

    def sealed(self):
        return sealed(self.table(), self.frames, self.packing)


def sealed(table, frames, packing, *, stored=None, decoded=None, number=2):
    """A packed delta with this table, whatever it says."""
    head = struct.pack("<8sHB5x", b"wcdelta\n", number, packing)
    stored = zipped(table) if stored is None else stored
    body = b"".join([head, *frames])
    tail = struct.pack("<QII", len(body), len(stored), len(table) if decoded is None else decoded)
    return body + stored + tail + xxhash.xxh3_128(head + stored + tail).digest() + b"wcdelta\n"


@dataclass
class Streams:
    """A sparse frame taken apart: its streams as they are before compression."""

    changes: int
    groups: bytes
    gap_symbols: bytes
    gap_bits: bytes
    steps: bytes
    large_symbols: bytes
    large_bits: bytes
    stored: dict = field(default_factory=dict)  # streams whose stored bytes are not those above compressed

    NAMES = ("groups", "gap_symbols", "gap_bits", "steps", "large_symbols", "large_bits")

    @classmethod
    def of(cls, frame):
        changes, *sizes = struct.unpack_from("<7I", frame)
        parts, at = [], 28
        for name, size in zip(cls.NAMES, sizes, strict=True):
            part = frame[at : at + size]
            parts.append(part if name.endswith("bits") else zstandard.decompress(part))
            at += size
        return cls(changes, *parts)

    def frame(self):
        parts = []
        for name in self.NAMES:
            contents = getattr(self, name)
            parts.append(self.stored.get(name, contents if name.endswith("bits") else zipped(contents)))
        return struct.pack("<7I", self.changes, *map(len, parts)) + b"".join(parts)


# -- what is damaged -----------------------------------------------------------------------------------------------
