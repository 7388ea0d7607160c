"""The changes of a chunk, put into groups: by the block they lie in (`gaps`) or the class of the old lane (`classes`)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from weightcast.delta.runs import Run, placed_run
from weightcast.delta.slicing import Place
from weightcast.delta.sparse import TensorDelta, span
from weightcast.delta.streams import Groups
from weightcast.errors import InvalidInput
from weightcast.tensors.boxes import Held
from weightcast.tensors.kernels import NO_SUMS, Kernels, Numbers, Summing
from weightcast.tensors.lanes import LaneKind, Lanes, Steps
from weightcast.tensors.sums import Sum


class Classed(NamedTuple):
    """Where changes stand in their classes, and what the classes have counted after the block."""

    gaps: Numbers
    classes: NDArray[np.uint8]
    since: NDArray[np.uint32]


class Changed(NamedTuple):
    """The changes of a block."""

    indices: NDArray[np.uint32]
    steps: Steps
    classed: Classed | None = None
    new: Lanes | None = None  # all lanes of the block as they are now, where it was compared
    sums: tuple[Sum, Sum] | None = None  # of all of them, and of the changes, where they were summed in passing


class Grouping(Protocol):
    """Groups the blocks of one chunk. A block that is scanned need not be added: it may turn out to be better off alone."""

    def scan(self, old: Lanes, new: Lanes, summing: Summing | None) -> Changed:
        """The changes of the next block, and its sums if they cost less in passing."""

    def add(self, old: Lanes | None, changed: Changed) -> None:
        """Take a block in: one just scanned, or one whose changes were known."""

    def grouped(self) -> Groups:
        """Everything that was added."""


class ByBlock:
    """Packing `gaps`: the groups are the blocks."""

    def __init__(self, kind: LaneKind, kernels: Kernels) -> None:
        self._kind, self._kernels = kind, kernels
        self._lanes: list[NDArray[np.uint32]] = []
        self._steps: list[Steps] = []

    def scan(self, old: Lanes, new: Lanes, summing: Summing | None) -> Changed:
        """The changes of the next block, and its sums."""
        found = self._kernels.find(old, new, self._kind, summing or NO_SUMS)
        sums = (Sum(*found.whole), Sum(*found.grown)) if summing is not None else None
        return Changed(found.indices, found.steps, new=new, sums=sums)

    def add(self, old: Lanes | None, changed: Changed) -> None:  # noqa: ARG002 - the other packing looks at it
        """Take a block in."""
        self._lanes.append(changed.indices)
        self._steps.append(changed.steps)

    def grouped(self) -> Groups:
        """A group for each block."""
        counts = np.array(list(map(len, self._lanes)), dtype=np.int64)
        return Groups(counts, np.concatenate(self._lanes), np.concatenate(self._steps), lanes=True)


class ByClass:
    """Packing `classes`: the groups are the classes of the old lanes, counted through all blocks that were added."""

    def __init__(self, kind: LaneKind, kernels: Kernels) -> None:
        self._kernels, self._kind = kernels, kind
        self._since = np.zeros(kind.classes, dtype=np.uint32)
        self._gaps: list[NDArray[np.uint32]] = []
        self._classes: list[NDArray[np.uint8]] = []
        self._steps: list[Steps] = []

    def scan(self, old: Lanes, new: Lanes, summing: Summing | None) -> Changed:  # noqa: ARG002 - the other packing sums
        """The changes of the next block, and their places in their classes if it is added."""
        since = self._since.copy()
        indices, steps, gaps, classes = self._kernels.find_with_gaps(old, new, self._kind, since)
        return Changed(indices, steps, Classed(gaps, classes, since), new)

    def add(self, old: Lanes | None, changed: Changed) -> None:
        """Take a block in."""
        classed = changed.classed
        if classed is None:
            if old is None:
                raise InvalidInput("packing 'classes' needs the lanes of the base.")
            since = self._since.copy()
            classed = Classed(*self._kernels.class_gaps(old, changed.indices, self._kind, since), since)
        self._since = classed.since
        self._gaps.append(classed.gaps)
        self._classes.append(classed.classes)
        self._steps.append(changed.steps)

    def grouped(self) -> Groups:
        """A group for each class, empty ones included."""
        classes = np.concatenate(self._classes)
        order = np.argsort(classes, kind="stable")
        counts = np.bincount(classes, minlength=self._kind.classes)
        return Groups(counts, np.concatenate(self._gaps)[order], np.concatenate(self._steps)[order])


def changed_in(tensor: TensorDelta, place: Place) -> Changed:
    """The changes of a tensor that lie in a block of it, counted from the start of the block."""
    if tensor.indices is None:
        run = Run(tensor.spec.name, place.start, None, tensor.steps[place.start : place.stop])
    else:
        first, last = span(tensor.indices, place.start, place.stop)
        inside = tensor.indices[first:last] - tensor.indices.dtype.type(place.start)
        run = Run(tensor.spec.name, place.start, inside, tensor.steps[first:last])
    if place.box is None:
        indices, steps = run.sparse()
        return Changed(indices.astype(np.uint32), steps)
    held = Held.slice_of(tensor.spec, place.box)
    placed = placed_run(run, tensor.spec, held.placements[0], held.spec)
    if placed is None:
        return Changed(np.zeros(0, dtype=np.uint32), tensor.steps[:0])
    return Changed(placed[0].astype(np.uint32), placed[1])
