"""The states that versions are, read range by range from wherever their files are served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from weightcast.clock import Deadline
from weightcast.delta import Delta, State, fold
from weightcast.errors import BaseVersionMismatch, ManifestCorrupt
from weightcast.store.chain import decoded_step, moved
from weightcast.tensors.box_plan import Place, read_flat
from weightcast.tensors.flat import Bytes, flat_bytes
from weightcast.tensors.lanes import Lanes, kind_of
from weightcast.tensors.spec import TensorSpec
from weightcast.transports.base import Range, RangeReceiver
from weightcast.transports.pieces import proved_ranges
from weightcast.wire.manifest import Manifest, chosen_payloads


class RangeState:
    """A full version as the delta codec reads states. Nothing is held in memory, and nothing is proved."""

    def __init__(self, receiver: RangeReceiver, manifest: Manifest, deadline: Deadline) -> None:
        self.specs: Mapping[str, TensorSpec] = {entry.name: entry.spec for entry in manifest.tensors}
        self._places = {entry.name: manifest.places(entry) for entry in manifest.tensors}
        self._receiver, self._manifest, self._deadline = receiver, manifest, deadline

    def lanes(self, name: str, start: int, stop: int) -> Lanes:
        """A range of a tensor's lanes in C order, in fresh memory."""
        spec = self.specs[name]
        kind = kind_of(spec.dtype)
        lanes = np.empty(stop - start, dtype=kind.unsigned)
        read_flat(spec.shape, spec.dtype.itemsize, self._places[name], start * kind.nbytes, flat_bytes(lanes), self._fetch)
        return lanes

    def _fetch(self, wanted: Sequence[tuple[Place, Bytes]]) -> None:
        ranges = [Range(*place, memory) for place, memory in wanted]
        for _ in self._receiver.ranges(self._manifest, ranges, deadline=self._deadline):
            continue


class RangeStates:
    """What makes a `StateReceiver` of a receiver of ranges. The base of a delta is read whole wherever decoding needs it."""

    @contextmanager
    def opened_state(self: RangeReceiver, manifest: Manifest, *, deadline: Deadline) -> Iterator[State]:
        """The whole state that a version is, deltas applied, read as it is asked for. Nothing is proved by it."""
        deltas: list[Manifest] = []
        seen = {manifest.version}
        while manifest.kind == "delta" and manifest.base is not None:
            deltas.insert(0, manifest)
            if manifest.base.version in seen:
                raise ManifestCorrupt(f"of version {manifest.version}", f"its bases lead back to {manifest.base.version}")
            seen.add(manifest.base.version)
            base = self.manifest(manifest.base.version, deadline=deadline)
            if base.root_digest != manifest.base.root_digest:
                raise BaseVersionMismatch(
                    version=manifest.version,
                    base=manifest.base.version,
                    base_root=manifest.base.root_digest,
                    serving=base.version,
                    serving_root=base.root_digest,
                )
            manifest = base
        state = RangeState(self, manifest, deadline)
        yield moved(state, _folded(self, deltas, state, deadline))


def _folded(receiver: RangeReceiver, deltas: Sequence[Manifest], base: State, deadline: Deadline) -> Delta | None:
    folded: Delta | None = None
    for manifest in deltas:
        payloads = [memory.data for memory in _payloads(receiver, manifest, deadline)]
        step = decoded_step(payloads, manifest, moved(base, folded), threads=1)
        folded = step if folded is None else fold(folded, step)
    return folded


def _payloads(receiver: RangeReceiver, manifest: Manifest, deadline: Deadline) -> list[Bytes]:
    found: list[Bytes] = []
    for payload in chosen_payloads(manifest):
        found.append(np.empty(payload.nbytes, dtype=np.uint8))
        for _ in proved_ranges(receiver, manifest, [Range(payload.file, 0, found[-1])], deadline=deadline):
            continue
    return found
