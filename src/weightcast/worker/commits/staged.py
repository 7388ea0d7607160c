"""What every commit is, and `copy` and `swap`: commits of tensors that were staged and verified beforehand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from weightcast.clock import Deadline
from weightcast.delta.edit import TensorEdit
from weightcast.errors import DigestMismatch, InvalidInput
from weightcast.tensors.flat import Array, flat_bytes
from weightcast.tensors.sums import Sum
from weightcast.wire.manifest import Manifest
from weightcast.worker.buffers import Buffers
from weightcast.worker.fit import Landing, Plan
from weightcast.worker.staging import Verified
from weightcast.worker.targets.base import Slot, live_proof

Tick = Callable[[], None]

_SAMPLED_NBYTES, _PAGE_NBYTES = 1 << 20, 4 << 10


def silent() -> None:
    """A tick that does nothing."""


class StagedCommit(ABC):
    """One commit. `prepare` runs beside inference; `apply` is what an engine pauses for; `undo` reverts any part of it.

    `tick` is called after every slot that was written, installed, undone or proved.
    """

    # Whether undoing needs nothing but what the commit holds. If not, it may take long, and fail with the source.
    undoes_alone = True

    # By how much it makes the sums of blocks of tensors grow; None if it writes all of them anew.
    growth: Mapping[str, Mapping[int, Sum]] | None = None

    # What a commit that learned of it only by applying it is a commit of: a stream has its digests at its end.
    sealed: tuple[Manifest, Plan] | None = None

    def __init__(self, plan: Plan, *, tick: Tick = silent) -> None:
        self._plan, self._tick = plan, tick
        self._undo: list[Callable[[], None]] = []

    @property
    def harmless(self) -> bool:
        """Whether what was applied so far has changed nothing that counts."""
        return False

    @abstractmethod
    def prepare(self, deadline: Deadline) -> None:
        """Do everything that does not touch the live model."""

    @abstractmethod
    def apply(self) -> None:
        """Write every slot, and do nothing else. If this raises, `undo` is to be called."""

    def undo(self) -> None:
        """Put back what `apply` changed so far, last first. If it raises, it may be called again and goes on from there."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
            self._tick()

    @abstractmethod
    def prove(self) -> None:
        """Compare the live bytes with what they should be. Only reads. If this raises, `undo` is to be called."""

    def changes(self) -> Iterable[TensorEdit]:
        """What it is going to change in the live parameters, where it leaves most as it is."""
        raise InvalidInput("only a commit by delta knows what it is going to change.")

    def keep_way_back(self) -> bool:
        """It counts now: hold on to what `undo` needs and to nothing else. False if it cannot be undone any more."""
        return True

    def incoming(self) -> dict[str, Array]:
        """The tensors that it is going to make live, by their names in the version, where it has them beside the model."""
        raise InvalidInput("only a commit by swap has the tensors of a version beside the model before it is applied.")

    def forget(self) -> None:
        """Let go of all memory. Neither `apply` nor `undo` may follow."""
        self.keep_way_back()
        self._undo.clear()

    def _install(self, slot: Slot, memory: object) -> None:
        former = slot.memory()
        self._undo.append(lambda: slot.install(former))  # before the step, so that an interrupt between them loses nothing
        slot.install(memory)
        self._tick()


def prove_landings(where: str, landings: Iterable[Landing], tick: Tick = silent) -> None:
    """Read all live memory. Raise `DigestMismatch` listing every slot that does not hold what its entry says."""
    wrong = []
    for landing in landings:
        entry = landing.entry
        found = live_proof(landing.slot, entry.sum_spec, entry.proof, tick)
        if found != entry.proof:
            wrong.append((landing.slot.spec.name, entry.proof, found))
        tick()
    if wrong:
        raise DigestMismatch(where, wrong)


def prove_installed(plan: Plan, memories: Sequence[object]) -> None:
    """Raise `DigestMismatch` unless each slot has the memory that was installed in it."""
    wrong = [
        (landing.slot.spec.name, "the memory that was installed", "other memory")
        for landing, memory in zip(plan.landings, memories, strict=True)
        if not _same_place(landing.slot.live(), landing.slot.seen(memory))
    ]
    if wrong:
        raise DigestMismatch("the live model after the commit", wrong)


def sampled(nbytes: int) -> Iterator[tuple[int, int]]:
    """The byte ranges of a tensor that are read back after a copy: small ones whole, else its end and a page of each MiB."""
    if nbytes <= _SAMPLED_NBYTES:
        yield 0, nbytes
        return
    end = 0
    for start in (*range(0, nbytes, _SAMPLED_NBYTES), max(0, nbytes - _PAGE_NBYTES)):
        begin, end = max(start, end), min(start + _PAGE_NBYTES, nbytes)
        if begin < end:
            yield begin, end


def copied(slot: Slot, elements: Array, buffers: Buffers) -> Array:
    """A copy of a slot's elements, whatever their strides, in contiguous memory that comes back to `buffers` by itself."""
    copy, width = buffers.take(slot.spec), f"u{slot.spec.dtype.itemsize}"
    np.copyto(copy.view(width), elements.view(width))
    return copy


class WholeCommit(StagedCommit):
    """A commit of whole tensors that were staged and verified. What it copies beside the model lies in `buffers`."""

    def __init__(self, plan: Plan, verified: Verified, buffers: Buffers, *, tick: Tick = silent) -> None:
        super().__init__(plan, tick=tick)
        self._verified, self._buffers = verified, buffers
        self._given: set[str] = set()

    def prove(self) -> None:
        """Compare a sample of the live bytes with what was staged, and the pointers of slots that took that memory over."""
        wrong = []
        for landing in self._plan.landings:
            live, staged = landing.slot.live(), self._verified.arrays[landing.entry.name]
            if not _same_memory(live, staged) and not _same_samples(live, staged):
                wrong.append((landing.slot.spec.name, "the bytes that were staged", "others"))
            self._tick()
        if wrong:
            raise DigestMismatch("the live model after the commit", wrong)

    def keep_way_back(self) -> bool:
        """What was staged is live now, or copied."""
        self._verified = Verified(arrays={}, digests={})
        return True

    def _made_for(self, landing: Landing) -> object:
        """Memory for the slot to keep: the first slot of a tensor may get the staged array, further ones get copies."""
        staged = self._verified.arrays[landing.entry.name]
        if landing.entry.name in self._given:
            staged = copied(landing.slot, staged, self._buffers)
        self._given.add(landing.entry.name)
        return landing.slot.make(staged)


class CopyCommit(WholeCommit):
    """Copies over live memory, so addresses stay. Slots without memory adopt the staged buffers."""

    def prepare(self, deadline: Deadline) -> None:
        """Keep what the slots hold now: the live weights do not change while a version is staged."""
        self._steps: list[Callable[[], None]] = []
        for landing in self._plan.landings:
            self._steps.append(self._step(landing))
            deadline.check("keeping what the model holds")

    def apply(self) -> None:
        """Copy, or adopt where there is nothing to copy over."""
        for step in self._steps:
            step()

    def keep_way_back(self) -> bool:
        """What the slots held before."""
        self._steps = []
        return super().keep_way_back()

    def _step(self, landing: Landing) -> Callable[[], None]:
        slot = landing.slot
        if not slot.resident:
            made = self._made_for(landing)
            return lambda: self._install(slot, made)
        data, before = self._verified.arrays[landing.entry.name], copied(slot, slot.live(), self._buffers)
        return lambda: self._overwrite(slot, data, before)

    def _overwrite(self, slot: Slot, data: Array, before: Array) -> None:
        self._undo.append(lambda: slot.write(before))
        slot.write(data)
        self._tick()


class SwapCommit(WholeCommit):
    """Switches pointers to a second set of memory in the model's own layout. Captured graphs still see the old addresses."""

    def prepare(self, deadline: Deadline) -> None:
        """Bring the staged tensors into the layout and onto the device of their slots."""
        self._new: list[object] = []
        for landing in self._plan.landings:
            self._new.append(self._made_for(landing))
            deadline.check("laying out the second set of memory")

    def apply(self) -> None:
        """Switch every slot."""
        for landing, memory in zip(self._plan.landings, self._new, strict=True):
            self._install(landing.slot, memory)

    def keep_way_back(self) -> bool:
        """What the slots had before."""
        self._new = []
        return super().keep_way_back()

    def incoming(self) -> dict[str, Array]:
        """The second set of memory."""
        return seen_by_name(self._plan, self._new)


def seen_by_name(plan: Plan, memories: Iterable[object]) -> dict[str, Array]:
    """The elements of a memory for each landing of a plan, by the name of its tensor."""
    return {landing.entry.name: landing.slot.seen(memory) for landing, memory in zip(plan.landings, memories, strict=True)}


def _same_samples(live: Array, staged: Array) -> bool:
    if not live.flags.c_contiguous:  # rows of it instead: each is as good as a page
        step = 1 if live.nbytes <= _SAMPLED_NBYTES else _SAMPLED_NBYTES // _PAGE_NBYTES
        width = f"u{live.dtype.itemsize}"
        ours, theirs = live.view(width), staged.view(width)
        return np.array_equal(ours[::step], theirs[::step]) and np.array_equal(ours[-1:], theirs[-1:])
    ours, theirs = flat_bytes(live), flat_bytes(staged)
    return all(np.array_equal(ours[start:end], theirs[start:end]) for start, end in sampled(len(ours)))


def _same_place(a: Array, b: Array) -> bool:
    """Whether two arrays are the same elements. Those without any have no place."""
    return a.size == 0 or (a.__array_interface__["data"][0], a.strides) == (b.__array_interface__["data"][0], b.strides)


def _same_memory(a: Array, b: Array) -> bool:
    return a.__array_interface__["data"][0] == b.__array_interface__["data"][0] and a.flags.c_contiguous
