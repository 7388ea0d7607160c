"""The seam to the GPU: everything else says "cpu" or "cuda" to torch and means the same place."""

from __future__ import annotations

import torch

from weightcast.engines.embedded.settings import Device
from weightcast.errors import InvalidInput


def claim_device(device: Device, rank: int, ranks: int) -> None:
    """Make "cuda" mean this rank's own GPU: the one with its number among those that this process may see."""
    if device == "cpu":
        return
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < ranks:
        raise InvalidInput(
            f"{ranks} rank(s) on cuda need a GPU each, and torch {torch.__version__} sees {found}. Serve with fewer ranks, "
            "or with --device cpu."
        )
    torch.cuda.set_device(rank)
