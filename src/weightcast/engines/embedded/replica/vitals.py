"""Who hangs? Decided from heartbeats and explicit times; nothing here reads a clock."""

from __future__ import annotations

from dataclasses import dataclass

TICKS = 32  # how often per heartbeat period the ranks are looked at: a hang is noticed that much late at most
PATIENCE = 0.8  # how much of a heartbeat period a rank may be still: with the time between beats and looks less than one
STARTING_PERIODS = 5  # importing a framework may hold the interpreter, and with it the heartbeat, for seconds


class Attention:
    """Time in which the front end really looked.

    A front end that was stopped, suspended or blocked has not read the heartbeats that came meanwhile, so that time must
    not count against the ranks. `at` is called `TICKS` times per heartbeat period if all is well; of a gap that is longer
    than an eighth of a period, the rest is left out. All times given to `Vitals` are of this clock: after a stall, a rank
    still has what it had left.
    """

    def __init__(self, now: float, heartbeat_s: float) -> None:
        self._last, self._longest_s = now, heartbeat_s / 8
        self._attended = 0.0
        self.missed_s = 0.0

    def at(self, now: float) -> float:
        """Seconds attended until the moment `now` of the real clock."""
        gap = max(0.0, now - self._last)
        self._last = max(self._last, now)
        self._attended += min(gap, self._longest_s)
        self.missed_s += max(0.0, gap - self._longest_s)
        return self._attended


@dataclass
class _Signs:
    ready: bool = False
    beats: int = 0
    heard_at: float = 0.0
    alive_at: float = 0.0
    progress: int = -1
    busy: bool = False


class Vitals:
    """The signs of life of all ranks of one start.

    A rank lives while, within each period of `still_s`, it says that it is idle or that it got somewhere. Until it is ready
    it only has to be heard, `STARTING_PERIODS` apart, and before its first heartbeat not even that: the caller's deadline
    for the start holds there, as one step of loading may be long.
    """

    def __init__(self, ranks: int, still_s: float) -> None:
        self._still_s = still_s
        self._signs = [_Signs() for _ in range(ranks)]

    def ready(self, rank: int, now: float) -> None:
        """The rank serves from now on."""
        signs = self._signs[rank]
        signs.ready = True
        signs.heard_at = signs.alive_at = now

    def beat(self, rank: int, progress: int, busy: bool, now: float) -> None:
        """A heartbeat came."""
        signs = self._signs[rank]
        if not busy or (progress, busy) != (signs.progress, signs.busy):
            signs.alive_at = now
        signs.progress, signs.busy, signs.heard_at = progress, busy, now
        signs.beats += 1

    def hanging(self, now: float) -> dict[int, str]:
        """Every rank that hangs, and how that shows."""
        found = ((rank, self._complaint(signs, now)) for rank, signs in enumerate(self._signs))
        return {rank: complaint for rank, complaint in found if complaint}

    def _complaint(self, signs: _Signs, now: float) -> str | None:
        silent_s, quiet_s = now - signs.heard_at, now - signs.alive_at
        if not signs.ready:
            patience_s = STARTING_PERIODS * self._still_s
            silent = signs.beats > 0 and silent_s > patience_s
            return f"no heartbeat for {silent_s:.1f} s while starting" if silent else None
        if quiet_s <= self._still_s:
            return None
        if signs.busy and silent_s <= self._still_s / 2:
            return f"busy without progress for {quiet_s:.1f} s (stands at {signs.progress})"
        return f"no heartbeat for {silent_s:.1f} s"
