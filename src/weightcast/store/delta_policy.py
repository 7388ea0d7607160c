"""When a version is published as a delta, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Literal, get_args

import numpy as np

from weightcast.delta import Packing, Slicing
from weightcast.delta.slicing import WHOLE
from weightcast.errors import InvalidInput
from weightcast.tensors.lanes import Lanes

Keep = Literal["store", "memory"]
Packed = Literal["auto", "gaps", "classes", "both"]

# Costs from `publish` to a model that serves the version, in bytes of a full version. Measured: docs/decisions/0013.
_SCAN = 0.4  # for each byte of the state: a delta is compared with its base
_CHANGE = 72.0  # for each lane that changes: encode, decode, write
_CHANGE_NBYTES = 1.5  # that a change takes in a payload
_FULL_NBYTES_PER_S = 700e6  # of the full way, where no link limits it
FEW_CHANGES = 250_000  # take 10 to 20 ms, whatever share of a small model they are
_FAR_NBYTES_PER_S = 2e6  # below, the bytes that `classes` saves take longer than decoding it
_WRONG = 1.5  # encoding stops at so many times the changes that pay

_SAMPLE_LANES = 512  # at each place
_SAMPLE_SHIFT, _SAMPLE_PLACES = 16, 64  # places: 1 up to 64 Ki lanes, 4 for 1 Mi, 32 for 64 Mi, 64 at most


@dataclass(frozen=True)
class DeltaPolicy:
    """Settings for publishing deltas.

    `auto` publishes a delta where it is expected to bring a model to the version as soon as a full version would:
    `most_changes` says up to how many changes. `link_nbytes_per_s` is the speed of the slowest link to a receiver; the
    slower it is, the more changes pay. None means a local store, or a network that is as fast as memory.

    `max_share`: a payload of this share of the full size, or more, is published as a full version instead. `full_every`:
    of so many versions in a row at least one is full; 1 means all. `packing`: `gaps` is decoded without the base and much
    faster; `classes` is smaller, which pays on links below about 2 MB/s and in archives; `both` lie side by side for near
    and far receivers; `auto` follows `link_nbytes_per_s`. `slicing` says where tensors are
    cut, so that tensor-parallel ranks fetch and decode their own part: `Slicing.decoder()` for the usual names.

    `keep` says where the last published state is when the next one is compared with it. `store` reads it back from the
    medium and takes memory for the changes since the last full version only, about 6 bytes each; `memory` keeps a private
    copy of the whole state. `threads` defaults to what the machine has, up to 4.
    """

    max_share: float = 0.5
    full_every: int = 20
    packing: Packed = "auto"
    slicing: Slicing = WHOLE
    keep: Keep = "store"
    threads: int | None = None
    link_nbytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.max_share, int | float) or not 0 < self.max_share <= 1:
            raise InvalidInput(f"max_share must be above 0 and at most 1, not {self.max_share!r}.")
        if not _is_count(self.full_every):
            raise InvalidInput(f"full_every must be a whole number of at least 1, not {self.full_every!r}.")
        if self.packing not in get_args(Packed):
            raise InvalidInput(f"packing must be one of {', '.join(get_args(Packed))}, not {self.packing!r}.")
        if not isinstance(self.slicing, Slicing):
            raise InvalidInput(f"slicing must be a Slicing, not {type(self.slicing).__name__}.")
        if self.keep not in get_args(Keep):
            raise InvalidInput(f"keep must be one of {', '.join(get_args(Keep))}, not {self.keep!r}.")
        if self.threads is not None and not _is_count(self.threads):
            raise InvalidInput(f"threads must be a whole number of at least 1, or None, not {self.threads!r}.")
        link = self.link_nbytes_per_s
        if link is not None and (not isinstance(link, int | float) or not link > 0):
            raise InvalidInput(f"link_nbytes_per_s must be above 0, or None, not {link!r}.")

    @property
    def packings(self) -> tuple[Packing, ...]:
        """How payloads are packed, the first of them first."""
        if self.packing == "both":
            return ("gaps", "classes")
        if self.packing != "auto":
            return (self.packing,)
        far = self.link_nbytes_per_s is not None and self.link_nbytes_per_s < _FAR_NBYTES_PER_S
        return ("classes",) if far else ("gaps",)

    def most_changes(self, nbytes: int, *, spent: float = 0.0) -> float:
        """Up to how many changed elements a delta of a state of so many bytes pays.

        `spent` is the share of the state that is encoded already. A full version would lose that work, so more changes pay.
        """
        sent = _FULL_NBYTES_PER_S / self.link_nbytes_per_s if self.link_nbytes_per_s else 0.0
        spared = (1 + sent - _SCAN + spent) * nbytes
        return max(FEW_CHANGES, spared / (_CHANGE + _CHANGE_NBYTES * sent))

    def stop_changes(self, nbytes: int, *, spent: float = 0.0) -> float:
        """At how many changes encoding stops, as the estimate was wrong."""
        return _WRONG * self.most_changes(nbytes, spent=spent)


def estimate_changes(lanes: int, old: Callable[[int, int], Lanes], new: Callable[[int, int], Lanes]) -> float:
    """About how many of so many lanes differ, from a few thousand of them. The same states give the same answer."""
    seen = changed = 0
    for start, stop in _places(lanes):
        seen += stop - start
        changed += int(np.count_nonzero(old(start, stop) != new(start, stop)))
    return changed / seen * lanes if seen else 0.0


def _places(lanes: int) -> Iterator[tuple[int, int]]:
    """Ranges over the whole tensor, at uneven distances: rows of a matrix change together."""
    count = min(_SAMPLE_PLACES, max(1, isqrt(lanes >> _SAMPLE_SHIFT)))
    stride = lanes / count
    for place in range(count):
        spare = max(0.0, stride - _SAMPLE_LANES)
        start = int(place * stride + (place + 1) * 0.618034 % 1 * spare)
        yield start, min(lanes, start + _SAMPLE_LANES)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
