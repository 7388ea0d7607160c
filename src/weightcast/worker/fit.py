"""Does a version fit a model? Pure: compares, and lists every mismatch before anything is written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from weightcast.errors import Mismatch, VersionDoesNotFit
from weightcast.wire.manifest import Manifest, TensorEntry
from weightcast.worker.targets.base import Slot
from weightcast.worker.targets.capture import CapturedPart

Group = tuple[str, ...]

# Tensors that engines fuse into one: half of such a group must never arrive alone.
TRANSFORMER_GROUPS: tuple[Group, ...] = (
    ("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"),
    ("*.q_proj.bias", "*.k_proj.bias", "*.v_proj.bias"),
    ("*.gate_proj.weight", "*.up_proj.weight"),
)


@dataclass(frozen=True)
class Landing:
    """A tensor of the version and the slot it goes into. One tensor may land in several slots.

    `same` are further tensors with equal bytes that the model ties to this slot: they are not fetched again.
    """

    entry: TensorEntry
    slot: Slot
    same: tuple[TensorEntry, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything an update will write: every slot exactly once."""

    landings: tuple[Landing, ...]

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """The tensors that are needed, by the name that holds their bytes."""
        return {landing.entry.name: landing.entry for landing in self.landings}

    @property
    def nbytes(self) -> int:
        """Bytes to fetch."""
        return sum(entry.nbytes for entry in self.entries.values())

    def slots(self) -> dict[str, list[Slot]]:
        """The slots that each tensor lands in, by the tensor's name."""
        slots: dict[str, list[Slot]] = {}
        for landing in self.landings:
            slots.setdefault(landing.entry.name, []).append(landing.slot)
        return slots


@dataclass(frozen=True)
class FitRules:
    """What the caller declared about a model.

    `groups` are sets of patterns with one ``*`` in common places that must be in a version together. `ignore` are patterns
    of tensors that a version has and no model wants. `fixed` are patterns of parameters that versions do not carry.
    """

    groups: Sequence[Group] = ()
    ignore: Sequence[str] = ()
    fixed: Sequence[str] = ()


def plan_update(manifest: Manifest, parts: Sequence[CapturedPart], rules: FitRules, *, swap: bool) -> Plan:
    """Which tensor goes where, or `VersionDoesNotFit` with every mismatch; `swap` also asks that memory can be swapped."""
    mismatches: list[Mismatch] = []
    landings: list[Landing] = []
    for part in parts:
        found = _Arrivals(manifest, part)
        mismatches += found.mismatches
        landings += found.land(rules.fixed, mismatches)
    landed = {entry.name for landing in landings for entry in (landing.entry, *landing.same)}
    for name, entry in manifest.by_name().items():
        if entry.name not in landed and not _matches(name, rules.ignore) and name == entry.name:
            mismatches.append(
                Mismatch("unexpected", name, f"the version has {entry.spec.describe()}, the model has no such name")
            )
    mismatches += _broken_groups(set(manifest.by_name()), rules.groups)
    if swap:
        mismatches += [
            Mismatch(
                "not swappable", landing.slot.spec.name, "its memory is shared with other tensors; commit by copy instead"
            )
            for landing in landings
            if landing.slot.resident and not landing.slot.owns_memory
        ]
    if not landings and not mismatches:
        mismatches.append(
            Mismatch("nothing to write", manifest.version, "no tensor of the version has a place in the model")
        )
    if mismatches:
        raise VersionDoesNotFit(manifest.version, _without_repeats(mismatches))
    return Plan(tuple(landings))


class _Arrivals:
    """What a version brings for each slot of one part."""

    def __init__(self, manifest: Manifest, captured: CapturedPart) -> None:
        part = captured.part
        self.mismatches: list[Mismatch] = []
        self._slots = captured.slots
        self._digests = manifest.algorithm is not None
        self._by_slot: dict[int, list[TensorEntry]] = {}
        known = {name: slot for slot in captured.slots for name in slot.names}
        matched = 0
        for name, entry in manifest.by_name().items():
            if part.names is not None and not _matches(name, part.names):
                continue
            matched += 1
            own_name = part.rename(name) if part.rename else name
            slot = known.get(own_name)
            if slot is not None:
                self._by_slot.setdefault(id(slot), []).append(entry)
            elif part.names is not None:
                self.mismatches.append(Mismatch("unexpected", name, f"it was declared for a model that has no {own_name!r}"))
        if part.names is not None and not matched:
            patterns = ", ".join(part.names)
            self.mismatches.append(Mismatch("missing", patterns, "the version has no tensor that matches these names"))

    def land(self, fixed: Sequence[str], mismatches: list[Mismatch]) -> Iterator[Landing]:
        for slot in self._slots:
            entries = self._by_slot.get(id(slot), [])
            if not entries:
                if not (slot.resident and any(_matches(name, fixed) for name in slot.names)):
                    detail = f"the model wants {slot.spec.describe()}, the version does not have it"
                    mismatches.append(Mismatch("missing", " = ".join(slot.names), detail))
                continue
            mismatches += self._disagreements(slot, entries)
            first, *rest = {entry.name: entry for entry in entries}.values()
            yield Landing(first, slot, tuple(rest))

    def _disagreements(self, slot: Slot, entries: list[TensorEntry]) -> Iterator[Mismatch]:
        for entry in entries:
            if entry.dtype != slot.spec.dtype:
                yield Mismatch("dtype", entry.name, f"the model has {slot.spec.dtype}, the version {entry.dtype}")
            if entry.shape != slot.spec.shape:
                yield Mismatch(
                    "shape", entry.name, f"the model has {list(slot.spec.shape)}, the version {list(entry.shape)}"
                )
        distinct = {entry.name for entry in entries}
        if len(distinct) > 1 and (not self._digests or len({entry.digest for entry in entries}) > 1):
            detail = "the model ties these names to one memory, the version has different bytes for them"
            yield Mismatch("tied", " = ".join(sorted(distinct)), detail)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _without_repeats(mismatches: list[Mismatch]) -> list[Mismatch]:
    return list(dict.fromkeys(mismatches))


def _broken_groups(names: set[str], groups: Sequence[Group]) -> Iterator[Mismatch]:
    for group in groups:
        stems: dict[tuple[str, ...], set[str]] = {}
        for pattern in group:
            expression = re.compile("(.*)".join(map(re.escape, pattern.split("*"))))
            for name in names:
                match = expression.fullmatch(name)
                if match:
                    stems.setdefault(match.groups(), set()).add(pattern)
        for stem, present in sorted(stems.items()):
            absent = [pattern for pattern in group if pattern not in present]
            if absent:
                lacking = ", ".join(_fill(pattern, stem) for pattern in absent)
                having = ", ".join(_fill(pattern, stem) for pattern in group if pattern in present)
                yield Mismatch("incomplete group", having, f"must come together with {lacking}")


def _fill(pattern: str, stem: tuple[str, ...]) -> str:
    pieces = pattern.split("*")
    return "".join(piece + (stem[index] if index < len(stem) else "") for index, piece in enumerate(pieces))
