"""What to read from where: the bytes of a version as stretches of a depot's memory, put together to reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from weightcast.errors import InvalidInput, SourceFailed
from weightcast.transports.base import Range
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
        if leased or manifest.kind == "delta":
            source, start = entry.name, 0
        else:
            source, start = manifest.parts[entry.part].file, entry.offset
        what = f"{entry.name} of version {manifest.version}"
        yield from _lying(entry.name, 0, grant.regions.get(source, ()), start, entry.nbytes, limit, what)


def range_stretches(manifest: Manifest, grant: Grant, wanted: Mapping[str, Range], *, limit: int) -> Iterator[Stretch]:
    """The bytes of ranges of files, each under the name that it is wanted by, none longer than `limit`."""
    for name, one in wanted.items():
        what = f"{one.file} of version {manifest.version}"
        yield from _lying(name, 0, grant.regions.get(one.file, ()), one.start, len(one.memory), limit, what)


def joined(regions: Iterable[Region]) -> list[Region]:
    """Regions with those that are adjacent put together: to register one takes as long as to register many times as much."""
    found: list[Region] = []
    for region in sorted(regions, key=lambda region: (region.device, region.address)):
        last = found[-1] if found else None
        if last is not None and (last.device, last.address + last.nbytes) == (region.device, region.address):
            found[-1] = Region(last.address, last.nbytes + region.nbytes, last.device)
        else:
            found.append(region)
    return found


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
