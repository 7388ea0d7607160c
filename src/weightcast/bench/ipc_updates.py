"""Our own updates on one host, timed: a trainer publishes, engines commit, and memory is copied in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from weightcast.bench.ipc_children import Child
from weightcast.bench.ipc_copies import Memcpys
from weightcast.bench.ipc_tensors import Model
from weightcast.clock import Deadline
from weightcast.errors import UpdateFailed
from weightcast.publish.publisher import Publisher
from weightcast.worker.result import CommitMode

Progress = Callable[[str], None]

WARM_UP = 2  # rounds after the first: the second slab and the second set of buffers are touched in them
ROUND_S = 120.0
START_S = 120.0
_RECEIVER = "weightcast.bench.ipc_receiver"


@dataclass(frozen=True)
class Way:
    """One way to update. A stream goes through two buckets, anything else through a slab that holds the version."""

    kind: str
    commit: CommitMode
    receivers: int = 1
    stream: bool = False


WAYS = (
    Way("swap", "swap"),
    Way("swap, 2 receivers", "swap", receivers=2),
    Way("copy", "copy"),
    Way("stream", "swap", stream=True),
)


@dataclass(frozen=True)
class Round:
    """One update. `total_s` is from the call of publish to the last commit. Of what receivers tell, the most counts.

    `publish_s` is how long the trainer was kept, `noticed_s` from its call until a receiver knew of the version.
    """

    total_s: float
    publish_s: float
    noticed_s: float
    stage_s: float
    verify_s: float
    commit_s: float


@dataclass(frozen=True)
class Timed:
    """Rounds in the order in which they ran, and what two memcpys took around each of those after the warm-up."""

    cold: Round
    warm_up: tuple[Round, ...]
    steady: tuple[Round, ...]
    memcpys_s: tuple[float, ...]
    two_threads_s: tuple[float, ...]
    one_piece_s: tuple[float, ...]


class Updates:
    """A trainer, which is this process, and its receivers. A context manager: it starts them, and leaves nothing behind.

    `busy` says that an update was begun and has not succeeded.
    """

    def __init__(self, way: Way, model: Model, directory: Path) -> None:
        self._way, self._model, self._directory = way, model, directory
        self._number, self.busy = 0, False
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        with self._opened as opened:
            self._publisher = opened.enter_context(Publisher(f"ipc://{self._directory}"))
            self._receivers = [opened.enter_context(Child(_RECEIVER)) for _ in range(self._way.receivers)]
            deadline = Deadline.after(START_S)
            for child in self._receivers:
                child.tell("begin", directory=str(self._directory), nbytes=self._model.asked_nbytes)
            for child in self._receivers:
                child.hear(deadline)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.__exit__(kind, error, trace)

    def round(self, copy: Callable[[], object] | None = None) -> Round:
        """Update once, to a version that differs in every element. `copy` is called right before, off the clock."""
        self.busy = True
        for child in self._receivers:
            child.tell("update", commit=self._way.commit, timeout_s=ROUND_S)
        self._model.change(self._number)
        if copy is not None:
            copy()
        self._number += 1
        done = self._published(f"step_{self._number}")
        self.busy = False
        return done

    def _published(self, version: str) -> Round:
        way, deadline, began = self._way, Deadline.after(ROUND_S), time.monotonic()
        if way.stream:
            self._publisher.stream(version, self._model.tensors, receivers=way.receivers, timeout=ROUND_S)
        else:
            self._publisher.publish(version, self._model.tensors, timeout=ROUND_S)
        publish_s = time.monotonic() - began
        answers = [child.hear(deadline) for child in self._receivers]
        results = [answer["result"] for answer in answers]
        done = [(result["version"], result["mode"]) for result in results]
        if set(done) != {(version, way.commit)}:
            raise UpdateFailed(f"{way.kind}: {version} was published, but receivers committed {done}.")
        return Round(
            total_s=max(answer["committed_s"] for answer in answers) - began,
            publish_s=publish_s,
            noticed_s=max(answer["noticed_s"] for answer in answers) - began,
            **{name: max(result[name] for result in results) for name in ("stage_s", "verify_s", "commit_s")},
        )

    def check(self) -> None:
        """Prove that all receivers have the trainer's bytes."""
        check_same(self._way, self._receivers, self._model)


def measure_way(way: Way, model: Model, memcpys: Memcpys, *, rounds: int, directory: Path, progress: Progress) -> Timed:
    """All rounds of one way: cold, warming up, and those that count with memory copied around each."""
    memcpys_s: list[float] = []
    two_threads_s: list[float] = []
    one_piece_s: list[float] = []

    def copy() -> None:
        memcpys_s.append(memcpys.two(1))
        two_threads_s.append(memcpys.two(2))
        one_piece_s.append(memcpys.two_of_one_piece())

    with Updates(way, model, directory) as updates:
        done: list[Round] = []
        for number in range(1 + WARM_UP + rounds):
            progress(f"{way.kind}: {'cold' if number == 0 else f'round {number} of {WARM_UP + rounds}'}")
            done.append(updates.round(copy if number > WARM_UP else None))
        copy()
        updates.check()
    return Timed(
        done[0], tuple(done[1 : 1 + WARM_UP]), tuple(done[1 + WARM_UP :]),
        tuple(memcpys_s), tuple(two_threads_s), tuple(one_piece_s),
    )  # fmt: skip


def check_same(way: Way, receivers: Sequence[Child], model: Model) -> None:
    """Raise `UpdateFailed` if a receiver has other bytes than the trainer."""
    deadline, expected = Deadline.after(ROUND_S), model.digest()
    found = [child.ask("digest", deadline)["digest"] for child in receivers]
    if set(found) != {expected}:
        raise UpdateFailed(f"{way.kind}: receivers hold {', '.join(found)} and not {expected}, the trainer's bytes.")
