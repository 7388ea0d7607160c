"""What the benches of pauses update: a model of any size that computes little per token, and versions of it in a store.

a            the checkpoint that the replica starts from, as a full version
b            another full version: every element differs
b1 … b5      deltas, each on the one before, the first on `b`: one element in a hundred differs, by one unit in the last
             place, everywhere alike
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.errors import InvalidInput
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.store import Store
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array

Progress = Callable[[str], None]

FULL = ("a", "b")
DELTAS = ("b1", "b2", "b3", "b4", "b5")
ONE_IN = 100  # elements that a delta changes

LAYERS = 4  # the first without experts
_BITS = np.uint16(3)  # of every element that `b` has otherwise: finite values stay finite
_ULP = np.uint16(1)


@dataclass(frozen=True)
class Made:
    """A checkpoint on disk and a store with its versions. `nbytes` are those of the tensors."""

    model_dir: Path
    store_dir: Path
    nbytes: int


def model_config(nbytes: int, ranks: int) -> dict[str, Any]:
    """Changes to the "moe" preset that make it about so large. A token visits one expert of many, so it computes little.

    Raises `InvalidInput` if the size is too small to be divided over the ranks.
    """
    hidden, width = (512, 1024) if nbytes >= 64 << 20 else (128, 256)
    expert_nbytes = 3 * hidden * width * 2
    experts = round(nbytes / ((LAYERS - 1) * expert_nbytes) / ranks) * ranks
    if experts < ranks:
        least = (LAYERS - 1) * expert_nbytes * ranks
        raise InvalidInput(f"a model of {nbytes} bytes cannot be divided over {ranks} ranks: take {least} or more.")
    return {
        "num_hidden_layers": LAYERS,
        "hidden_size": hidden,
        "intermediate_size": width,
        "moe_intermediate_size": width,
        "num_attention_heads": 4 * ranks,
        "num_key_value_heads": ranks,
        "head_dim": 32,
        "num_experts": experts,
        "num_experts_per_tok": 1,
        "mlp_only_layers": [0],
    }


def make_versions(directory: Path, *, nbytes: int, ranks: int, seed: int, progress: Progress) -> Made:
    """Write the checkpoint and publish all versions."""
    model_dir, store_dir = directory / "model", directory / "store"
    progress("making a model")
    made = init_checkpoint(model_dir, "moe", seed=seed, dtype="bfloat16", **model_config(nbytes, ranks))
    publish_versions(model_dir, store_dir, seed=seed, progress=progress)
    return Made(model_dir, store_dir, made)


def publish_versions(model_dir: Path, store_dir: Path, *, seed: int, progress: Progress) -> None:
    """Publish all versions of a BF16 checkpoint."""
    store = Store(store_dir, delta=DeltaPolicy(keep="memory"))
    progress("publishing full versions")
    store.publish_checkpoint("a", model_dir, "full")
    tensors = {name: array.view(np.uint16) ^ _BITS for name, array in store.load("a").items()}
    store.publish("b", dict(_as_bf16(tensors)), "full")
    for number, version in enumerate(DELTAS):
        progress(f"publishing delta {version}")
        random = np.random.default_rng([seed, number])
        for array in tensors.values():
            flip_some(array, random)
        store.publish(version, dict(_as_bf16(tensors)), "delta")


def _as_bf16(tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    for name, array in tensors.items():
        yield name, array.view(DType.BF16.numpy)


def flip_some(array: Array, random: np.random.Generator) -> int:
    """Move one element out of each hundred by one unit in the last place, at least one. Returns how many."""
    flat = array.reshape(-1)
    starts = np.arange(0, max(1, flat.size // ONE_IN)) * ONE_IN
    chosen = starts + random.integers(0, min(ONE_IN, flat.size), size=len(starts))
    flat[chosen] ^= _ULP
    return len(chosen)
