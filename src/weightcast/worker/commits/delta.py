"""`delta`: scatter what changed into the live parameters; and its sister for `swap`, which moves spare buffers instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from weightcast.clock import Deadline
from weightcast.delta import ArrayState, Delta, MovedState, fold, invert
from weightcast.delta.edit import TensorEdit, edit_tensor
from weightcast.delta.memory import LaneMemory
from weightcast.delta.sparse import span
from weightcast.delta.states import tensor_proof
from weightcast.errors import DigestMismatch
from weightcast.tensors.flat import Array, flat_bytes
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import Sum, add_up, array_proof, array_sum, change_sum, range_sum
from weightcast.wire.manifest import Manifest, TensorEntry, compute_root
from weightcast.worker.buffers import Buffers
from weightcast.worker.commits.staged import StagedCommit, Tick, copied, prove_installed, seen_by_name, silent
from weightcast.worker.fit import Landing, Plan
from weightcast.worker.scrub import BLOCK_NBYTES
from weightcast.worker.staging import check_digests
from weightcast.worker.targets.base import Slot


class _Sums:
    """The sums that tensors will have once edits are written: those of the base, and what the edits add to them.

    Only edits are read. A base that has no sums (format 1, or weights that came from elsewhere) is summed once, whole.
    """

    def __init__(self, base: Mapping[str, TensorEntry]) -> None:
        self._base = base
        self.found: dict[str, str] = {}
        self.growth: dict[str, dict[int, Sum]] = {}

    def add(self, landing: Landing, held: Callable[[], Array], edit: TensorEdit | None, tick: Tick) -> None:
        """Take in what one slot will hold. `held` gives what it holds now, or its spare memory before the edit."""
        for entry in (landing.entry, *landing.same):
            before = self._base.get(entry.name)
            known = before is not None and before.sum and before.sum_spec == entry.sum_spec
            total = Sum.parse(before.sum) if before is not None and known else array_sum(entry.sum_spec, held(), tick)
            grown = _growth(entry.sum_spec, edit)
            if edit is not None:
                self.growth[entry.name] = grown
            after = str(total + add_up(grown.values()))
            if after != entry.sum or entry.name not in self.found:  # of several slots, the one that is wrong counts
                self.found[entry.name] = after

    def check(self, where: str, plan: Plan) -> None:
        """Raise `DigestMismatch` listing every tensor that would not be what its entry says, tied ones included."""
        entries = {entry.name: entry for landing in plan.landings for entry in (landing.entry, *landing.same)}
        wrong = [
            (name, entry.sum, self.found[name]) for name, entry in entries.items() if entry.sum not in ("", self.found[name])
        ]
        if wrong:
            raise DigestMismatch(where, wrong)

    def seal(self, manifest: Manifest, plan: Plan) -> tuple[Manifest, Plan]:
        """Both with the sums that were worked out, where they have none: the parameters of a rank get theirs so."""
        tensors = tuple(
            replace(entry, sum=self.found.get(entry.name, "")) if not entry.proof else entry for entry in manifest.tensors
        )
        sealed = replace(manifest, tensors=tensors, root_digest=compute_root(tensors, manifest.algorithm))
        return sealed, plan.with_entries({entry.name: entry for entry in tensors})


def _growth(spec: TensorSpec, edit: TensorEdit | None) -> dict[int, Sum]:
    """What an edit adds to the sum of its tensor, by the blocks in which the scrubber reads it."""
    if edit is None:
        return {}
    lanes = BLOCK_NBYTES // edit.after.itemsize
    last = edit.indices[-1] if edit.indices is not None and len(edit.indices) else len(edit.after) - 1
    grown = {}
    for block in range(int(last) // lanes + 1):
        if edit.indices is None:
            inside = slice(block * lanes, (block + 1) * lanes)
            before, after = flat_bytes(edit.before[inside]), flat_bytes(edit.after[inside])
            offset = block * BLOCK_NBYTES
            grown[block] = range_sum(spec, offset, after) - range_sum(spec, offset, before)
        else:
            first, end = span(edit.indices, block * lanes, (block + 1) * lanes)
            if first < end:
                inside = slice(first, end)
                grown[block] = change_sum(spec, edit.indices[inside], edit.before[inside], edit.after[inside])
    return grown


class DeltaCommit(StagedCommit):
    """Writes new values over the old ones that changed; addresses stay.

    Old and new values are worked out beforehand and written as values, never added: so an interrupted commit can be undone,
    and undone again, whatever it had reached. `base` is what the model serves.
    """

    def __init__(
        self, plan: Plan, manifest: Manifest, delta: Delta, *, base: Manifest, checksum: bool, tick: Tick = silent
    ) -> None:
        super().__init__(plan, tick=tick)
        self._manifest, self._delta, self._base, self._checksum = manifest, delta, base, checksum
        self._edits: list[tuple[LaneMemory, TensorEdit]] = []

    def prepare(self, deadline: Deadline) -> None:
        """Work the delta out, and prove what it will lead to before anything is touched. Reads what changes, and no more."""
        sums = _Sums({entry.name: entry for entry in self._base.tensors})
        for landing in self._plan.landings:
            change, edit = self._delta.tensors.get(landing.entry.name), None
            if change is not None:
                memory = landing.slot.lanes()
                edit = edit_tensor(memory, change)
                self._edits.append((memory, edit))
            sums.add(landing, landing.slot.live, edit, self._tick)
            deadline.check(f"working out the delta to {self._manifest.version}")
        if self._checksum:
            where = f"version {self._manifest.version} as the delta makes it"
            sums.check(where, self._plan)
            self._check_bytes(where, deadline)
        if not self._manifest.sealed:
            self.sealed = sums.seal(self._manifest, self._plan)
        self.growth = sums.growth

    def _check_bytes(self, where: str, deadline: Deadline) -> None:
        """Compare tensors that have digests of bytes and no sums, as in format 1, with the whole new state."""
        found: dict[str, str] = {}
        for landing in self._plan.landings:
            entry = landing.entry
            if not entry.sum and entry.digest:
                after = MovedState(ArrayState({entry.name: landing.slot.live()}), self._delta)
                digest = tensor_proof(after, entry.name, entry.digest)
                if digest != entry.digest or entry.name not in found:  # of several slots, the one that is wrong counts
                    found[entry.name] = digest
                deadline.check(f"hashing {entry.name} of {self._manifest.version}")
        check_digests(where, {name: self._plan.entries[name] for name in found}, found)

    def apply(self) -> None:
        """Write the new values."""
        for memory, edit in self._edits:
            self._undo.append(partial(memory.write, edit.indices, edit.before))  # before the step: nothing is lost between
            memory.write(edit.indices, edit.after)
            self._tick()

    def prove(self) -> None:
        """Read back what was written."""
        wrong = []
        for memory, edit in self._edits:
            if not memory.holds(edit.indices, edit.after):
                wrong.append((edit.spec.name, "the values that were written", "others"))
            self._tick()
        if wrong:
            raise DigestMismatch("the live model after the commit", wrong)

    def changes(self) -> Iterable[TensorEdit]:
        """The old and the new values."""
        return [edit for _, edit in self._edits]

    def keep_way_back(self) -> bool:
        """The old values."""
        self._edits = []
        self._delta = Delta({}, {})
        return True


@dataclass(frozen=True)
class Spare:
    """The buffers that a swap took out of the model, the version that they hold, and the delta from there to what the model
    holds.
    """

    memories: Mapping[int, object]
    held: Manifest
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
        base: Manifest,
        checksum: bool,
        spare: Spare | None,
        buffers: Buffers,
        tick: Tick = silent,
    ) -> None:
        super().__init__(plan, tick=tick)
        self._manifest, self._delta, self._checksum, self._spare = manifest, delta, checksum, spare
        self._base = base
        self._buffers = buffers
        self._new: list[object] = []
        self._former: dict[int, object] = {}

    def prepare(self, deadline: Deadline) -> None:
        """Move the spare buffers to the new version, and prove what that leads to."""
        slots = [landing.slot for landing in self._plan.landings]
        spare, self._spare = self._spare, None
        if spare is not None and all(spare.memory(slot) is not None for slot in slots):
            self._new = [spare.memory(slot) for slot in slots]
            folded, held = fold(spare.lead, self._delta), spare.held
        else:
            self._new = [slot.make(copied(slot, slot.live(), self._buffers)) for slot in slots]
            folded, held = self._delta, self._base
        sums = _Sums({entry.name: entry for entry in held.tensors})
        for landing, memory in zip(self._plan.landings, self._new, strict=True):
            change, edit = folded.tensors.get(landing.entry.name), None
            lanes = landing.slot.lanes(memory)
            if change is not None:
                edit = edit_tensor(lanes, change)
            sums.add(landing, partial(landing.slot.seen, memory), edit, self._tick)
            if edit is not None:
                lanes.write(edit.indices, edit.after)
            deadline.check(f"bringing the spare buffers to {self._manifest.version}")
        if self._checksum:
            where = f"version {self._manifest.version} in the spare buffers"
            sums.check(where, self._plan)
            self._check_bytes(where, deadline)
        if not self._manifest.sealed:
            self.sealed = sums.seal(self._manifest, self._plan)

    def _check_bytes(self, where: str, deadline: Deadline) -> None:
        """Compare tensors that have digests of bytes and no sums, as in format 1."""
        found: dict[str, str] = {}
        for landing, memory in zip(self._plan.landings, self._new, strict=True):
            entry = landing.entry
            if not entry.sum and entry.digest:
                digest = array_proof(entry.sum_spec, landing.slot.seen(memory), entry.digest, self._tick)
                if digest != entry.digest or entry.name not in found:
                    found[entry.name] = digest
                deadline.check(f"hashing {entry.name} of {self._manifest.version}")
        check_digests(where, {name: self._plan.entries[name] for name in found}, found)

    def apply(self) -> None:
        """Switch every slot."""
        for landing, memory in zip(self._plan.landings, self._new, strict=True):
            former = landing.slot.memory()
            if former is not None:
                self._former[id(landing.slot)] = former
            self._install(landing.slot, memory)

    def prove(self) -> None:
        """Compare the pointers. Nothing was written since the spare buffers were proved."""
        prove_installed(self._plan, self._new)

    def changes(self) -> Iterable[TensorEdit]:
        """The live values that differ in the spare buffers, and what lies there."""
        for landing, memory in zip(self._plan.landings, self._new, strict=True):
            change = self._delta.tensors.get(landing.entry.name)
            if change is not None:
                before, after = landing.slot.lanes().read(change.indices), landing.slot.lanes(memory).read(change.indices)
                yield TensorEdit(change.spec, change.indices, before, after)

    def incoming(self) -> dict[str, Array]:
        """The spare buffers."""
        return seen_by_name(self._plan, self._new)

    def next_spare(self) -> Spare:
        """What the model held before: the buffers for the next swap."""
        return Spare(self._former, self._base, self._delta)

    def spare_after_undo(self) -> Spare:
        """The buffers that `undo` took out of the model again, which hold what the delta led to."""
        new = {id(landing.slot): memory for landing, memory in zip(self._plan.landings, self._new, strict=True)}
        return Spare(new, (self.sealed or (self._manifest, self._plan))[0], invert(self._delta))

    def forget(self) -> None:
        """Let go of both sets of buffers."""
        super().forget()
        self._new, self._former, self._delta = [], {}, Delta({}, {})
