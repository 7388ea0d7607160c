"""One update of a running SGLang model: staged and checked beside it, loaded by all ranks, or undone by all."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.host.copy import HostCopy, StagedVersion, Wanted, changed_names
from weightcast.engines.sglang.dry_run import find_mismatches, is_plain
from weightcast.engines.sglang.ranks import Ranks, Said, problems, tensor_parallel_ranks
from weightcast.engines.sglang.request import Request
from weightcast.errors import CommitFailed, Mismatch, UpdateFailed, WeightcastError
from weightcast.tensors.bridges.torch_bridge import from_host, torch_dtype
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec
from weightcast.transports.allowed import AllowedSources
from weightcast.wire.manifest import Manifest
from weightcast.worker.fit import TRANSFORMER_GROUPS, misfit

log = logs.get(__name__)

# Entered around a load: it brings parameters into the layout that can be loaded, and back into the one that is served.
Session = Callable[[], AbstractContextManager[object]]

_GRACE_S = 10.0  # ranks have the same deadline, and do not notice it at the same moment

_updates: weakref.WeakKeyDictionary[nn.Module, ModelUpdates] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def bring(model: nn.Module, request: Request, *, session: Session = nullcontext, ranks: Ranks | None = None) -> str:
    """Load a version into a model that may serve, together with the other ranks, and tell what was done.

    Raises a `WeightcastError` whose message tells what is served then: the former version, unless it says otherwise.
    """
    with _lock:
        updates = _updates.get(model)
        if updates is None:
            updates = _updates[model] = ModelUpdates()
    return updates.bring(model, request, session, tensor_parallel_ranks() if ranks is None else ranks)


def forget(model: nn.Module | None = None) -> None:
    """Somebody else writes into a model (None: all of them): what it holds is not known. The next update loads all."""
    with _lock:
        known = [_updates.get(model)] if model is not None else list(_updates.values())
    for updates in known:
        if updates is not None:
            updates.known = False


class ModelUpdates:
    """What one model was given. `known` is whether it holds exactly the version that was committed to the host copy."""

    def __init__(self) -> None:
        self.known = False
        self._copy = HostCopy(name=f"sglang-{socket.gethostname()}-{os.getpid()}")
        self._fitting: frozenset[TensorSpec] | None = None
        weakref.finalize(self, self._copy.close)

    @property
    def served(self) -> Manifest | None:
        """The version that the model holds, as far as it came from here."""
        return self._copy.held if self.known else None

    def bring(self, model: nn.Module, request: Request, session: Session, ranks: Ranks) -> str:
        """See the function of this name."""
        started_s = time.monotonic()
        load = _Load(model, session, ranks, request.timeout)
        ready = self._ready(model, request, load, ranks)
        manifest, served = ready.staged.manifest, self.served
        failures = load.tried(lambda: load.put(manifest, ready.staged.arrays, ready.names))
        if failures:
            undoing = load.tried(ready.way_back)
            self._copy.abandon(ready.staged)
            before = f"version {served.version}" if served is not None else "what was served before"
            if undoing:
                self.known = False
                raise CommitFailed(
                    f"version {manifest.version} could not be loaded ({failures}), and neither could {before} ({undoing}). "
                    "This server holds no whole version: take it out of service, and update it again or start it anew."
                )
            raise CommitFailed(
                f"version {manifest.version} could not be loaded: {failures}. It was undone: {before} is served."
            )
        self.known = False  # unless the copy follows
        self._copy.commit(ready.staged)
        self.known = True
        loaded, among = len(ready.names), len(manifest.by_name())
        log.info(
            "update committed",
            version=manifest.version,
            rank=ranks.rank,
            tensors=loaded,
            among=among,
            ms=logs.ms(time.monotonic() - started_s),
        )
        return f"version {manifest.version} is served: {loaded} of its {among} tensors were loaded, the others are the same."

    def _ready(self, model: nn.Module, request: Request, load: _Load, ranks: Ranks) -> _Ready:
        """The same version at every rank, verified, with the way back; or an error at every rank, and nothing is staged."""
        found: _Ready | WeightcastError
        try:
            found = self._prepared(model, request, load)
        except WeightcastError as error:
            found = error
        except Exception as error:  # noqa: BLE001 - the other ranks wait to be told
            found = UpdateFailed(f"{type(error).__name__}: {error}. No weights were changed.")
            found.__cause__ = error
        if isinstance(found, _Ready):
            said = Said(version=found.staged.manifest.version, root_digest=found.staged.manifest.root_digest)
        else:
            said = Said(problem=str(found))
        try:
            everybody = ranks.exchange(said, request.timeout + _GRACE_S)
            if isinstance(found, WeightcastError):
                raise found
            _agree(everybody)
        except BaseException:
            if isinstance(found, _Ready):
                self._copy.abandon(found.staged)
            raise
        return found

    def _prepared(self, model: nn.Module, request: Request, load: _Load) -> _Ready:
        source = AllowedSources.of_environment().resolve(request.source)
        wanted = Wanted(source, request.version, request.verify_checksum, request.timeout)
        deadline = Deadline.after(request.timeout)
        staged = self._copy.stage(wanted, fits=lambda manifest: self._check(model, manifest, request), deadline=deadline)
        try:
            names = self._names(model, staged, whole=request.whole)
            served = self.served
            if served is None:
                return _Ready(staged, names, _snapshot(model))
            return _Ready(staged, names, lambda: load.put(served, staged.former, names))
        except BaseException:
            self._copy.abandon(staged)
            raise

    def _check(self, model: nn.Module, manifest: Manifest, request: Request) -> None:
        """Refuse what differs in kind from the version that is served, and what the model's loader does not take."""
        specs = {name: _named(name, entry.spec) for name, entry in manifest.by_name().items()}
        served = self.served
        mismatches = list(_differences(served, manifest)) if served is not None else []
        fitting = frozenset(specs.values())
        if not mismatches and fitting != self._fitting and is_plain(model):
            mismatches = find_mismatches(model, specs, allow_unwritten=request.allow_unwritten)
        if mismatches:
            raise misfit(manifest.version, specs, mismatches, None)
        if not request.allow_unwritten:
            self._fitting = fitting

    def _names(self, model: nn.Module, staged: StagedVersion, *, whole: bool) -> set[str]:
        """The tensors to load: those that changed and what is fused with them, or all of them."""
        everything = set(staged.manifest.by_name())
        if whole or self.served is None or not is_plain(model):
            return everything
        names = changed_names(self.served, staged.manifest)
        return complete_groups(names, everything)


@dataclass(frozen=True)
class _Ready:
    """What is to be loaded, and how to get back: the same tensors of the former version, or the model's own memory."""

    staged: StagedVersion
    names: set[str]
    way_back: Callable[[], None]


class _Load:
    """Writing into the live model, at all ranks."""

    def __init__(self, model: nn.Module, session: Session, ranks: Ranks, timeout_s: float) -> None:
        self._model, self._session, self._ranks, self._timeout_s = model, session, ranks, timeout_s

    def put(self, manifest: Manifest, arrays: Mapping[str, Array], names: set[str]) -> None:
        """The model's own loader takes these tensors, in one call."""
        if not names:
            return
        with self._session():
            self._model.load_weights(_tensors(manifest, arrays, names))  # type: ignore[operator]
        param = next(self._model.parameters(), None)
        if param is not None and param.device.type == "cuda":
            torch.cuda.synchronize(param.device)

    def tried(self, act: Callable[[], None]) -> str:
        """Do it here, hear how it went elsewhere, and tell what went wrong; empty if nothing did."""
        problem = ""
        try:
            with torch.no_grad():
                act()
        except Exception as error:
            log.exception("load crashed", rank=self._ranks.rank)
            problem = f"{type(error).__name__}: {error}"
        try:
            return problems(self._ranks.exchange(Said(problem=problem), self._timeout_s + _GRACE_S))
        except WeightcastError as error:
            return f"{problem}; {error}" if problem else str(error)


def _agree(said: list[Said]) -> None:
    if problems(said):
        raise UpdateFailed(f"not all ranks could stage the version; no weights were changed. {problems(said)}")
    found = sorted({f"{one.version} {one.root_digest}" for one in said})
    if len(found) > 1:
        raise UpdateFailed(
            f"the ranks found different versions: {', '.join(found)}. No weights were changed; name the version."
        )


def complete_groups(names: Iterable[str], everything: set[str]) -> set[str]:
    """These names, and all that engines fuse with one of them."""
    completed = set(names)
    for group in TRANSFORMER_GROUPS:
        ends = [pattern.removeprefix("*") for pattern in group]
        for end in ends:
            stems = [name.removesuffix(end) for name in completed if name.endswith(end)]
            completed |= {stem + other for stem in stems for other in ends} & everything
    return completed


def _tensors(manifest: Manifest, arrays: Mapping[str, Array], names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    by_name = manifest.by_name()
    for name in sorted(names):
        entry = by_name[name]
        yield name, from_host(arrays[entry.name], torch_dtype(entry.dtype))


def _differences(served: Manifest, manifest: Manifest) -> Iterator[Mismatch]:
    before, after = served.by_name(), manifest.by_name()
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            yield Mismatch("missing", name, f"{served.version}, which is served, has {before[name].spec.describe()}")
        elif name not in before:
            yield Mismatch("unexpected", name, f"{served.version}, which is served, has no such tensor")
        elif (before[name].dtype, before[name].shape) != (after[name].dtype, after[name].shape):
            was, comes = before[name].spec.describe(), after[name].spec.describe()
            yield Mismatch("shape", name, f"{served.version}, which is served, has {was}, the version {comes}")


def _named(name: str, spec: TensorSpec) -> TensorSpec:
    return TensorSpec(name=name, dtype=spec.dtype, shape=spec.shape)


def _snapshot(model: nn.Module) -> Callable[[], None]:
    """Copy what the model holds to the host; calling the result writes it back."""
    held = [*model.parameters(), *model.buffers()]
    saved = [tensor.detach().to("cpu", copy=True) for tensor in held]

    def write_back() -> None:
        for tensor, former in zip(held, saved, strict=True):
            tensor.data.copy_(former)

    return write_back
