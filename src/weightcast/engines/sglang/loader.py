"""The loader for `--custom-weight-loader`: SGLang calls it with one tiny tensor, and it fetches the version itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from weightcast.engines.sglang.request import FORMAT, LOADER, Request, encode_request, request_from_bytes
from weightcast.engines.sglang.update import bring
from weightcast.errors import InvalidInput

__all__ = ["LOADER", "load", "request"]


def load(model: nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Runs in each worker, between begin_weight_update and end_weight_update, which care for packed layouts.

    Raises a `WeightcastError` on failure; its message tells what is served. The plugin makes success=false of that.
    """
    tensors = dict(named_tensors)
    if set(tensors) != {FORMAT}:
        raise InvalidInput(
            f"this loader wants one tensor, named {FORMAT}, and got {', '.join(sorted(tensors)) or 'none'}. Make it with "
            "weightcast.engines.sglang.loader.request(source, version). No weights were changed."
        )
    bring(model, request_from_bytes(tensors[FORMAT].cpu().numpy().tobytes()))


def request(source: str, version: str | None = None, *, timeout: float = 180.0) -> list[tuple[str, torch.Tensor]]:
    """What a trainer passes to `update_weights_from_tensor`, the same for every rank."""
    words = encode_request(Request(source=source, version=version, timeout=timeout))
    return [(FORMAT, torch.frombuffer(bytearray(words), dtype=torch.uint8))]
