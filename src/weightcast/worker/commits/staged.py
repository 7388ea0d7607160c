"""`copy` and `swap`: commits of tensors that were staged and verified beforehand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from weightcast.errors import DigestMismatch
from weightcast.tensors.digest import algorithm_of, array_digest
from weightcast.tensors.flat import Array
from weightcast.worker.fit import Landing, Plan
from weightcast.worker.staging import Verified
from weightcast.worker.targets.base import Slot


class StagedCommit(ABC):
    """One commit. `prepare` runs beside inference; `apply` is what an engine pauses for; `undo` reverts any part of it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._undo: list[Callable[[], None]] = []

    @abstractmethod
    def prepare(self) -> None:
        """Do everything that does not touch the live model."""

    @abstractmethod
    def apply(self) -> None:
        """Write every slot. If this raises, `undo` is to be called."""

    def undo(self) -> None:
        """Put back what `apply` changed so far, last first. If it raises, it may be called again and goes on from there."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    @abstractmethod
    def prove(self) -> None:
        """Compare the live bytes with what they should be. If this raises, `undo` is to be called."""

    def _install(self, slot: Slot, memory: object) -> None:
        former = slot.memory()
        self._undo.append(lambda: slot.install(former))  # before the step, so that an interrupt between them loses nothing
        slot.install(memory)


class WholeCommit(StagedCommit):
    """A commit of whole tensors that were staged and verified."""

    def __init__(self, plan: Plan, verified: Verified) -> None:
        super().__init__(plan)
        self._verified = verified
        self._given: set[str] = set()

    def prove(self) -> None:
        """Compare the live bytes with what was staged. A slot that took over staged memory is that memory, proved before."""
        wrong = []
        for landing in self._plan.landings:
            live, staged = landing.slot.live(), self._verified.arrays[landing.entry.name]
            if _same_memory(live, staged):
                continue
            expected = self._verified.digests[landing.entry.name]
            found = array_digest(live, algorithm_of(expected))
            if found != expected:
                wrong.append((landing.slot.spec.name, expected, found))
        if wrong:
            raise DigestMismatch("the live model after the commit", wrong)

    def _made_for(self, landing: Landing) -> object:
        """Memory for the slot to keep: the first slot of a tensor may get the staged array, further ones get copies."""
        staged = self._verified.arrays[landing.entry.name]
        if landing.entry.name in self._given:
            staged = staged.copy()
        self._given.add(landing.entry.name)
        return landing.slot.make(staged)


class CopyCommit(WholeCommit):
    """Copies over live memory, so addresses stay. Slots without memory adopt the staged buffers."""

    def prepare(self) -> None:
        """Keep what the slots hold now: the live weights do not change while a version is staged."""
        resident = [landing.slot for landing in self._plan.landings if landing.slot.resident]
        self._before = {id(slot): slot.live().copy() for slot in resident}

    def apply(self) -> None:
        """Copy, or adopt where there is nothing to copy over."""
        for landing in self._plan.landings:
            before = self._before.get(id(landing.slot))
            if before is None:
                self._install(landing.slot, self._made_for(landing))
            else:
                self._overwrite(landing.slot, self._verified.arrays[landing.entry.name], before)

    def _overwrite(self, slot: Slot, data: Array, before: Array) -> None:
        self._undo.append(lambda: slot.write(before))
        slot.write(data)


class SwapCommit(WholeCommit):
    """Switches pointers to a second set of memory in the model's own layout. Captured graphs still see the old addresses."""

    def prepare(self) -> None:
        """Bring the staged tensors into the layout and onto the device of their slots."""
        self._spares = [self._made_for(landing) for landing in self._plan.landings]

    def apply(self) -> None:
        """Switch every slot."""
        for landing, spare in zip(self._plan.landings, self._spares, strict=True):
            self._install(landing.slot, spare)


def _same_memory(a: Array, b: Array) -> bool:
    return a.__array_interface__["data"][0] == b.__array_interface__["data"][0] and a.flags.c_contiguous
