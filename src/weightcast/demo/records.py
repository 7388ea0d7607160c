"""What a run is asked for, and what it tells: data, of which views, plots and summaries are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weightcast.demo.sources import DEFAULT, Transport

RANKS = 2
STEPS = 48


@dataclass(frozen=True)
class RunSettings:
    """One run. Logs go to `out_dir`. `kill` is whether a rank is killed half-way."""

    out_dir: Path
    transport: Transport = DEFAULT
    steps: int = STEPS
    seed: int = 0
    kill: bool = True

    @property
    def kill_step(self) -> int | None:
        """The step whose rollout loses a rank."""
        return self.steps // 2 + 1 if self.kill else None


@dataclass(frozen=True)
class Started:
    """The engine runs and has the trainer's first weights. `full_nbytes` are those of all weights."""

    url: str
    source: str
    parameters: int
    full_nbytes: int
    first: Committed
    start_s: float


@dataclass(frozen=True)
class Committed:
    """A version that went from the trainer into the running engine.

    `nbytes` is what was published, `density` the share of the weights whose BF16 value is another one than before. Of what
    the ranks report the slowest counts: `stage_s` fetching and verifying while the engine serves, `pause_s` not computing.
    `update_s` is from the call until all ranks served it, and `mode` how they committed.
    """

    version: str
    kind: Literal["full", "delta"]
    mode: str
    nbytes: int
    density: float
    publish_s: float
    stage_s: float
    pause_s: float
    update_s: float


@dataclass(frozen=True)
class Step:
    """One optimizer step: answers by the version before, what was learned from them, and the version that came of it.

    `reward` is the mean over all answers, `sample` the best of them. `gap` is by how much the log-probabilities of trainer
    and engine differ on average.
    """

    number: int
    reward: float
    sample: str
    tokens: int
    rollout_s: float
    train_s: float
    gap: float
    committed: Committed

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the engine made, over the time it took to get them."""
        return self.tokens / self.rollout_s


@dataclass(frozen=True)
class Happened:
    """Something that a watcher should be told of at once."""

    step: int
    text: str
    at_s: float


@dataclass(frozen=True)
class Recovery:
    """A rank was killed and came back. `recovery_s` is from the kill until the engine answered again."""

    step: int
    rank: int
    pid: int
    version: str
    requests: int
    lost_requests: int
    lost_answers: int
    recovery_s: float


@dataclass(frozen=True)
class Finished:
    """The end of a run. `problems` is empty if the engine's weights are the trainer's, bit for bit."""

    version: str
    root_digest: str
    tensors: int
    boxes: int
    problems: list[str]
    recovery: Recovery | None
    total_s: float


Told = Started | Step | Happened | Finished
