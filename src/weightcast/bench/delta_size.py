"""How many bytes a delta takes: ours beside the codecs of others and the bounds. Nothing is counted that was not decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from weightcast import delta
from weightcast.bench.rivals import RIVALS, Rival, State, given_exponent_bytes, order0_entropy_bytes
from weightcast.errors import Corrupt
from weightcast.tensors.flat import Array, flat_bytes

FOLDED = (2, 4, 8)  # how many steps are folded into one delta


@dataclass(frozen=True)
class SizeRow:
    """One codec on one workload.

    `over_exponent_bound` is the ratio to the bound whose differences are given the old exponent too,
    `over_loose_exponent_bound` to the one where only the positions are.
    """

    workload: str
    codec: str
    elements: int
    changes: int
    density: float
    nbytes: int
    bytes_per_change: float
    times_smaller_than_full: float
    over_order0: float
    over_exponent_bound: float
    over_loose_exponent_bound: float
    kind: Literal["size"] = "size"


@dataclass(frozen=True)
class FoldRow:
    """`steps` consecutive deltas as one."""

    workload: str
    steps: int
    density: float
    nbytes: int
    singles_nbytes: int
    over_singles: float
    kind: Literal["fold"] = "fold"


def packed_by(packing: delta.Packing) -> Rival:
    """Our codec in the form of the others: whole packed deltas, their tables included."""

    def encode(old: State, new: State) -> bytes:
        return delta.encode(old, new, packing=packing)

    return Rival(packing, encode, applied)


def applied(old: State, blob: bytes) -> dict[str, Array]:
    """What a packed delta makes of a state, which stays as it is. The root digests are checked on the way."""
    target = {name: array.copy() for name, array in old.items()}
    delta.apply(target, blob)
    return target


CODECS = (packed_by("classes"), packed_by("gaps"), *RIVALS)


def size_rows(workload: str, old: State, new: State) -> Iterator[SizeRow]:
    """A row for each codec. `Corrupt` if one does not give back the new state bit for bit."""
    elements = sum(array.size for array in old.values())
    nbytes = sum(array.nbytes for array in old.values())
    order0, exponent = order0_entropy_bytes(old, new), given_exponent_bytes(old, new)
    for codec in CODECS:
        blob = codec.encode(old, new)
        _check(codec.name, workload, codec.decode(old, blob), new)
        yield SizeRow(
            workload=workload,
            codec=codec.name,
            elements=elements,
            changes=order0.changes,
            density=order0.changes / elements,
            nbytes=len(blob),
            bytes_per_change=len(blob) / order0.changes,
            times_smaller_than_full=nbytes / len(blob),
            over_order0=len(blob) / order0.total,
            over_exponent_bound=len(blob) / exponent.total_given_exponent,
            over_loose_exponent_bound=len(blob) / exponent.total,
        )


def fold_rows(workload: str, states: Sequence[State]) -> Iterator[FoldRow]:
    """Fold the last 2, 4 and 8 of the steps between these states, as far as there are so many."""
    singles = [delta.encode(old, new) for old, new in pairwise(states)]
    for steps in FOLDED:
        if steps > len(singles):
            return
        base, payloads = states[-steps - 1], singles[-steps:]
        folded = delta.decode_chain(payloads, base)
        blob = delta.pack(folded, packing="classes", base=base)
        _check(f"folding {steps} steps", workload, applied(base, blob), states[-1])
        together = sum(map(len, payloads))
        elements = sum(array.size for array in base.values())
        yield FoldRow(workload, steps, folded.changes / elements, len(blob), together, len(blob) / together)


def _check(what: str, workload: str, got: State, wanted: State) -> None:
    if got.keys() != wanted.keys() or not all(
        np.array_equal(flat_bytes(got[name]), flat_bytes(array)) for name, array in wanted.items()
    ):
        raise Corrupt(f"{what} does not give back the weights of {workload} bit for bit: its size means nothing.")
