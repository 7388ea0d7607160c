"""`nixl://…?mode=rdma`: any range of the files that a depot holds, read by NIXL where it lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence

from weightcast.clock import Deadline
from weightcast.tensors.flat import Bytes, Pieces
from weightcast.transports.base import UNSEEN, Landed, Range, Witness
from weightcast.transports.boxes import box_landings, box_pieces
from weightcast.transports.nixl.agent import region_of
from weightcast.transports.nixl.plan import joined, range_stretches
from weightcast.transports.nixl.receiver import NixlReceiver
from weightcast.transports.range_states import RangeStates
from weightcast.wire.manifest import Manifest


class NixlDepotReceiver(RangeStates, NixlReceiver):
    """Reads what a depot holds."""

    def pieces(self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None) -> Pieces:
        """The bytes through a ring of buckets, in the order in which they lie."""
        if not manifest.shares or manifest.kind == "delta":
            return super().pieces(manifest, deadline=deadline, names=names)
        size, depth = self._bucket_nbytes, self._prefetch
        return box_pieces(self, manifest, names, bucket_nbytes=size, prefetch=depth, deadline=deadline)

    def landings(
        self, manifest: Manifest, memories: Mapping[str, Bytes], *, deadline: Deadline, witness: Witness = UNSEEN
    ) -> Generator[Landed, None, None]:
        """Read straight into the memories."""
        if not manifest.shares or manifest.kind == "delta":
            return super().landings(manifest, memories, deadline=deadline, witness=witness)
        return box_landings(self, manifest, memories, deadline=deadline, witness=witness)

    def ranges(self, manifest: Manifest, wanted: Sequence[Range], *, deadline: Deadline) -> Generator[int, None, None]:
        """Read straight into the memories; tells the index of each that is there. Nothing is verified."""
        yield from (index for index, one in enumerate(wanted) if not len(one.memory))
        filled = {str(index): one for index, one in enumerate(wanted) if len(one.memory)}
        if not filled:
            return
        targets = {name: region_of(name, one.memory) for name, one in filled.items()}
        come: Counter[str] = Counter()
        with self._opened(manifest, deadline) as (session, grant):
            session.use([one.memory for one in filled.values()], joined(targets.values()))
            parts = range_stretches(manifest, grant, filled, limit=self._read_nbytes)
            for landed in self._landed(session, parts, targets):
                come[landed.name] += landed.nbytes
                if come[landed.name] == len(filled[landed.name].memory):
                    yield int(landed.name)
