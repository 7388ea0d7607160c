"""What changed since the version that a publisher holds, packed as a delta beside the new version."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from msgspec.structs import replace

from weightcast import logs
from weightcast.delta import Encoder
from weightcast.delta.container import Table
from weightcast.delta.encoder import TooManyChanges
from weightcast.errors import InvalidInput
from weightcast.store.delta_policy import DeltaPolicy, estimate_changes
from weightcast.store.payload import payload_entry
from weightcast.tensors.boxes import Box
from weightcast.tensors.digest import Algorithm, bytes_digest, piece_digests
from weightcast.tensors.flat import Array, flat_bytes
from weightcast.tensors.lanes import kind_of
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import Sum
from weightcast.wire.manifest import PayloadEntry

log = logs.get(__name__)

_SMALL_NBYTES = 64 << 10  # changes of a rank that are never too large


class Compared(NamedTuple):
    """A tensor, or a box of it, as it was published last and as it is now, with the sums of both, taken as `summed`."""

    spec: TensorSpec
    summed: TensorSpec
    box: Box
    old: Array
    new: Array
    old_sum: str
    new_sum: str


class PackedChanges(NamedTuple):
    """A packed delta, and its table."""

    data: bytes
    table: Table

    def entry(self, file: str, algorithm: Algorithm, *, part: int = 0, offset: int = 0) -> PayloadEntry:
        """What a manifest says of it."""
        digest, pieces = bytes_digest(self.data, algorithm), piece_digests(self.data, algorithm)
        return replace(payload_entry(file, len(self.data), digest, pieces, self.table), part=part, offset=offset)


def check_policy(policy: DeltaPolicy | None) -> DeltaPolicy | None:
    """Refuse a policy that only `Store` can follow."""
    if policy is not None and policy.packing == "both":
        raise InvalidInput(
            "packing='both' is for Store alone: other publishers pack the changes once. Choose 'auto', 'gaps' or 'classes'."
        )
    return policy


def most_payload_nbytes(policy: DeltaPolicy, nbytes: int, ranks: int) -> int:
    """Up to how many bytes the changes of a rank are published, if it holds `nbytes`: less than `max_share` of that.

    Where several ranks share a version it is 64 KiB at least, as a rank that holds nothing needs a payload too.
    """
    most = ceil(policy.max_share * nbytes) - 1
    return most if ranks == 1 else max(most, _SMALL_NBYTES)


def packed_changes(
    version: str, compared: Sequence[Compared], policy: DeltaPolicy, *, most_nbytes: int
) -> PackedChanges | None:
    """The delta between what was held and what is held now; None if it does not pay, or if what was held is damaged.

    Samples tell whether it pays. Both sums are known, so that the sums of the changes prove the memory that they are
    compared in.
    """
    nbytes = sum(one.new.nbytes for one in compared)
    expected = sum(_expected(one) for one in compared)
    if expected > policy.most_changes(nbytes):
        return None
    pieces: list[bytes] = []
    try:
        with Encoder(
            pieces.append,
            packing=policy.packings[0],
            slicing=policy.slicing,
            threads=policy.threads,
            most_changes=policy.stop_changes(nbytes),
        ) as encoder:
            for one in compared:
                encoder.add_box(one.spec, one.box, one.old, one.new, summed=one.summed)
            encoder.flush()
            wrong = [
                one.spec.name
                for one in compared
                if str(Sum.parse(one.old_sum) + encoder.grown[one.spec.name]) != one.new_sum
            ]
            table = encoder.finish(base_root="", new_root="")
    except TooManyChanges:
        return None
    if wrong:
        log.warning("no delta", version=version, why=f"{wrong[0]} of the version before is damaged in memory")
        return None
    data = b"".join(pieces)
    return PackedChanges(data, table) if len(data) <= most_nbytes else None


def _expected(one: Compared) -> float:
    """About how many lanes of a tensor changed."""
    old, new = (flat_bytes(array).view(kind_of(one.spec.dtype).unsigned) for array in (one.old, one.new))
    return estimate_changes(len(new), lambda start, stop: old[start:stop], lambda start, stop: new[start:stop])
