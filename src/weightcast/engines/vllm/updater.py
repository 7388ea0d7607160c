"""One worker of vLLM and its versions: staged beside the model, committed together with the other ranks, or not at all."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.host.copy import HostVersions, StagedVersion, Wanted, changed_names
from weightcast.engines.vllm.commits import Commit, Reload, Switch
from weightcast.engines.vllm.layers import LayerMaker, can_be_made_beside
from weightcast.engines.vllm.layout import Layout, learn_layout
from weightcast.engines.vllm.peers import Peers
from weightcast.errors import CommitFailed, DeadlineExceeded, InvalidInput, UpdateFailed, WeightcastError, WrongState
from weightcast.tensors.bridges.torch_bridge import from_host, torch_dtype
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec
from weightcast.wire.manifest import Manifest
from weightcast.worker.buffers import Buffers

log = logs.get(__name__)

CommitMode = Literal["switch", "reload"]
State = Literal["READY", "STAGING", "STAGED", "COMMITTING", "FAILED"]
_LATE_S = 30.0  # beyond its own deadline, for a staging to say what happened
_STOP_S = 2.0  # for one that is not wanted any more: the engine waits for this
_BREATH_S = 0.01  # between two pieces of memory of the old version that are freed, after the pause


@dataclass
class _Staging:
    """A version on its way, in a thread of its own."""

    wanted: Wanted
    ids: dict[str, str]  # of whoever asked for it, for the log
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    version: StagedVersion | None = None
    commit: Commit | None = None
    layers: int = 0
    stage_s: float = 0.0
    error: BaseException | None = None


_updaters: weakref.WeakSet[ModelUpdater] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for updater in list(_updaters):
        updater.end()


class ModelUpdater:
    """Updates the model of one worker. `stage`, `begin`, `status` and `abandon` may be called from any thread; `commit` only
    where no step of the engine runs, and by all ranks of the replica.

    `versions` is where staged versions come from. `mode` is how they are committed: `switch` makes layers beside the live
    ones, which takes the memory of what changed and no time in the pause; `reload` lets vLLM load them in the pause. By
    default it is `switch` where that can be done.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: Any,
        *,
        make_versions: Callable[[Callable[[Manifest], None]], HostVersions],
        peers: Peers,
        rank: int = 0,
        mode: CommitMode | None = None,
    ) -> None:
        self._model, self._config, self._peers, self.rank = model, model_config, peers, rank
        self.mode = mode
        self.held: Manifest | None = None
        self._versions = make_versions(self._check_fits)
        self._buffers = Buffers()
        self._torn = False
        self._committing = False
        self._staging: _Staging | None = None
        self._layouts: tuple[frozenset[TensorSpec], Layout, LayerMaker] | None = None
        self._lock = threading.Lock()
        self._last: dict[str, float | int] = {}
        self._hurry, self._freeing = threading.Event(), threading.Thread()
        _updaters.add(self)

    @property
    def version(self) -> str | None:
        """What the model serves; None if that is what the server was started with, or nothing whole."""
        return self.held.version if self.held is not None else None

    # -- staging ---------------------------------------------------------------------------------------------------

    def begin(self, wanted: Wanted) -> None:
        """Stage a version in the background. The same one that is being staged or waits is kept; another is dropped."""
        with self._lock:
            current = self._staging
            if current is not None and current.wanted == wanted and current.error is None:
                return
            self._drop()
            staging = _Staging(wanted, logs.ids())
            self._staging = staging
            run = logs.carried(self._run)
            threading.Thread(target=run, args=(staging,), name="weightcast-stage", daemon=True).start()

    def stage(self, wanted: Wanted) -> None:
        """Stage a version and wait for it. Raises what went wrong; nothing was changed then."""
        self.begin(wanted)
        staging = self._staging
        if staging is None or not staging.done.wait(wanted.timeout + _LATE_S):
            raise DeadlineExceeded(f"staging version {wanted.version} from {wanted.source}", wanted.timeout)
        if staging.error is not None:
            raise staging.error

    def abandon(self) -> None:
        """Drop what is staged or being staged."""
        with self._lock:
            self._drop()

    def status(self) -> dict[str, object]:
        """For people and programs: JSON."""
        staging, error = self._staging, None
        resting: State = "FAILED" if self._torn else "READY"
        state: State = "COMMITTING" if self._committing else resting
        if staging is not None and not self._committing:
            state = "STAGING" if not staging.done.is_set() else "STAGED" if staging.error is None else resting
            failed = staging.error
            if failed is not None:
                code = failed.code if isinstance(failed, WeightcastError) else UpdateFailed.code
                error = {"code": code, "message": str(failed)}
        return {
            "rank": self.rank, "state": state, "version": self.version,
            "root_digest": self.held.root_digest if self.held is not None else None,
            "staged": staging.version.manifest.version if staging is not None and staging.version is not None else None,
            "error": error, "mode": self._mode(), **self._last,
        }  # fmt: skip

    def forget(self) -> None:
        """The weights were changed by somebody else: what is staged is dropped, and the next version is loaded whole."""
        self.abandon()
        self.held = None

    def close(self) -> None:
        """Drop what is staged, and release memory and connections. The model stays as it is; the next `stage` opens them."""
        self.forget()
        self._versions.close()
        self._buffers.clear()

    def end(self) -> None:
        """The process ends: wait for the threads, which must not be cut off while they are in vLLM's kernels."""
        self.abandon()
        self._finish_freeing(_STOP_S)

    def _finish_freeing(self, seconds: float) -> None:
        """Let go of the layers before the last commit: their memory is wanted."""
        self._hurry.set()
        if self._freeing.ident is not None:
            self._freeing.join(seconds)

    def _drop(self) -> None:
        staging, self._staging = self._staging, None
        if staging is None:
            return
        staging.cancelled.set()
        if not staging.done.wait(_STOP_S):
            log.warning(
                "stage left",
                rank=self.rank,
                version=staging.wanted.version,
                why="it does not stop at once, and goes on unused",
            )
            return
        if staging.commit is not None:
            staging.commit.forget()
        if staging.version is not None:
            self._versions.abandon(staging.version)

    def _run(self, staging: _Staging) -> None:
        started = time.monotonic()
        try:
            self._prepare(staging)
        except WeightcastError as error:
            staging.error = error
        except BaseException as error:  # noqa: BLE001 - told to whoever waits; a thread has nobody else to tell
            staging.error = UpdateFailed(
                f"staging {staging.wanted.version} failed and changed nothing: {type(error).__name__}: {error}"
            )
            staging.error.__cause__ = error
        if staging.error is not None:
            log.warning("stage failed", rank=self.rank, version=staging.wanted.version, error=staging.error)
        staging.stage_s = time.monotonic() - started
        staging.done.set()

    def _prepare(self, staging: _Staging) -> None:
        wanted = staging.wanted
        deadline = Deadline.after(wanted.timeout, cancelled=staging.cancelled)
        version = self._versions.stage(wanted, fits=self._check_fits, deadline=deadline)
        staging.version = version
        layout, maker = self._layout(version.manifest)
        layers = layout.layers_of(changed_names(self.held, version.manifest))
        needed = layout.names_of(layers)
        staging.layers = len(layers)
        tensors = dict(_tensors(version.manifest, version.arrays, needed))
        self._finish_freeing(deadline.remaining())
        if self._mode() == "switch" and not layout.opaque:
            staging.commit = Switch(maker.make(layers, tensors, deadline))
        else:
            known, former = version.former_manifest, version.former
            same = known is not None and self.held is not None and known.root_digest == self.held.root_digest
            back = partial(_tensors, known, former, needed) if same and known is not None else lambda: iter(())
            staging.commit = Reload(self._model, self._config, layout, tensors, back)

    def _mode(self) -> CommitMode:
        if self.mode is None:
            self.mode = "switch" if can_be_made_beside(self._model) else "reload"
        return self.mode

    def _layout(self, manifest: Manifest) -> tuple[Layout, LayerMaker]:
        specs = [TensorSpec(name, entry.dtype, entry.shape) for name, entry in manifest.by_name().items()]
        if self._layouts is None or self._layouts[0] != frozenset(specs):
            layout = learn_layout(self._model, manifest.version, specs)
            self._layouts = frozenset(specs), layout, LayerMaker(self._model, layout, self._buffers)
        return self._layouts[1:]

    def _check_fits(self, manifest: Manifest) -> None:
        self._layout(manifest)

    # -- committing ------------------------------------------------------------------------------------------------

    def commit(self) -> str:
        """Make the staged version live on all ranks, and return its name, or leave the old one live on all, and raise.

        The ranks first agree that all of them have the same version ready, then that all have made it live.
        """
        with self._lock:
            staging = self._staging if self._staging is not None and self._staging.done.is_set() else None
            if staging is not None:
                self._staging = None  # one that is still on its way stays
        version = staging.version if staging is not None and staging.error is None else None
        bid = _bid(version.manifest) if version is not None else 0
        lowest, highest = self._peers.range_of(bid)
        if version is None or staging is None or lowest != highest:
            self._give_back(staging)
            if version is None:
                raise WrongState("commit a version", "nothing is staged", ["a version was staged by update_weights"])
            raise CommitFailed(f"version {version.manifest.version} is not staged on every rank. Nothing was changed.")
        self._committing = True
        try:
            with logs.bound(**staging.ids):
                self._apply(staging, version.manifest)
        finally:
            self._committing = False
        return version.manifest.version

    def withdraw(self) -> None:
        """Take part in a commit of the other ranks without having anything: it fails on all of them, and nobody waits."""
        self._peers.range_of(0)

    def _apply(self, staging: _Staging, manifest: Manifest) -> None:
        commit, version, started = staging.commit, staging.version, time.monotonic()
        if commit is None or version is None:
            raise InvalidInput("nothing is staged.")
        failure: BaseException | None = None
        try:
            commit.apply()
        except BaseException as error:  # noqa: BLE001 - it is undone, and raised after all ranks know
            failure = error
        if not self._all_did(failure is None):
            self._undo(staging, manifest, failure)
        self.held, self._torn = manifest, False
        self._last = {
            "stage_s": staging.stage_s, "commit_s": time.monotonic() - started, "layers": staging.layers,
            "nbytes": version.nbytes,
        }  # fmt: skip
        try:
            self._versions.commit(version)
        except WeightcastError as error:  # the model has it; only the next delta has to start further back
            log.warning("host copy late", rank=self.rank, version=manifest.version, error=error)
        self._hurry.clear()
        breathe = partial(self._hurry.wait, _BREATH_S)
        self._freeing = threading.Thread(target=commit.forget, args=(breathe,), name="weightcast-free", daemon=True)
        self._freeing.start()
        log.info(
            "update committed",
            rank=self.rank,
            version=manifest.version,
            layers=staging.layers,
            stage_ms=logs.ms(staging.stage_s),
            commit_ms=logs.ms(self._last["commit_s"]),
        )

    def _all_did(self, done: bool) -> bool:
        try:
            return self._peers.range_of(int(done))[0] == 1
        except RuntimeError as error:  # a rank that does not answer has not done it
            log.error("ranks not asked", rank=self.rank, error=error)
            return False

    def _undo(self, staging: _Staging, manifest: Manifest, failure: BaseException | None) -> None:
        reason = f"{type(failure).__name__}: {failure}" if failure is not None else "another rank failed"
        held = self.version or "the weights it was started with"
        try:
            if staging.commit is not None:
                staging.commit.undo()
        except Exception as error:  # noqa: BLE001 - raised as what it means
            self._torn, self.held = True, None
            raise CommitFailed(
                f"committing {manifest.version} failed ({reason}) and could not be undone: "
                f"{type(error).__name__}: {error}. "
                "The model holds no whole version; update it again, or restart the server."
            ) from (failure or error)
        finally:
            self._give_back(staging)
        raise CommitFailed(
            f"committing {manifest.version} failed and was undone: {reason}. The model holds {held} as before."
        ) from failure

    def _give_back(self, staging: _Staging | None) -> None:
        if staging is None:
            return
        if staging.commit is not None:
            staging.commit.forget()
        if staging.version is not None:
            self._versions.abandon(staging.version)


def _bid(manifest: Manifest) -> int:
    """A number that two ranks have in common exactly if they have the same state ready, never 0."""
    return int(manifest.root_digest.rpartition(":")[2][:15] or "1", 16) + 1


def _tensors(manifest: Manifest, arrays: Mapping[str, Array], names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors over staged memory, in the order of the version: neighbours fill a layer before the next one begins."""
    for name, entry in manifest.by_name().items():
        if name in names:
            yield name, from_host(arrays[entry.name], torch_dtype(entry.dtype))
