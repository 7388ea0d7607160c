"""Draft models for a checkpoint at hand: for speculative decoding without training anything.

A draft is only worth its while if it often guesses what the main model says. A copy of the main model with some noise does
that, the better the less noise; it saves no time, but everything around it can be run and tested with any rate of success.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from weightcast.engines.embedded.checkpoint_dir import PART_NBYTES, write_checkpoint_dir
from weightcast.engines.embedded.model_config import MTP, ModelConfig
from weightcast.errors import InvalidInput
from weightcast.store.checkpoint import Checkpoint
from weightcast.store.files import read_small
from weightcast.tensors.flat import Array

DraftKind = Literal["plain", "mtp"]
DRAFT_KINDS: tuple[DraftKind, ...] = get_args(DraftKind)

_EMBEDDING = "model.embed_tokens.weight"
_HEARING = 0.03  # how much an MTP head listens to the main model's hidden state


def init_draft(
    directory: str | Path, main_dir: str | Path, kind: DraftKind = "plain", *, noise: float = 0.05, seed: int = 0
) -> int:
    """Write a draft for the checkpoint in `main_dir`; returns the bytes of its tensors.

    "plain" is a whole model of its own; "mtp" is a head that uses the embedding, the head and the hidden states of the main
    model. Every weight differs from the main model's by `noise` times the spread of its tensor. `directory` must not exist,
    or be empty.
    """
    if kind not in DRAFT_KINDS or seed < 0 or not noise >= 0:
        raise InvalidInput(
            f"no draft {kind!r} with noise {noise} and seed {seed}: kinds are {', '.join(DRAFT_KINDS)}, neither number "
            "may be negative."
        )
    checkpoint = Checkpoint(Path(main_dir))
    config = ModelConfig.read(main_dir)
    if config.mtp:
        raise InvalidInput(f"{main_dir} holds an MTP head: a draft is made for a main model.")
    fields = json.loads(read_small(Path(main_dir) / "config.json", 1 << 24))
    tensors = _noisy(checkpoint, noise, seed)
    files = dict(checkpoint.files())
    del files["config.json"]
    if kind == "mtp":
        fields |= {"architectures": [MTP], "model_type": "qwen3_mtp"}
        tensors, files = _mtp_tensors(checkpoint, config, tensors, seed), {}
    return write_checkpoint_dir(Path(directory), config=fields, tensors=tensors, files=files, part_nbytes=PART_NBYTES)


def _noisy(checkpoint: Checkpoint, noise: float, seed: int) -> Iterator[tuple[str, Array]]:
    for index, (name, array) in enumerate(checkpoint.tensors()):
        yield name, _with_noise(array, noise, np.random.default_rng([seed, index])) if noise else array


def _with_noise(array: Array, noise: float, random: np.random.Generator) -> Array:
    values: NDArray[np.float32] = array.astype(np.float32)
    spread = values.std() if values.ndim > 1 else 0.1
    return (values + np.float32(noise) * spread * random.standard_normal(array.shape, dtype=np.float32)).astype(array.dtype)


def _mtp_tensors(
    checkpoint: Checkpoint, config: ModelConfig, tensors: Iterator[tuple[str, Array]], seed: int
) -> Iterator[tuple[str, Array]]:
    """The main model's layers under the head's names, behind a projection that mostly passes the embedding on.

    The head sees embeddings normed. A weight of that norm as large as the loudest embedding undoes it for those as loud.
    """
    hidden, random = config.hidden_size, np.random.default_rng([seed, 1 << 20])
    dtype = checkpoint.specs[_EMBEDDING].dtype.numpy
    loudness = 1.0
    for name, array in tensors:
        if name == _EMBEDDING:
            rows: NDArray[np.float32] = array.astype(np.float32)
            loudness = float(np.sqrt((rows * rows).mean(axis=1)).max(initial=0))
        elif name.startswith("model."):
            yield f"mtp.{name.removeprefix('model.')}", array
    listening = random.standard_normal((hidden, hidden), dtype=np.float32) * np.float32(_HEARING * loudness / hidden**0.5)
    yield "mtp.pre_fc_norm_embedding.weight", np.full(hidden, loudness, dtype=dtype)
    yield "mtp.pre_fc_norm_hidden.weight", np.ones(hidden, dtype=dtype)
    yield "mtp.fc.weight", np.concatenate((np.eye(hidden, dtype=np.float32), listening), axis=1).astype(dtype)
