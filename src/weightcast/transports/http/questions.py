"""Questions to depots: boxes of tensors, the digests of a rank's parameters, and one delta from what is held."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from math import prod
from urllib.parse import urlencode

import msgspec

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    SourceFailed,
    UpdateCancelled,
    WeightcastError,
)
from weightcast.tensors.boxes import Held
from weightcast.tensors.flat import Bytes
from weightcast.transports.http.client import STALL_S, WORK_S, DepotClient, Response, version_path
from weightcast.transports.http.shared_out import shared_out
from weightcast.wire.decoding import decode, is_count
from weightcast.wire.depot import DIGESTS_HEADER, BoxOf, BoxQuery, HeldDigests, HeldQuery
from weightcast.wire.manifest import MAX_MANIFEST_NBYTES, Manifest, decode_manifest, is_digest

log = logs.get(__name__)

BATCH_NBYTES = 32 << 20  # asked for at once, and asked for again if it breaks off
_BATCH_BOXES = 4096
_HELD_NBYTES = 256 << 20  # parameters that a depot puts together for one answer
_HELD_COUNT = 1024
_WORK_NBYTES_PER_S = 100 << 20  # what a depot that answers late must at least get through

Wanted = Sequence[tuple[BoxOf, Bytes]]


def fetch_boxes(
    clients: Sequence[DepotClient], manifest: Manifest, wanted: Wanted, *, deadline: Deadline, spread: int = 0
) -> Generator[tuple[int, str], None, None]:
    """Fill each memory with its box; tells the index of each that is there, and the digest that a depot has of it.

    Boxes are asked for in batches, several at a time, of the first `spread` depots (0: all); what one of them does not have
    or does not send comes from another. Nothing is verified. Closing the iterator cancels the rest.
    """
    _check_sizes(manifest, wanted)
    batches = list(_batches([len(memory) for _, memory in wanted], BATCH_NBYTES, _BATCH_BOXES))

    def fetch(client: DepotClient, batch: Sequence[int], until: Deadline) -> list[tuple[int, str]]:
        return _fetch_batch(client, manifest, [(index, *wanted[index]) for index in batch], until)

    what = f"fetching boxes of {manifest.version}"
    with closing(shared_out(clients, batches, fetch, deadline=deadline, what=what, spread=spread)) as results:
        for told in results:
            yield from told


def _fetch_batch(
    client: DepotClient, manifest: Manifest, batch: Sequence[tuple[int, BoxOf, Bytes]], deadline: Deadline
) -> list[tuple[int, str]]:
    query = BoxQuery(manifest.root_digest, tuple(box for _, box, _ in batch))
    memories = [memory.data for _, _, memory in batch if len(memory)]
    nbytes = sum(len(memory) for memory in memories)
    path = version_path(manifest.version, "boxes")
    with client.stream("POST", path, query, deadline=deadline, patience_s=_until_sent(manifest, query)) as response:
        tail = response.headers.get(DIGESTS_HEADER.lower(), "")
        if not is_count(tail) or response.left != nbytes + int(tail):
            raise SourceFailed(
                f"{client.url} was asked for {nbytes} bytes of boxes of {manifest.version} and sends {response.left}, "
                f"of which {tail[:40] or 'no'} are digests."
            )
        _fill(response, memories)
        digests = _digests(client, response.read())
    if len(digests) != len(batch) or not all(map(is_digest, digests)):
        raise SourceFailed(f"{client.url} sent {len(digests)} digests, or what is none, for {len(batch)} boxes.")
    return [(index, digest) for (index, _, _), digest in zip(batch, digests, strict=True)]


def _fill(response: Response, memories: Sequence[memoryview]) -> None:
    """Receive bytes straight into one memory after the other."""
    first, done = 0, 0  # everything before the byte `done` of the memory `first` is there
    while first < len(memories):
        count = response.receive([memories[first][done:], *memories[first + 1 : first + 64]])
        done += count
        while first < len(memories) and done >= len(memories[first]):
            done, first = done - len(memories[first]), first + 1


def _digests(client: DepotClient, data: bytes) -> list[str]:
    try:
        return decode(data, list[str])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SourceFailed(f"{client.url} sent something else than digests behind boxes: {error}.") from error


def ask_held_digests(
    clients: Sequence[DepotClient], manifest: Manifest, held: Sequence[Held], *, deadline: Deadline, spread: int = 0
) -> dict[str, str]:
    """The digests that parameters must have when they are cut from the state that a version is, by their names.

    Depots work them out, and keep them: all replicas ask the same one for the same parameters. Of several depots the first
    `spread` share the work (0: all).
    """
    batches = list(_batches([one.spec.nbytes for one in held], _HELD_NBYTES, _HELD_COUNT))
    path = version_path(manifest.version, "digests")

    def ask(client: DepotClient, batch: Sequence[int], until: Deadline) -> dict[str, str]:
        query = HeldQuery(manifest.root_digest, tuple(held[index] for index in batch))
        patience_s = _patience(manifest.nbytes)
        told = client.ask("POST", path, query, HeldDigests, deadline=until, patience_s=patience_s).digests
        if told.keys() != {one.spec.name for one in query.held} or not all(map(is_digest, told.values())):
            raise SourceFailed(f"{client.url} was asked for {len(batch)} digests of parameters and told others.")
        return told

    found: dict[str, str] = {}
    what = f"asking for the digests of parameters of {manifest.version}"
    told_all = shared_out(clients, batches, ask, deadline=deadline, what=what, spread=spread, each=1, pinned=True)
    with closing(told_all) as results:
        for told in results:
            found |= told
    return found


def ask_shortcut(
    clients: Sequence[DepotClient],
    manifest: Manifest,
    held: Manifest,
    *,
    sliced: bool,
    deadline: Deadline,
    limit: int | None = None,
) -> Manifest | None:
    """A version as one delta on what is held; None if no depot has one, or if it is not cheaper than what there is already.

    `sliced`: it must be decodable without its base, and have fewer bytes than the full version; else it must have no more
    bytes than the deltas that lead there. `limit` is the most bytes that it may have, if that is less. A depot that cannot
    be asked is one that has none, as there are other ways; one that answers with another delta has failed, and if no other
    has the right one `SourceFailed` says so.
    """
    if not held.root_digest or manifest.base is None or held.version == manifest.version or not manifest.sealed:
        return None
    if not sliced and manifest.base.root_digest == held.root_digest:
        return None
    query = {"from": held.root_digest} | ({"packing": "gaps"} if sliced else {})
    if limit is not None or sliced:  # else the depot compares with the deltas that it has
        query["limit"] = str(min(manifest.nbytes, manifest.nbytes if limit is None else limit))
    path = f"{version_path(manifest.version, 'delta')}?{urlencode(query)}"
    wrong: SourceFailed | None = None
    for client in clients:
        patience_s = min(_patience(manifest.nbytes), max(STALL_S, deadline.remaining() / 3))  # there are other ways
        try:
            with client.stream("GET", path, None, deadline=deadline, patience_s=patience_s) as response:
                short = decode_manifest(response.read(MAX_MANIFEST_NBYTES), f"{client.url}{path}")
        except (DeadlineExceeded, UpdateCancelled):
            raise
        except WeightcastError as error:
            log.at(logging.DEBUG if isinstance(error, NotFound) else logging.WARNING, "no shortcut", error=error)
            continue
        wrong = _mistake(client, short, manifest, held)
        if wrong is None:
            return short
    if wrong is not None:
        raise wrong
    return None


def _mistake(client: DepotClient, short: Manifest, manifest: Manifest, held: Manifest) -> SourceFailed | None:
    """Why a delta is not the one that was asked for; None if it is."""
    leads = (short.version, short.root_digest, short.tied) == (manifest.version, manifest.root_digest, manifest.tied)
    if leads and short.base is not None and short.base.root_digest == held.root_digest:
        return None
    base = short.base.root_digest if short.base else "nothing"
    return SourceFailed(
        f"{client.url} was asked for a delta from {held.root_digest} to {manifest.version} ({manifest.root_digest}) "
        f"and has one from {base} to {short.version} ({short.root_digest})."
    )


def _check_sizes(manifest: Manifest, wanted: Wanted) -> None:
    """Refuse memories that are not of the size of their boxes. All are listed."""
    entries = manifest.by_name()
    problems = []
    for asked, memory in wanted:
        entry = entries.get(asked.tensor)
        nbytes = None if entry is None else prod(asked.box.shape) * entry.dtype.itemsize
        if nbytes != len(memory):
            problems.append(f"{asked.box} of {asked.tensor!r} has {nbytes} bytes, its memory {len(memory)}")
    if problems:
        raise InvalidInput(f"these boxes of {manifest.version} cannot be fetched: {'; '.join(problems)}.")


def _batches(sizes: Sequence[int], nbytes: int, count: int) -> Iterator[list[int]]:
    """The places of sizes in groups that are not much more than `nbytes` together, or one by itself."""
    batch: list[int] = []
    together = 0
    for place, size in enumerate(sizes):
        if batch and (together + size > nbytes or len(batch) == count):
            yield batch
            batch, together = [], 0
        batch.append(place)
        together += size
    if batch:
        yield batch


def _patience(nbytes: int) -> float:
    """Seconds that a depot may be silent while it works through so many bytes."""
    return WORK_S + nbytes / _WORK_NBYTES_PER_S


def _until_sent(manifest: Manifest, query: BoxQuery) -> float:
    """The same for boxes, whose tensors it must have read once; but for a delta it works the whole state out before."""
    if manifest.base is not None:
        return _patience(manifest.nbytes)
    entries = manifest.by_name()
    return STALL_S + sum(entries[name].nbytes for name in {box.tensor for box in query.boxes}) / _WORK_NBYTES_PER_S
