"""Who receives in the fault trials: whole models, and the two ranks of a replica.

Each knows which version it must hold, bit for bit, whatever happened to its update.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from weightcast import LiveModel
from weightcast.clock import Deadline
from weightcast.errors import WeightcastError
from weightcast.transports.registry import open_receiver
from weightcast.worker.buffers import Buffers
from weightcast.worker.result import CommitMode
from weightcast.worker.shards import HeldVersion, cut
from weightcast.worker.states import State as Lifecycle

from .fault_versions import RANKS, Published, State, blank, blank_shard, differing, shard_by_hand, shards_of


@dataclass
class Outcome:
    """How one update ended: None is success. `wrong` is what must not be."""

    error: str | None
    seconds: float
    mode: str = ""
    wrong: list[str] = field(default_factory=list)
    message: str = ""


class Model:
    """A live model, and the version that it must hold; None before its first one. `torn`: an update in place failed for
    good, so it holds nothing, and says so.
    """

    def __init__(self, published: Published, blank_state: State) -> None:
        self._published = published
        self.arrays = blank_state
        self._blank = {name: array.copy() for name, array in blank_state.items()}
        self.live = LiveModel(self.arrays)
        self.version: str | None = None
        self.torn = False
        self._kept: list[tuple[str, State]] = []  # arrays that were live once: nobody may write to them

    def expected(self, version: str | None) -> State:
        return self._blank if version is None else self._published.states[version]

    def take(self, version: str, mode: CommitMode, source: str, timeout: float, *, checksum: bool) -> str:
        """Update; the mode that it was done in."""
        return self.live.update(version, source=source, commit=mode, timeout=timeout, verify_checksum=checksum).mode

    def update(self, version: str, mode: CommitMode, source: str, timeout: float, *, checksum: bool = True) -> Outcome:
        """Try to take a version, and look at what came of it."""
        if mode == "swap":
            self._kept = []  # the model itself brings them up to date
        kept = dict(self.arrays)
        began = time.monotonic()
        try:
            done = self.take(version, mode, source, timeout, checksum=checksum)
        except WeightcastError as error:
            outcome = Outcome(error.code, time.monotonic() - began, message=str(error))
        except Exception as error:
            outcome = Outcome("foreign", time.monotonic() - began, message=repr(error))
            outcome.wrong.append(f"an error that is not ours: {error!r}")
        else:
            outcome = Outcome(None, time.monotonic() - began, mode=done)
            if any(self.arrays[name] is not array for name, array in kept.items() if array.nbytes):
                self._kept = [] if self.version is None or self.torn else [*self._kept, (self.version, kept)][-2:]
            self.version, self.torn = version, False
        outcome.wrong += self._judged(outcome, mode)
        return outcome

    def _judged(self, outcome: Outcome, mode: str) -> list[str]:
        state, wrong = self.live.state, []
        if state is Lifecycle.FAILED and outcome.error is not None and mode == "inplace":
            self.torn = True
            return [] if self.live.version is None else [f"it is torn and says that it serves {self.live.version}"]
        if state is not Lifecycle.READY:
            wrong.append(f"it is {state} after {outcome.error}")
        if self.live.version != self.version:
            wrong.append(f"it says that it serves {self.live.version}, and must serve {self.version}")
        self.torn = False
        return wrong + self.check()

    def check(self) -> list[str]:
        """What is not as it must be: in the live arrays, and in those that were live before them."""
        wrong = []
        if not self.torn:
            found = differing(self.arrays, self.expected(self.version))
            if found:
                wrong.append(f"{len(found)} live tensor(s) are not {self.version}: {', '.join(found[:5])}")
        for version, arrays in self._kept:
            found = differing(arrays, self.expected(version))
            if found:
                wrong.append(f"{len(found)} tensor(s) swapped out of the model were written to: {', '.join(found[:5])}")
        return wrong

    def check_root(self) -> list[str]:
        """Whether the live bytes have the root digest of the version."""
        root = self.live.root_digest()
        wanted = self._published.roots[str(self.version)]
        return [] if root == wanted else [f"the root digest is {root}, not {wanted}"]

    def close(self) -> None:
        """Let go of what is kept between updates."""
        self.live.close()
        self._kept = []


class RankModel(Model):
    """What one rank holds of a model, cut out of versions by the depot."""

    def __init__(self, published: Published, rank: int) -> None:
        super().__init__(published, blank_shard(rank))
        self._rank, self._shards, self._buffers = rank, shards_of(rank), Buffers()
        self._held: HeldVersion | None = None

    def expected(self, version: str | None) -> State:
        return self._blank if version is None else shard_by_hand(self._published.states[version], self._rank)

    def take(self, version: str, mode: CommitMode, source: str, timeout: float, *, checksum: bool) -> str:
        """Cut the rank's share, then commit it. A stream in place needs the source until it is committed."""
        deadline = Deadline.after(timeout)
        receiver = open_receiver(source, rank=self._rank)
        try:
            shard = cut(
                receiver, receiver.manifest(version, deadline=deadline), self._shards,
                held=None if self.torn else self._held, mode=mode, checksum=checksum, deadline=deadline,
                progress=lambda _done, _total: None, buffers=self._buffers,
            )  # fmt: skip
            left = max(0.0, deadline.remaining())
            result = self.live.update(source=shard, commit=mode, timeout=left, verify_checksum=checksum)
            served = self.live.served_manifest
            assert served is not None
            self._held = HeldVersion(shard.full, served, shard.url, proved=checksum)
            shard.close()
        finally:
            receiver.close()
        return result.mode

    def check_root(self) -> list[str]:
        """The root digest of a rank's own parameters is that of the version that was cut."""
        assert self._held is not None
        found, wanted = self.live.root_digest(), self._held.shard.root_digest
        return [] if found == wanted else [f"the root digest is {found}, not {wanted}"]


class Replica:
    """One or several models that are updated at the same time."""

    def __init__(self, models: list[Model]) -> None:
        self.models = models

    @property
    def version(self) -> str | None:
        """What all of them must hold; None if they differ."""
        versions = {model.version for model in self.models}
        return versions.pop() if len(versions) == 1 else None

    @property
    def held(self) -> set[str | None]:
        """What any of them holds."""
        return {model.version for model in self.models}

    def update(self, version: str, mode: CommitMode, source: str, timeout: float, *, checksum: bool = True) -> list[Outcome]:
        """Update all, each in a thread if there are several."""
        if len(self.models) == 1:
            return [self.models[0].update(version, mode, source, timeout, checksum=checksum)]
        outcomes: dict[int, Outcome] = {}

        def run(number: int) -> None:
            outcomes[number] = self.models[number].update(version, mode, source, timeout, checksum=checksum)

        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(self.models))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [outcomes[number] for number in range(len(self.models))]

    def check(self) -> list[str]:
        return [problem for model in self.models for problem in model.check()]

    def check_root(self) -> list[str]:
        return [problem for model in self.models for problem in model.check_root()]

    def close(self) -> None:
        for model in self.models:
            model.close()


def make_replica(kind: str, published: Published) -> Replica:
    """A replica that has never been loaded."""
    if kind == "ranks":
        return Replica([RankModel(published, rank) for rank in range(RANKS)])
    return Replica([Model(published, blank())])
