"""One model of a rank, main or draft, as a target of updates: its live memory, and what it was filled from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np

from weightcast.clock import Deadline
from weightcast.engines.embedded.messages import Feed, PartLayout, RankRead, SourceBox, Stage, version_name
from weightcast.engines.embedded.model.build import Model
from weightcast.engines.embedded.model.held import shards_of
from weightcast.engines.embedded.model.weights import declared_weights
from weightcast.errors import CommitFailed, DigestMismatch, SourceFailed, WrongState
from weightcast.tensors.bridges import torch_bridge
from weightcast.tensors.digest import Algorithm, array_digest
from weightcast.tensors.sums import array_proof
from weightcast.transports.base import LandingReceiver, Receiver
from weightcast.transports.checkpoint import CheckpointReceiver
from weightcast.transports.kept import KeptReceiver
from weightcast.transports.registry import open_receiver
from weightcast.wire.decoding import decode
from weightcast.wire.manifest import Manifest
from weightcast.worker.buffers import Buffers
from weightcast.worker.live_model import LiveModel
from weightcast.worker.result import CommitMode, UpdateResult
from weightcast.worker.scrub import ScrubReport
from weightcast.worker.serving import StagedUpdate
from weightcast.worker.shard_sums import BoxSum
from weightcast.worker.shards import HeldVersion, ShardVersion, cut
from weightcast.worker.states import State

Progress = Callable[[int, int], None]
Mode = Literal["auto", "copy", "swap", "inplace", "delta"]


@dataclass
class Fetched:
    """This rank's slices of a version, verified, and what has to be closed after it.

    `began` is when the fetch did, by `time.monotonic`. `read` is what the rank's vote says.
    """

    version: ShardVersion
    source: str
    commit: Mode
    release: Callable[[], None]
    proved: bool
    began: float
    read: RankRead

    def close(self) -> None:
        """Let go of the slices, and of the source if it is still open for them."""
        self.version.close()
        self.release()


@dataclass(frozen=True)
class _Coming:
    """A version on its way into the model, and the sums that the rank votes with."""

    fetched: Fetched
    staged: StagedUpdate
    sums: tuple[BoxSum, ...]

    @property
    def version(self) -> ShardVersion:
        return self.fetched.version


def _way(held: HeldVersion | None, manifest: Manifest, asked: Mode) -> Mode:
    """A delta on what the model holds needs no memory to stage in, so `inplace` takes it as such."""
    ours = held is not None and manifest.base is not None and manifest.base.root_digest == held.full.root_digest
    return "delta" if asked == "inplace" and ours else asked


def _own_manifest(manifest: Manifest, deadline: Deadline, receiver: Receiver) -> Manifest:
    """The version as this rank's own source describes it now. It may be another than the one that the front end saw.

    Sources that are asked for bytes by their root digest refuse any other. A checkpoint would be read whole to describe it:
    its bytes are compared with the front end's manifest instead, always.
    """
    if isinstance(receiver, LandingReceiver | CheckpointReceiver):
        return manifest
    return receiver.manifest(manifest.version, deadline=deadline)


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
        self._model, self._rank, self._ranks, self._names = model, rank, ranks, names
        self._shards = lru_cache(maxsize=4)(partial(shards_of, model))  # a layout does not change
        self._buffers = Buffers()
        self._live = LiveModel(model, rank=rank, device=device, tick=tick, buffers=self._buffers)
        self._kept = KeptReceiver()
        self._coming: _Coming | None = None
        self._before: HeldVersion | None = None
        self.held: HeldVersion | None = None

    @property
    def state(self) -> str:
        """That of the live model."""
        return self._live.state

    def scrub(self, share: float, damaged: Callable[[DigestMismatch], None]) -> None:
        """Compare live weights with what was committed all the time, in a thread."""
        self._live.scrub(share, damaged)

    @property
    def scrubbed(self) -> ScrubReport:
        """The last pass of that."""
        return self._live.scrubbed

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

    @property
    def layout_nbytes(self) -> int:
        """Bytes of the parameters, whether they have memory or not."""
        return sum(one.spec.nbytes for one in self._shards().held)

    def layout(self) -> PartLayout:
        """What this rank holds of the model, under the model's own names."""
        shards = self._shards()
        boxes = [SourceBox(p.source, p.box.start, p.box.shape) for one in shards.held for p in one.placements]
        return PartLayout(boxes=tuple(boxes), sources={name: tuple(shape) for name, shape in shards.sources.items()})

    # -- an update -------------------------------------------------------------------------------------------------------

    def fetch(self, feed: Feed, action: Stage, deadline: Deadline, progress: Progress) -> Fetched:
        """Fetch this rank's slices of a version and verify them. Touches nothing of the live model."""
        began = time.monotonic()
        held = None if action.afresh else self.held
        manifest = decode(feed.manifest, Manifest)
        others = [name for name in manifest.by_name() if feed.names and not _matches(name, feed.names)]
        shards = self._shards(names=feed.names, ignore=(*feed.ignore, *others))
        ask = partial(_own_manifest, manifest, deadline)
        use, own = self._kept.open(feed.source, rank=self._rank, ask=ask)
        with ExitStack() as opened:
            receiver = opened.enter_context(use)
            self._check_own(manifest, own, feed.source)
            checksum = action.verify_checksum or isinstance(receiver, CheckpointReceiver)
            restore = None
            if action.commit == "inplace" and held is not None and held.source != feed.source:
                restore = opened.enter_context(closing(open_receiver(held.source, rank=self._rank)))
            version = cut(
                receiver, manifest, shards,
                held=held, mode=_way(held, manifest, action.commit), checksum=checksum, deadline=deadline,
                progress=progress, buffers=self._buffers, restore=restore, live=self._live.parameters,
                keep=action.commit != "inplace",
            )  # fmt: skip
            if not checksum and manifest.sealed:  # no digest tells whether the source was replaced while it was read
                self._check_own(manifest, ask(receiver), feed.source)
            later = ExitStack()
            if action.commit == "inplace":  # the slices are streamed from there when they are committed, and not before
                opened.callback(use.drop)
                later = opened.pop_all()
        read = RankRead.of(own if manifest.sealed else version.full, version.unproved)
        proved = checksum or (version.unchanged and held is not None and held.proved)
        return Fetched(version, feed.source, action.commit, later.close, proved, began, read)

    def _check_own(self, manifest: Manifest, own: Manifest, source: str) -> None:
        """Raise `SourceFailed` if this rank's source has another version than the one that is wanted."""
        problems = RankRead.of(own).differences(RankRead.of(manifest), rank=self._rank, ranks=self._ranks)
        if problems:
            raise SourceFailed(
                f"rank {self._rank} finds something else at {source} than {manifest.version} as the front end saw it: "
                f"{'; '.join(problems)}. Nothing was changed."
            )

    def stage(self, fetched: Fetched, deadline: Deadline) -> tuple[float, bytes]:
        """Make everything ready for `enter`, beside the live model. Gives the seconds that verifying took, and the sums of
        what was staged, for the vote.
        """
        version, fetch_s = fetched.version, time.monotonic() - fetched.began
        asked: CommitMode = "copy" if fetched.commit == "auto" else fetched.commit
        mode: CommitMode = "delta" if version.by_delta and (asked != "swap" or version.unchanged) else asked
        # Always verified: the parameters have sums of their own.
        staged = self._live.stage(version.shard.version, source=version, commit=mode, deadline=deadline)
        staged.timeline.attribute(fetch_s, to="stage")
        staged.nbytes, staged.source = version.nbytes, fetched.source
        try:
            sums = version.sums(staged.commit, deadline)
        except BaseException:
            self._live.abandon(staged)
            raise
        self._coming = _Coming(fetched, staged, sums)
        numbers = [(one.total.one, one.total.other, one.elements) for one in sums]
        return staged.verify_s, np.array(numbers, dtype="<u8").tobytes()

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
            shard, fetched = coming.staged.manifest, coming.fetched
            self._before = self.held
            self.held = HeldVersion(coming.version.full, shard, fetched.source, proved=fetched.proved, sums=coming.sums)
            self._drop()
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
        wrong = []
        for entry in self.held.shard.tensors:
            live = torch_bridge.host(self._model.get_parameter(entry.name))
            if (found := array_proof(entry.spec, live, entry.proof)) != entry.proof:
                wrong.append(f"{self.name}: {entry.name} ({found}, and {entry.proof} was committed)")
        return wrong

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
