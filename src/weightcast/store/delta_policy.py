"""When a version is published as a delta, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from weightcast.delta import Packing
from weightcast.errors import InvalidInput

Keep = Literal["store", "memory"]


@dataclass(frozen=True)
class DeltaPolicy:
    """Settings for publishing deltas.

    `max_share`: a payload of this share of the full size, or more, is published as a full version instead. `full_every`:
    of so many versions in a row at least one is full; 1 means all. `packing`: `gaps` for receivers that hold only slices.

    `keep` says where the last published state is when the next one is compared with it. `store` reads it back from the
    medium and takes memory for the changes since the last full version only, about 6 bytes each; `memory` keeps a private
    copy of the whole state. `threads` defaults to what the machine has, up to 4.
    """

    max_share: float = 0.5
    full_every: int = 20
    packing: Packing = "classes"
    keep: Keep = "store"
    threads: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.max_share, int | float) or not 0 < self.max_share <= 1:
            raise InvalidInput(f"max_share must be above 0 and at most 1, not {self.max_share!r}.")
        if not _is_count(self.full_every):
            raise InvalidInput(f"full_every must be a whole number of at least 1, not {self.full_every!r}.")
        if self.packing not in get_args(Packing):
            raise InvalidInput(f"packing must be one of {', '.join(get_args(Packing))}, not {self.packing!r}.")
        if self.keep not in get_args(Keep):
            raise InvalidInput(f"keep must be one of {', '.join(get_args(Keep))}, not {self.keep!r}.")
        if self.threads is not None and not _is_count(self.threads):
            raise InvalidInput(f"threads must be a whole number of at least 1, or None, not {self.threads!r}.")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
