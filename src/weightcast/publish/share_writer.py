"""`ShareWriter`: a trainer rank that writes what it holds of a version into a store, beside the files of the other ranks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import (
    AnyPath,
    GatherFailed,
    InvalidInput,
    StorageFailed,
    VersionExists,
    VersionNotFound,
    WeightcastError,
)
from weightcast.publish.changes import check_policy
from weightcast.publish.depot_publisher import DELTAS, TIMEOUT_S
from weightcast.publish.drafting import ChangesSince, Filled, Release, drafted
from weightcast.publish.filling import fill
from weightcast.publish.shares import given
from weightcast.store import layout
from weightcast.store.catalog import Catalog
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.files import make_dir, read_small, remove_file, replace_synced, sync_dir
from weightcast.store.lock import exclusive
from weightcast.store.pruning import unreferenced
from weightcast.store.store import Store
from weightcast.store.version_file import put_back_version_file, raw_version_file, step_of, version_yaml, write_version_file
from weightcast.store.writer import HasStateDict, PublishAs
from weightcast.tensors.digest import DEFAULT, Algorithm
from weightcast.transports.ipc.host_memory import HostDevice, HostMemory, private_memory
from weightcast.wire.decoding import decode
from weightcast.wire.manifest import MAX_MANIFEST_NBYTES, Manifest, check_version_id, decode_manifest, encode_manifest
from weightcast.wire.shares import Share, SharedPublish, decode_share, encode_share, merged, share_file

log = logs.get(__name__)

_POLL_S = 0.02
_STATE = ".publish.json"
_MAX_STATE_NBYTES = 1 << 20

_Fill = Callable[[int], tuple[Filled, ChangesSince | None]]


class ShareWriter:
    """Publishes a model that several trainer ranks share into a store on a file system that all of them reach.

        writer = ShareWriter("/mnt/weights", rank=rank, ranks=world_size)
        for step in range(1000):
            train()
            writer.publish(f"step_{step}", model.state_dict())

    Every rank calls `publish` with the same versions and what it holds: whole tensors, `DTensor`s, or `Shard`s. Each rank
    writes its own boxes, or what changed in them since the version before. Rank 0 writes the manifest last. Nothing is
    gathered; ranks meet in the directory of the version. A version is a delta only if every rank holds the one before, which
    each keeps in memory: two copies of its boxes. `deltas` says when deltas are made, in one packing, not "both"; None means
    never. `threads` copy and hash.
    """

    def __init__(
        self, path: AnyPath, *, rank: int, ranks: int, threads: int = 2, deltas: DeltaPolicy | None = DELTAS
    ) -> None:  # fmt: skip
        if not 0 <= rank < ranks or threads < 1:
            raise InvalidInput(f"rank {rank} of {ranks} with {threads} thread(s) cannot be: ranks count from 0.")
        self.path = Path(path)
        self._rank, self._ranks, self._threads, self._deltas = rank, ranks, threads, check_policy(deltas)
        self._catalog = Catalog(self.path)
        self._store = Store(self.path, delta=deltas)  # for one rank alone
        self._last: Filled | None = None  # the version before, in `_kept`
        self._kept: HostMemory | None = None
        self._spare: HostMemory | None = None
        self._since_full = 0

    def publish(
        self,
        version: str,
        tensors: Mapping[str, object] | HasStateDict,
        *,
        dtype: str | None = None,
        keep_dtype: Sequence[str] = (),
        strip_wrappers: bool = False,
        finite: bool = False,
        step: int | None = None,
        metadata: Mapping[str, str] | None = None,
        algorithm: Algorithm = DEFAULT,
        timeout: float = TIMEOUT_S,
    ) -> Manifest:
        """Publish a version together with all other ranks, and make it the newest. All ranks return the same manifest.

        When this returns, the version is whole and on the medium. When it raises, the store is as before: `GatherFailed` if
        another rank failed or did not come. When a rank dies, the others raise after `timeout` seconds. `dtype`,
        `keep_dtype`, `strip_wrappers` and `finite` are those of `Store.publish`; all ranks must give the same.
        """
        check_version_id(version)
        if self._ranks == 1:
            return self._store.publish(
                version, tensors, "full" if self._deltas is None else "auto", dtype=dtype, keep_dtype=keep_dtype,
                strip_wrappers=strip_wrappers, finite=finite, step=step, metadata=metadata, algorithm=algorithm,
            )  # fmt: skip
        form = PublishAs.of(dtype, keep_dtype, strip_wrappers=strip_wrappers)
        deadline, began = Deadline.after(timeout), time.monotonic()

        def filled(sequence: int) -> tuple[Filled, ChangesSince | None]:
            number = step_of(version, default=sequence) if step is None else step
            release = Release(sequence, number, dict(metadata or {}))
            return self._fill(version, form, tensors, release, algorithm, deadline, finite=finite)

        manifest, self._last = (self._lead if self._rank == 0 else self._follow)(version, filled, deadline)
        self._kept, self._spare = self._spare, self._kept
        self._since_full = 1 if manifest.kind == "full" else self._since_full + 1
        log.info(
            "published",
            version=version,
            kind=manifest.kind,
            rank=self._rank,
            tensors=len(manifest.tensors),
            nbytes=manifest.nbytes,
            payload_nbytes=manifest.payload_nbytes,
            ms=logs.ms(time.monotonic() - began),
            store=self.path,
        )
        return manifest

    def _fill(
        self,
        version: str,
        form: PublishAs,
        tensors: Mapping[str, object] | HasStateDict,
        release: Release,
        algorithm: Algorithm,
        deadline: Deadline,
        *,
        finite: bool,
    ) -> tuple[Filled, ChangesSince | None]:
        """Copy what this rank holds into memory of its own, and find what changed in it."""
        named = form.named(tensors, version)
        if not isinstance(named, Mapping):
            raise InvalidInput("publish needs a mapping of tensors that are alive together.")
        own, tied = given(named, ranks=self._ranks, form=form)
        draft = drafted(version, own, tied, rank=self._rank, ranks=self._ranks, algorithm=algorithm)
        if self._spare is None or self._spare.nbytes != draft.memory_nbytes:
            self._spare = private_memory(draft.memory_nbytes)
        memory = self._spare
        digests = fill(
            HostDevice(), memory, draft.targets(), draft.tensors(), algorithm=None, threads=self._threads, deadline=deadline,
            boxes=draft.boxes(), finite=finite,
        )  # fmt: skip
        changes = None
        if self._last is not None and self._deltas is not None and self._since_full < self._deltas.full_every:
            changes = draft.changes_since(self._last, memory.bytes, digests, self._deltas)
        held = draft.sealed(memory.bytes, digests, release, self._threads, changes)
        return Filled(draft, memory.bytes, digests, held), changes

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    def _lead(self, version: str, fill_memory: _Fill, deadline: Deadline) -> tuple[Manifest, Filled]:
        directory, path = self._catalog.directory(version), layout.manifest_path(self.path, version)
        make_dir(self.path)
        with exclusive(layout.lock_path(self.path), deadline):
            self._check_absent(version)
            make_dir(directory)
            remove_file(directory / _STATE)  # first: the other ranks must not join a try that is over
            for leftover in sorted(directory.iterdir()):
                remove_file(leftover)
            state = SharedPublish(secrets.token_hex(8), self._catalog.next_sequence())
            before = raw_version_file(self.path)
            try:
                _write_state(directory, state)
                filled, changes = fill_memory(state.sequence)
                self._write(directory, state, filled, changes)
                manifest = self._described(merged(self._announced(version, state, deadline)))
                if manifest.kind == "full":
                    _write_state(directory, replace(state, full=True))
                    if changes is not None:
                        self._write_share(directory, filled)
                    self._wait_for(version, state, [share.file for share in manifest.shares], deadline)
                sync_dir(directory)
                encoded = encode_manifest(manifest)
                decode_manifest(encoded, path)  # what cannot be read back must never be sealed
                replace_synced(path, encoded)
                write_version_file(self.path, version=version, step=manifest.step)
            except BaseException as error:
                if put_back_version_file(self.path, before):  # else it names the new version, which must then stay
                    with suppress(WeightcastError):  # the first error counts; gc removes the rest
                        remove_file(path)
                        _write_state(directory, replace(state, error=str(error) or type(error).__name__))
                raise
            with suppress(WeightcastError, OSError):
                remove_file(directory / _STATE)  # first: the other ranks wait for this
                for stray in unreferenced(directory, manifest):
                    remove_file(stray)
        return manifest, filled

    def _announced(self, version: str, state: SharedPublish, deadline: Deadline) -> list[Share]:
        """What all ranks hold of the version."""
        directory = self._catalog.directory(version)
        names = [_announcement(rank, state) for rank in range(self._ranks)]
        self._wait_for(version, state, names, deadline)
        return [decode_share(read_small(directory / name, MAX_MANIFEST_NBYTES), directory / name) for name in names]

    def _wait_for(self, version: str, state: SharedPublish, names: Sequence[str], deadline: Deadline) -> None:
        """Wait until every rank has written its file. `names` are by rank."""
        directory = self._catalog.directory(version)
        while True:
            missing = [rank for rank, name in enumerate(names) if not (directory / name).exists()]
            if not missing:
                return
            for rank in missing:
                with suppress(FileNotFoundError):
                    why = read_small(directory / _failure(rank, state), _MAX_STATE_NBYTES).decode(errors="replace")
                    raise GatherFailed(f"version {version} was not published to {self.path}: rank {rank} failed: {why}")
            if deadline.remaining() <= 0:
                raise GatherFailed(
                    f"version {version} was not published to {self.path}: rank(s) {', '.join(map(str, missing))} of "
                    f"{self._ranks} did not write their part within {deadline.seconds:g} s. Publish it again on all ranks."
                )
            deadline.check(f"waiting for all ranks to write version {version}")
            time.sleep(_POLL_S)

    def _described(self, shared: Manifest) -> Manifest:
        """The version as a delta, if all ranks have one on a version that the store has; else as a full one."""
        base, why = shared.base, "not every rank has changes since the version before"
        try:
            if base is not None and self._catalog.manifest(base.version).root_digest == base.root_digest:
                boxes = {name: tuple(replace(box, offsets=()) for box in held) for name, held in shared.boxes.items()}
                return replace(shared, kind="delta", shares=(), boxes=boxes)
            why = why if base is None else f"{base.version} is another one in the store"
        except VersionNotFound:
            why = "the version before is not in the store any more"
        log.info("full version chosen", version=shared.version, why=why)
        return replace(shared, base=None, payloads=())

    # -- all other ranks ----------------------------------------------------------------------------------------------

    def _follow(self, version: str, fill_memory: _Fill, deadline: Deadline) -> tuple[Manifest, Filled]:
        """Write this rank's part once rank 0 has begun, and again if it begins anew; wait until the version is there."""
        directory, joined = self._catalog.directory(version), SharedPublish("", 0)
        before = _read_state(directory)  # of an earlier try, if that has failed
        found: tuple[Filled, ChangesSince | None] | None = None
        while True:
            state = _read_state(directory)  # before looking for the manifest: rank 0 removes this when all is written
            if found is None:
                self._check_absent(version)
            elif (state is None or deadline.remaining() <= 0) and layout.manifest_path(self.path, version).exists():
                manifest = self._catalog.manifest(version)
                named = version_yaml(version=version, step=manifest.step)
                if state is None or raw_version_file(self.path) == named:  # else rank 0 may still take it back
                    return manifest, found[0]
            if state is not None and state != joined:
                if state.error and (before is None or state.attempt != before.attempt or not before.error):
                    raise GatherFailed(f"version {version} was not published to {self.path}: rank 0 failed: {state.error}")
                if not state.error:
                    try:
                        if found is None and (directory / _announcement(self._rank, state)).exists():
                            raise GatherFailed(
                                f"version {version} was not published by this process: another process of rank "
                                f"{self._rank}, or an earlier call, has written its part of it already. If the version is "
                                f"in {self.path} when rank 0 is done, go on with the next one, else publish it again on "
                                "all ranks."
                            )
                        if state.attempt != joined.attempt or found is None:
                            found = fill_memory(state.sequence)
                            self._write(directory, state, *found)
                        if state.full and found[1] is not None:
                            self._write_share(directory, found[0])
                    except BaseException as error:
                        after = _read_state(directory)
                        if isinstance(error, StorageFailed) and (after is None or after.attempt != state.attempt):
                            continue  # rank 0 has removed the directory, and begins anew
                        with suppress(WeightcastError):
                            replace_synced(directory / _failure(self._rank, state), str(error).encode())
                        raise
                    joined = state
            failed = f" (it failed before: {state.error})" if state is not None and state.error else ""
            deadline.check(f"waiting for rank 0 to publish version {version} to {self.path}{failed}")
            time.sleep(_POLL_S)

    # -- files --------------------------------------------------------------------------------------------------------

    def _check_absent(self, version: str) -> None:
        if layout.manifest_path(self.path, version).exists():
            raise VersionExists(
                f"version {version} is already published in {self.path}, and a version never changes: choose another id."
            )

    def _write(self, directory: Path, state: SharedPublish, filled: Filled, changes: ChangesSince | None) -> None:
        """Write the changes of this rank, or its boxes if it has none, and then what they are."""
        if changes is None:
            self._write_share(directory, filled)
        else:
            replace_synced(directory / changes.payload.file, changes.data)
        replace_synced(directory / _announcement(self._rank, state), encode_share(filled.held.share))

    def _write_share(self, directory: Path, filled: Filled) -> None:
        replace_synced(directory / share_file(self._rank), filled.memory[: filled.draft.memory_nbytes].data)


def _announcement(rank: int, state: SharedPublish) -> str:
    return f".share-{rank:05d}-{state.attempt}.json"


def _failure(rank: int, state: SharedPublish) -> str:
    return f".error-{rank:05d}-{state.attempt}.txt"


def _write_state(directory: Path, state: SharedPublish) -> None:
    replace_synced(directory / _STATE, msgspec.json.encode(state))


def _read_state(directory: Path) -> SharedPublish | None:
    try:
        return decode(read_small(directory / _STATE, _MAX_STATE_NBYTES), SharedPublish)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        cure = "Remove it with `weightcast store gc STORE`, and publish again."
        raise GatherFailed(f"{directory / _STATE} is not what rank 0 writes: {error}. {cure}") from error
