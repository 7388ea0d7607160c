"""File names of the legacy snapshot layout: one builder and one parser that invert each other.

    model_state.tp{rank}.{id}.part{N}.pdparams     one part of several
    model_state.tp{rank}.{id}.pdparams             everything in one file
    model_state.tp0{id}.pdparams                   the oldest form: no dot, the rank always 0
    model_state.tp{rank}.{id}.manifest.json        ours, beside the files it describes

Ids have no dots, so the dots alone tell the forms and the rank from the id: tp1 + 234 and tp12 + 34 are two names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from weightcast.errors import InvalidInput

Kind = Literal["part", "single", "legacy", "manifest"]

SUFFIX = ".pdparams"
_MANIFEST_SUFFIX = ".manifest.json"
_START = "model_state."
_ID = re.compile(r"(?!part[0-9]*\Z)[a-z0-9][a-z0-9_-]{0,127}", re.ASCII | re.IGNORECASE)  # `part3` would read as a part
_DOTTED = re.compile(
    r"model_state[.]tp(?P<rank>0|[1-9][0-9]*)[.](?P<id>[^.]+)"
    r"(?:[.]part(?P<part>[0-9]+)[.]pdparams|(?P<single>[.]pdparams)|(?P<manifest>[.]manifest[.]json))"
)
_LEGACY = re.compile(r"model_state[.]tp0(?P<id>[^.]+)[.]pdparams")


@dataclass(frozen=True)
class SnapshotName:
    """What a file name says. `part` is set for kind `part` alone."""

    kind: Kind
    rank: int
    device_id: str
    part: int | None = None


def check_rank(rank: int) -> int:
    """Refuse what is not a rank. A rank is always given, never guessed."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise InvalidInput(f"{rank!r} cannot be a rank: it must be an integer, zero or more.")
    return rank


def check_device_id(device_id: str) -> str:
    """Refuse a device id that a file name could not give back."""
    if not isinstance(device_id, str) or not _ID.fullmatch(device_id):
        raise InvalidInput(
            f"{device_id!r} cannot be a device id: use a number or a UUID such as GPU-1f2e, made of 1 to 128 letters, "
            "digits, - and _, not starting with a mark and not of the form part3."
        )
    return device_id


def build(name: SnapshotName) -> str:
    """The file name; `parse` gives back exactly `name`."""
    check_rank(name.rank)
    check_device_id(name.device_id)
    if (name.part is not None) != (name.kind == "part") or (name.part is not None and name.part < 0):
        raise InvalidInput(f"a snapshot file of kind {name.kind} cannot have part number {name.part}.")
    stem = f"{_START}tp{name.rank}.{name.device_id}"
    if name.kind == "part":
        return f"{stem}.part{name.part}{SUFFIX}"
    if name.kind == "single":
        return stem + SUFFIX
    if name.kind == "manifest":
        return stem + _MANIFEST_SUFFIX
    if name.rank != 0:
        raise InvalidInput(f"the legacy file name has room for rank 0 only, not for rank {name.rank}.")
    return f"{_START}tp0{name.device_id}{SUFFIX}"


def parse(file_name: str) -> SnapshotName | None:
    """What a file name (without its directory) says, or None if it is not one of the forms.

    A part number may have leading zeros: the layout always allowed any digits. Everything else has one spelling.
    """
    found = _DOTTED.fullmatch(file_name) or _LEGACY.fullmatch(file_name)
    if found is None or not _ID.fullmatch(found["id"]):
        return None
    if found.re is _LEGACY:
        return SnapshotName("legacy", 0, found["id"])
    rank, device_id = int(found["rank"]), found["id"]
    if found["part"] is not None:
        return SnapshotName("part", rank, device_id, int(found["part"]))
    return SnapshotName("single" if found["single"] else "manifest", rank, device_id)


def looks_like_part(file_name: str, rank: int, device_id: str) -> bool:
    """Whether a name means to be a part of this rank and id. It may still not parse."""
    return file_name.startswith(f"{_START}tp{rank}.{device_id}.part") and file_name.endswith(SUFFIX)


def looks_like_snapshot(file_name: str) -> bool:
    """Whether a name means to be a file of this layout. It may still not parse."""
    return file_name.startswith(f"{_START}tp") and file_name.endswith((SUFFIX, _MANIFEST_SUFFIX))


def part_name(rank: int, device_id: str, part: int) -> str:
    """The file name of one part."""
    return build(SnapshotName("part", rank, device_id, part))


def single_name(rank: int, device_id: str) -> str:
    """The file name of a snapshot in one file."""
    return build(SnapshotName("single", rank, device_id))


def legacy_name(device_id: str) -> str:
    """The oldest file name, which carries rank 0 whatever the rank is."""
    return build(SnapshotName("legacy", 0, device_id))


def manifest_name(rank: int, device_id: str) -> str:
    """The file name of our manifest."""
    return build(SnapshotName("manifest", rank, device_id))
