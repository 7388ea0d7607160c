"""Boxes of tensors, sent from where they lie, each with the digest of the very bytes that were sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod

import msgspec
import numpy as np

from weightcast.depot.exchange import Reply, Request
from weightcast.depot.holding import Shelf
from weightcast.depot.reading import BOUNCE_NBYTES, Reading, Tensors, box_blocks
from weightcast.errors import Conflict, InvalidInput, NotFound
from weightcast.tensors.boxes import Box
from weightcast.tensors.digest import DEFAULT, Algorithm, Hasher
from weightcast.tensors.flat import Buffer
from weightcast.wire.depot import DIGESTS_HEADER, BoxOf, BoxQuery
from weightcast.wire.manifest import Manifest, TensorEntry

MAX_BOXES = 1 << 16
MAX_PROBLEMS = 100  # of a question that are listed in an answer
_PROBLEM_LENGTH = 1000

Chosen = Sequence[tuple[TensorEntry, Box]]


class Boxes:
    """Answers questions for boxes of a version."""

    def __init__(self, shelf: Shelf, reading: Reading) -> None:
        self._shelf, self._reading = shelf, reading

    def answer(self, request: Request, stack: ExitStack) -> Reply:
        """The bytes of all boxes one after the other, and then their digests."""
        query = request.read(BoxQuery)
        holding = stack.enter_context(self._shelf.holding(request.path["version"]))
        check_root(holding.manifest, query.root_digest)
        tensors = stack.enter_context(self._reading.tensors(holding, deadline=request.deadline))
        chosen = _chosen(tensors, query.boxes)
        for entry in {entry.name: entry for entry, _ in chosen}.values():
            self._reading.prove(tensors, entry, deadline=request.deadline)
        algorithm = holding.manifest.algorithm or DEFAULT
        tail = len(msgspec.json.encode([Hasher(algorithm).digest()] * len(chosen)))  # all digests are of the same length
        nbytes = sum(prod(box.shape) * entry.dtype.itemsize for entry, box in chosen)
        headers = {"Content-Type": "application/octet-stream", DIGESTS_HEADER: str(tail)}
        return Reply(200, _body(tensors, chosen, algorithm), nbytes + tail, headers)


def _body(tensors: Tensors, chosen: Chosen, algorithm: Algorithm) -> Iterator[Buffer]:
    bounce = np.empty(BOUNCE_NBYTES, dtype=np.uint8)
    digests = []
    for entry, box in chosen:
        hasher = Hasher(algorithm)
        for block in box_blocks(tensors, entry, box, bounce):
            hasher.update(block)
            yield block
        digests.append(hasher.digest())
    yield msgspec.json.encode(digests)


def check_root(manifest: Manifest, root_digest: str) -> None:
    """Refuse a question about another state than the version is here."""
    if manifest.root_digest != root_digest:
        raise Conflict(
            f"version {manifest.version} has root digest {manifest.root_digest} here, and the question is about "
            f"{root_digest}. Read the manifest again, or ask another depot."
        )


def _chosen(tensors: Tensors, boxes: Sequence[BoxOf]) -> Chosen:
    """The boxes with the entries that hold their bytes, or an error that lists everything that is wrong with them."""
    if len(boxes) > MAX_BOXES:
        raise InvalidInput(f"{len(boxes)} boxes are asked for at once: {MAX_BOXES} is the most.")
    entries = tensors.manifest.by_name()
    chosen, wrong, absent = [], [], []
    held: dict[str, Box | None] = {}
    for asked in boxes:
        problem = box_problem(entries, asked.tensor, asked.box)
        if problem is not None:
            wrong.append(clip(problem))
            continue
        entry = entries[asked.tensor]
        if entry.name not in held:
            held[entry.name] = tensors.held(entry)
        if not lies_in(asked.box, held[entry.name]):
            absent.append(clip(f"{asked.box} of {asked.tensor!r} ({_told(held[entry.name])})"))
        chosen.append((entry, asked.box))
    complain(tensors.manifest, wrong, absent)
    return chosen


def box_problem(entries: Mapping[str, TensorEntry], name: str, box: Box) -> str | None:
    """Why a version cannot have such a box; None if it has."""
    entry = entries.get(name)
    if entry is None:
        return f"{name!r} is not a tensor of it"
    return None if box.fits(entry.shape) else f"{name!r} is {entry.spec.describe()} and has no {box}"


def lies_in(box: Box, held: Box | None) -> bool:
    """Whether all of a box is inside of what is held. A box without elements is always there."""
    if prod(box.shape) == 0:
        return True
    return held is not None and all(
        first <= start and start + size <= first + length
        for start, size, first, length in zip(box.start, box.shape, held.start, held.shape, strict=True)
    )


def complain(manifest: Manifest, wrong: Sequence[str], absent: Sequence[str]) -> None:
    """Raise `InvalidInput` if something asked for cannot be, `NotFound` if something is not here; the first are listed."""
    if wrong:
        raise InvalidInput(f"version {manifest.version} was asked for what it does not have: {_listed(wrong)}.")
    if absent:
        raise NotFound(
            f"this depot does not have what was asked for of version {manifest.version}: {_listed(absent)}. Ask another."
        )


def clip(problem: str) -> str:
    """The problem, or its beginning: a client chooses the names in it."""
    return problem if len(problem) <= _PROBLEM_LENGTH else f"{problem[:_PROBLEM_LENGTH]}…"


def _listed(problems: Sequence[str]) -> str:
    more = len(problems) - MAX_PROBLEMS
    return "; ".join(problems[:MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


def _told(held: Box | None) -> str:
    return "nothing of it is here" if held is None else f"here is {held}"
