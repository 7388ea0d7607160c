"""Reading a delta version: the nearest full version with the chain of deltas applied on the way."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from weightcast.delta import State
from weightcast.store.catalog import Catalog
from weightcast.store.chain import opened_state, resolve
from weightcast.store.reader import Reader, VersionReader
from weightcast.tensors.flat import flat_bytes
from weightcast.tensors.lanes import kind_of
from weightcast.wire.manifest import Manifest, TensorEntry


class StateReader(Reader):
    """A state read by byte range. Closing it closes what `holding` holds."""

    def __init__(self, where: str, manifest: Manifest, state: State, holding: ExitStack) -> None:
        super().__init__(where, manifest)
        self._state, self._holding = state, holding

    def in_order(self) -> list[TensorEntry]:
        """The tensors in the order they were published."""
        return list(self.manifest.tensors)

    def read_into(self, entry: TensorEntry, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tensor's bytes from `start` on."""
        if not buffer:
            return
        width = kind_of(entry.dtype).nbytes
        first, last = start // width, -(-(start + len(buffer)) // width)
        data = flat_bytes(self._state.lanes(entry.name, first, last))
        skip = start - first * width
        np.frombuffer(buffer, dtype=np.uint8)[:] = data[skip : skip + len(buffer)]

    def close(self) -> None:
        """Close the parts of the full version. Safe twice."""
        self._holding.close()


def open_version(catalog: Catalog, version: str) -> Reader:
    """A version opened for reading. Memory, for a delta: the changes since its full version, about 6 bytes each."""
    chain = resolve(catalog, version)
    directory = catalog.directory(version)
    if not chain.deltas:
        return VersionReader(directory, chain.full)
    with ExitStack() as opening:
        state = opening.enter_context(opened_state(catalog.path, chain))
        where = f"{directory} ({len(chain.deltas)} delta(s) after the full version {chain.full.version})"
        return StateReader(where, chain.end, state, opening.pop_all())
