"""A version as one rank sees it, ready to be committed: a source like any other, with nothing left to fetch."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import closing
from functools import partial

from msgspec.structs import replace

from weightcast.clock import Deadline
from weightcast.delta import Delta
from weightcast.errors import DeadlineExceeded, InvalidInput, SourceFailed, UpdateCancelled, VersionNotFound, WeightcastError
from weightcast.tensors.flat import Array, Piece, Pieces, flat_bytes
from weightcast.transports.base import Receiver
from weightcast.wire.manifest import Manifest
from weightcast.worker.buffers import Buffers
from weightcast.worker.commits.staged import StagedCommit
from weightcast.worker.shard_assembly import assembled
from weightcast.worker.shard_boxes import STREAMED_NBYTES
from weightcast.worker.shard_layout import HeldVersion, Shards
from weightcast.worker.shard_stream import Origin, Proof, untold
from weightcast.worker.shard_sums import BoxSum, ConvertedSums, add_changes, sum_parameter


class ShardVersion:
    """The parameters of a rank as a version. Made by `cut`.

    `full` is the version as it was published, `nbytes` what was fetched of it, `by_delta` whether it is the changes since
    what the rank serves. `unproved` are the digests of whole tensors that were read and not compared. It also knows the
    version that the rank serves, so that a commit that failed can be undone. The receivers that it was made with stay the
    caller's to close.
    """

    def __init__(
        self,
        origin: Origin,
        shard: Manifest,
        shards: Shards,
        buffers: Buffers,
        *,
        held: HeldVersion | None,
        restore: Receiver | None,
        arrays: dict[str, Array] | None,
        changes: Delta | None,
        nbytes: int,
        unproved: Mapping[str, str],
        converted: ConvertedSums,
        sums: tuple[BoxSum, ...] = (),
    ) -> None:
        self.url = origin.receiver.url
        self.full = origin.manifest
        self.shard = shard
        self.nbytes = nbytes
        self.unproved = unproved
        self._sums, self._converted = sums, converted
        self._origin, self._shards, self._buffers = origin, shards, buffers
        self._held, self._restore = held, restore
        self._arrays, self._changes = arrays, changes

    @property
    def by_delta(self) -> bool:
        """Whether there are changes to apply rather than whole parameters."""
        return self.shard.base is not None

    @property
    def unchanged(self) -> bool:
        """Whether the rank serves these very bytes already, under whatever name."""
        return self._changes is not None and not self._changes.tensors

    def sums(self, staged: StagedCommit, deadline: Deadline) -> tuple[BoxSum, ...]:
        """What the boxes of the rank will add to the sums of the version, once this is committed."""
        check = partial(deadline.check, f"summing {self.full.version}")
        held, entries = self._shards.named_as(self.full), self.full.by_name()
        if self.by_delta and self._held is not None:
            edits = {edit.spec.name: edit for edit in staged.changes()}
            return tuple(add_changes(self._held.sums, held, entries, edits, check))
        if self._arrays is None:
            return self._sums
        arrays, converted = self._arrays, self._converted
        return tuple(total for one in held for total in sum_parameter(one, entries, arrays[one.spec.name], converted, check))

    def newest(self) -> str:
        """The version that was cut."""
        return self.shard.version

    def manifest(self, version: str, *, deadline: Deadline) -> Manifest:
        """The version that was cut, or the one that the rank serves, as a full version."""
        deadline.check(f"reading the manifest of {version} from {self.url}")
        if version == self.shard.version:
            return self.shard
        if self._held is not None and version == self._held.shard.version:
            return replace(self._held.shard, kind="full", base=None)
        known = [self.shard.version] + ([self._held.shard.version] if self._held else [])
        raise VersionNotFound(version, f"what was cut from {self.url}", known)

    def arrays(self, manifest: Manifest) -> Mapping[str, Array]:
        """The parameters, to be kept or changed by the caller."""
        if self._arrays is None or not _same(manifest, self.shard):
            raise InvalidInput(f"the parameters of {manifest.version} are not in memory: it was cut as {self._form()}.")
        return self._arrays

    def changes(self, manifest: Manifest) -> Delta:
        """What leads from the parameters that the rank serves to those of the version."""
        if self._changes is None or not _same(manifest, self.shard):
            raise InvalidInput(f"there are no changes that lead to {manifest.version}: it was cut as {self._form()}.")
        return self._changes

    def pieces(self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None) -> Pieces:
        """One whole parameter after the other, of the version that was cut or of the one that the rank serves.

        What is not in memory is streamed from its source again, each parameter as soon as it is complete.
        """
        if _same(manifest, self.shard):
            return self._kept(names, deadline) if self._arrays is not None else self._streamed(self._origin, names, deadline)
        if self._held is not None and _same(manifest, self._held.shard):
            return self._streamed(self._find_held(self._held, deadline), names, deadline)
        raise SourceFailed(f"what was cut from {self.url} is {self.shard.version}, not {manifest.version}.")

    def close(self) -> None:
        """Let go of parameters and changes."""
        self._arrays = self._changes = None

    def _form(self) -> str:
        return "a delta" if self.by_delta else "a stream" if self._arrays is None else "whole parameters"

    def _kept(self, names: Collection[str] | None, deadline: Deadline) -> Pieces:
        for name, array in dict(self._arrays or {}).items():
            deadline.check(f"reading {self.shard.version}")
            if array.nbytes and (names is None or name in names):
                yield Piece(name, 0, flat_bytes(array).data)

    def _streamed(self, origin: Origin, names: Collection[str] | None, deadline: Deadline) -> Generator[Piece, None, None]:
        held = [one for one in self._shards.named_as(origin.manifest) if names is None or one.spec.name in names]
        tally = untold()
        proof = Proof(origin, checksum=False, hashed=False)  # the digests of parameters are compared where they are written
        stream = assembled(
            origin, held, self._buffers,
            proof=proof, deadline=deadline, tally=tally, converted={}, group_nbytes=STREAMED_NBYTES,
        )  # fmt: skip
        with closing(stream) as parameters:
            for one, array in parameters:
                if one.spec.nbytes:
                    yield Piece(one.spec.name, 0, flat_bytes(array).data)
                del array  # its memory is for the next one
        self.nbytes += tally.nbytes

    def _find_held(self, held: HeldVersion, deadline: Deadline) -> Origin:
        """Where the version that the rank serves can be had again."""
        wanted, reasons = held.full, []
        for receiver in (self._restore, self._origin.receiver):
            if receiver is None:
                continue
            try:
                found = receiver.manifest(wanted.version, deadline=deadline)
                if _same(found, wanted):
                    origin = Origin(receiver, found)
                    origin.check_readable()
                    return origin
                reasons.append(f"{receiver.url} has other bytes under that name")
            except (DeadlineExceeded, UpdateCancelled):
                raise
            except WeightcastError as error:
                reasons.append(f"{receiver.url}: {error}")
        raise SourceFailed(
            f"version {wanted.version} ({wanted.root_digest}), which the rank held before, cannot be streamed again: "
            f"{'; '.join(reasons)}."
        )


def _same(a: Manifest, b: Manifest) -> bool:
    return (a.version, a.root_digest) == (b.version, b.root_digest)
