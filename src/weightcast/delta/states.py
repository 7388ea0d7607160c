"""States as the codec reads them: named tensors that give out ranges of lanes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from weightcast.delta.container import Block
from weightcast.delta.sparse import Delta, every_step, span
from weightcast.tensors.boxes import Box, box_of
from weightcast.tensors.bridges import host_array, spec_of
from weightcast.tensors.digest import algorithm_of, root_digest
from weightcast.tensors.flat import Array
from weightcast.tensors.kernels import kernels
from weightcast.tensors.lanes import Lanes, kind_of, lane_count, lane_range, lanes_per_element
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import ROOT_LABEL, Sum, root_of_sums, tensor_hasher

CHUNK_LANES = 1 << 23  # lanes that are worked on at once: enough for small chunks to cost little, few enough for memory


class State(Protocol):
    """A whole state. `lanes` may be called from several threads at once; what it returns is not to be written to."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor."""

    def lanes(self, name: str, start: int, stop: int) -> Lanes:
        """A range of a tensor's lanes in C order: a view or a copy."""


class ArrayState:
    """Tensors of any framework in host memory. Nothing is copied, except ranges of tensors that are not contiguous."""

    def __init__(self, tensors: Mapping[str, object]) -> None:
        self._arrays: dict[str, Array] = {name: host_array(name, tensor) for name, tensor in tensors.items()}
        self._specs = {name: spec_of(name, tensor) for name, tensor in tensors.items()}

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor."""
        return self._specs

    def array(self, name: str) -> Array:
        """A tensor's memory."""
        return self._arrays[name]

    def lanes(self, name: str, start: int, stop: int) -> Lanes:
        """A view where memory is contiguous."""
        return lane_range(self._arrays[name], self._specs[name].dtype, start, stop)


class MovedState:
    """A state as it will be once a delta is applied to it. Ranges that the delta touches are copied.

    `in_place`: they are changed instead, as `state` gives each range in fresh memory.
    """

    def __init__(self, state: State, delta: Delta, *, in_place: bool = False) -> None:
        self._state, self._delta, self._in_place = state, delta, in_place

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor."""
        return self._state.specs

    def lanes(self, name: str, start: int, stop: int) -> Lanes:
        """A range with the delta applied."""
        lanes = self._state.lanes(name, start, stop)
        tensor = self._delta.tensors.get(name)
        if tensor is None:
            return lanes
        kind = kind_of(tensor.spec.dtype)
        if tensor.indices is None:
            every = np.arange(stop - start, dtype=np.uint32)
            return kernels().moved(lanes, every, every_step(tensor)[start:stop], kind)[1]
        first, last = span(tensor.indices, start, stop)
        if first == last:
            return lanes
        inside = (tensor.indices[first:last] - tensor.indices.dtype.type(start)).astype(np.uint32)
        _, values = kernels().moved(lanes, inside, tensor.steps[first:last], kind)
        moved = lanes if self._in_place else lanes.copy()
        kernels().scatter(moved, inside, values)
        return moved


def as_state(state: Mapping[str, object] | State) -> State:
    """Mappings of tensors as states; states as they are."""
    return ArrayState(state) if isinstance(state, Mapping) else state


def block_ranges(lanes: int) -> list[tuple[int, int]]:
    """The ranges in which so many lanes are worked on."""
    return [(start, min(start + CHUNK_LANES, lanes)) for start in range(0, lanes, CHUNK_LANES)]


def rows_box(spec: TensorSpec, box: Box, rows: Lanes) -> Lanes:
    """What a box has of its rows, given all lanes of these: in its own C order."""
    per_element = lanes_per_element(spec.dtype)
    shaped = rows.reshape(box.shape[0], *spec.shape[1:], per_element)
    inner = Box((0, *box.start[1:]), box.shape)
    lanes: Lanes = np.ascontiguousarray(box_of(shaped, inner)).reshape(-1)
    return lanes


def block_lanes(state: State, block: Block) -> Lanes:
    """The lanes of a block."""
    if block.box is None:
        return state.lanes(block.tensor, block.start, block.start + block.lanes)
    spec = state.specs[block.tensor]
    row, bounds = math.prod(spec.shape[1:]) * lanes_per_element(spec.dtype), block.bounds(spec)
    rows = state.lanes(block.tensor, bounds.start[0] * row, (bounds.start[0] + bounds.shape[0]) * row)
    skip = block.start % (math.prod(bounds.shape[1:]) * lanes_per_element(spec.dtype))  # of the first row
    return rows_box(spec, bounds, rows)[skip : skip + block.lanes]


def tensor_proof(state: State, name: str, expected: str, summed_as: str | None = None) -> str:
    """The digest of one tensor of a state, of the same kind as `expected`: its sum, or a digest of its bytes."""
    spec = state.specs[name]
    hasher = tensor_hasher(spec if summed_as is None else replace(spec, name=summed_as), expected)
    for start, stop in block_ranges(lane_count(state.specs[name])):
        hasher.update(state.lanes(name, start, stop).view(np.uint8).data)
    return hasher.digest()


def state_root(state: State, expected: str, summed_as: Mapping[str, str] | None = None) -> str:
    """The root digest of a state, of the same kind as `expected`: over sums, or over digests of bytes.

    `summed_as` has the names that tensors are summed under, where these are not their own.
    """
    if expected.startswith(f"{ROOT_LABEL}:"):
        names = {name: (summed_as or {}).get(name, name) for name in state.specs}
        return root_of_sums(
            (replace(spec, name=names[name]), tensor_proof(state, name, str(Sum()), names[name]))
            for name, spec in state.specs.items()
        )
    proofs = ((spec, tensor_proof(state, name, expected)) for name, spec in state.specs.items())
    return root_digest(proofs, algorithm_of(expected))
