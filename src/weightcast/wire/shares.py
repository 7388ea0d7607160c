"""A version that several publishers share: what each of them holds of it, and the manifest that follows from all of that."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import prod

import msgspec

from weightcast.errors import AnyPath, InvalidInput, ManifestCorrupt, UnsupportedFormat, UnsupportedTensor
from weightcast.tensors.boxes import Box
from weightcast.tensors.digest import Algorithm, root_digest
from weightcast.tensors.dtypes import DType
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import Digests, Sum, add_up, is_sum
from weightcast.wire.manifest import (
    BaseRef,
    BoxEntry,
    Manifest,
    PayloadEntry,
    ShareFile,
    TensorEntry,
    compute_root,
    entry_of,
    find_problems,
    merged_base,
    summed_names,
)
from weightcast.wire.seal import seal, unseal

FORMAT = 2  # 1 had no sums and no places


class ShareEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The box of a tensor that a publisher holds. `shape` is that of the whole tensor; `offset` is where the box lies in the
    file of the publisher, in C order; `sum` is what it adds to the sum of the tensor.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    box: Box
    offset: int
    sum: str


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What the publisher of one of several trainer ranks holds of a version: one file of `nbytes`, proved in `pieces`.

    `root_digest` covers all its entries. `tied` maps a name to the name that holds its bytes at this rank; `tied_sums` has
    what those bytes add to the sum of a tensor of that name. Beside it lie the changes since the `base`, if the publisher
    holds that too: `payloads`.
    """

    version: str
    sequence: int
    step: int
    created_s: float
    rank: int
    ranks: int
    algorithm: Algorithm
    root_digest: str
    entries: tuple[ShareEntry, ...]
    nbytes: int
    pieces: bytes
    piece_nbytes: int
    tied: dict[str, str] = {}
    metadata: dict[str, str] = {}
    format: int = FORMAT
    tied_sums: dict[str, str] = {}
    base: BaseRef | None = None
    payloads: tuple[PayloadEntry, ...] = ()


class SharedPublish(msgspec.Struct, frozen=True):
    """How far several ranks are in writing a version into a store. Rank 0 writes this for the others.

    Each try of rank 0 is another `attempt`. `full`: every rank must write its boxes, and not only changes. `error` says why
    rank 0 gave up.
    """

    attempt: str
    sequence: int
    full: bool = False
    error: str = ""


def share_file(rank: int) -> str:
    """The name of the file that a publisher serves of a version that several share."""
    return f"share-{rank:05d}.bin"


def share_root(entries: Sequence[ShareEntry], algorithm: Algorithm) -> str:
    """The root digest of a share."""
    return root_digest(
        (
            (
                TensorSpec(name=entry.name, dtype=entry.dtype, shape=entry.shape),
                f"{','.join(map(str, entry.box.start))};{','.join(map(str, entry.box.shape))};{entry.sum}",
            )
            for entry in entries
        ),
        algorithm,
    )


def encode_share(share: Share) -> bytes:
    """A share as it is sent: sealed."""
    return seal(share)


def decode_share(data: bytes, where: AnyPath) -> Share:
    """Read what `encode_share` wrote, believing nothing. `where` is only for messages. Raises `ManifestCorrupt`, or
    `UnsupportedFormat` for another format.
    """
    try:
        share = unseal(data, where, Share, newest=FORMAT, oldest=FORMAT)
        if share.root_digest != share_root(share.entries, share.algorithm):
            raise ManifestCorrupt(where, "the root digest does not follow from the boxes")
        if not all(map(is_sum, (*(entry.sum for entry in share.entries), *share.tied_sums.values()))):
            raise ManifestCorrupt(where, "it has boxes without sums")
        if share.base is not None and not all(map(is_sum, share.base.sums.values())):
            raise ManifestCorrupt(where, "its base has no sums")
        if any(payload.part != share.rank for payload in share.payloads):
            raise ManifestCorrupt(where, "its payloads are those of another rank")
        if share.tied.keys() != share.tied_sums.keys():
            raise ManifestCorrupt(where, "it has tied names without sums")
    except UnsupportedFormat:
        raise
    except (InvalidInput, UnsupportedTensor) as error:  # a box or a name that cannot be
        raise ManifestCorrupt(where, str(error)) from error
    return share


def merged(shares: Sequence[Share]) -> Manifest:
    """The version that several publishers share, as one manifest.

    The boxes of each tensor cover it exactly once; one that several publishers hold is listed once, with all their ranks.
    The same shares give the same manifest in any order. Raises `ManifestCorrupt` with everything that does not go together.
    """
    if not shares:
        raise InvalidInput("there are no shares to make a version of.")
    shares = sorted(shares, key=lambda share: share.rank)
    first = shares[0]
    missing = list(_rank_problems(shares))
    problems = [*missing, *_disagreements(shares)]
    tied = _tied(shares)
    summed_as = summed_names(tied)
    held: dict[str, list[tuple[int, ShareEntry]]] = defaultdict(list)
    for share in shares:
        for entry in _expanded(share, tied, summed_as):
            held[entry.name].append((share.rank, entry))
    problems += [problem for entries in held.values() for problem in _entry_problems(entries)]
    problems += _tie_problems(shares, summed_as)
    boxes = {name: _boxes(entries) for name, entries in held.items()}
    tensors = tuple(_tensor(entries[0][1], boxes[name], summed_as.get(name, "")) for name, entries in held.items())
    base = None
    if not problems and all(share.tied.keys() == tied.keys() for share in shares):  # else a name has other bytes somewhere
        base = merged_base(tensors, [share.base for share in shares], boxes)
    manifest = Manifest(
        version=first.version,
        sequence=max(share.sequence for share in shares),
        step=first.step,
        kind="full",
        created_s=max(share.created_s for share in shares),
        algorithm=first.algorithm,
        root_digest=compute_root(tensors, first.algorithm),
        parts=(),
        tensors=tensors,
        tied=tied,
        metadata={key: value for share in shares for key, value in share.metadata.items()},
        boxes=boxes,
        base=base,
        payloads=() if base is None else tuple(payload for share in shares for payload in share.payloads),
        piece_nbytes=first.piece_nbytes,
        shares=tuple(ShareFile(file=share_file(one.rank), nbytes=one.nbytes, pieces=one.pieces) for one in shares),
    )
    if not missing:  # else what they hold would be told as holes
        problems += find_problems(manifest)
    if problems:
        raise ManifestCorrupt(f"of version {first.version} as {len(shares)} publisher(s) share it", problems)
    return manifest


def _rank_problems(shares: Sequence[Share]) -> Iterator[str]:
    """Ranks that are missing, or there twice."""
    expected = max(share.ranks for share in shares)
    counts = Counter(share.rank for share in shares)
    missing = [str(rank) for rank in range(expected) if rank not in counts]
    if missing:
        yield f"rank(s) {', '.join(missing)} of {expected} are missing"
    yield from (f"rank {rank} is there {count} times" for rank, count in counts.items() if count > 1)
    yield from (f"rank {rank} of {expected} cannot be" for rank in counts if not 0 <= rank < expected)


def _disagreements(shares: Sequence[Share]) -> Iterator[str]:
    """What all publishers must say alike and do not."""
    for field in ("version", "ranks", "step", "algorithm", "piece_nbytes"):
        told = [(getattr(share, field), share.rank) for share in shares]
        if len({value for value, _ in told}) > 1:
            yield f"{field} is {', '.join(f'{value} at rank {rank}' for value, rank in told)}"
    for key in sorted({key for share in shares for key in share.metadata}):
        told = [(share.metadata[key], share.rank) for share in shares if key in share.metadata]
        if len({value for value, _ in told}) > 1:
            yield f"metadata {key!r} is {', '.join(f'{value!r} at rank {rank}' for value, rank in told)}"


def _tied(shares: Sequence[Share]) -> dict[str, str]:
    """Names that are tied wherever they have bytes, and to the same name everywhere."""
    told: dict[str, set[str]] = defaultdict(set)
    for share in shares:
        for name, holder in share.tied.items():
            told[name].add(holder)
    own = {entry.name for share in shares for entry in share.entries if prod(entry.box.shape)}
    return {name: min(holders) for name, holders in told.items() if len(holders) == 1 and name not in own}


def _tie_problems(shares: Sequence[Share], summed_as: dict[str, str]) -> Iterator[str]:
    """Publishers that hold boxes of tied bytes and do not say what these add to the sum that counts."""
    for share in shares:
        for entry in share.entries:
            name = summed_as.get(entry.name)
            if name is not None and 0 not in entry.box.shape and name not in share.tied_sums:
                yield f"{name!r} is tied to {entry.name!r}, and rank {share.rank}, which holds boxes of it, does not say so"


def _expanded(share: Share, tied: dict[str, str], summed_as: dict[str, str]) -> Iterator[ShareEntry]:
    """The entries of a share, summed as the version is; a name that is tied here and not everywhere has the box of its
    holder as its own.
    """
    entries = {entry.name: entry for entry in share.entries}
    for entry in share.entries:
        if entry.name not in tied:
            other = share.tied_sums.get(summed_as.get(entry.name, ""), entry.sum)
            yield msgspec.structs.replace(entry, sum=other)
    for name, holder in share.tied.items():
        if name not in tied and holder in entries:
            yield msgspec.structs.replace(entries[holder], name=name, sum=share.tied_sums[name])


def _entry_problems(entries: Sequence[tuple[int, ShareEntry]]) -> Iterator[str]:
    """Publishers that take a tensor for something else than the others do, or hold other bytes of it."""
    name = entries[0][1].name
    kinds = {(entry.dtype, entry.shape) for _, entry in entries}
    if len(kinds) > 1:
        described = ", ".join(f"{entry.dtype}{list(entry.shape)} at rank {rank}" for rank, entry in entries)
        yield f"tensor {name!r} is {described}"
    same: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, str]]] = defaultdict(list)
    for rank, entry in entries:
        same[entry.box.start, entry.box.shape].append((rank, entry.sum))
    for (start, shape), told in same.items():
        if prod(shape) and len({total for _, total in told}) > 1:
            described = ", ".join(f"{total} at rank {rank}" for rank, total in told)
            yield f"the box of tensor {name!r} at {list(start)} of shape {list(shape)} is {described}"


def _boxes(entries: Sequence[tuple[int, ShareEntry]]) -> tuple[BoxEntry, ...]:
    same: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, ShareEntry]]] = defaultdict(list)
    for rank, entry in entries:
        if prod(entry.box.shape):
            same[entry.box.start, entry.box.shape].append((rank, entry))
    return tuple(
        BoxEntry(
            start=start,
            shape=shape,
            ranks=tuple(rank for rank, _ in told),
            offsets=tuple(entry.offset for _, entry in told),
            sum=told[0][1].sum,
        )
        for (start, shape), told in sorted(same.items())
    )


def _tensor(entry: ShareEntry, boxes: Sequence[BoxEntry], summed_as: str) -> TensorEntry:
    total = str(add_up(Sum.parse(box.sum) for box in boxes))
    spec = TensorSpec(name=entry.name, dtype=entry.dtype, shape=entry.shape)
    return entry_of(spec, digests=Digests("", total), summed_as=summed_as)
