"""The digests that the parameters of a rank must have: put together from a version as the rank does it, one at a time."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from math import prod

import numpy as np

from weightcast.clock import Deadline
from weightcast.depot.boxes import MAX_PROBLEMS, box_problem, check_root, clip, complain, lies_in
from weightcast.depot.exchange import Reply, Request
from weightcast.depot.holding import Shelf
from weightcast.depot.once import Once, Turns
from weightcast.depot.reading import BLOCK_NBYTES, Reading, Tensors
from weightcast.errors import InvalidInput
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.digest import DEFAULT, Hasher
from weightcast.tensors.flat import byte_blocks
from weightcast.tensors.placing import converts, place
from weightcast.wire.depot import HeldDigests, HeldQuery
from weightcast.wire.manifest import TensorEntry, repeats

MAX_PARAMETERS = 1 << 16
_KEPT_DIGESTS = 1 << 14  # all replicas ask the same
_AT_ONCE = 2  # parameters that are put together at a time, whoever asks
_PADDING_NBYTES = 1 << 30  # a parameter may be larger by this than everything that could lie in it


class Slices:
    """Answers questions for the digests of parameters."""

    def __init__(self, shelf: Shelf, reading: Reading) -> None:
        self._shelf, self._reading = shelf, reading
        self._digests: Once[tuple[str, Held], str] = Once(_KEPT_DIGESTS)
        self._turns = Turns(_AT_ONCE)

    def answer(self, request: Request, stack: ExitStack) -> Reply:
        """The digests, by the names of the parameters."""
        query = request.read(HeldQuery)
        deadline = request.deadline
        holding = stack.enter_context(self._shelf.holding(request.path["version"]))
        check_root(holding.manifest, query.root_digest)
        known = {one.spec.name: self._digests.peek((query.root_digest, one)) for one in query.held}
        if len(known) == len(query.held) and None not in known.values():
            return Reply.message(HeldDigests({name: digest for name, digest in known.items() if digest is not None}))
        tensors = stack.enter_context(self._reading.tensors(holding, deadline=deadline))
        entries = tensors.manifest.by_name()
        _check(tensors, query.held)
        digests = {one.spec.name: self._digest(tensors, query.root_digest, one, entries, deadline) for one in query.held}
        return Reply.message(HeldDigests(digests))

    def _digest(
        self, tensors: Tensors, root_digest: str, one: Held, entries: dict[str, TensorEntry], deadline: Deadline
    ) -> str:
        work = partial(self._work, tensors, one, entries, deadline)
        what = f"hashing {one.spec.name} of {tensors.manifest.version}"
        return self._digests.get((root_digest, one), work, deadline=deadline, what=what)

    def _work(self, tensors: Tensors, one: Held, entries: dict[str, TensorEntry], deadline: Deadline) -> str:
        for name in {entries[placement.source].name for placement in one.placements}:
            self._reading.prove(tensors, entries[name], deadline=deadline)
        what = f"hashing {one.spec.name} of {tensors.manifest.version}"
        check = partial(deadline.check, what)
        with self._turns.taken(deadline=deadline, what=what):
            parameter = np.zeros(one.spec.shape, dtype=one.spec.dtype.numpy)  # what no box covers is 0
            for placement in one.placements:
                for part, array in tensors.parts(entries[placement.source], placement.box):
                    place(array, parameter, _moved(placement, part), check)
            hasher = Hasher(tensors.manifest.algorithm or DEFAULT)
            for block in byte_blocks(parameter, BLOCK_NBYTES):
                check()
                hasher.update(block.data)
            return hasher.digest()


def _moved(placement: Placement, part: Box) -> Placement:
    """Where a part of a box goes, seen as a tensor of its own."""
    offsets = [start - first for start, first in zip(part.start, placement.box.start, strict=True)]
    if placement.transposed:
        offsets.reverse()
    extra = len(placement.at) - len(offsets)
    at = tuple(start + offset for start, offset in zip(placement.at, [0] * extra + offsets, strict=True))
    return replace(placement, box=Box.whole(part.shape), at=at)


def _check(tensors: Tensors, held: tuple[Held, ...]) -> None:
    """Refuse what a rank cannot hold, or what is not here to cut it from. Up to `MAX_PROBLEMS` are found and listed."""
    if len(held) > MAX_PARAMETERS:
        raise InvalidInput(f"{len(held)} parameters are asked for at once: {MAX_PARAMETERS} is the most.")
    entries = tensors.manifest.by_name()
    absent: list[str] = []
    wrong = [clip(problem) for problem in islice(repeats("parameter", [one.spec.name for one in held]), MAX_PROBLEMS)]
    room = 4 * tensors.manifest.nbytes + _PADDING_NBYTES
    for one in held:
        if len(wrong) + len(absent) >= MAX_PROBLEMS:
            break
        spec = one.spec
        if min(spec.shape, default=0) < 0 or spec.nbytes > room:
            wrong.append(clip(f"parameter {spec.name!r} cannot be {spec.describe()}"))
            continue
        for placement in one.placements:
            if len(wrong) + len(absent) >= MAX_PROBLEMS:
                break
            problem = box_problem(entries, placement.source, placement.box) or _misplaced(one, placement, entries)
            if problem is not None:
                wrong.append(clip(f"parameter {spec.name!r}: {problem}"))
            elif not lies_in(placement.box, tensors.held(entries[placement.source])):
                absent.append(clip(f"{placement.box} of {placement.source!r}"))
    complain(tensors.manifest, wrong, absent)


def _misplaced(one: Held, placement: Placement, entries: dict[str, TensorEntry]) -> str | None:
    source, spec = entries[placement.source], one.spec
    if len(placement.at) < len(placement.box.shape) or not placement.target.fits(spec.shape):
        return f"{placement.box} of {placement.source!r} does not fit at {placement.at} of {spec.describe()}"
    if prod(placement.box.shape) and not converts(source.dtype, spec.dtype):
        return f"{placement.source!r} is {source.dtype} and cannot be converted to {spec.dtype}"
    return None
