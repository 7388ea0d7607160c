"""Finding and fetching again what came wrong, without fetching all of it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, InvalidInput, UpdateCancelled, WeightcastError
from weightcast.tensors.digest import algorithm_of, bytes_digest
from weightcast.transports.http.client import DepotClient
from weightcast.transports.http.depots import Depots, combined
from weightcast.transports.http.fetching import Origin
from weightcast.transports.http.ranges import Place, places
from weightcast.wire.manifest import Manifest

_Answer = TypeVar("_Answer")


def suspect(
    depots: Depots, origins: Sequence[Origin], manifest: Manifest, name: str, memory: memoryview, *, deadline: Deadline
) -> list[tuple[int, int]]:
    """The ranges of a tensor that no digest of a piece of its file proves right; all of it if that would be none.

    Pieces at its ends hold bytes of other tensors too, so that they cannot be proved here and are always among them.
    """
    place = _place(manifest, name)
    start, stop = place.entry.offset, place.entry.offset + place.entry.nbytes
    told = _first_answer(
        _others_first(depots, origins, place.file, start, stop),
        lambda client: client.piece_digests(manifest, place.file, deadline=deadline),
        f"asking for the digests of {place.file}",
    )
    wrong: list[tuple[int, int]] = []
    for index in range(start // told.piece_nbytes, -(-stop // told.piece_nbytes)):
        deadline.check(f"looking for what is wrong in {name}")
        first, last = index * told.piece_nbytes, (index + 1) * told.piece_nbytes
        inside = first >= start and (last <= stop or (index == len(told.digests) - 1 and stop <= last))
        begin, end = max(first, start) - start, min(last, stop) - start
        if inside and index < len(told.digests):
            digest = told.digests[index]
            if bytes_digest(memory[begin:end], algorithm_of(digest)) == digest:
                continue
        wrong.append((begin, end - begin))
    return wrong or [(0, place.entry.nbytes)]


def refetch(
    depots: Depots,
    origins: Sequence[Origin],
    manifest: Manifest,
    name: str,
    memory: memoryview,
    ranges: Sequence[tuple[int, int]],
    *,
    deadline: Deadline,
) -> None:
    """Fill ranges of a tensor's memory again, from depots that they did not come from if there are any."""
    place = _place(manifest, name)
    for offset, nbytes in ranges:
        start = place.entry.offset + offset
        target = memory[offset : offset + nbytes]

        def read(client: DepotClient, start: int = start, target: memoryview = target) -> None:
            client.read(manifest, place.file, start, target, deadline=deadline)

        clients = _others_first(depots, origins, place.file, start, start + nbytes)
        _first_answer(clients, read, f"fetching bytes {offset} to {offset + nbytes} of {name} again")


def _place(manifest: Manifest, name: str) -> Place:
    found = places(manifest, [name])
    if not found:
        raise InvalidInput(f"{name} of version {manifest.version} has no bytes.")
    return found[0]


def _others_first(depots: Depots, origins: Sequence[Origin], file: str, start: int, stop: int) -> list[DepotClient]:
    """All depots, those last that sent a part of this range."""
    senders = {id(one.depot) for one in origins if one.file == file and one.start < stop and start < one.stop}
    return [depot.client for depot in sorted(depots.in_order(), key=lambda depot: id(depot) in senders)]


def _first_answer(clients: Sequence[DepotClient], ask: Callable[[DepotClient], _Answer], what: str) -> _Answer:
    causes: list[tuple[str, WeightcastError]] = []
    for client in clients:
        try:
            return ask(client)
        except (DeadlineExceeded, UpdateCancelled):
            raise
        except WeightcastError as error:
            causes.append((client.url, error))
    raise combined(what, causes)
