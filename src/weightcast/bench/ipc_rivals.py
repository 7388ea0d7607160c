"""Others who move weights between two processes of one host, timed on the same bytes: gloo, Ray, files in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from weightcast.bench.ipc_children import GRACE_S, Child, Message
from weightcast.clock import Deadline
from weightcast.errors import UpdateFailed

Progress = Callable[[str], None]

START_S = 180.0  # Ray starts a dozen processes
ROUND_S = 60.0


@dataclass(frozen=True)
class Rival:
    """How one is run. `roles` are its processes, the trainer's first; one that has no second starts its own.

    `together`: both begin at once, otherwise the receiver is told when the trainer is done. `{directory}` in a value of the
    environment stands for the directory of the run.
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


class Moves:
    """The processes of one that moves bytes. A context manager: it starts them, and ends them whatever happens.

    `told` is what the last process to answer said of the last round.
    """

    def __init__(self, rival: Rival, *, nbytes: int, seed: int, directory: Path) -> None:
        self._rival, self._number = rival, 0
        self._facts = {"directory": str(directory), "nbytes": nbytes, "seed": seed, "timeout_s": ROUND_S}
        self._opened = ExitStack()
        self.told: Message = {}

    def __enter__(self) -> Self:
        rival, directory = self._rival, self._facts["directory"]
        environment = {name: value.format(directory=directory) for name, value in rival.environment.items()}
        with self._opened as opened:
            self._children = [
                opened.enter_context(Child(rival.module, role, environment=environment, grace_s=rival.grace_s))
                for role in rival.roles
            ]
            self.ask_all("begin", Deadline.after(START_S), **self._facts)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.__exit__(kind, error, trace)

    @property
    def _receiver(self) -> Child | None:
        return self._children[1] if len(self._children) > 1 else None

    def ask_all(self, do: str, deadline: Deadline, **facts: object) -> None:
        """Let all processes do something at once."""
        for child in self._children:
            child.tell(do, **facts)
        for child in self._children:
            child.hear(deadline)

    def round(self, before: Callable[[], None] | None = None) -> float:
        """The seconds that another version took. `before` is called when it is made and before it is moved."""
        deadline = Deadline.after(ROUND_S)
        self._children[0].ask("change", deadline, number=self._number)
        self._number += 1
        if before is not None:
            before()
        return self._moved(deadline)

    def _moved(self, deadline: Deadline) -> float:
        receiver = self._receiver
        if receiver is not None and self._rival.together:
            receiver.tell("move")
        sent = self.told = self._children[0].ask("move", deadline)
        if receiver is None:
            return float(sent["ended_s"] - sent["began_s"])
        if not self._rival.together:
            receiver.tell("move")
        self.told = receiver.hear(deadline)
        return float(self.told["ended_s"] - sent["began_s"])

    def check(self) -> None:
        """Prove that the receiver has the trainer's bytes."""
        _check_same(self._rival, self._children[0], self._receiver)


def measure_rival(
    rival: Rival, *, nbytes: int, seed: int, rounds: int, directory: Path, between: Callable[[], None], progress: Progress
) -> list[float]:
    """The seconds of so many rounds, the first one cold, from the trainer's beginning to the last byte at the receiver.

    `between` is called before each but the first. Ends with a proof that the receiver has the trainer's bytes.
    """
    progress(f"{rival.kind}: starting")
    with Moves(rival, nbytes=nbytes, seed=seed, directory=directory) as moves:
        seconds = []
        for number in range(rounds):
            progress(f"{rival.kind}: {'cold' if number == 0 else f'round {number} of {rounds - 1}'}")
            seconds.append(moves.round(between if number else None))
        moves.check()
        return seconds


def _check_same(rival: Rival, trainer: Child, receiver: Child | None) -> None:
    deadline = Deadline.after(ROUND_S)
    answer = trainer.ask("digest", deadline)
    sent = answer["digest"]
    taken = answer["taken"] if receiver is None else receiver.ask("digest", deadline)["digest"]
    if sent != taken:
        raise UpdateFailed(f"{rival.kind}: the receiver holds {taken} and not {sent}, the trainer's bytes.")
