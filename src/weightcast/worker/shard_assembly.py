"""Parameters of a rank, each given out as soon as its last box is in: cut from whole tensors where these must come whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial

from weightcast.clock import Deadline
from weightcast.tensors.boxes import Held, Placement, box_of
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Array, Bytes, flat_bytes
from weightcast.tensors.placing import Check, landing, place, row_start
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import box_sum
from weightcast.wire.manifest import TensorEntry
from weightcast.worker.buffers import Buffers
from weightcast.worker.shard_boxes import GROUP_NBYTES, boxes_nbytes, fetched
from weightcast.worker.shard_layout import padded
from weightcast.worker.shard_stream import Origin, Proof, Run, Tally
from weightcast.worker.shard_sums import ConvertedSums, is_converted

Parameters = Generator[tuple[Held, Array], None, None]


def needed(origin: Origin, held: Sequence[Held]) -> dict[str, TensorEntry]:
    """The tensors that these parameters have boxes of, in the order of the version."""
    names = {placement.source for one in held for placement in one.placements}
    return {entry.name: entry for entry in origin.manifest.tensors if entry.name in names}


def needed_nbytes(origin: Origin, held: Sequence[Held]) -> int:
    """How many bytes have to come for these parameters: boxes, or whole tensors where ranges cannot be fetched."""
    if origin.ranges is not None:
        return boxes_nbytes(origin, held)
    return sum(entry.nbytes for entry in needed(origin, held).values())


def assembled(
    origin: Origin,
    held: Sequence[Held],
    buffers: Buffers,
    *,
    proof: Proof,
    deadline: Deadline,
    tally: Tally,
    converted: ConvertedSums,
    group_nbytes: int = GROUP_NBYTES,
) -> Parameters:
    """Each parameter once, complete, in memory from `buffers` that is the caller's from then on.

    `held` names sources as the version does. Beside what was given out, there is memory only for parameters that are not
    complete yet and for the tensor that is being cut. `proof` compares the tensors with their digests. `converted` takes in
    the sums of boxes that are converted.
    """
    if origin.ranges is not None:
        yield from fetched(
            origin, origin.ranges, held, buffers,
            proved=proof.checksum, deadline=deadline, tally=tally, converted=converted, group_nbytes=group_nbytes,
        )  # fmt: skip
        return
    what = f"cutting {origin.manifest.version} from {origin.receiver.url}"
    entries = needed(origin, held)
    assembly = _Assembly(held, entries, buffers, converted, partial(deadline.check, what))
    yield from assembly.without_boxes()
    with closing(origin.wholes(entries, assembly, proof=proof, deadline=deadline, tally=tally)) as wholes:
        for entry, tensor in wholes:
            yield from assembly.add(entry.name, tensor)
            del tensor  # its memory is for the next one


class _Assembly:
    """The parameters that are being put together. It takes bytes that stay as they are where they belong, and cuts the
    rest from whole tensors.
    """

    def __init__(
        self,
        held: Sequence[Held],
        entries: Mapping[str, TensorEntry],
        buffers: Buffers,
        converted: ConvertedSums,
        check: Check,
    ) -> None:
        self._held, self._entries, self._buffers, self._check = held, entries, buffers, check
        self._converted = converted
        self._boxes: dict[str, list[tuple[Held, Placement]]] = defaultdict(list)
        for one in held:
            for placement in one.placements:
                self._boxes[placement.source].append((one, placement))
        self._to_come = {one.spec.name: len(one.placements) for one in held}
        self._open: dict[str, Array] = {}
        self._largest = max((entry.nbytes for entry in entries.values() if self._cuts(entry)), default=0)

    def without_boxes(self) -> Iterator[tuple[Held, Array]]:
        """Parameters that are padding and nothing else."""
        for one in self._held:
            if not one.placements:
                yield one, self._buffers.take(one.spec, zeroed=True)

    def add(self, source: str, tensor: Array | None) -> Iterator[tuple[Held, Array]]:
        """Cut a tensor into all its places, unless it is there already; gives out the parameters that are complete then."""
        for one, placement in self._boxes[source]:
            name = one.spec.name
            if tensor is not None:
                place(tensor, self._memory(one), placement, self._check)
                if is_converted(one, self._entries[source]):
                    elements = box_of(tensor, placement.box)
                    total = box_sum(self._entries[source].sum_spec, placement.box, elements, self._check)
                    self._converted[source, placement.box] = total
            self._to_come[name] -= 1
            if self._to_come[name] == 0:
                yield one, self._open.pop(name)

    def _cuts(self, entry: TensorEntry) -> bool:
        """Whether a tensor is needed whole."""
        return any(row_start(entry.spec, one.spec, placement) is None for one, placement in self._boxes[entry.name])

    def runs(self, entry: TensorEntry) -> list[Run] | None:
        """Where the bytes of a tensor go as they are: possible if all its boxes are whole rows, here as there."""
        runs = []
        for one, placement in self._boxes[entry.name]:
            start = row_start(entry.spec, one.spec, placement)
            if start is None:
                return None
            runs.append((start, one, placement))
        return [Run(start, flat_bytes(landing(self._memory(one), placement))) for start, one, placement in runs]

    def bounce(self, entry: TensorEntry) -> Bytes:
        """Memory that a tensor is put together in."""
        return self._buffers.take(TensorSpec("bounce", DType.U8, (max(self._largest, entry.nbytes),)))

    def _memory(self, one: Held) -> Array:
        if one.spec.name not in self._open:
            self._open[one.spec.name] = self._buffers.take(one.spec, zeroed=padded(one))
        return self._open[one.spec.name]
