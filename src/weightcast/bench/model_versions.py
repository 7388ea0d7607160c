"""What the benches of running engines update: a model of any size that computes little per token, and versions of it.

a            the checkpoint that the engine starts from, as a full version
a1, a2, a3   deltas, each on the one before, the first on `a`: to warm up with
b            another full version: every element differs
b1, b2 …     deltas, each on the one before, the first on `b`: one element in a hundred differs, by one unit in the last
             place, everywhere alike
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightcast.delta import Cut, Slicing
from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.errors import InvalidInput
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.store import Store
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array

Progress = Callable[[str], None]

DELTAS = 5  # on `b`, where no other number is asked for
_NEVER = 1 << 20  # versions: more than a chain here has
ONE_IN = 100  # elements that a delta changes

SLICING = Slicing((Cut(("*.experts.*",), dim=None, number=r"experts\.(\d+)", like="experts"), *Slicing.decoder().cuts))

LAYERS = 4  # the first without experts
_FLIPS = (1, 2, 4)  # bits that are flipped in turn: no version equals one of the five before it
_ULP = np.uint16(1)


@dataclass(frozen=True)
class Made:
    """A checkpoint on disk and a store with its versions. `nbytes` are those of the tensors.

    `publish_s` are the seconds that publishing each version took.
    """

    model_dir: Path
    store_dir: Path
    nbytes: int
    publish_s: Mapping[str, float]


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


def make_versions(directory: Path, *, nbytes: int, ranks: int, seed: int, progress: Progress, deltas: int = DELTAS) -> Made:
    """Write the checkpoint and publish all versions, with so many deltas on `b`."""
    model_dir, store_dir = directory / "model", directory / "store"
    progress("making a model")
    made = init_checkpoint(model_dir, "moe", seed=seed, dtype="bfloat16", **model_config(nbytes, ranks))
    publish_s = publish_versions(model_dir, store_dir, seed=seed, progress=progress, deltas=deltas)
    return Made(model_dir, store_dir, made, publish_s)


def publish_versions(
    model_dir: Path, store_dir: Path, *, seed: int, progress: Progress, deltas: int = DELTAS
) -> dict[str, float]:
    """Publish all versions of a BF16 checkpoint. Returns the seconds that each took."""
    store = Store(store_dir, delta=DeltaPolicy(keep="memory", full_every=_NEVER, slicing=SLICING))
    began = time.perf_counter()
    progress("publishing a")
    store.publish_checkpoint("a", model_dir, "full")
    taken = {"a": time.perf_counter() - began}
    tensors = {name: array.view(np.uint16).copy() for name, array in store.load("a").items()}
    for number, version in enumerate(("a1", "a2", "a3", "b", *(f"b{number}" for number in range(1, deltas + 1)))):
        progress(f"publishing {version}")
        random = np.random.default_rng([seed, number])
        for array in tensors.values():
            if version == "b":
                flip_all(array)
            else:
                flip_some(array, random)
        began = time.perf_counter()
        store.publish(version, dict(as_bf16(tensors)), "full" if version == "b" else "delta")
        taken[version] = time.perf_counter() - began
    return taken


def as_bf16(tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """The tensors whose bit patterns these are."""
    for name, array in tensors.items():
        yield name, array.view(DType.BF16.numpy)


def flip_all(array: Array, number: int = 0) -> None:
    """Change every element of an array of bit patterns, otherwise for each of a few numbers; finite values stay finite."""
    array ^= np.uint16(_FLIPS[number % len(_FLIPS)])


def flip_some(array: Array, random: np.random.Generator) -> int:
    """Move one element out of each hundred by one unit in the last place, at least one. Returns how many."""
    flat = array.reshape(-1)
    starts = np.arange(0, max(1, flat.size // ONE_IN)) * ONE_IN
    chosen = starts + random.integers(0, min(ONE_IN, flat.size), size=len(starts))
    flat[chosen] ^= _ULP
    return len(chosen)
