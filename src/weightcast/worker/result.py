"""What an update reports: one form on every path."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

from weightcast import logs

log = logs.get(__name__)

CommitMode = Literal["copy", "swap", "inplace", "delta"]


@dataclass(frozen=True)
class UpdateResult:
    """One rank's finished update. Times are in seconds.

    `stage_s` is receiving into staging memory, `verify_s` proving staged and live bytes, `commit_s` the time in which the
    live weights were not whole: what an engine must pause for. A version that was already there has mode "none". `mode` is
    what was done: a delta on what the model holds is scattered ("delta") also where `copy` or `inplace` was asked for.
    `bytes` were fetched.
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


def finished(
    version: str,
    rank: int,
    source: str,
    mode: CommitMode | Literal["none"],
    tensors: int,
    nbytes: int,
    *,
    started: float,
    stage_s: float = 0.0,
    verify_s: float = 0.0,
    commit_s: float = 0.0,
) -> UpdateResult:
    """The result of an update that began at `started` (monotonic) and has just succeeded. It is logged here."""
    log.info(
        "model updated",
        version=version,
        rank=rank,
        mode=mode,
        tensors=tensors,
        nbytes=nbytes,
        stage_ms=logs.ms(stage_s),
        verify_ms=logs.ms(verify_s),
        commit_ms=logs.ms(commit_s),
        source=source,
    )
    return UpdateResult(
        version=version, rank=rank, source=source, mode=mode, tensors=tensors, bytes=nbytes,
        stage_s=stage_s, verify_s=verify_s, commit_s=commit_s, total_s=time.monotonic() - started,
    )  # fmt: skip
