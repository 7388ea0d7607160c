"""A model whose parameters are boxes of a version's tensors: what its `LiveModel` takes of each version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from weightcast.errors import InvalidInput, Mismatch
from weightcast.tensors.boxes import Held, Placement
from weightcast.wire.manifest import Manifest
from weightcast.worker.fit import FitRules, broken_groups, misfit, plan_update
from weightcast.worker.result import CommitMode
from weightcast.worker.serving import Served
from weightcast.worker.shard_layout import HeldVersion, Shards
from weightcast.worker.shard_sums import BoxSum, sums_by_tensor
from weightcast.worker.shard_version import ShardVersion
from weightcast.worker.shards import cut
from weightcast.worker.stager import Stager
from weightcast.worker.targets.capture import CapturedPart, ModelPart

_UNTIED = (
    "the model ties them, the version does not, and a delta does not tell whether they stay equal. Publish them as one "
    "tensor with both names, or publish a full version"
)


@dataclass(frozen=True)
class BoxTarget:
    """One model, and where its parameters lie in a version's tensors: `layout`, or what its distributed tensors say."""

    part: CapturedPart
    rules: FitRules
    layout: Shards | None

    @classmethod
    def of(cls, parts: Sequence[CapturedPart], rules: FitRules, layout: Shards | None) -> BoxTarget | None:
        """None for models of whole tensors. Refuses a layout that is not that of the model."""
        if layout is None and not any(part.boxes for part in parts):
            return None
        if len(parts) > 1 or (layout is not None and (parts[0].boxes or parts[0].part.rename or parts[0].part.names)):
            raise InvalidInput(
                "a model whose parameters are boxes of tensors needs a LiveModel of its own. With a layout give the module "
                "or mapping itself: not a ModelPart, and no DTensors."
            )
        if layout is not None and rules.strip_wrappers:
            raise InvalidInput("a layout names the tensors of a version: write the names there instead of strip_wrappers.")
        target = cls(parts[0], rules, layout)
        if layout is not None:
            target._check(layout)
        return target

    def cut(self, stager: Stager, manifest: Manifest, served: Served | None, mode: CommitMode) -> ShardVersion:
        """What the model takes of a version, fetched and proved. Nothing live is touched."""
        held = None
        if served is not None and served.full is not None and all(slot.resident for slot in self.part.slots):
            held = HeldVersion(served.full, served.manifest, stager.receiver.url, proved=served.proved, sums=served.sums)
        based = held is not None and manifest.base is not None and manifest.base.root_digest == held.full.root_digest
        return cut(
            stager.receiver,
            manifest,
            self._shards(manifest, swap=mode == "swap"),
            held=held,
            mode="delta" if mode == "inplace" and based else mode,  # a delta needs no memory to stage in
            checksum=stager.checksum,
            deadline=stager.deadline,
            progress=lambda _done, _total: None,
            buffers=stager.buffers,
            keep=mode != "inplace",
            live=lambda: {name: slot.live() for slot in self.part.slots for name in slot.names},
        )

    def staging(self, stager: Stager, version: ShardVersion, mode: CommitMode) -> tuple[Stager, Manifest, CommitMode]:
        """What stages that: its tensors are called as the model's own, and have sums of their own."""
        part = CapturedPart(ModelPart(self.part.part.model), self.part.slots)
        own = replace(stager, receiver=version, parts=(part,), rules=FitRules(fixed=("*",)), checksum=True)
        return own, version.shard, "delta" if version.by_delta and mode != "swap" else mode

    def tensor_sums(self, full: Manifest, sums: Sequence[BoxSum]) -> dict[str, BoxSum]:
        """What the model's boxes add to each tensor of a version that the model wants, on whatever rank.

        `sums` are those of the boxes in their order.
        """
        shards, entries = self._shards(full, swap=False), full.by_name()
        wanted = {entries[name].name: BoxSum() for name in shards.sources}
        return wanted | sums_by_tensor(shards.named_as(full), sums)

    def _shards(self, manifest: Manifest, *, swap: bool) -> Shards:
        if self.layout is not None:
            shards = replace(self.layout, ignore=(*self.layout.ignore, *self.rules.ignore))
            names = manifest.by_name()
            mismatches = [*shards.mismatches(manifest), *broken_groups(set(names), self.rules.groups)]
            if mismatches:
                raise misfit(manifest.version, names, mismatches, shards.sources)
            return shards
        landings = plan_update(manifest, [self.part], self.rules, swap=swap).landings
        untied = [
            Mismatch("tied", " = ".join(entry.name for entry in (landing.entry, *landing.same)), _UNTIED)
            for landing in landings
            if landing.same and not landing.entry.digest
        ]
        if untied:
            raise misfit(manifest.version, manifest.by_name(), untied, None)
        held = []
        for landing in landings:
            spec = landing.slot.spec
            box = self.part.box(landing.slot)
            placed = (Placement(landing.entry.name, box, (0,) * len(box.shape)),) if prod(box.shape) else ()
            held.append(Held(spec, placed))
        return Shards(tuple(held), {one.entry.name: one.entry.shape for one in landings}, ignore=("*",))

    def _check(self, layout: Shards) -> None:
        slots = {name: slot for slot in self.part.slots for name in slot.names}
        problems = []
        for held in layout.held:
            slot = slots.get(held.spec.name)
            if slot is None:
                problems.append(f"the model has no {held.spec.name!r}")
            elif slot.spec != replace(held.spec, name=slot.spec.name):
                problems.append(f"{held.spec.name!r} is {slot.spec.describe()} in the model, not {held.spec.describe()}")
        laid_out = {held.spec.name for held in layout.held}
        problems += [
            f"{slot.spec.name!r} is not in the layout"
            for slot in self.part.slots
            if laid_out.isdisjoint(slot.names) and not self.rules.keeps(slot)
        ]
        if problems:
            raise InvalidInput(f"the layout is not that of the model: {'; '.join(problems)}.")
