"""The manifest: what a version is, where its bytes lie and how to prove them. The format is written down in docs/format.md.

A manifest is JSON whose first field is a digest over the file itself, so that a flipped byte anywhere is noticed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

import msgspec

from weightcast.errors import AnyPath, InvalidInput, ManifestCorrupt, UnsupportedTensor
from weightcast.tensors.box_plan import Place, PlacedBox, tiling_problems
from weightcast.tensors.boxes import Box
from weightcast.tensors.digest import (
    ALGORITHMS,
    Algorithm,
    bytes_digest,
    digest_nbytes,
    piece_digests,
    root_digest,
)
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Buffer
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import NO_DIGESTS, ROOT_LABEL, Digests, Sum, add_up, is_sum, root_of_sums
from weightcast.wire.seal import seal, unseal

Packing = Literal["gaps", "classes"]

FORMAT = 2  # 1 had no sums and no pieces, and a root digest over the digests of bytes
MAX_MANIFEST_NBYTES = 1 << 30
MIN_PIECE_NBYTES, MAX_PIECE_NBYTES = 64 << 10, 64 << 20  # what is fetched again if a byte of it is wrong
_MAX_CREATED_S = 1 << 36  # the year 4147

# Keys of `metadata` in which a source says what it recorded beside the version: the rank whose file it is and the number of
# ranks (snapshots), and the root digest, where the tensors have no digests of their own (legacy shared memory).
RANK, RANKS, ROOT = "weightcast.rank", "weightcast.ranks", "weightcast.root"

_DIGITS = 10  # of a number in metadata
_ROOT_OF_SUMS = re.compile(rf"{ROOT_LABEL}:[0-9a-f]{{32}}")
_SEAL = re.compile(r"([0-9a-f]{32})?")
_VERSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,254}")


@lru_cache(maxsize=1 << 16)  # versions that follow one another have the same tensors
def _spec(name: str, dtype: DType, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a version: what it is and where its bytes sit.

    `offset` counts bytes from the start of the file of part `part`. `digest` covers raw bytes, so two NaNs may differ; it is
    empty in a delta, whose bytes are its payload. `sum` is the summable digest, empty in format 1. Tied bytes are summed
    under the smallest of their names: `summed_as`, where that is not `name`.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    part: int
    offset: int
    nbytes: int
    digest: str
    sum: str = ""
    summed_as: str = ""

    @property
    def spec(self) -> TensorSpec:
        """The tensor without its place."""
        return _spec(self.name, self.dtype, self.shape)

    @property
    def sum_spec(self) -> TensorSpec:
        """The tensor as it is summed."""
        return _spec(self.summed_as or self.name, self.dtype, self.shape)

    @property
    def proof(self) -> str:
        """What the whole tensor is compared with: the digest of its bytes, or its sum where there is none."""
        return self.digest or self.sum


def entry_of(
    spec: TensorSpec, *, part: int = 0, offset: int = 0, digests: Digests = NO_DIGESTS, summed_as: str = ""
) -> TensorEntry:
    """The entry of a tensor. One of a delta, or of a rank's own parameters, has no place."""
    return TensorEntry(
        name=spec.name,
        dtype=spec.dtype,
        shape=spec.shape,
        part=part,
        offset=offset,
        nbytes=spec.nbytes,
        digest=digests.digest,
        sum=digests.sum,
        summed_as=summed_as,
    )


class PartEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One safetensors file. Its tensors' digests cover the data; `header_digest` covers the bytes before the data.

    `pieces` has the digests of its pieces, one after the other.
    """

    file: str
    nbytes: int
    header_nbytes: int
    header_digest: str
    pieces: bytes = b""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file that travels with a version unchanged: the index, a config, a tokenizer; or the payload of a delta."""

    file: str
    nbytes: int
    digest: str
    pieces: bytes = b""


def file_entry(file: str, data: Buffer, algorithm: Algorithm) -> FileEntry:
    """The entry of a file that is in memory."""
    view = memoryview(data).cast("B")
    digest, pieces = bytes_digest(view, algorithm), piece_digests(view, algorithm)
    return FileEntry(file=file, nbytes=len(view), digest=digest, pieces=pieces)


class FilePiece(NamedTuple):
    """Bytes of a file that are proved by one digest."""

    start: int
    stop: int
    digest: str


class PayloadEntry(FileEntry, frozen=True, kw_only=True):
    """A packed delta. `table` is where its table begins, and `seal`, in hex, what covers head and table.

    So a receiver fetches the table, and then the chunks that it needs. In format 1 neither is known, nor is the packing.
    Where publishers hold versions in shared memory, it lies at `offset` of that of publisher `part`.
    """

    packing: Packing | None = None
    table: int = 0
    seal: str = ""
    part: int = 0
    offset: int = 0


class BaseRef(msgspec.Struct, frozen=True, kw_only=True):
    """The version that a delta was built on, and the root digest it must have.

    One of several publishers does not know that of the whole: it tells the `sums` of what it has, and has an own root.
    """

    version: str
    root_digest: str
    sums: dict[str, str] = {}


class ShareFile(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one of several publishers that share a version, as a file: boxes of tensors, each in C order."""

    file: str
    nbytes: int
    pieces: bytes


class BoxEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A box of a tensor that publishers hold: the ranks of those publishers, and where it lies in the file of each.

    `sum` is what the box adds to the sum of its tensor.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    offsets: tuple[int, ...]
    sum: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A version: an immutable set of tensors.

    `sequence` is the order of publication in a store. `algorithm` is None for a source that holds no digests (a legacy
    snapshot without a manifest); all digests are then empty. `tied` maps a name to the name that holds its bytes.

    A delta describes the whole new state too: `tensors` has an entry for each of its tensors, with its sum but without a
    place. Its bytes are packed deltas, `payloads`, which lead there from `base`: all those of one packing together. A full
    version may have payloads too, for receivers that hold their base.

    Its files are proved in pieces of `piece_nbytes`; in format 1, where that is 0, by the digests of what lies in them.

    A version that several publishers share, each with boxes of its tensors, has them in `boxes`: they cover each tensor
    exactly once, and their sums add up to that of the tensor, which has no digest of its own. They lie in the `shares`, the
    file of each rank. A delta has no `shares`: its boxes tell which ranks hold what, and the payload of the first of these
    ranks counts.
    """

    version: str
    sequence: int
    step: int
    kind: Literal["full", "delta"]
    created_s: float
    algorithm: Algorithm | None
    root_digest: str
    parts: tuple[PartEntry, ...]
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...] = ()
    tied: dict[str, str] = {}
    base: BaseRef | None = None
    metadata: dict[str, str] = {}
    format: int = FORMAT
    payload: FileEntry | None = None  # in format 1 only: `decode_manifest` makes it one of `payloads`
    payloads: tuple[PayloadEntry, ...] = ()
    boxes: dict[str, tuple[BoxEntry, ...]] = {}
    piece_nbytes: int = 0
    shares: tuple[ShareFile, ...] = ()

    def recorded(self, key: str) -> int | None:
        """A number that a source recorded in the metadata; None if there is none."""
        return recorded_number(self.metadata, key)

    @property
    def sealed(self) -> bool:
        """Whether all is known of it. A live stream is not sealed before its end: its digests come with its bytes."""
        return self.algorithm is None or bool(self.root_digest)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the state that this version is."""
        return sum(entry.nbytes for entry in self.tensors)

    def transfers(self) -> dict[str, TensorEntry]:
        """What a transport moves for this version, by name: its tensors, or a delta's payloads, each a tensor of bytes."""
        if self.kind == "full":
            return {entry.name: entry for entry in self.tensors}
        return {
            file.file: TensorEntry(
                name=file.file,
                dtype=DType.U8,
                shape=(file.nbytes,),
                part=file.part,
                offset=file.offset,
                nbytes=file.nbytes,
                digest=file.digest,
            )
            for file in self.payloads
        }

    @property
    def payload_nbytes(self) -> int:
        """Bytes of all payloads."""
        return sum(payload.nbytes for payload in self.payloads)

    def as_delta(self) -> Manifest:
        """The same as the delta on its base, of which only payloads are moved."""
        return self if self.kind == "delta" else msgspec.structs.replace(self, kind="delta", parts=())

    def counted_elsewhere(self) -> dict[tuple[int, str], tuple[Box, ...]]:
        """By publisher and tensor, the boxes that an earlier publisher holds too, whose payload counts for them."""
        found: dict[tuple[int, str], list[Box]] = {}
        for name, boxes in self.boxes.items():
            for box in boxes:
                for rank in box.ranks[1:]:
                    found.setdefault((rank, name), []).append(Box(box.start, box.shape))
        return {place: tuple(boxes) for place, boxes in found.items()}

    @property
    def listed_files(self) -> dict[str, PartEntry | FileEntry | ShareFile]:
        """The files that the version is made of, small ones first."""
        listed: list[PartEntry | FileEntry | ShareFile] = [*self.files, *self.payloads, *self.parts, *self.shares]
        return {entry.file: entry for entry in listed}

    def places(self, entry: TensorEntry) -> list[PlacedBox]:
        """Where the bytes of a tensor of a full version lie: all of them in a part, or in boxes in several files."""
        if not self.shares:
            return [PlacedBox(Box.whole(entry.shape), (Place(self.parts[entry.part].file, entry.offset),))]
        return [
            PlacedBox(
                Box(box.start, box.shape),
                tuple(Place(self.shares[rank].file, at) for rank, at in zip(box.ranks, box.offsets, strict=True)),
            )
            for box in self.boxes[entry.name]
        ]

    def pieces(self, file: str) -> list[FilePiece]:
        """The pieces of a file, front to back, without a gap."""
        entry, size, algorithm = self.listed_files[file], self.piece_nbytes, self.algorithm
        if size and algorithm is not None:
            width = digest_nbytes(algorithm)
            return [
                FilePiece(
                    index * size,
                    min((index + 1) * size, entry.nbytes),
                    f"{algorithm}:{entry.pieces[index * width : (index + 1) * width].hex()}",
                )
                for index in range(-(-entry.nbytes // size))
            ]
        if isinstance(entry, FileEntry):
            return [FilePiece(0, entry.nbytes, entry.digest)] if entry.nbytes else []
        if isinstance(entry, ShareFile):
            raise InvalidInput(f"{file} of version {self.version} has no pieces.")
        lying = [one for one in self.tensors if one.nbytes and self.parts[one.part].file == file]
        data = [FilePiece(one.offset, one.offset + one.nbytes, one.digest) for one in lying]
        return [FilePiece(0, entry.header_nbytes, entry.header_digest), *sorted(data)]

    def by_name(self) -> dict[str, TensorEntry]:
        """Every name of the version with the entry that holds its bytes; tied names lead to the same entry."""
        entries = {entry.name: entry for entry in self.tensors}
        return entries | {name: entries[holder] for name, holder in self.tied.items()}


class FileListing(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says of the files of a version, without its tensors: what it takes to serve them."""

    version: str
    sequence: int
    step: int
    root_digest: str
    parts: tuple[PartEntry, ...]
    files: tuple[FileEntry, ...] = ()
    payload: FileEntry | None = None
    payloads: tuple[PayloadEntry, ...] = ()
    piece_nbytes: int = 0
    shares: tuple[ShareFile, ...] = ()

    @property
    def listed_files(self) -> dict[str, PartEntry | FileEntry | ShareFile]:
        """The files that the version is made of, small ones first."""
        old = () if self.payload is None else (self.payload,)
        return {entry.file: entry for entry in (*self.files, *old, *self.payloads, *self.parts, *self.shares)}


def chosen_payloads(manifest: Manifest, wanted: Packing = "gaps") -> tuple[PayloadEntry, ...]:
    """The payloads of one packing, which lead to a version: the wanted one if there are both."""
    packings = {payload.packing for payload in manifest.payloads}
    chosen = wanted if wanted in packings else next(iter(packings), None)
    return tuple(payload for payload in manifest.payloads if payload.packing == chosen)


def summed_names(tied: Mapping[str, str]) -> dict[str, str]:
    """The names that tied bytes are summed under, by the names that hold them, where the two differ."""
    smallest: dict[str, str] = {}
    for name, holder in tied.items():
        smallest[holder] = min(name, smallest.get(holder, holder))
    return {holder: name for holder, name in smallest.items() if name != holder}


def recorded_number(metadata: Mapping[str, str], key: str) -> int | None:
    """A number in the metadata of a file or version; None if there is none."""
    text = metadata.get(key, "")
    return int(text) if text.isdecimal() and len(text) < _DIGITS else None


def check_version_id(version: str) -> str:
    """Refuse a version id that could not be a directory name everywhere."""
    if not isinstance(version, str) or not _VERSION_ID.fullmatch(version):
        raise InvalidInput(
            f"{version!r} cannot be a version id: use 1 to 128 letters, digits and . _ + -, starting with a letter or digit."
        )
    return version


def is_digest(text: object) -> bool:
    """Whether this is a digest as they are written: the name of a version that nobody gave another."""
    if not isinstance(text, str):
        return False
    return any(_is_digest(text, algorithm) for algorithm in ALGORITHMS) or _ROOT_OF_SUMS.fullmatch(text) is not None


def is_file_name(name: str) -> bool:
    """Whether a name can be that of a file of a version: plain characters, no directory, not hidden."""
    return _FILE_NAME.fullmatch(name) is not None


def compute_root(tensors: tuple[TensorEntry, ...], algorithm: Algorithm | None) -> str:
    """The root digest that follows from the entries: from their sums, or, in format 1, from the digests of their bytes.

    Empty where there are neither.
    """
    if tensors and all(entry.sum for entry in tensors):
        return root_of_sums((entry.sum_spec, entry.sum) for entry in tensors)
    return root_digest(((entry.spec, entry.digest) for entry in tensors), algorithm) if algorithm else ""


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json: one line, the seal first."""
    return seal(manifest)


def decode_manifest(data: bytes, path: AnyPath) -> Manifest:
    """Read manifest.json, believing nothing: the seal, every field, every place and the root digest are checked.

    `path` is only for messages. Raises `ManifestCorrupt` with all problems, or `UnsupportedFormat` for a newer format.
    """
    manifest = unseal(data, path, Manifest, newest=FORMAT)
    if manifest.payload is not None:
        old = manifest.payload
        payload = PayloadEntry(file=old.file, nbytes=old.nbytes, digest=old.digest)
        manifest = msgspec.structs.replace(manifest, payload=None, payloads=(payload,))
    problems = list(find_problems(manifest))
    if problems:
        raise ManifestCorrupt(path, problems)
    return manifest


def decode_listing(data: bytes, path: AnyPath) -> FileListing:
    """The files in manifest.json. The seal is checked, and that no file lies outside of the version: receivers check the
    rest, which takes many times as long. Raises what `decode_manifest` does.
    """
    listing = unseal(data, path, FileListing, newest=FORMAT)
    wrong = [
        f"file {file[:200]!r} of {entry.nbytes} bytes is not allowed"
        for file, entry in listing.listed_files.items()
        if entry.nbytes < 0 or not is_file_name(file)
    ]
    if wrong:
        raise ManifestCorrupt(path, wrong)
    return listing


def find_problems(manifest: Manifest) -> Iterator[str]:
    """Everything in a manifest that contradicts itself or points outside of its version."""
    if not _VERSION_ID.fullmatch(manifest.version):
        yield f"version id {manifest.version!r} is not allowed"
    if manifest.algorithm is None:
        yield "it has no digests"
    if manifest.kind == "delta" and (manifest.base is None or manifest.parts):
        yield f"kind {manifest.kind} with base {manifest.base} and {len(manifest.parts)} part(s)"
    if manifest.base is not None and manifest.base.version == manifest.version:
        yield "it is its own base"
    if manifest.base is not None and not _VERSION_ID.fullmatch(manifest.base.version):
        yield f"base {manifest.base.version!r} is not a version id"
    if not 0 <= manifest.created_s < _MAX_CREATED_S:
        yield f"it was made {manifest.created_s} s after 1970"
    yield from piece_problems(manifest)
    yield from (
        f"file {file.file[:200]!r} has {file.nbytes} bytes and digest {file.digest[:80]!r}"
        for file in (*manifest.files, *manifest.payloads)
        if file.nbytes < 0 or not _is_digest(file.digest, manifest.algorithm)
    )
    yield from (
        f"part {part.file[:200]!r} has {part.nbytes} bytes, {part.header_nbytes} of them a header"
        for part in manifest.parts
        if not 0 < part.header_nbytes <= part.nbytes
    )
    yield from (f"share {file.file[:200]!r} has {file.nbytes} bytes" for file in manifest.shares if file.nbytes < 0)
    files = [file.file for file in (*manifest.files, *manifest.payloads)]
    files += [part.file for part in manifest.parts] + [share.file for share in manifest.shares]
    yield from payload_problems(manifest)
    yield from repeats("file", files)
    yield from (f"file name {file!r} is not allowed" for file in files if not is_file_name(file))
    yield from repeats("tensor", [*(entry.name for entry in manifest.tensors), *manifest.tied])
    yield from tie_problems(manifest)
    placed = manifest.format == 1 or (manifest.kind == "full" and not manifest.shares)
    yield from tensor_problems(manifest.tensors, manifest.algorithm, summed=manifest.format > 1, placed=placed)
    if manifest.shares or manifest.boxes:
        yield from box_problems(manifest)
    elif manifest.kind == "full":
        yield from place_problems(manifest.parts, manifest.tensors)
    if manifest.root_digest != _root_or_none(manifest):
        yield "the root digest does not follow from the tensors"


def payload_problems(manifest: Manifest) -> Iterator[str]:
    """Payloads without a base, a base without payloads, and places that cannot be."""
    if (manifest.base is None) != (not manifest.payloads):
        yield f"base {manifest.base} with {len(manifest.payloads)} payload(s)"
    if manifest.base is not None and not all(map(is_sum, manifest.base.sums.values())):
        yield "the sums of its base are not sums"
    for payload in manifest.payloads:
        if not 0 <= payload.table <= payload.nbytes or not _SEAL.fullmatch(payload.seal) or payload.offset < 0:
            yield (
                f"payload {payload.file[:200]!r} of {payload.nbytes} bytes at {payload.offset} has its table at byte "
                f"{payload.table} and seal {payload.seal[:80]!r}"
            )


def merged_base(
    tensors: Sequence[TensorEntry], bases: Sequence[BaseRef | None], boxes: Mapping[str, Sequence[BoxEntry]] | None = None
) -> BaseRef | None:
    """The base of what several publishers share; None unless all have a delta on the same version.

    Each tells what its tensors, or its `boxes` of them, add to the sums of the base. A box that several hold counts once.
    """
    known = [base for base in bases if base is not None]
    if len(known) < len(bases) or len({base.version for base in known}) > 1:
        return None
    sums: dict[str, Sum] = {}
    for entry in tensors:
        summed = entry.summed_as or entry.name
        told = [base.sums.get(summed) for base in known]
        if boxes is not None:
            told = [told[box.ranks[0]] for box in boxes[entry.name]]
        else:
            told = [one for one in told if one is not None]
        if None in told or (boxes is None and not told):
            return None
        sums[entry.name] = add_up(Sum.parse(one) for one in told if one is not None)
    root = root_of_sums((entry.sum_spec, str(sums[entry.name])) for entry in tensors)
    return BaseRef(version=known[0].version, root_digest=root)


def piece_problems(manifest: Manifest) -> Iterator[str]:
    """Files that do not have a digest for each of their pieces."""
    size = manifest.piece_nbytes
    if not (MIN_PIECE_NBYTES <= size <= MAX_PIECE_NBYTES if manifest.format > 1 else size == 0):
        yield f"its files have pieces of {size} bytes"
        return
    width = digest_nbytes(manifest.algorithm) if manifest.algorithm is not None else 0
    for entry in manifest.listed_files.values() if size else ():
        if len(entry.pieces) != width * -(-entry.nbytes // size):
            yield f"file {entry.file[:200]!r} has {entry.nbytes} bytes, and digests of pieces in {len(entry.pieces)} bytes"


def tie_problems(manifest: Manifest) -> Iterator[str]:
    """Tied names without bytes, and bytes that are not summed under the smallest of their names."""
    holders = {entry.name for entry in manifest.tensors}
    for name, holder in manifest.tied.items():
        if holder not in holders:
            yield f"{name!r} is tied to {holder!r}, which has no bytes"
    smallest = summed_names(manifest.tied) if manifest.format > 1 else {}
    for entry in manifest.tensors:
        if entry.summed_as != smallest.get(entry.name, ""):
            yield f"tensor {entry.name!r} is summed as {entry.summed_as!r}, not as {smallest.get(entry.name, '')!r}"


def box_problems(manifest: Manifest) -> Iterator[str]:
    """Boxes that do not cover each tensor of a shared version exactly once, or whose sums do not make that of the tensor."""
    if manifest.parts or (manifest.kind == "full") != bool(manifest.shares):
        yield f"it has boxes, and is {manifest.kind} with {len(manifest.parts)} part(s) and {len(manifest.shares)} share(s)"
    entries = {entry.name: entry for entry in manifest.tensors}
    yield from (f"boxes of {name!r}, which is not a tensor of it" for name in manifest.boxes if name not in entries)
    for name, entry in entries.items():
        boxes = manifest.boxes.get(name, ())
        try:
            covering = [Box(box.start, box.shape) for box in boxes]
            yield from (f"tensor {name!r}: {problem}" for problem in tiling_problems(entry.shape, covering))
        except InvalidInput as error:
            yield f"tensor {name!r}: {error}"
            continue
        for box in boxes:
            if not is_sum(box.sum) or not _is_placed(box, entry, manifest):
                yield f"tensor {name!r} has a box with sum {box.sum!r} at {list(box.offsets)} of ranks {list(box.ranks)}"
        if all(is_sum(box.sum) for box in boxes) and entry.sum != str(add_up(Sum.parse(box.sum) for box in boxes)):
            yield f"the sum of tensor {name!r} does not follow from its boxes"


def _is_placed(box: BoxEntry, entry: TensorEntry, manifest: Manifest) -> bool:
    """Whether a box lies in the files of the ranks that hold it; in a delta, whether these ranks have payloads."""
    shares, nbytes = manifest.shares, prod(box.shape) * entry.dtype.itemsize
    if manifest.kind == "delta":
        return bool(box.ranks) and not box.offsets and {*box.ranks} <= {payload.part for payload in manifest.payloads}
    return 0 < len(box.ranks) == len(box.offsets) and all(
        0 <= rank < len(shares) and 0 <= at <= shares[rank].nbytes - nbytes
        for rank, at in zip(box.ranks, box.offsets, strict=True)
    )


def _root_or_none(manifest: Manifest) -> str | None:
    try:
        return compute_root(manifest.tensors, manifest.algorithm)
    except UnsupportedTensor:  # a name that cannot be; reported with the tensor itself
        return None


def repeats(what: str, names: Iterable[str]) -> Iterator[str]:
    """Names that are listed more than once."""
    return (f"{what} {name!r} is listed {count} times" for name, count in Counter(names).items() if count > 1)


def tensor_problems(
    tensors: tuple[TensorEntry, ...], algorithm: Algorithm | None, *, summed: bool = False, placed: bool = True
) -> Iterator[str]:
    """Tensors that cannot be: names, sizes and digests. `summed`: each must have its sum; one that is not `placed` in a
    file needs no digest of its bytes.
    """
    for entry in tensors:
        try:
            expected = entry.spec.nbytes
        except UnsupportedTensor as error:
            yield str(error)
            continue
        if min(entry.shape, default=0) < 0 or entry.nbytes != expected:
            yield f"tensor {entry.name!r} is {entry.spec.describe()} but has {entry.nbytes} bytes"
        if not _is_digest(entry.digest, algorithm) and (entry.digest or placed):
            yield f"tensor {entry.name!r} has digest {entry.digest!r}, not one by {algorithm}"
        if (entry.sum or summed) and not is_sum(entry.sum):
            yield f"tensor {entry.name!r} has sum {entry.sum[:80]!r}"


def _is_digest(digest: str, algorithm: Algorithm | None) -> bool:
    if algorithm is None:
        return digest == ""
    name, _, value = digest.partition(":")
    return name == algorithm and algorithm in ALGORITHMS and re.fullmatch(r"[0-9a-f]{32,64}", value) is not None


def place_problems(parts: tuple[PartEntry, ...], tensors: tuple[TensorEntry, ...]) -> Iterator[str]:
    """Safetensors allows no holes: the tensors of a part must fill it exactly."""
    ends = {index: part.header_nbytes for index, part in enumerate(parts)}
    for entry in sorted(tensors, key=lambda entry: (entry.part, entry.offset, entry.nbytes)):
        if entry.part not in ends:
            yield f"tensor {entry.name!r} lies in part {entry.part} of {len(parts)}"
        elif entry.offset != ends[entry.part]:
            yield f"tensor {entry.name!r} starts at {entry.offset} in part {entry.part}, not at {ends[entry.part]}"
        else:
            ends[entry.part] += entry.nbytes
    for index, part in enumerate(parts):
        if ends[index] != part.nbytes:
            yield f"part {part.file!r} has {part.nbytes} bytes but its tensors end at {ends[index]}"
