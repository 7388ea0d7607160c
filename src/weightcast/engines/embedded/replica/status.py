"""What a replica says about itself."""

from __future__ import annotations

from dataclasses import dataclass

from weightcast.engines.states import TABLE, UPDATING, ReplicaState


@dataclass(frozen=True)
class ReplicaStatus:
    """A replica at one moment. `since` is the time of the last change of state or reason, in seconds of the Unix clock.

    `version` and `root_digest` are empty until the checkpoint has been read. `restarts` counts the times that the ranks were
    started again and became ready. `pids` are those of the ranks that run now, in the order of their ranks.
    """

    state: ReplicaState
    reason: str
    since: float
    version: str
    root_digest: str
    restarts: int
    in_flight: int
    pids: tuple[int, ...]
    paused: bool = False
    resting: ReplicaState = ReplicaState.READY

    @property
    def healthy(self) -> bool:
        """Whether a router should send requests here."""
        state = self.resting if self.state in UPDATING else self.state  # what is served meanwhile
        return TABLE[state].healthy and not self.paused


@dataclass(frozen=True)
class Limits:
    """What requests must keep to. `blocks` of `block_size` tokens are the KV cache; `max_length` is prompt and answer."""

    max_length: int
    blocks: int
    block_size: int
    vocab_size: int
    moe: bool
