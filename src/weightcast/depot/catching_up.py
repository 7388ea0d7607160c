"""One delta for a receiver that is several versions behind: folded once, kept in memory, sent like any other file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args

from msgspec.structs import replace

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.delta import Packing, inspect
from weightcast.depot.exchange import FileRange, Reply, Request
from weightcast.depot.holding import Holding, Shelf
from weightcast.depot.once import Once, Turns
from weightcast.depot.piece_digests import PieceDigester
from weightcast.errors import Corrupt, InvalidInput, NotFound, VersionNotFound
from weightcast.store.catalog import Catalog
from weightcast.store.chain import Chain, resolve
from weightcast.store.folding import delta_between
from weightcast.tensors.boxes import Box
from weightcast.tensors.digest import DEFAULT, bytes_digest
from weightcast.tensors.flat import Array
from weightcast.wire.decoding import is_count
from weightcast.wire.depot import PIECE_NBYTES, Newest, Offer, PieceDigests
from weightcast.wire.manifest import BaseRef, FileEntry, Manifest, encode_manifest

log = logs.get(__name__)

_KEPT_PACKINGS = 256
_ROOM_NBYTES = 1024  # what an answer takes beside its bytes


class _Key(NamedTuple):
    version: str
    root_digest: str
    held_root: str
    packing: Packing


@dataclass(frozen=True)
class CatchUp:
    """A version as one delta on a state that a receiver holds; or why there is none."""

    encoded: bytes
    file: str
    payload: bytes
    way_nbytes: int  # what the deltas take that lead there in the store
    refusal: str = ""

    @property
    def nbytes(self) -> int:
        """What it takes to keep it."""
        return len(self.payload) + len(self.encoded) + _ROOM_NBYTES


class CatchUps:
    """Folds the deltas that lead to a version. What it keeps of them is at most `keep_nbytes`.

    Versions that no stored deltas join have none: their states are not compared.
    """

    def __init__(self, shelf: Shelf, store: Path | None, *, threads: int | None, keep_nbytes: int) -> None:
        self._shelf, self._threads, self._keep_nbytes = shelf, threads, keep_nbytes
        self._catalog = Catalog(store) if store is not None else None
        self._worked: Once[_Key, CatchUp] = Once(keep_nbytes, lambda one: one.nbytes)
        self._packings: Once[tuple[str, str], Packing | None] = Once(_KEPT_PACKINGS)
        self._turns = Turns(1)  # the changes of one fold at a time are in memory

    def answer(self, request: Request, stack: ExitStack) -> Reply:
        """The manifest of the version as one delta on the state with the root digest `from`.

        It has no more than `limit` bytes, or, without a limit, no more than there are already on the way.
        """
        held_root, asked, limit = _asked(request.query)
        holding = stack.enter_context(self._shelf.holding(request.path["version"]))
        manifest = holding.manifest
        stored = self._stored_packing(holding, request.deadline)
        if stored is None or manifest.base is None or manifest.payload is None:
            raise NotFound(f"version {manifest.version} is a full version: no deltas lead to it.")
        packing = asked or stored
        if packing == stored and manifest.base.root_digest == held_root:  # the version is just that delta
            encoded, nbytes, way_nbytes = holding.encoded, manifest.payload.nbytes, manifest.nbytes
        else:
            key = _Key(manifest.version, manifest.root_digest, held_root, packing)
            work = partial(self._work, manifest, key, request.deadline)
            what = f"folding the deltas to {manifest.version}"
            found = self._worked.get(key, work, deadline=request.deadline, what=what)
            if found.refusal:
                raise NotFound(found.refusal)
            encoded, nbytes, way_nbytes = found.encoded, len(found.payload), found.way_nbytes
        most = way_nbytes if limit is None else limit
        if nbytes > most:
            raise NotFound(f"the delta from {held_root} to version {manifest.version} has {nbytes} bytes, more than {most}.")
        return Reply(200, (encoded,), len(encoded), {"Content-Type": "application/json"})

    def payloads(self, manifest: Manifest) -> dict[str, tuple[_Key, bytes]]:
        """The packed deltas that lead to a version, by the names of their files."""
        wanted = (manifest.version, manifest.root_digest)
        return {one.file: (key, one.payload) for key, one in self._worked.kept() if key[:2] == wanted and not one.refusal}

    def used(self, key: _Key) -> None:
        """A payload was asked for again: it is kept longer than those that were not."""
        self._worked.peek(key)

    def _stored_packing(self, holding: Holding, deadline: Deadline) -> Packing | None:
        """How the payload of a version is packed; None for a full version."""
        manifest, payload = holding.manifest, holding.manifest.payload
        if payload is None:
            return None

        def read() -> Packing | None:
            views = holding.views(payload.file, 0, payload.nbytes, deadline=deadline)
            return inspect(views[0] if len(views) == 1 else b"".join(views)).packing

        key, what = (manifest.root_digest, payload.file), f"reading the payload of {manifest.version}"
        return self._packings.get(key, read, deadline=deadline, what=what)

    def _work(self, manifest: Manifest, key: _Key, deadline: Deadline) -> CatchUp:
        if self._catalog is None:
            raise NotFound(f"this depot has no store to fold deltas to {manifest.version} from.")
        chain = resolve(self._catalog, manifest.version)
        if chain.end.root_digest != manifest.root_digest:
            raise NotFound(f"version {manifest.version} in the store of this depot has other bytes than it serves.")
        bases = {base.root_digest: base for base in (chain.full, *chain.deltas[:-1])} if chain.deltas else {}
        held = bases.get(key.held_root)
        if held is None:
            return _none(f"no deltas lead from {key.held_root} to version {manifest.version}.")
        try:
            with self._turns.taken(deadline=deadline, what=f"folding the deltas to {manifest.version}"):
                packed = delta_between(
                    self._catalog, held.version, manifest.version,
                    packing=key.packing, threads=self._threads, deadline=deadline,
                )  # fmt: skip
        except VersionNotFound:
            raise
        except Corrupt:
            resolve(self._catalog, manifest.version)  # one that was removed meanwhile is no damage, and this says so
            raise
        made = _made(manifest, held, packed, _way_nbytes(chain, key.held_root))
        if made.nbytes > self._keep_nbytes or len(packed) > manifest.nbytes:
            return _none(f"the delta from {held.version} to {manifest.version} is too large: {len(packed)} bytes.")
        return made


def _made(manifest: Manifest, held: Manifest, packed: bytes, way_nbytes: int) -> CatchUp:
    """A version as the packed delta that leads there."""
    digest = bytes_digest(packed, manifest.algorithm or DEFAULT)
    file = f"catch-up-{digest.partition(':')[2]}.bin"  # the same name is the same bytes, at every depot
    short = replace(
        manifest,
        kind="delta",
        parts=(),
        tensors=tuple(replace(entry, part=0, offset=0) for entry in manifest.tensors),
        base=BaseRef(version=held.version, root_digest=held.root_digest),
        payload=FileEntry(file=file, nbytes=len(packed), digest=digest),
    )
    log.info("versions folded", version=manifest.version, base=held.version, nbytes=len(packed))
    return CatchUp(encode_manifest(short), file, packed, way_nbytes)


def _none(why: str) -> CatchUp:
    return CatchUp(b"", "", b"", 0, refusal=why)


def _way_nbytes(chain: Chain, held_root: str) -> int:
    """What the deltas take that lead from one state on a chain to its end."""
    nbytes = 0
    for manifest in reversed(chain.deltas):
        nbytes += manifest.payload.nbytes if manifest.payload is not None else 0
        if manifest.base is not None and manifest.base.root_digest == held_root:
            break
    return nbytes


def _asked(query: Mapping[str, str]) -> tuple[str, Packing | None, int | None]:
    """The root digest, the packing (None: as it is stored) and the limit of a question."""
    held_root, packing, limit = query.get("from", ""), query.get("packing"), query.get("limit")
    problems = [] if held_root else ["from=… must be the root digest of what is held"]
    choices: tuple[Packing, ...] = get_args(Packing)
    chosen = next((one for one in choices if one == packing), None)
    if packing is not None and chosen is None:
        problems.append(f"packing={packing} must be one of {', '.join(choices)}")
    if limit is not None and not is_count(limit):
        problems.append(f"limit={limit[:40]} must be a number of bytes")
    if problems:
        raise InvalidInput(f"that is no question for a delta: {'; '.join(problems)}.")
    return held_root, chosen, None if limit is None else int(limit)


class WithPayloads:
    """A shelf whose versions have one more file for each delta that was worked out for them."""

    def __init__(self, shelf: Shelf, catch_ups: CatchUps) -> None:
        self._shelf, self._catch_ups = shelf, catch_ups
        self._digester = PieceDigester()

    def offers(self) -> list[Offer]:
        """What there is, in the order of publication."""
        return self._shelf.offers()

    def newest(self) -> Newest | None:
        """The version to take where none is asked for."""
        return self._shelf.newest()

    def wait_newer(self, after: str, *, deadline: Deadline) -> Newest | None:
        """The newest version once it is another than `after`."""
        return self._shelf.wait_newer(after, deadline=deadline)

    @contextmanager
    def holding(self, version: str) -> Iterator[Holding]:
        """A version. The payloads that it has now stay as long as the context lasts."""
        with self._shelf.holding(version) as holding:
            extra = self._catch_ups.payloads(holding.manifest)
            yield _Extended(holding, extra, self._catch_ups, self._digester) if extra else holding

    def close(self) -> None:
        """Let go of everything. Safe twice."""
        self._shelf.close()


class _Extended:
    """A version and the payloads that lead to it."""

    def __init__(
        self,
        holding: Holding,
        extra: Mapping[str, tuple[_Key, bytes]],
        catch_ups: CatchUps,
        digester: PieceDigester,
    ) -> None:
        self._holding, self._extra, self._catch_ups, self._digester = holding, extra, catch_ups, digester
        self.manifest, self.in_files = holding.manifest, holding.in_files

    @property
    def encoded(self) -> bytes:
        return self._holding.encoded

    @property
    def files(self) -> Mapping[str, int]:
        return {**self._holding.files, **{file: len(payload) for file, (_, payload) in self._extra.items()}}

    def views(self, file: str, start: int, stop: int, *, deadline: Deadline) -> list[memoryview]:
        if file not in self._extra:
            return self._holding.views(file, start, stop, deadline=deadline)
        key, payload = self._extra[file]
        if not 0 <= start <= stop <= len(payload):
            raise InvalidInput(f"{file} has {len(payload)} bytes: {start} to {stop} is not a range of it.")
        self._catch_ups.used(key)
        return [memoryview(payload)[start:stop]]

    def sendable(self, file: str, start: int, stop: int, *, deadline: Deadline) -> Sequence[memoryview | FileRange]:
        if file in self._extra:
            return self.views(file, start, stop, deadline=deadline)
        return self._holding.sendable(file, start, stop, deadline=deadline)

    def tensor(self, name: str) -> tuple[Box, Array]:
        return self._holding.tensor(name)

    def piece_digests(self, file: str, *, deadline: Deadline) -> PieceDigests:
        if file not in self._extra:
            return self._digester.digests(self._holding, file, deadline=deadline)
        algorithm, (key, payload) = self.manifest.algorithm or DEFAULT, self._extra[file]
        self._catch_ups.used(key)
        pieces = (memoryview(payload)[start : start + PIECE_NBYTES] for start in range(0, len(payload), PIECE_NBYTES))
        return PieceDigests(algorithm, PIECE_NBYTES, tuple(bytes_digest(piece, algorithm) for piece in pieces))
