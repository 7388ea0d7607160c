"""Publishing one version: the choice between full and delta, and the order in which everything becomes visible."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, get_args

from weightcast import logs
from weightcast.errors import Conflict, InvalidInput, VersionExists, VersionNotSet, WeightcastError
from weightcast.store import layout
from weightcast.store.catalog import Catalog
from weightcast.store.chain import Chain, resolve
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.delta_writer import DeltaWriter
from weightcast.store.draft import Contents, Draft
from weightcast.store.kept import keep_state
from weightcast.store.version_file import put_back_version_file, raw_version_file, step_of, write_version_file
from weightcast.store.writer import FullWriter, NamedTensors
from weightcast.tensors.digest import Algorithm
from weightcast.wire.manifest import Manifest, check_version_id

log = logs.get(__name__)

Mode = Literal["full", "delta", "auto"]


@dataclass(frozen=True)
class Request:
    """What is to be published. Making one checks everything that can be told without the store."""

    version: str
    tensors: NamedTensors
    mode: Mode
    step: int | None
    files: Mapping[str, bytes]
    metadata: Mapping[str, str]
    part_nbytes: int
    algorithm: Algorithm
    finite: bool = False

    def __post_init__(self) -> None:
        check_version_id(self.version)
        if self.mode not in get_args(Mode):
            raise InvalidInput(f"mode must be one of {', '.join(get_args(Mode))}, not {self.mode!r}.")
        if self.part_nbytes < 1:
            raise InvalidInput(f"part_nbytes must be positive, not {self.part_nbytes}.")
        if not isinstance(self.step, int | None):
            raise InvalidInput(f"step must be an integer, not {self.step!r}.")
        if not all(isinstance(text, str) for item in self.metadata.items() for text in item):
            raise InvalidInput("metadata must map texts to texts.")


class StorePublisher:
    """Writes versions into a store. The caller holds the store's lock during `publish`."""

    def __init__(self, catalog: Catalog, policy: DeltaPolicy) -> None:
        self._catalog, self._policy = catalog, policy
        self._kept = keep_state(catalog.path, policy)

    def publish(self, request: Request) -> Manifest:
        """Write a version and make it the newest, or leave the store as it was."""
        path, version = self._catalog.path, request.version
        started = time.monotonic()
        if layout.manifest_path(path, version).exists():
            raise VersionExists(
                f"version {version} is already published in {path}, and a version never changes. Publish under another "
                f"id; if it is not the newest and should be, Store.announce({version!r}) makes it so."
            )
        sequence = self._catalog.next_sequence()
        draft = Draft(path, version, request.algorithm)
        before = raw_version_file(path)
        try:
            draft.begin()
            contents = self._write(draft, request)
            for name, data in request.files.items():
                draft.add_file(name, data)
            step = step_of(version, default=sequence) if request.step is None else request.step
            manifest = draft.seal(contents, sequence=sequence, step=step, metadata=request.metadata)
            write_version_file(path, version=version, step=manifest.step)
        except BaseException:
            self._kept.drop()
            if put_back_version_file(path, before):  # else it names the new version, which must then stay
                draft.abandon()
            raise
        self._follow(manifest, contents)
        log.info(
            "published",
            version=version,
            kind=manifest.kind,
            tensors=len(manifest.tensors),
            nbytes=manifest.nbytes,
            parts=len(manifest.parts),
            payload_nbytes=manifest.payload_nbytes,
            density=round(contents.density, 6),
            ms=logs.ms(time.monotonic() - started),
            store=path,
        )
        return manifest

    def _follow(self, manifest: Manifest, contents: Contents) -> None:
        try:
            if contents.delta is not None:
                self._kept.advance(manifest, contents.delta)
        except MemoryError as error:  # the version is published; what is kept can be read back
            log.warning("state dropped", version=manifest.version, why="the next delta has to read the store", error=error)
            self._kept.drop()

    def _write(self, draft: Draft, request: Request) -> Contents:
        if request.mode == "full":
            return self._write_full(draft, request, request.tensors)
        with ExitStack() as using:
            try:
                chain = self._find_base(request)
                state = using.enter_context(self._kept.opened(chain))
            except WeightcastError as error:
                self._choose_full(request, str(error), error)
                return self._write_full(draft, request, request.tensors)
            writer = DeltaWriter(
                draft, chain.end, state, self._policy, choosing=request.mode == "auto", finite=request.finite
            )
            outcome = writer.write(request.tensors)
            if isinstance(outcome, Contents):
                return outcome
            self._kept.drop()
            self._choose_full(request, outcome.why)
            with outcome.tensors as tensors:
                contents = self._write_full(draft, request, tensors)
            outcome.conclude(contents.tensors)
            return contents

    def _find_base(self, request: Request) -> Chain:
        """The chain of the newest version, if a delta may be made on it."""
        try:
            newest = self._catalog.newest()
        except VersionNotSet as error:
            raise Conflict("the store has no newest version to build on") from error
        chain = resolve(self._catalog, newest)
        if len(chain) >= self._policy.full_every:
            raise Conflict(f"{len(chain)} versions since {chain.full.version} are enough (full_every)")
        if chain.end.algorithm != request.algorithm:
            raise Conflict(f"{chain.end.version} has digests by {chain.end.algorithm}, not by {request.algorithm}")
        return chain

    def _choose_full(self, request: Request, why: str, cause: WeightcastError | None = None) -> None:
        """Log that a version becomes a full one and why, or refuse where a delta was asked for."""
        reason = why.partition("\n")[0].rstrip(".:")
        if request.mode == "delta":
            raise Conflict(
                f"version {request.version} cannot be published as a delta: {reason}. Nothing was published. Use mode "
                "'full', or 'auto', which takes a delta where it can."
            ) from cause
        log.info("full version chosen", version=request.version, why=reason)

    def _write_full(self, draft: Draft, request: Request, tensors: NamedTensors) -> Contents:
        with FullWriter(draft, part_nbytes=request.part_nbytes, finite=request.finite) as writer:
            writer.add_all(tensors)
            return writer.finish()
