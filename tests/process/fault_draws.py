"""Which fault happens to whom, and when: drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace

from weightcast.worker.result import CommitMode

from .fault_versions import CHAIN, NEWEST
from .fault_wire import BREAKS, Deed, Fault

KINDS = ("killed", "stopped", "link", "half-open", "truncated", "corrupt", "token", "replayed")
MODES: tuple[CommitMode, ...] = ("copy", "swap", "inplace", "delta")
DEADLINE_S = 2.5

# Eight of sixteen receive whole models from one depot or two, five are ranks, two read by NIXL, one goes through a relay.
_RECEIVERS = (
    "whole", "ranks", "nixl", "whole", "ranks", "whole", "relay", "whole",
    "ranks", "whole", "nixl", "ranks", "whole", "whole", "ranks", "whole",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One fault. `moment` is when, as a share of what such an update usually takes, in time or in bytes."""

    number: int
    kind: str
    receiver: str
    depots: int
    mode: CommitMode
    next_mode: CommitMode
    fresh: bool
    far: bool  # whether the way to the wanted version should be a full one
    moment: float
    passes_s: float  # a stop or a cut link ends by itself after this; 0: when the trial is over
    end: str  # of the link that is cut
    at_relay: bool  # or at the depot that the relay fills itself from
    place: int
    fault: Fault | None
    choice: float
    wanted: str = ""

    @property
    def wired(self) -> bool:
        """Whether it happens on the wire, and not to a process, a link or a file."""
        return self.fault is not None

    @property
    def direct(self) -> bool:
        """Whether receivers go straight to the depot: what happens to a process should reach them unsoftened."""
        return not self.wired

    def aimed(self, held: Collection[str | None]) -> Trial:
        """The same with a version to go to, which none of the receivers holds."""
        if self.receiver == "relay":
            return replace(self, wanted=NEWEST)
        families = {version[0] for version in held if version}
        near = [version for version in CHAIN if version[0] in families and version not in held]
        away = [version for version in CHAIN if version[0] not in families]
        some = near if near and not self.far else away
        return replace(self, wanted=some[int(self.choice * len(some))])

    def following(self, held: Collection[str | None]) -> str:
        """The version to go to when all is well again."""
        some = [version for version in CHAIN if version not in held]
        return some[self.place % len(some)]

    def of(self, receiver: str) -> Trial:
        """Another receiver, and one depot."""
        return replace(self, receiver=receiver, depots=1)

    def told(self) -> str:
        """What it is, in a line."""
        what = f"for {self.passes_s:.2f} s" if self.passes_s and self.kind in ("stopped", "link") else "for good"
        if self.fault is not None:
            what = f"{self.fault.deed}, {'for good' if self.fault.lasting else 'once'}"
        where = f"at the {'relay' if self.at_relay else 'source'} " if self.receiver == "relay" else ""
        return (
            f"{self.number}: {self.kind} ({what}) {where}at {self.moment:.3f}, {self.receiver} of {self.depots} depot(s), "
            f"{self.mode} to {self.wanted or '?'}{', fresh' if self.fresh else ''}"
        )


def drawn(seed: int, number: int, *, without: Collection[str] = ()) -> Trial:
    """Trial `number` of a seed. Every kind comes equally often; those in `without` are replaced by others."""
    rng = random.Random(f"{seed} {number}")
    turn, place = divmod(number, len(KINDS))
    kind = KINDS[place]
    if kind in without:
        kind = rng.choice([other for other in KINDS if other not in without])
    receiver = _RECEIVERS[(turn + 3 * place + seed) % len(_RECEIVERS)]
    if receiver in without:
        receiver = "whole"
    mode = MODES[(turn + place) % len(MODES)]
    trial = Trial(
        number=number,
        kind=kind,
        receiver=receiver,
        depots=2 if receiver in ("whole", "ranks") and rng.random() < 0.3 else 1,
        mode=mode,
        next_mode=rng.choice(MODES),
        fresh=rng.random() < 0.1,
        far=rng.random() < (0.2 if mode == "delta" else 0.7) or kind in ("token", "replayed"),  # those need many requests
        moment=0.95 * rng.random(),
        passes_s=rng.uniform(0.05, 0.8) if rng.random() < 0.4 else 0.0,
        end=rng.choice(["near", "far"]),
        at_relay=rng.random() < 0.5 or kind == "token",  # a relay that was refused does not ask again for half a minute
        place=rng.randrange(1 << 30),
        fault=None,
        choice=rng.random(),
    )
    return _with_fault(rng, trial)


def _with_fault(rng: random.Random, trial: Trial) -> Trial:
    """With what the wire does, for the kinds that happen there. What NIXL reads does not come over a wire of ours: only the
    questions before and after it do, and bytes that are wrong are wrong where they lie.
    """
    deeds: dict[str, tuple[Deed, ...]] = {
        "half-open": ("silence",),
        "truncated": BREAKS,
        "corrupt": ("flip", "flip", "flip", "flip request"),
        "token": ("token",),
        "replayed": ("old", "old as new", "recorded") if trial.receiver == "ranks" else ("old", "old as new"),
    }
    in_memory = trial.receiver == "nixl" and (trial.kind == "replayed" or (trial.kind == "corrupt" and rng.random() < 0.5))
    if trial.kind not in deeds or in_memory:
        return trial
    deed = rng.choice(deeds[trial.kind])
    if deed not in ("close", "reset", "silence", "flip"):  # those hit the next request, and questions come first
        trial = replace(trial, moment=trial.moment * (0.02 if deed in ("flip request", "recorded") else 0.5))
    again = rng.randrange(20_000) if deed == "flip request" else rng.choice([0, 0, 150, 5_000, 80_000])
    return replace(trial, fault=Fault(deed, at=0, lasting=rng.random() < 0.5, again=again, bit=rng.randrange(8)))
