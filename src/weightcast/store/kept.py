"""The last published state, kept from one publish to the next as the base of a delta."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from weightcast.delta import ArrayState, Delta, State, fold, move
from weightcast.delta.encoder import default_threads
from weightcast.store import layout
from weightcast.store.chain import Chain, decode_step, fold_deltas, load_chain, moved
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.part_state import PartState
from weightcast.tensors.flat import Array
from weightcast.wire.manifest import Manifest


class Kept(Protocol):
    """What is kept of the last state. When it is needed it is brought up to date from the store, or rebuilt from it.

    It is not proved here. `DeltaWriter` compares it with the sums of its version while it reads it.
    """

    def opened(self, chain: Chain) -> AbstractContextManager[State]:
        """The state that the chain leads to, for as long as the block runs. Whatever is raised in it drops what is kept."""

    def advance(self, manifest: Manifest, delta: Delta) -> None:
        """A version was published on what is kept: follow it without reading it back."""

    def drop(self) -> None:
        """Keep nothing: the next use reads everything from the store."""


def keep_state(store: Path, policy: DeltaPolicy) -> Kept:
    """The way of keeping that a policy asks for."""
    threads = default_threads() if policy.threads is None else policy.threads
    return _KeptInMemory(store, threads) if policy.keep == "memory" else _KeptInStore(store, threads)


def _steps_from(chain: Chain, root: str) -> tuple[Manifest, ...] | None:
    """The deltas from a state on the chain to its end, none if it is the end; None if the state is not on the chain."""
    for place, manifest in reversed(list(enumerate((chain.full, *chain.deltas)))):
        if manifest.root_digest == root:
            return chain.deltas[place:]
    return None


class _KeptInStore:
    """The parts of the full version on the medium, and in memory the changes since then, folded into one delta."""

    def __init__(self, store: Path, threads: int) -> None:
        self._store, self._threads = store, threads
        self.drop()

    def drop(self) -> None:
        self._full_root = self._root = ""
        self._folded: Delta | None = None

    def advance(self, manifest: Manifest, delta: Delta) -> None:
        if self._root and delta.base_root == self._root:
            self._folded = delta if self._folded is None else fold(self._folded, delta, threads=self._threads)
            self._root = manifest.root_digest

    @contextmanager
    def opened(self, chain: Chain) -> Iterator[State]:
        try:
            with PartState(layout.version_dir(self._store, chain.full.version), chain.full) as parts:
                self._follow(chain, parts)
                yield moved(parts, self._folded)
        except BaseException:
            self.drop()
            raise

    def _follow(self, chain: Chain, parts: PartState) -> None:
        steps = _steps_from(chain, self._root) if self._full_root == chain.full.root_digest else None
        if steps is None:
            self.drop()
            steps = chain.deltas
        self._folded = fold_deltas(self._store, steps, parts, start=self._folded, threads=self._threads)
        self._full_root, self._root = chain.full.root_digest, chain.end.root_digest


class _KeptInMemory:
    """A private copy of all tensors, which the deltas that were published since are applied to.

    A delta that was published is applied in a thread of its own: the caller of `publish` does not wait for that.
    """

    def __init__(self, store: Path, threads: int) -> None:
        self._store, self._threads = store, threads
        self._following: threading.Thread | None = None
        self.drop()

    def drop(self) -> None:
        self._wait()
        self._root = ""
        self._arrays: dict[str, Array] = {}

    def advance(self, manifest: Manifest, delta: Delta) -> None:
        self._wait()
        if self._root and delta.base_root == self._root:
            self._root = ""  # until it is done
            self._following = threading.Thread(target=self._apply, args=(manifest.root_digest, delta), name="keep-state")
            self._following.start()

    def _apply(self, root: str, delta: Delta) -> None:
        move(self._arrays, delta, threads=self._threads)
        self._root = root

    def _wait(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            following.join()

    @contextmanager
    def opened(self, chain: Chain) -> Iterator[State]:
        try:
            self._follow(chain)
            yield ArrayState(self._arrays)
        except BaseException:
            self.drop()
            raise

    def _follow(self, chain: Chain) -> None:
        self._wait()
        steps = _steps_from(chain, self._root)
        if steps is None:
            self.drop()  # before the new copy is made
            loaded = load_chain(self._store, chain, threads=self._threads)
            self._arrays = {entry.name: loaded[entry.name] for entry in chain.end.tensors}
        else:
            for manifest in steps:
                move(self._arrays, decode_step(self._store, manifest, ArrayState(self._arrays), self._threads))
        self._root = chain.end.root_digest
