"""Others who move weights between two processes of one host, timed on the same bytes: gloo, Ray, files in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from weightcast.bench.ipc_children import GRACE_S, Child
from weightcast.clock import Deadline
from weightcast.errors import UpdateFailed

Progress = Callable[[str], None]

START_S = 180.0  # Ray starts a dozen processes
ROUND_S = 60.0


@dataclass(frozen=True)
class Rival:
    """How one is run. `roles` are its processes, the trainer's first; one that has no second starts its own.

    `together`: both begin at once, otherwise the receiver is told when the trainer is done.
    """

    kind: str
    module: str
    packages: tuple[str, ...]
    roles: tuple[str, ...] = ("trainer", "receiver")
    together: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    grace_s: float = GRACE_S

    @property
    def lacking(self) -> list[str]:
        """Packages that are not installed."""
        return [package for package in self.packages if find_spec(package) is None]


RIVALS = (
    Rival(
        "gloo broadcast",
        "weightcast.bench.ipc_gloo",
        ("torch",),
        together=True,
        environment={"GLOO_SOCKET_IFNAME": "lo"},
    ),
    Rival(
        "ray put+get+copy",
        "weightcast.bench.ipc_ray",
        ("ray",),
        roles=("trainer",),
        environment={"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"},
        grace_s=30.0,
    ),
    Rival("safetensors in tmpfs", "weightcast.bench.ipc_files", ("safetensors", "torch")),
)


def measure_rival(
    rival: Rival, *, nbytes: int, seed: int, rounds: int, directory: Path, between: Callable[[], None], progress: Progress
) -> list[float]:
    """The seconds of so many rounds, the first one cold, from the trainer's beginning to the last byte at the receiver.

    `between` is called before each but the first. Ends with a proof that the receiver has the trainer's bytes.
    """
    with ExitStack() as opened:
        trainer, *others = [
            opened.enter_context(Child(rival.module, role, environment=rival.environment, grace_s=rival.grace_s))
            for role in rival.roles
        ]
        receiver = others[0] if others else None
        progress(f"{rival.kind}: starting")
        deadline = Deadline.after(START_S)
        for child in (trainer, *others):
            child.tell("begin", directory=str(directory), nbytes=nbytes, seed=seed, timeout_s=ROUND_S)
        for child in (trainer, *others):
            child.hear(deadline)
        seconds = []
        for number in range(rounds):
            progress(f"{rival.kind}: {'cold' if number == 0 else f'round {number} of {rounds - 1}'}")
            deadline = Deadline.after(ROUND_S)
            trainer.ask("change", deadline, number=number)
            if number:
                between()
            seconds.append(_moved(trainer, receiver, together=rival.together, deadline=deadline))
        _check_same(rival, trainer, receiver)
        return seconds


def _moved(trainer: Child, receiver: Child | None, *, together: bool, deadline: Deadline) -> float:
    if receiver is not None and together:
        receiver.tell("move")
    sent = trainer.ask("move", deadline)
    if receiver is None:
        return float(sent["ended_s"] - sent["began_s"])
    if not together:
        receiver.tell("move")
    return float(receiver.hear(deadline)["ended_s"] - sent["began_s"])


def _check_same(rival: Rival, trainer: Child, receiver: Child | None) -> None:
    deadline = Deadline.after(ROUND_S)
    answer = trainer.ask("digest", deadline)
    sent = answer["digest"]
    taken = answer["taken"] if receiver is None else receiver.ask("digest", deadline)["digest"]
    if sent != taken:
        raise UpdateFailed(f"{rival.kind}: the receiver holds {taken} and not {sent}, the trainer's bytes.")
