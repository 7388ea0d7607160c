"""`delta`: scatter what changed into the live parameters; and its sister for `swap`, which moves spare buffers instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from weightcast.clock import Deadline
from weightcast.delta import Delta, MovedState, fold, invert
from weightcast.delta.edit import TensorEdit, edit_tensor, move_tensor
from weightcast.delta.memory import LaneMemory
from weightcast.delta.states import tensor_digest
from weightcast.tensors.digest import DEFAULT, array_digest
from weightcast.tensors.flat import Array
from weightcast.wire.manifest import Manifest
from weightcast.worker.buffers import Buffers
from weightcast.worker.commits.staged import StagedCommit, Tick, copied, prove_slots, seen_by_name, silent
from weightcast.worker.deltas import live_state
from weightcast.worker.fit import Plan
from weightcast.worker.staging import check_digests
from weightcast.worker.targets.base import Slot


class DeltaCommit(StagedCommit):
    """Writes new values over the old ones that changed; addresses stay.

    Old and new values are worked out beforehand and written as values, never added: so an interrupted commit can be undone,
    and undone again, whatever it had reached.
    """

    def __init__(self, plan: Plan, manifest: Manifest, delta: Delta, *, checksum: bool, tick: Tick = silent) -> None:
        super().__init__(plan, tick=tick)
        self._manifest, self._delta, self._checksum = manifest, delta, checksum
        self._edits: list[tuple[LaneMemory, TensorEdit]] = []
        self._digests: dict[str, str] = {}

    def prepare(self, deadline: Deadline) -> None:
        """Work the delta out, and prove what it will lead to before anything is touched."""
        algorithm = self._manifest.algorithm or DEFAULT
        after = MovedState(live_state(self._plan), self._delta)
        for landing in self._plan.landings:
            name = landing.entry.name
            change = self._delta.tensors.get(name)
            if change is not None:
                memory = landing.slot.lanes()
                self._edits.append((memory, edit_tensor(memory, change)))
            if name not in self._digests:
                touched = change is not None or not self._checksum
                self._digests[name] = tensor_digest(after, name, algorithm) if touched else landing.entry.digest
            deadline.check(f"working out the delta to {self._manifest.version}")
        if self._checksum:
            check_digests(f"version {self._manifest.version} as the delta makes it", self._plan.entries, self._digests)

    def apply(self) -> None:
        """Write the new values."""
        for memory, edit in self._edits:
            self._undo.append(partial(memory.write, edit.indices, edit.before))  # before the step: nothing is lost between
            memory.write(edit.indices, edit.after)
            self._tick()

    def prove(self) -> None:
        """Compare the whole live state with the manifest, tensors that the delta did not touch included."""
        expected = [(landing.slot, self._digests[landing.entry.name]) for landing in self._plan.landings]
        prove_slots("the live model after the commit", expected, self._tick)

    def keep_way_back(self) -> bool:
        """The old values."""
        self._edits = []
        self._delta = Delta({}, {})
        return True


@dataclass(frozen=True)
class Spare:
    """The buffers that a swap took out of the model, and the delta from what they hold to what the model holds."""

    memories: Mapping[int, object]
    lead: Delta

    def memory(self, slot: Slot) -> object | None:
        """The spare memory of a slot."""
        return self.memories.get(id(slot))


class DeltaSwapCommit(StagedCommit):
    """Brings spare buffers up to date while the model serves, and switches to them.

    `spare` are those of the version before, which take both deltas folded; without it they are copied once, into `buffers`.
    """

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest,
        delta: Delta,
        *,
        checksum: bool,
        spare: Spare | None,
        buffers: Buffers,
        tick: Tick = silent,
    ) -> None:
        super().__init__(plan, tick=tick)
        self._manifest, self._delta, self._checksum, self._spare = manifest, delta, checksum, spare
        self._buffers = buffers
        self._new: list[object] = []
        self._former: dict[int, object] = {}

    def prepare(self, deadline: Deadline) -> None:
        """Move the spare buffers to the new version and prove them, all of them."""
        slots = [landing.slot for landing in self._plan.landings]
        spare, self._spare = self._spare, None
        if spare is not None and all(spare.memory(slot) is not None for slot in slots):
            self._new = [spare.memory(slot) for slot in slots]
            folded = fold(spare.lead, self._delta)
        else:
            self._new = [slot.make(copied(slot, slot.live(), self._buffers)) for slot in slots]
            folded = self._delta
        algorithm = self._manifest.algorithm or DEFAULT
        found: dict[str, str] = {}
        for landing, memory in zip(self._plan.landings, self._new, strict=True):
            change = folded.tensors.get(landing.entry.name)
            if change is not None:
                move_tensor(landing.slot.lanes(memory), change)
            digest = array_digest(landing.slot.seen(memory), algorithm)
            if digest != landing.entry.digest or landing.entry.name not in found:  # of several slots, the wrong one counts
                found[landing.entry.name] = digest
            deadline.check(f"bringing the spare buffers to {self._manifest.version}")
        if self._checksum:
            check_digests(f"version {self._manifest.version} in the spare buffers", self._plan.entries, found)

    def apply(self) -> None:
        """Switch every slot."""
        for landing, memory in zip(self._plan.landings, self._new, strict=True):
            former = landing.slot.memory()
            if former is not None:
                self._former[id(landing.slot)] = former
            self._install(landing.slot, memory)

    def prove(self) -> None:
        """Nothing was written since the spare buffers were proved."""

    def incoming(self) -> dict[str, Array]:
        """The spare buffers."""
        return seen_by_name(self._plan, self._new)

    def next_spare(self) -> Spare:
        """What the model held before: the buffers for the next swap."""
        return Spare(self._former, self._delta)

    def spare_after_undo(self) -> Spare:
        """The buffers that `undo` took out of the model again, which hold what the delta led to."""
        new = {id(landing.slot): memory for landing, memory in zip(self._plan.landings, self._new, strict=True)}
        return Spare(new, invert(self._delta))

    def forget(self) -> None:
        """Let go of both sets of buffers."""
        super().forget()
        self._new, self._former, self._delta = [], {}, Delta({}, {})
