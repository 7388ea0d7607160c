"""Which bytes of a file a request wants: Range, If-Range, If-Match and If-None-Match. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

MAX_RANGES = 64  # in one request

_SEVERAL = re.compile(r"bytes=[ \t]*(\d{1,18}-\d{1,18}(?:[ \t]*,[ \t]*\d{1,18}-\d{1,18})+)[ \t]*", re.ASCII | re.IGNORECASE)
_RANGE = re.compile(r"bytes=[ \t]*(\d{0,18})-(\d{0,18})[ \t]*", re.ASCII | re.IGNORECASE)


def asked_range(headers: Mapping[str, str], tag: str, nbytes: int) -> tuple[int, int] | None:
    """Start and stop of the one range that is asked for; None if the whole file is. An empty range is one outside the file.

    As HTTP has it, the whole file answers everything that is not a single range in bytes of this very file: other units,
    several ranges, nonsense, and an If-Range that names other bytes.
    """
    found = _RANGE.fullmatch(headers.get("range", ""))
    if found is None or headers.get("if-range", tag) != tag:
        return None
    first, last = found[1], found[2]
    if first and last and int(last) < int(first):
        return None
    if first:
        start = int(first)
        stop = min(int(last) + 1, nbytes) if last else nbytes
        return (start, stop) if start < nbytes else (0, 0)
    if not last:
        return None
    return max(0, nbytes - int(last)), nbytes


def asked_ranges(headers: Mapping[str, str], tag: str, nbytes: int) -> list[tuple[int, int]]:
    """Start and stop of each of several ranges; empty if not several are asked for. Then `asked_range` says what is.

    Only ranges in ascending order that do not overlap count, so an answer never has more bytes than the file.
    """
    found = _SEVERAL.fullmatch(headers.get("range", ""))
    if found is None or headers.get("if-range", tag) != tag:
        return []
    texts = found[1].split(",", MAX_RANGES)
    if len(texts) > MAX_RANGES:
        return []
    ranges = [(int(first), int(last) + 1) for first, _, last in (text.partition("-") for text in texts)]
    apart = all(before[1] <= after[0] for before, after in pairwise(ranges))
    return ranges if apart and ranges[-1][1] <= nbytes and all(start < stop for start, stop in ranges) else []


def names_tag(field: str, tag: str, *, weak: bool) -> bool:
    """Whether the list of tags in a header field has this one; `weak` tags count only where nothing is written together."""
    if field.strip() == "*":
        return True
    tags = [one.strip() for one in field.split(",")]
    return tag in tags or (weak and f"W/{tag}" in tags)
