"""Safetensors files that fill up one after another as tensors come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from weightcast.errors import InvalidInput, UnsupportedTensor
from weightcast.store.safetensors_file import HEADER_ROOM, SafetensorsWriter
from weightcast.tensors.digest import Algorithm
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec
from weightcast.wire.manifest import PartEntry, TensorEntry, entry_of

_RAGGED_NBYTES = 1 << 20


class PartSeries:
    """The parts of one version or snapshot, in the order they fill up. `part_nbytes` None puts everything into one part.

    Tensors are written as they come and not kept. Only small tensors whose size would put their successor off its
    alignment wait: up to 1 MiB of them, or, with a single part, until the end.
    """

    def __init__(
        self,
        path_of: Callable[[int], Path],
        *,
        part_nbytes: int | None,
        algorithm: Algorithm,
        metadata_of: Callable[[int], Mapping[str, str]] = lambda _: {"format": "pt"},
    ) -> None:
        self.header_room = HEADER_ROOM  # of the parts that are not begun yet
        self.parts: list[PartEntry] = []
        self.entries: list[TensorEntry] = []
        self.summed_as: Mapping[str, str] = {}
        self._path_of, self._metadata_of = path_of, metadata_of
        self._part_nbytes, self._algorithm = part_nbytes, algorithm
        self._part: SafetensorsWriter | None = None
        self._ragged: list[tuple[TensorSpec, Array]] = []
        self._ragged_nbytes = 0

    def add(self, spec: TensorSpec, array: Array) -> None:
        """Write one tensor, summed under the name that `summed_as` has for it. Its memory may change once this returns."""
        if spec.nbytes % 8 and spec.nbytes <= _RAGGED_NBYTES:
            self._ragged.append((spec, np.array(array, order="C")))
            self._ragged_nbytes += spec.nbytes
            if self._ragged_nbytes > _RAGGED_NBYTES and self._part_nbytes is not None:
                self._write_ragged()
        else:
            self._write(spec, array)

    def finish(self) -> None:
        """Write what waited and close the last part: `parts` and `entries` are complete, the files on the medium."""
        self._write_ragged()
        self._close_part()

    def close(self) -> None:
        """Close the open part, finished or not. Safe twice."""
        if self._part is not None:
            self._part.close()

    def _write_ragged(self) -> None:
        """Write the tensors that waited: widest items first, so that each lies on a multiple of its item size."""
        waiting, self._ragged, self._ragged_nbytes = self._ragged, [], 0
        for spec, array in sorted(waiting, key=lambda item: -item[0].dtype.itemsize):
            self._write(spec, array)

    def _write(self, spec: TensorSpec, array: Array) -> None:
        part = self._part_for(spec)
        summed_as = self.summed_as.get(spec.name, "")
        place, digests = part.append(spec, array, summed_as)
        self.entries.append(entry_of(spec, part=len(self.parts), offset=place.offset, digests=digests, summed_as=summed_as))

    def _part_for(self, spec: TensorSpec) -> SafetensorsWriter:
        part = self._part
        if part is not None and part.places:
            if self._part_nbytes is None:
                if not part.takes(spec):
                    raise InvalidInput(
                        f"tensor {spec.name!r} ({spec.describe()}) cannot follow the {len(part.places)} tensors before it "
                        "in one file: its header is full or the tensor would lie off its alignment. Allow several parts, or "
                        "give all tensors at once as a mapping."
                    )
            elif spec.nbytes > self._part_nbytes - part.nbytes or not part.takes(spec):
                self._close_part()
        if self._part is None:
            self._part = SafetensorsWriter(self._path_of(len(self.parts)), self._algorithm, header_room=self.header_room)
        if not self._part.takes(spec):
            raise UnsupportedTensor(f"tensor {spec.name[:80]!r}…: its name of {len(spec.name)} characters is too long.")
        return self._part

    def _close_part(self) -> None:
        part = self._part
        if part is None:
            return
        header_digest, pieces = part.finish(self._metadata_of(len(self.parts)))
        self._part = None  # only now: a finish that failed leaves an open file for close()
        self.parts.append(
            PartEntry(
                file=part.path.name,
                nbytes=part.nbytes,
                header_nbytes=part.header_nbytes,
                header_digest=header_digest,
                pieces=pieces,
            )
        )
