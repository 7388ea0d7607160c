"""A trainer for the proof under load: versions that answer differently, published into a store that stays small."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightcast import Store
from weightcast.delta import Cut, Slicing
from weightcast.engines.embedded.checkpoint_dir import write_checkpoint_dir
from weightcast.engines.embedded.presets import companion_files, init_checkpoint, preset_config
from weightcast.store.delta_policy import DeltaPolicy

KINDS = ("full", "delta")
COMMITS = ("copy", "swap", "inplace")
DONE_AS = {
    ("full", "copy"): "copy", ("full", "swap"): "swap", ("full", "inplace"): "inplace",
    ("delta", "copy"): "delta", ("delta", "swap"): "swap", ("delta", "inplace"): "delta",
}  # fmt: skip
KEPT_VERSIONS = 5  # in the store, beside the bases that they need: the trainer is up to two ahead of the server

State = dict[str, np.ndarray]


@dataclass(frozen=True)
class Planned:
    """One update. `number` counts the commits: 0 is the version that the server starts from."""

    number: int
    kind: str
    commit: str
    pause: str
    release_cache: bool

    @property
    def version(self) -> str:
        return f"step_{self.number}"

    @property
    def body(self) -> dict[str, Any]:
        """Of the call to `/v1/update_weights`."""
        body = {"version": self.version, "commit": self.commit, "pause": self.pause, "timeout": 60}
        return body | ({"release_cache": True} if self.release_cache else {})


def plan(updates: int, seed: int) -> list[Planned]:
    """Every kind with every way to commit, over and over, each round in another order, so that all follow upon all.

    Most keep what runs; every tenth waits for it, every tenth ends it, and every ninth frees the caches meanwhile.
    """
    rng, combinations = np.random.default_rng(seed), list(itertools.product(KINDS, COMMITS))
    rounds = itertools.chain.from_iterable(rng.permutation(combinations) for _ in itertools.count())
    pauses = {5: "wait", 0: "abort"}
    return [
        Planned(number, str(kind), str(commit), pauses.get(number % 10, "keep"), number % 9 == 0)
        for number, (kind, commit) in zip(range(1, updates + 1), rounds, strict=False)
    ]


class Trainer:
    """Publishes one version after the other. `states` has the tensors of all, and never asks the store for them."""

    def __init__(self, root: Path, seed: int) -> None:
        self.model_dir, self._root = root / "model", root
        self.config = preset_config("tiny", tied=True, dtype="float32")
        init_checkpoint(self.model_dir, "tiny", seed=seed)
        # Both packings: the one that is decoded along the slices of a rank, and the one that needs no base.
        vocabulary = Cut(("*embed_tokens.weight", "*lm_head.weight"), 0, edges=(130,), like="vocabulary")  # 259 rows, padded
        cuts = Slicing((vocabulary, *Slicing.decoder(2).cuts))
        self._stores = [
            Store(root / "store", delta=DeltaPolicy(packing=packing, slicing=cuts)) for packing in ("classes", "gaps")
        ]
        self.store = self._stores[0]
        self.store.publish_checkpoint("step_0", self.model_dir)
        self._rng = np.random.default_rng(seed)
        self._first: State = self.store.load("step_0")
        self.states: list[State] = [self._first]
        self.store_nbytes = 0  # at most

    def publish(self, planned: Planned) -> None:
        """Train one step and publish it; of the earlier versions the store keeps a few."""
        assert planned.number == len(self.states)
        self.states.append(self._step(self.states[-1]))
        self._stores[planned.number // 3 % 2].publish(planned.version, self.states[-1], mode=planned.kind)
        self.store.gc(keep_last=KEPT_VERSIONS)
        nbytes = sum(path.stat().st_size for path in self.store.path.rglob("*") if path.is_file())
        self.store_nbytes = max(self.store_nbytes, nbytes)

    def _step(self, state: State) -> State:
        """About 1 % of all elements become others of the same row: answers change, and weights never grow."""
        changed = {}
        for name, array in state.items():
            new, rows = array.copy(), self._first[name].reshape(-1, array.shape[-1])
            places = self._rng.choice(array.size, max(1, array.size // 100), replace=False)
            others = self._rng.integers(array.shape[-1], size=places.size)
            new.reshape(-1)[places] = rows[places // array.shape[-1], others]
            changed[name] = new
        return changed

    def export(self, number: int) -> Path:
        """A version as a checkpoint of its own, for an engine that has never seen another."""
        directory = self._root / f"exported_{number}"
        if not directory.exists():
            tensors, files = self.states[number].items(), companion_files(self.config)
            write_checkpoint_dir(directory, config=self.config, tensors=tensors, files=files)
        return directory
