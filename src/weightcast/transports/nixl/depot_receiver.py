"""`nixl://…?mode=rdma` for ranks: boxes are read by NIXL where they lie, and what a depot works out comes over its HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence

from weightcast.clock import Deadline
from weightcast.tensors.boxes import Box, Held, Placement, run_nbytes
from weightcast.tensors.flat import Bytes, Pieces
from weightcast.tensors.spec import TensorSpec
from weightcast.transports.base import UNSEEN, Landed, Witness
from weightcast.transports.http.access import Access
from weightcast.transports.http.receiver import HttpReceiver
from weightcast.transports.nixl.agent import region_of
from weightcast.transports.nixl.plan import box_stretches
from weightcast.transports.nixl.receiver import BUCKET_NBYTES, PREFETCH, STALL_S, NixlReceiver
from weightcast.wire.depot import BoxOf
from weightcast.wire.manifest import Manifest

_MIN_RUN_NBYTES = 16 << 10  # columns that are narrower are gathered by the depot: a read of many small stretches is slower

Wanted = Sequence[tuple[BoxOf, Bytes]]


class NixlDepotReceiver(NixlReceiver):
    """Reads what a depot holds. The payloads of deltas, which are small and may be folded for this receiver, and boxes of
    narrow columns come over HTTP.
    """

    def __init__(
        self,
        url: str,
        *,
        access: Access | None = None,
        prefetch: int = PREFETCH,
        bucket_nbytes: int = BUCKET_NBYTES,
        stall_s: float = STALL_S,
        nic: str = "",
    ) -> None:
        super().__init__(url, access=access, prefetch=prefetch, bucket_nbytes=bucket_nbytes, stall_s=stall_s, nic=nic)
        self._http = HttpReceiver(
            [url], access=access, prefetch=prefetch, bucket_nbytes=bucket_nbytes, stall_s=stall_s
        )  # fmt: skip

    def landings(
        self, manifest: Manifest, memories: Mapping[str, Bytes], *, deadline: Deadline, witness: Witness = UNSEEN
    ) -> Generator[Landed, None, None]:
        """Fill each memory."""
        if manifest.payload is None:
            return super().landings(manifest, memories, deadline=deadline, witness=witness)
        return self._http.landings(manifest, memories, deadline=deadline, witness=witness)

    def pieces(self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None) -> Pieces:
        """The bytes through a ring of buckets."""
        if manifest.payload is None:
            return super().pieces(manifest, deadline=deadline, names=names)
        return self._http.pieces(manifest, deadline=deadline, names=names)

    def boxes(self, manifest: Manifest, wanted: Wanted, *, deadline: Deadline) -> Generator[tuple[int, str], None, None]:
        """Fill each memory with the bytes of its box; tells the index of each that is there, and the digest that the depot
        has of it. None of it counts before the iterator has ended well.
        """
        entries = manifest.transfers()
        reads, asked = {}, []
        for index, (query, memory) in enumerate(wanted):
            entry = entries.get(query.tensor)
            if entry is not None and len(memory) and run_nbytes(entry.spec, query.box) >= _MIN_RUN_NBYTES:
                reads[index] = query, memory
            else:  # also what is wrong with a question is told by the depot
                asked.append(index)
        if reads:
            yield from self._read_boxes(manifest, reads, deadline)
        for number, digest in self._http.boxes(manifest, [wanted[index] for index in asked], deadline=deadline):
            yield asked[number], digest

    def _read_boxes(
        self, manifest: Manifest, wanted: Mapping[int, tuple[BoxOf, Bytes]], deadline: Deadline
    ) -> Generator[tuple[int, str], None, None]:
        digests = self._digests(manifest, {index: query for index, (query, _) in wanted.items()}, deadline)
        memories = {str(index): memory for index, (_, memory) in wanted.items()}
        targets = {name: region_of(name, memory) for name, memory in memories.items()}
        come: Counter[str] = Counter()
        with self._opened(manifest, deadline) as (session, grant):
            session.use(list(memories.values()), list(targets.values()))
            queries = {str(index): query for index, (query, _) in wanted.items()}
            parts = box_stretches(manifest, grant, queries, limit=self._read_nbytes)
            for landed in self._landed(session, parts, targets):
                come[landed.name] += landed.nbytes
                if come[landed.name] == len(memories[landed.name]):
                    yield int(landed.name), digests[int(landed.name)]

    def _digests(self, manifest: Manifest, wanted: Mapping[int, BoxOf], deadline: Deadline) -> dict[int, str]:
        """The digests of boxes: that of the version for a whole tensor, else what the depot finds."""
        entries = manifest.transfers()
        known = {
            i: entries[one.tensor].digest
            for i, one in wanted.items()
            if one.box == Box.whole(entries[one.tensor].shape) and entries[one.tensor].digest
        }
        held = [
            Held(
                TensorSpec(str(index), entries[one.tensor].dtype, one.box.shape),
                (Placement(one.tensor, one.box, (0,) * len(one.box.shape)),),
            )
            for index, one in wanted.items()
            if index not in known
        ]
        told = self._http.held_digests(manifest, held, deadline=deadline) if held else {}
        return known | {int(name): digest for name, digest in told.items()}

    def shortcut(self, manifest: Manifest, held: Manifest, *, sliced: bool, deadline: Deadline) -> Manifest | None:
        """The same version as one delta on what is held, if the depot can make one that is worth it."""
        return self._http.shortcut(manifest, held, sliced=sliced, deadline=deadline)

    def close(self) -> None:
        """Disconnect. It connects again if it is used again."""
        super().close()
        self._http.close()
