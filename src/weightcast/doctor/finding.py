"""What a probe says."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "note", "problem"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at.

    `ok`: there, and it works. `note`: absent or small, and something is slower or not offered. `problem`: there and broken.
    `cure` is a command, or what to do; empty where nothing is to be done.
    """

    name: str
    level: Level
    found: str
    meaning: str
    cure: str = ""


def ok(name: str, found: str, meaning: str) -> Finding:
    """There, and it works."""
    return Finding(name=name, level="ok", found=found, meaning=meaning)


def note(name: str, found: str, meaning: str, cure: str = "") -> Finding:
    """Absent or small: what that means, and what changes it."""
    return Finding(name=name, level="note", found=found, meaning=meaning, cure=cure)


def problem(name: str, found: str, meaning: str, cure: str) -> Finding:
    """There, and broken."""
    return Finding(name=name, level="problem", found=found, meaning=meaning, cure=cure)


def extra(name: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'weightcast[{name}]'"
