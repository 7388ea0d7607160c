"""Versions to update between, and what each of them answers."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from weightcast import Store
from weightcast.engines.embedded.presets import init_checkpoint

from .update_load_reference import TIE, PlainModel

BASE, FULL_A, FULL_B, DELTA_1, DELTA_2 = "base", "full_a", "full_b", "delta_1", "delta_2"
TENSOR = "model.layers.1.mlp.down_proj.weight"  # cut by columns: no rank has it in one stretch of bytes
PROMPTS = (tuple(b"The quick brown fox jumps over the lazy dog."), tuple(b"x"))
ANSWER = 12

State = Mapping[str, np.ndarray]


class World:
    """A model directory at version `base`, and a store: full_a, delta_1 on it, delta_2 on that, full_b."""

    def __init__(self, root: Path) -> None:
        self.root, self.model_dir = root, root / "model"
        init_checkpoint(self.model_dir, "tiny", seed=7, part_nbytes=256 << 10)
        (self.model_dir / "version.yaml").write_text(f"step: 0\nversion: {BASE}\n")
        self.config = json.loads((self.model_dir / "config.json").read_text())
        self.store = Store(root / "store")
        self._rng = np.random.default_rng(11)
        self.store.publish_checkpoint(BASE, self.model_dir)
        self.states: dict[str, State] = {BASE: self.store.load(BASE)}
        for version, before, mode in (
            (FULL_A, BASE, "full"), (DELTA_1, FULL_A, "delta"), (DELTA_2, DELTA_1, "delta"), (FULL_B, BASE, "full")
        ):  # fmt: skip
            self.states[version] = self._step(self.states[before])
            self.store.publish(version, self.states[version], mode=mode, part_nbytes=256 << 10)
        self._copies = 0

    @property
    def source(self) -> str:
        """The store, sound."""
        return f"file://{self.store.path}"

    def copy(self) -> Path:
        """A store of its own with the same versions, to be damaged."""
        self._copies += 1
        path = self.root / f"copy-{self._copies}"
        shutil.copytree(self.store.path, path)
        return path

    def publish(self, version: str, state: State) -> str:
        """The source of a store that has this version alone."""
        self._copies += 1
        path = self.root / f"other-{self._copies}"
        Store(path).publish(version, state, mode="full")
        return f"file://{path}"

    def _step(self, state: State) -> State:
        """2 % of all elements become others of the same tensor: answers change, and weights never grow."""
        changed = {}
        for name, array in state.items():
            new = array.copy()
            places = self._rng.choice(array.size, max(1, array.size // 50), replace=False)
            new.reshape(-1)[places] = self._rng.permutation(array.reshape(-1))[: places.size]
            changed[name] = new
        return changed

    # -- what a version says ---------------------------------------------------------------------------------------------

    @functools.cache  # noqa: B019 - there is one world
    def model(self, version: str) -> PlainModel:
        """The version, written down plainly."""
        return PlainModel(self.config, self.states[version])

    @functools.cache  # noqa: B019
    def expected(self, version: str, prompt: tuple[int, ...]) -> list[int]:
        """The greedy answer of `ANSWER` tokens."""
        text = list(prompt)
        for _ in range(ANSWER):
            text.append(int(self.model(version).logits(torch.tensor([text]))[0, -1].argmax()))
        return text[len(prompt) :]

    def wrong_tokens(self, prompt: tuple[int, ...], tokens: list[int], versions: list[str]) -> list[str]:
        """Every token of an answer that the version named for it would not have chosen behind all tokens before it."""
        wrong = []
        text = torch.tensor([[*prompt, *tokens]])
        for version in dict.fromkeys(versions):
            logits = self.model(version).logits(text)[0]
            for place, (token, named) in enumerate(zip(tokens, versions, strict=True)):
                row = logits[len(prompt) - 1 + place]
                if named == version and row[token] < row.max() - TIE:
                    wrong.append(f"token {place} of {len(tokens)} is not of {version}, but {token}, not {int(row.argmax())}")
        return wrong
