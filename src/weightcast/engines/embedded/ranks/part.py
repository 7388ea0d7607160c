"""One model of a rank, main or draft, as a target of updates: its live memory, and what it was filled from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

from weightcast.clock import Deadline
from weightcast.engines.embedded.messages import Feed, Stage
from weightcast.engines.embedded.model.build import Model
from weightcast.engines.embedded.model.held import shards_of, version_name
from weightcast.engines.embedded.model.weights import declared_weights
from weightcast.errors import CommitFailed, WrongState
from weightcast.tensors.bridges import torch_bridge
from weightcast.tensors.digest import Algorithm, array_digest
from weightcast.transports.base import MappedReceiver, Receiver
from weightcast.transports.kept import KeptReceiver
from weightcast.transports.registry import open_receiver
from weightcast.wire.decoding import decode
from weightcast.wire.manifest import Manifest
from weightcast.worker.buffers import Buffers
from weightcast.worker.live_model import LiveModel
from weightcast.worker.result import CommitMode, UpdateResult
from weightcast.worker.serving import StagedUpdate
from weightcast.worker.shards import HeldVersion, ShardVersion, cut
from weightcast.worker.states import State

Progress = Callable[[int, int], None]
Mode = Literal["auto", "copy", "swap", "inplace", "delta"]


@dataclass
class Fetched:
    """This rank's slices of a version, verified, and what has to be closed after it.

    `root` is the root digest of the whole version if that was not known before it was fetched.
    """

    version: ShardVersion
    source: str
    commit: Mode
    release: Callable[[], None]
    proved: bool
    stage_s: float
    root: str = ""

    def close(self) -> None:
        """Let go of the slices, and of the source if it is still open for them."""
        self.version.close()
        self.release()


@dataclass(frozen=True)
class _Coming:
    """A version on its way into the model."""

    fetched: Fetched
    staged: StagedUpdate

    @property
    def version(self) -> ShardVersion:
        return self.fetched.version


def _way(held: HeldVersion | None, manifest: Manifest, asked: Mode) -> Mode:
    """A delta on what the model holds needs no memory to stage in, so `inplace` takes it as such."""
    ours = held is not None and manifest.base is not None and manifest.base.root_digest == held.full.root_digest
    return "delta" if asked == "inplace" and ours else asked


def _ask_again(manifest: Manifest, deadline: Deadline, receiver: Receiver) -> None:
    """See whether the other end of a connection that was kept is still there; other sources are found out by reading."""
    if isinstance(receiver, MappedReceiver):
        receiver.manifest(manifest.version, deadline=deadline)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Part:
    """`fetch` and `stage` run in a thread of their own; everything else is the main loop's, but for `prove` and the digests,
    which only read. `held` is what the model holds, whole: None while it has no memory or is torn.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        *,
        rank: int,
        ranks: int,
        device: str,
        tick: Callable[[], None],
        names: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._model, self._rank, self._names = model, rank, names
        self._buffers = Buffers()
        self._live = LiveModel(model, rank=rank, ranks=ranks, device=device, tick=tick, buffers=self._buffers)
        self._kept = KeptReceiver()
        self._coming: _Coming | None = None
        self._before: HeldVersion | None = None
        self.held: HeldVersion | None = None

    @property
    def state(self) -> str:
        """That of the live model."""
        return self._live.state

    @property
    def nbytes(self) -> int:
        """Bytes of what the model holds."""
        return self.held.shard.nbytes if self.held else 0

    @property
    def coming_version(self) -> str:
        """The version that was staged or entered; empty if there is none."""
        return self._coming.version.full.version if self._coming else ""

    @property
    def previous(self) -> str | None:
        """What a rollback would lead to."""
        return self._before.full.version if self._before is not None and self._live.previous is not None else None

    # -- an update -------------------------------------------------------------------------------------------------------

    def fetch(self, feed: Feed, action: Stage, deadline: Deadline, progress: Progress) -> Fetched:
        """Fetch this rank's slices of a version and verify them. Touches nothing of the live model."""
        began = time.monotonic()
        held = None if action.afresh else self.held
        manifest = decode(feed.manifest, Manifest)
        others = [name for name in manifest.by_name() if feed.names and not _matches(name, feed.names)]
        shards = shards_of(self._model, names=feed.names, ignore=(*feed.ignore, *others))
        use, _ = self._kept.open(feed.source, rank=self._rank, ask=partial(_ask_again, manifest, deadline))
        with ExitStack() as opened:
            receiver = opened.enter_context(use)
            restore = None
            if action.commit == "inplace" and held is not None and held.source != feed.source:
                restore = opened.enter_context(closing(open_receiver(held.source, rank=self._rank)))
            version = cut(
                receiver, manifest, shards,
                held=held, mode=_way(held, manifest, action.commit), checksum=action.verify_checksum, deadline=deadline,
                progress=progress, buffers=self._buffers, restore=restore,
            )  # fmt: skip
            later = ExitStack()
            if action.commit == "inplace":  # the slices are streamed from there when they are committed, and not before
                opened.callback(use.drop)
                later = opened.pop_all()
        root = "" if manifest.sealed else version.full.root_digest
        seconds = time.monotonic() - began
        return Fetched(version, feed.source, action.commit, later.close, action.verify_checksum, seconds, root)

    def stage(self, fetched: Fetched, deadline: Deadline) -> None:
        """Make everything ready for `enter`, beside the live model."""
        began, version = time.monotonic(), fetched.version
        asked: CommitMode = "copy" if fetched.commit == "auto" else fetched.commit
        mode: CommitMode = "delta" if version.by_delta and asked != "swap" else asked
        # Always verified: the slices have digests of their own.
        staged = self._live.stage(version.shard.version, source=version, commit=mode, deadline=deadline)
        fetched.stage_s += time.monotonic() - began
        self._coming = _Coming(fetched, staged)

    def abandon(self) -> None:
        """Drop what was staged. Safe if nothing was."""
        coming, self._coming = self._coming, None
        if coming is not None:
            self._live.abandon(coming.staged)
            coming.fetched.close()

    def enter(self) -> None:
        """Make what was staged live. If that fails it has been undone, or the live model says FAILED."""
        if self._coming is None:
            raise WrongState(f"commit the {self.name} model", "not staged", [State.STAGED])
        try:
            self._live.enter(self._coming.staged)
        except BaseException:
            self._forget_if_torn()
            self._drop()
            raise

    def prove(self) -> None:
        """Compare the live bytes with what they must be."""
        self._live.prove()

    def settle(self) -> UpdateResult:
        """What was entered counts."""
        result = self._live.settle()
        coming = self._coming
        if coming is not None:
            version = coming.version
            self._before, self.held = (
                self.held,
                HeldVersion(version.full, version.shard, coming.fetched.source, proved=coming.fetched.proved),
            )
            self._drop()
            result = replace(result, bytes=version.nbytes, stage_s=coming.fetched.stage_s, source=coming.fetched.source)
        return result

    def revert(self) -> None:
        """Undo what was entered and not settled."""
        try:
            self._live.revert()
        finally:
            self._forget_if_torn()
            self._drop()

    def prove_held(self) -> None:
        """Compare the live bytes with what is held. If they differ, nothing whole is held any more."""
        wrong = self.wrong() if self.held is not None else []
        if wrong:
            self.held = self._before = None
            raise CommitFailed(f"undoing the commit did not bring back every byte: {'; '.join(wrong)}.")

    def rollback(self) -> None:
        """Go back to what was held before the last update."""
        try:
            self._live.rollback()
        except BaseException:
            self._forget_if_torn()
            raise
        self.held, self._before = self._before, None

    def clear(self) -> None:
        """Free the memory of the weights, and prove that. The connection to a source that was kept is ended too."""
        self.held = self._before = None
        self._kept.close()
        self._live.clear()

    def _forget_if_torn(self) -> None:
        if self._live.version is None:
            self.held = self._before = None

    def _drop(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.fetched.close()

    # -- digests ---------------------------------------------------------------------------------------------------------

    def wrong(self) -> list[str]:
        """Every parameter whose live bytes are not those of the version."""
        if self.held is None:
            return [f"{self.name} holds no whole version"]
        algorithm = self.held.shard.algorithm
        return [
            f"{self.name}: {entry.name} ({found}, and {entry.digest} was committed)"
            for entry in self.held.shard.tensors
            if (found := array_digest(torch_bridge.host(self._model.get_parameter(entry.name)), algorithm)) != entry.digest
        ] if algorithm else []  # fmt: skip

    def sources(self) -> dict[str, str]:
        """All tensors that the model is made of, on any rank: what versions call them, and what the model does."""
        names = {name for weight in declared_weights(self._model) for name in weight.layout.sources}
        return {version_name(name, self._names): name for name in names}

    def digests(self, name: str, algorithm: Algorithm) -> Iterator[dict[str, Any]]:
        """The digest of every box of a tensor that this rank holds: raw bytes, in the orientation of the version."""
        for weight in declared_weights(self._model):
            for piece in weight.layout.pieces:
                if piece.source == name:
                    live = torch_bridge.host(piece.view(weight.parameter))
                    box = {"start": piece.box.start, "shape": piece.box.shape}
                    yield {"parameter": weight.name, "box": box, "digest": array_digest(live, algorithm)}
