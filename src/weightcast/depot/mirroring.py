"""Fetching one version from several depots at once, piece by piece, until it is whole and proved."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.depot.mirror_upstreams import Incoming, Upstream, Upstreams
from weightcast.depot.partial import PartialVersion
from weightcast.depot.partial_pieces import Piece, Run, check_digests
from weightcast.depot.partial_proof import Wrong
from weightcast.errors import DigestMismatch, PartCorrupt, SourceFailed, StorageFailed, UpdateCancelled, WeightcastError
from weightcast.wire.depot import PIECE_NBYTES, PieceDigests

log = logs.get(__name__)

CONNECTIONS = 4
GIVE_UP_S = 60.0
GRACE_S = 2.0
_TRIES = 2  # for each upstream to give a piece right: a byte may be flipped on the way
_LOOK_S = 0.05  # how often those who have nothing to fetch look again
_PAUSE_S = 0.1  # after a failure
_PROGRESS_S = 5.0  # between two lines about a version that takes long
_RUN = 8  # pieces that are asked for at once: they come without a pause, and are given on one by one
_PIECE_S = 60.0
_QUICK_S = 0.03  # where a piece takes longer, further connections gain nothing, and all pieces would come later
_TELLING_NBYTES = 1 << 20  # less tells nothing of how fast a link is


class Fetching:
    """Fills a partial version from upstreams, the nearest first, over `connections` at once where the network is fast.

    On a slow link one connection takes all there is. Several would share it, each with another piece, and whoever waits
    for pieces downstream would wait for all of these instead of one: in a chain of relays that adds up.

    A piece that is wrong is fetched again, from another upstream if there is one. It ends in an error when a piece is wrong
    everywhere, when what came is not what the manifest says, when no upstream has the version, or when nothing has come for
    `give_up_s`.
    """

    def __init__(
        self,
        partial: PartialVersion,
        upstreams: Upstreams,
        *,
        stop: threading.Event,
        connections: int = CONNECTIONS,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self._partial, self._upstreams, self._stop = partial, upstreams, stop
        self._manifest = partial.manifest
        self._connections, self._give_up_s = connections, give_up_s
        self._began = self._moved = time.monotonic()
        self._error: WeightcastError | None = None
        self._hopeless = threading.Event()  # a piece is wrong at every upstream
        self._told_by: dict[str, set[int]] = {}  # whose digests of a file were believed, one after the other
        self._counting = threading.Lock()
        self._busy, self._quick = 0, False
        self.nbytes: dict[str, int] = {}  # fetched, by the upstream's URL

    def run(self) -> None:
        """Until the version is whole and every digest of its manifest was compared, or raise."""
        self._fetch()
        while wrong := self._partial.prove():
            doubted = {file: [(one.stretch.start, one.stretch.stop) for one in found] for file, found in wrong.items()}
            if not self._believe_others(doubted):
                raise self._mismatch(wrong)
            self._fetch()

    # -- one round -------------------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Fetch what is not there. Where a piece is wrong everywhere, its digest may be: then others are asked for that."""
        while True:
            self._hopeless.clear()
            self._run_lanes()
            self._check_stopped()
            if self._error is not None:
                raise self._error
            if not self._hopeless.is_set():
                return
            bad = [piece for piece in self._partial.missing() if piece.wrong]
            doubted: dict[str, list[tuple[int, int]]] = {}
            for piece in bad:
                doubted.setdefault(piece.file, []).append((piece.start, piece.stop))
            if not self._believe_others(doubted):
                raise self._wrong_everywhere(bad)

    def _run_lanes(self) -> None:
        lanes: list[threading.Thread] = []
        try:
            for number in range(self._connections):
                name = f"mirror {self._manifest.version} {number}"
                lane = threading.Thread(target=logs.carried(self._lane), args=(number,), name=name, daemon=True)
                lane.start()
                lanes.append(lane)
            self._learn_digests()
        except (WeightcastError, RuntimeError) as error:  # the second: the system allows no more threads
            ours = error if isinstance(error, WeightcastError) else SourceFailed(f"cannot fetch: {error}")
            self._error = self._error or ours
        finally:
            for lane in lanes:
                lane.join(_PROGRESS_S)
                while lane.is_alive():  # each of its waits has a deadline
                    done, total = sum(list(self.nbytes.values())), sum(self._partial.files.values())
                    log.info("mirror progress", version=self._manifest.version, nbytes=done, total_nbytes=total)
                    lane.join(_PROGRESS_S)

    def _learn_digests(self) -> None:
        """Ask for the digests of file after file, while others already fetch the pieces of the first."""
        for file, nbytes in self._partial.files.items():
            while nbytes and file not in self._told_by and self._going_on():
                index = self._upstreams.choose(self._manifest, patient=self._patient)
                if index is None:
                    self._wait()
                    continue
                digests = self._ask_digests(index, file)
                if digests is not None:
                    self._told_by[file] = {index}
                    self._partial.expect(file, digests)
                    self._moved = time.monotonic()

    def _ask_digests(self, index: int, file: str) -> PieceDigests | None:
        upstream = self._upstreams.all[index]
        try:
            digests = upstream.client.piece_digests(self._manifest, file, deadline=self._deadline(self._give_up_s))
            check_digests(file, self._partial.files[file], digests)
        except WeightcastError as error:
            self._blame(upstream, error)
            return None
        upstream.answered()
        return digests

    def _lane(self, number: int) -> None:
        """What each connection does: fetch run after run."""
        buffer = memoryview(b"")
        try:
            while self._going_on() and not self._partial.whole:
                run = self._partial.take(self._choose, most=_RUN) if number == 0 or self._quick else None
                if run is None:
                    self._wait()
                    continue
                largest = max(piece.stop - piece.start for piece in run.pieces)
                if len(buffer) < largest:
                    buffer = memoryview(bytearray(largest))
                self._fetch_run(run, buffer)
        except WeightcastError as error:
            self._error = self._error or error
        except BaseException as error:  # or the version would never end
            log.exception("mirror crashed", version=self._manifest.version)
            self._error = self._error or SourceFailed(f"fetching version {self._manifest.version} broke: {error!r}")

    def _choose(self, piece: Piece) -> int | None:
        without = frozenset(index for index, times in piece.wrong.items() if times >= _TRIES)
        if len(without) == len(self._upstreams.all):
            self._hopeless.set()
        return self._upstreams.choose(self._manifest, without=without, patient=self._patient)

    def _fetch_run(self, run: Run, buffer: memoryview) -> None:
        upstream, rest = self._upstreams.all[run.source], list(run.pieces)
        deadline = self._deadline(_PIECE_S * len(rest))
        with self._counting:
            self._busy += 1
        try:
            with upstream.client.opened_range(self._manifest, run.file, run.start, run.stop, deadline=deadline) as incoming:
                while rest and self._going_on():
                    piece = rest[0]
                    memory = buffer[: piece.stop - piece.start]
                    self._receive(incoming, memory, upstream)
                    right = self._partial.came(piece, memory, run.source)
                    del rest[0]
                    if right:
                        self._moved = time.monotonic()
                    else:
                        self._say_wrong(piece, upstream)
        except StorageFailed:
            raise
        except WeightcastError as error:
            self._partial.dropped(rest)
            rest = []
            self._blame(upstream, error)
        finally:
            self._partial.dropped(rest)
            with self._counting:
                self._busy -= 1

    def _receive(self, incoming: Incoming, memory: memoryview, upstream: Upstream) -> None:
        """Fill the memory of a piece."""
        began, nbytes = time.monotonic(), len(memory)
        while memory:
            memory = memory[incoming.receive([memory]) :]
            if memory and time.monotonic() - began > _PIECE_S:
                raise SourceFailed(f"{upstream.url} took more than {_PIECE_S:g} s for {nbytes} bytes.")
        upstream.answered()
        seconds = time.monotonic() - began
        with self._counting:
            if nbytes >= _TELLING_NBYTES:
                self._quick = seconds * PIECE_NBYTES / nbytes < _QUICK_S * self._busy
            self.nbytes[upstream.url] = self.nbytes.get(upstream.url, 0) + nbytes

    def _say_wrong(self, piece: Piece, upstream: Upstream) -> None:
        log.warning(
            "piece fetched again",
            version=self._manifest.version,
            file=piece.file,
            start=piece.start,
            stop=piece.stop,
            url=upstream.url,
            why="its bytes came wrong",
        )

    def _blame(self, upstream: Upstream, error: WeightcastError) -> None:
        if self._stop.is_set():
            return
        log.debug("upstream failed", url=upstream.url, version=self._manifest.version, error=error)
        upstream.blame(error, self._manifest, Deadline.after(self._give_up_s))
        self._stop.wait(_PAUSE_S)

    # -- going on or not ---------------------------------------------------------------------------------------------------

    @property
    def _patient(self) -> bool:
        return time.monotonic() - self._began < GRACE_S

    def _deadline(self, seconds: float) -> Deadline:
        return Deadline.after(seconds, cancelled=self._stop)

    def _going_on(self) -> bool:
        return not (self._stop.is_set() or self._hopeless.is_set() or self._error is not None)

    def _check_stopped(self) -> None:
        if self._stop.is_set():
            raise UpdateCancelled(f"mirroring version {self._manifest.version} was stopped. What has come is kept.")

    def _wait(self) -> None:
        """Nothing can be fetched now. Raises once that has been so for too long."""
        version, idle_s = self._manifest.version, time.monotonic() - self._moved
        if not self._patient and self._upstreams.all_lack(self._manifest):
            raise SourceFailed(f"none of the upstreams has version {version} any more.")
        if idle_s > self._give_up_s:
            problems = [f"{url}: {problem}" for url, problem in self._upstreams.problems().items()]
            raise SourceFailed(f"nothing of version {version} has come for {idle_s:.0f} s. {' '.join(problems)}".rstrip())
        self._partial.wait(_LOOK_S)

    # -- when bytes are wrong ----------------------------------------------------------------------------------------------

    def _believe_others(self, doubted: Mapping[str, list[tuple[int, int]]]) -> bool:
        """Ask those that were not believed yet for the digests of files with doubted ranges, and believe one that differs.

        False if there are none: then the bytes are as they are everywhere.
        """
        news = False
        for file, ranges in doubted.items():
            known = self._partial.piece_digests(file, deadline=self._deadline(self._give_up_s))
            for index, upstream in enumerate(self._upstreams.all):
                if index in self._told_by.setdefault(file, set()) or upstream.rests:
                    continue
                self._told_by[file].add(index)
                digests = self._ask_digests(index, file)
                if digests is not None and _differ(known, digests, ranges):
                    log.warning(
                        "upstream differs",
                        url=upstream.url,
                        version=self._manifest.version,
                        file=file,
                        why="it has other bytes, which are tried",
                    )
                    self._partial.expect(file, digests)
                    news = True
                    break
        return news

    def _mismatch(self, wrong: Mapping[str, list[Wrong]]) -> DigestMismatch:
        where = f"version {self._manifest.version} as the upstreams have it"
        return DigestMismatch(
            where, [(one.stretch.name, one.stretch.digest, one.found) for found in wrong.values() for one in found]
        )

    def _wrong_everywhere(self, bad: list[Piece]) -> PartCorrupt:
        ranges = ", ".join(f"bytes {piece.start} to {piece.stop} of {piece.file}" for piece in bad[:8])
        urls = ", ".join(upstream.url for upstream in self._upstreams.all)
        more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
        return PartCorrupt(
            f"version {self._manifest.version}", f"{ranges}{more} came with other bytes than their digests say from {urls}"
        )


def _differ(one: PieceDigests, other: PieceDigests, ranges: list[tuple[int, int]]) -> bool:
    """Whether the digests of pieces that overlap any of the ranges are others."""
    if (one.piece_nbytes, one.algorithm) != (other.piece_nbytes, other.algorithm):
        return True
    size = one.piece_nbytes
    return any(
        one.digests[start // size : -(-stop // size)] != other.digests[start // size : -(-stop // size)]
        for start, stop in ranges
    )
