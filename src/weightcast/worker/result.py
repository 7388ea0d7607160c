"""What an update reports: one form on every path."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

CommitMode = Literal["copy", "swap", "inplace"]


@dataclass(frozen=True)
class UpdateResult:
    """One rank's finished update. Times are in seconds.

    `stage_s` is receiving into staging memory, `verify_s` proving staged and live bytes, `commit_s` the time in which the
    live weights were not whole: what an engine must pause for. A version that was already there has mode "none".
    """

    version: str
    rank: int
    source: str
    mode: CommitMode | Literal["none"]
    tensors: int
    bytes: int
    stage_s: float
    verify_s: float
    commit_s: float
    total_s: float

    @property
    def sync_cost(self) -> float:
        """Legacy name: seconds until the bytes were here."""
        return self.stage_s

    @property
    def update_cost(self) -> float:
        """Legacy name: seconds from there until they were served."""
        return self.verify_s + self.commit_s

    @property
    def total_cost(self) -> float:
        """Legacy name of `total_s`."""
        return self.total_s

    def as_dict(self) -> dict[str, Any]:
        """All fields, the legacy names included, for JSON."""
        return asdict(self) | {
            "sync_cost": self.sync_cost,
            "update_cost": self.update_cost,
            "total_cost": self.total_cost,
        }
