"""What to read from where: the bytes of a version as stretches of a depot's memory, put together to reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from weightcast.errors import InvalidInput, SourceFailed
from weightcast.tensors.boxes import box_runs
from weightcast.wire.depot import BoxOf
from weightcast.wire.manifest import Manifest
from weightcast.wire.nixl import HOST, Grant, Region

MAX_STRETCHES = 512  # in one read


class Stretch(NamedTuple):
    """Bytes of a tensor, or of the payload of a delta, that lie together in the memory of the depot."""

    name: str
    offset: int
    source: Region

    @property
    def nbytes(self) -> int:
        """How many."""
        return self.source.nbytes


def stretches(manifest: Manifest, grant: Grant, names: Collection[str], *, leased: bool, limit: int) -> Iterator[Stretch]:
    """The bytes of tensors (or of the payload), in the order in which they lie, none longer than `limit`.

    Raises `InvalidInput` for names that the version does not have, `SourceFailed` if the depot does not tell where all lies.
    """
    transfers = manifest.transfers()
    unknown = sorted(set(names) - transfers.keys())
    if unknown:
        raise InvalidInput(f"version {manifest.version} has no {', '.join(unknown)} to be received.")
    entries = sorted((transfers[name] for name in names), key=lambda entry: (entry.part, entry.offset))
    for entry in entries:
        if leased:
            source, start = entry.name, 0
        elif manifest.payload is not None:
            source, start = manifest.payload.file, 0
        else:
            source, start = manifest.parts[entry.part].file, entry.offset
        what = f"{entry.name} of version {manifest.version}"
        yield from _lying(entry.name, 0, grant.regions.get(source, ()), start, entry.nbytes, limit, what)


def box_stretches(
    manifest: Manifest, grant: Grant, wanted: Mapping[str, BoxOf], *, limit: int
) -> Iterator[Stretch]:  # fmt: skip
    """The bytes of boxes of a full version, each under the name that it is wanted by, none longer than `limit`."""
    entries = manifest.transfers()
    for name, one in wanted.items():
        entry, at = entries[one.tensor], 0
        regions = grant.regions.get(manifest.parts[entry.part].file, ())
        what = f"{one.tensor} of version {manifest.version}"
        for offset, nbytes in box_runs(entry.spec, one.box):
            yield from _lying(name, at, regions, entry.offset + offset, nbytes, limit, what)
            at += nbytes


def _lying(
    name: str, at: int, regions: Iterable[Region], start: int, nbytes: int, limit: int, what: str
) -> Iterator[Stretch]:  # fmt: skip
    """Bytes that begin at `start` of what the regions hold. `SourceFailed` if they do not hold all of them."""
    found = 0
    for region in _cut(regions, start, start + nbytes, limit):
        yield Stretch(name, at + found, region)
        found += region.nbytes
    if found != nbytes:
        raise SourceFailed(f"the depot tells where {found} of {nbytes} bytes of {what} lie.")


def _cut(regions: Iterable[Region], start: int, stop: int, limit: int) -> Iterator[Region]:
    """The part from `start` to `stop` of regions that follow one another."""
    behind = 0
    for region in regions:
        first, last = max(start, behind), min(stop, behind + region.nbytes)
        for at in range(first, last, limit):
            yield Region(region.address + at - behind, min(limit, last - at), region.device)
        behind += region.nbytes


def batches(parts: Iterable[Stretch], nbytes: int) -> Iterator[Sequence[Stretch]]:
    """Stretches put together until they are `nbytes`, or many. Those of one batch are all in host memory, or none is."""
    batch: list[Stretch] = []
    total = 0
    for part in parts:
        mixed = batch and (batch[0].source.device == HOST) != (part.source.device == HOST)
        if batch and (mixed or total + part.nbytes > nbytes or len(batch) == MAX_STRETCHES):
            yield batch
            batch, total = [], 0
        batch.append(part)
        total += part.nbytes
    if batch:
        yield batch
