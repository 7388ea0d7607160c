"""torch tensors on a device: lanes are read and written by torch's own indexing, where the tensor lies.

The same code runs on host tensors, which is how it is tested; it was not run on a GPU.
"""

from __future__ import annotations

from typing import cast

import torch

from weightcast.delta.kernels import Indices
from weightcast.delta.lanes import Lanes, kind_of
from weightcast.errors import UnsupportedTensor
from weightcast.tensors.spec import TensorSpec

_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def on_device(tensor: object) -> bool:
    """Whether a torch tensor lies outside of host memory."""
    return cast("torch.Tensor", tensor).device.type != "cpu"


class TorchMemory:
    """A contiguous torch tensor on any device."""

    def __init__(self, spec: TensorSpec, tensor: object) -> None:
        held = cast("torch.Tensor", tensor).detach()
        if not held.is_contiguous():
            raise UnsupportedTensor(f"tensor {spec.name!r} on {held.device} is not contiguous: a delta cannot be scattered.")
        self.spec = spec
        self._kind = kind_of(spec.dtype)
        self._lanes = held.reshape(-1).view(_CARRIER[self._kind.nbytes])

    def read(self, indices: Indices | None) -> Lanes:
        """A copy of the lanes at these indices, in host memory."""
        taken = self._lanes.clone() if indices is None else self._lanes[self._places(indices)]
        lanes: Lanes = taken.cpu().numpy().view(self._kind.unsigned)
        return lanes

    def write(self, indices: Indices | None, values: Lanes) -> None:
        """Overwrite the lanes at these indices."""
        carrier = values.view("u1" if self._kind.nbytes == 1 else f"i{self._kind.nbytes}")
        data = torch.from_numpy(carrier).to(self._lanes.device)
        if indices is None:
            self._lanes.copy_(data)
        else:
            self._lanes[self._places(indices)] = data

    def _places(self, indices: Indices) -> torch.Tensor:
        return torch.from_numpy(indices.astype("i8")).to(self._lanes.device)
