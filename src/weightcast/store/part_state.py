"""The state that a full version is, read from its files range by range, by any number of threads."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np

from weightcast.store.reader import ShareFiles, checked_part, entries_by_part
from weightcast.tensors.flat import flat_bytes
from weightcast.tensors.lanes import Lanes, kind_of
from weightcast.tensors.spec import TensorSpec
from weightcast.wire.manifest import Manifest


class PartState:
    """A full version as the delta codec reads states. Nothing is held in memory.

    The size and header of each part are checked on opening. The digests of tensors are not compared here: see `prove`.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.specs: Mapping[str, TensorSpec] = {entry.name: entry.spec for entry in manifest.tensors}
        self._entries = {entry.name: entry for entry in manifest.tensors}
        with ExitStack() as opening:
            self._files = [
                opening.enter_context(checked_part(directory, manifest, index, entries))
                for index, entries in enumerate(entries_by_part(manifest))
            ]
            self._shares = ShareFiles(directory, manifest) if manifest.shares else None
            if self._shares is not None:
                opening.callback(self._shares.close)
            self._open = opening.pop_all()

    def lanes(self, name: str, start: int, stop: int) -> Lanes:
        """A range of a tensor's lanes in C order, in fresh memory."""
        entry = self._entries[name]
        kind = kind_of(entry.dtype)
        lanes = np.empty(stop - start, dtype=kind.unsigned)
        if self._shares is not None:
            self._shares.read_into(entry, start * kind.nbytes, flat_bytes(lanes).data)
        else:
            self._files[entry.part].read_into(flat_bytes(lanes).data, entry.offset + start * kind.nbytes)
        return lanes

    def close(self) -> None:
        """Close all files. Safe twice."""
        self._open.close()

    def __enter__(self) -> PartState:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
