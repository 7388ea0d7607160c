"""Does a version fit a model? Pure: compares, and lists every mismatch before anything is written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from weightcast.errors import Mismatch, VersionDoesNotFit
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array
from weightcast.tensors.placing import converts
from weightcast.tensors.spec import bare_names, barest_names, check_distinct
from weightcast.tensors.sums import array_sum
from weightcast.wire.manifest import Manifest, TensorEntry
from weightcast.worker.targets.base import Slot
from weightcast.worker.targets.capture import CapturedPart

Group = tuple[str, ...]

_SHOWN_NAMES = 3  # of many that are explained at once

# Tensors that engines fuse into one: half of such a group must never arrive alone.
TRANSFORMER_GROUPS: tuple[Group, ...] = (
    ("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"),
    ("*.q_proj.bias", "*.k_proj.bias", "*.v_proj.bias"),
    ("*.gate_proj.weight", "*.up_proj.weight"),
)


_TIED = "the model ties these names to one memory, the version has different bytes for them"


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

    def with_entries(self, entries: Mapping[str, TensorEntry]) -> Plan:
        """The same with these entries for tensors of their names."""
        return Plan(
            tuple(
                Landing(entries[one.entry.name], one.slot, tuple(entries[entry.name] for entry in one.same))
                for one in self.landings
            )
        )

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
    `strip_wrappers` compares names without what wrappers of modules put into them.
    """

    groups: Sequence[Group] = ()
    ignore: Sequence[str] = ()
    fixed: Sequence[str] = ()
    strip_wrappers: bool = False

    def keeps(self, slot: Slot) -> bool:
        """Whether a slot may stay as it is where a version has nothing for it."""
        return slot.resident and any(_matches(name, self.fixed) for name in slot.names)


def plan_update(manifest: Manifest, parts: Sequence[CapturedPart], rules: FitRules, *, swap: bool) -> Plan:
    """Which tensor goes where, or `VersionDoesNotFit` with every mismatch; `swap` also asks that memory can be swapped."""
    mismatches: list[Mismatch] = []
    landings: list[Landing] = []
    bare = barest_names(manifest.by_name()) if rules.strip_wrappers else {}
    check_distinct(bare, f"version {manifest.version}")
    for part in parts:
        found = _Arrivals(manifest, part, bare)
        mismatches += found.mismatches
        landings += found.land(rules, mismatches)
    landed = {entry.name for landing in landings for entry in (landing.entry, *landing.same)}
    for name, entry in manifest.by_name().items():
        if entry.name not in landed and not _matches(name, rules.ignore) and name == entry.name:
            mismatches.append(
                Mismatch("unexpected", name, f"the version has {entry.spec.describe()}, the model has no such name")
            )
    mismatches += broken_groups(set(manifest.by_name()), rules.groups)
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
        names = {name for part in parts for slot in part.slots for name in slot.names}
        raise misfit(manifest.version, manifest.by_name(), mismatches, names, live=True)
    return Plan(tuple(landings))


class _Arrivals:
    """What a version brings for each slot of one part."""

    def __init__(self, manifest: Manifest, captured: CapturedPart, bare: Mapping[str, str]) -> None:
        """`bare` are the names to use instead of those of the version."""
        part = captured.part
        self._part = captured
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
            own_name = bare.get(name, name)
            own_name = part.rename(own_name) if part.rename else own_name
            slot = known.get(own_name)
            if slot is not None:
                self._by_slot.setdefault(id(slot), []).append(entry)
            elif part.names is not None:
                self.mismatches.append(Mismatch("unexpected", name, f"it was declared for a model that has no {own_name!r}"))
        if part.names is not None and not matched:
            patterns = ", ".join(part.names)
            self.mismatches.append(Mismatch("missing", patterns, "the version has no tensor that matches these names"))

    def land(self, rules: FitRules, mismatches: list[Mismatch]) -> Iterator[Landing]:
        for slot in self._slots:
            entries = self._by_slot.get(id(slot), [])
            if not entries:
                if not rules.keeps(slot):
                    detail = f"the model wants {self._part.whole(slot).describe()}, the version does not have it"
                    mismatches.append(Mismatch("missing", " = ".join(slot.names), detail))
                continue
            mismatches += self._disagreements(slot, entries)
            first, *rest = {entry.name: entry for entry in entries}.values()
            yield Landing(first, slot, tuple(rest))

    def _disagreements(self, slot: Slot, entries: list[TensorEntry]) -> Iterator[Mismatch]:
        for entry in entries:
            wanted = self._part.whole(slot)
            if entry.dtype != wanted.dtype:
                detail = f"the model has {wanted.dtype}, the version {entry.dtype}"
                yield Mismatch("dtype", entry.name, detail, found=entry.dtype, wanted=wanted.dtype)
            if entry.shape != wanted.shape:
                yield Mismatch("shape", entry.name, f"the model has {list(wanted.shape)}, the version {list(entry.shape)}")
        distinct = {entry.name for entry in entries}
        if len(distinct) > 1 and (not self._digests or len({entry.digest for entry in entries}) > 1):
            yield Mismatch("tied", " = ".join(sorted(distinct)), _TIED)


def check_ties(version: str, plan: Plan, array_of: Callable[[Landing], Array]) -> None:
    """Refuse a version that has different bytes for names that the model ties to one memory.

    Where such tensors have digests of bytes, planning has compared these. Others are compared by their sums, which depend on
    the name: each must be that of the one array that the slot takes.
    """
    different = [
        Mismatch("tied", f"{landing.entry.name} = {entry.name}", _TIED)
        for landing in plan.landings
        for entry in landing.same
        if entry.sum and not entry.digest and str(array_sum(entry.sum_spec, array_of(landing))) != entry.sum
    ]
    if different:
        raise VersionDoesNotFit(version, different)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def misfit(
    version: str,
    theirs: Collection[str],
    mismatches: Sequence[Mismatch],
    ours: Collection[str] | None,
    *,
    live: bool = False,
) -> VersionDoesNotFit:
    """The error for a version with names `theirs` that does not fit a model with names `ours` (None: they are not known).

    Names that differ only by wrappers, and dtypes that can be converted, are explained once. `live`: the model is that of a
    `LiveModel`, which can strip names itself.
    """
    found = list(dict.fromkeys(mismatches))
    return VersionDoesNotFit(version, found, [*_name_cures(found, theirs, ours, live=live), *_dtype_cures(found)])


def _name_cures(
    mismatches: Sequence[Mismatch], theirs: Collection[str], ours: Collection[str] | None, *, live: bool
) -> Iterator[tuple[str, list[Mismatch]]]:
    there = _by_bare_name(theirs)
    here = {bare: bare for bare in there} if ours is None else _by_bare_name(ours)
    pairs = {there[bare]: here[bare] for bare in there.keys() & here.keys() if there[bare] != here[bare]}
    wanted = set(pairs.values())
    some = [
        one
        for one in mismatches
        if (one.name in pairs if one.kind != "missing" else not wanted.isdisjoint(one.name.split(" = ")))
    ]
    if not some:
        return
    wrapped = [name for name in pairs if len(name) > len(pairs[name])]  # by what the trainer published; else it is the model
    example = min(wrapped or pairs)
    published = bare_names(theirs)  # with strip_wrappers; of module.module. it leaves one
    strips = bool(wrapped) and all(published[name] == pairs[name] for name in wrapped)
    cures = ["publish it with strip_wrappers=True (weightcast publish --strip-wrappers)"] if strips else []
    cures += ["make the LiveModel with strip_wrappers=True"] if live else []
    last = "publish it under the names of the model" if wrapped else "unwrap the model"
    yield (
        f"{len(pairs)} of its {len(theirs)} names differ from the model's only by what a wrapper puts into them: it has "
        f"{example!r}, the model {pairs[example]!r}; {' or '.join(cures) or last}.",
        some,
    )


def _by_bare_name(names: Collection[str]) -> dict[str, str]:
    """Names by what remains of them without wrappers, but for those of which the same remains."""
    bare = barest_names(names)
    counts = Counter(bare.values())
    return {short: name for name, short in bare.items() if counts[short] == 1}


def _dtype_cures(mismatches: Sequence[Mismatch]) -> Iterator[tuple[str, list[Mismatch]]]:
    by_dtypes: dict[tuple[str, str], list[Mismatch]] = {}
    for one in mismatches:
        if one.kind == "dtype" and one.found and converts(DType(one.found), DType(one.wanted)):
            by_dtypes.setdefault((one.found, one.wanted), []).append(one)
    for (found, wanted), some in by_dtypes.items():
        names = ", ".join([one.name for one in some[:_SHOWN_NAMES]] + (["..."] if len(some) > _SHOWN_NAMES else []))
        yield (
            f"{len(some)} tensor(s) are {found} and the model wants {wanted} ({names}): publish with dtype={str(wanted)!r} "
            f"(weightcast publish --dtype {wanted}), and keep_dtype= for tensors that are to stay as they are.",
            some,
        )


def broken_groups(names: set[str], groups: Sequence[Group]) -> Iterator[Mismatch]:
    """Groups of which a version has a part only."""
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
