"""torch tensors on a device: lanes are read, written and summed by torch's own operations, where the tensor lies.

The same code runs on host tensors, which is how it is tested; it was not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np
import torch

from weightcast.delta.memory import moved_by
from weightcast.errors import UnsupportedTensor
from weightcast.tensors.kernels import Indices
from weightcast.tensors.kernels.sum_tables import LANES, TABLES
from weightcast.tensors.lanes import Lanes, Steps, kind_of
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import Sum, products_sum, range_sum

_SUMMED_AT_ONCE = 1024  # blocks: the products of each word take some memory
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def on_device(tensor: object) -> bool:
    """Whether a torch tensor lies outside of host memory."""
    return cast("torch.Tensor", tensor).device.type != "cpu"


def is_lazy(tensor: object) -> bool:
    """Whether a torch tensor's memory holds the conjugates or negatives of its values."""
    held = cast("torch.Tensor", tensor)
    return held.is_conj() or held.is_neg()


class TorchMemory:
    """A torch tensor on any device that is contiguous, or whose elements have at most 32 bits."""

    def __init__(self, spec: TensorSpec, tensor: object) -> None:
        held = cast("torch.Tensor", tensor).detach()
        self.spec = spec
        self._kind = kind_of(spec.dtype)
        carrier = _CARRIER[self._kind.nbytes]
        if held.is_contiguous():
            self._lanes = held.reshape(-1).view(carrier)
        elif held.element_size() == self._kind.nbytes:
            self._lanes = held.view(carrier)
        else:
            raise UnsupportedTensor(f"tensor {spec.name!r} has 64-bit elements and is not contiguous.")

    def read(self, indices: Indices | None) -> Lanes:
        """A copy of the lanes at these indices, in host memory."""
        taken = self._lanes.clone() if indices is None else self._lanes[self._places(indices)]
        lanes: Lanes = taken.cpu().contiguous().numpy().reshape(-1).view(self._kind.unsigned)
        return lanes

    def moved(self, indices: Indices | None, steps: Steps) -> tuple[Lanes, Lanes]:
        """The lanes at these indices as they are, and as they would be after steps, in host memory. Reads only."""
        return moved_by(self.read(indices), steps, self._kind)

    def write(self, indices: Indices | None, values: Lanes) -> None:
        """Overwrite the lanes at these indices."""
        carrier = values.view("u1" if self._kind.nbytes == 1 else f"i{self._kind.nbytes}")
        data = torch.from_numpy(carrier if carrier.flags.writeable else carrier.copy()).to(self._lanes.device)
        if indices is None:
            self._lanes.copy_(data.reshape(self._lanes.shape))
        else:
            self._lanes[self._places(indices)] = data

    def holds(self, indices: Indices | None, values: Lanes) -> bool:
        """Whether the lanes at these indices are these."""
        return np.array_equal(self.read(indices), values)

    def total(self, spec: TensorSpec, check: Callable[[], None]) -> Sum:
        """The sum of the tensor under the name of `spec`. Only the products of blocks leave the device."""
        lanes = self._lanes.reshape(-1)
        words = lanes if lanes.element_size() == 1 else lanes.view(torch.int16)
        tables, blocks, total = _tables(words.device), len(words) // LANES, Sum()
        for first in range(0, blocks, _SUMMED_AT_ONCE):
            some = words[first * LANES : min(first + _SUMMED_AT_ONCE, blocks) * LANES].view(-1, LANES).to(torch.int16)
            left, right = [(some ^ table).int() for table in tables[:2]], [(some + table).int() for table in tables[2:]]
            products = torch.stack([(one * other).sum(dim=1, dtype=torch.int64) for one in left for other in right])
            total += products_sum(spec, first, products.cpu().numpy())
            check()
        rest = words[blocks * LANES :].cpu().contiguous().numpy().view(np.uint8)
        return total + range_sum(spec, blocks * LANES * words.element_size(), rest)

    def _places(self, indices: Indices) -> tuple[torch.Tensor, ...]:
        axes = np.unravel_index(indices.astype(np.int64), tuple(self._lanes.shape))
        return tuple(torch.from_numpy(axis).to(self._lanes.device) for axis in axes)


@cache
def _tables(device: torch.device) -> torch.Tensor:
    """The tables of sums, where the tensor lies."""
    return torch.from_numpy(TABLES.copy()).to(device)
