"""Fetching one version from several depots at once, piece by piece, each proved, until it is whole."""

from __future__ import annotations

import threading
import time

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.depot.mirror_upstreams import Incoming, Upstream, Upstreams
from weightcast.depot.partial import PartialVersion
from weightcast.depot.partial_pieces import Piece, Run
from weightcast.errors import PartCorrupt, SourceFailed, StorageFailed, UpdateCancelled, WeightcastError
from weightcast.tensors.digest import Hasher, algorithm_of
from weightcast.tensors.flat import BLOCK_NBYTES

log = logs.get(__name__)

CONNECTIONS = 4
GIVE_UP_S = 60.0
GRACE_S = 2.0
_TRIES = 2  # for each upstream to give a piece right: a byte may be flipped on the way
_LOOK_S = 0.05  # how often those who have nothing to fetch look again
_PAUSE_S = 0.1  # after a failure
_PROGRESS_S = 5.0  # between two lines about a version that takes long
_RUN_NBYTES = 32 << 20  # pieces that are asked for at once: they come without a pause, and are given on one by one
_PIECE_S = 60.0
_QUICK_S = 0.24  # where a run takes longer, further connections gain nothing, and all pieces would come later
_TELLING_NBYTES = 1 << 20  # less tells nothing of how fast a link is


class Fetching:
    """Fills a partial version from upstreams, the nearest first, over `connections` at once where the network is fast.

    On a slow link one connection takes all there is. Several would share it, each with another piece, and whoever waits
    for pieces downstream would wait for all of these instead of one: in a chain of relays that adds up.

    A piece that is wrong is fetched again, from another upstream if there is one. It ends in an error when a piece is wrong
    everywhere, when no upstream has the version, or when nothing has come for `give_up_s`.
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
        self._counting = threading.Lock()
        self._busy, self._quick = 0, False
        self.nbytes: dict[str, int] = {}  # fetched, by the upstream's URL

    def run(self) -> None:
        """Until every piece of the version is there, each with the digest that the manifest has of it, or raise."""
        self._run_lanes()
        self._check_stopped()
        if self._error is not None:
            raise self._error
        if self._hopeless.is_set():
            raise self._wrong_everywhere([piece for piece in self._partial.missing() if piece.wrong])

    # -- fetching ----------------------------------------------------------------------------------------------------------

    def _run_lanes(self) -> None:
        lanes: list[threading.Thread] = []
        try:
            for number in range(self._connections):
                name = f"mirror {self._manifest.version} {number}"
                lane = threading.Thread(target=logs.carried(self._lane), args=(number,), name=name, daemon=True)
                lane.start()
                lanes.append(lane)
            self._partial.resume()
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

    def _lane(self, number: int) -> None:
        """What each connection does: fetch run after run."""
        buffer = memoryview(bytearray(BLOCK_NBYTES))
        try:
            while self._going_on() and not self._partial.whole:
                run = self._partial.take(self._choose, most_nbytes=_RUN_NBYTES) if number == 0 or self._quick else None
                if run is None:
                    self._wait()
                    continue
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
                    digest = self._receive(incoming, piece, buffer, upstream)
                    right = self._partial.came(piece, digest, run.source)
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

    def _receive(self, incoming: Incoming, piece: Piece, buffer: memoryview, upstream: Upstream) -> str:
        """Write the bytes of a piece; their digest."""
        began, nbytes, start = time.monotonic(), piece.stop - piece.start, piece.start
        hasher = Hasher(algorithm_of(piece.digest))
        while start < piece.stop:
            block = buffer[: piece.stop - start]
            filled = 0
            while filled < len(block):
                filled += incoming.receive([block[filled:]])
                if filled < len(block) and time.monotonic() - began > _PIECE_S:
                    raise SourceFailed(f"{upstream.url} took more than {_PIECE_S:g} s for {nbytes} bytes.")
            hasher.update(block)
            self._partial.write(piece.file, start, block)
            start += len(block)
        upstream.answered()
        seconds = time.monotonic() - began
        with self._counting:
            if nbytes >= _TELLING_NBYTES:
                self._quick = seconds * _RUN_NBYTES / nbytes < _QUICK_S * self._busy
            self.nbytes[upstream.url] = self.nbytes.get(upstream.url, 0) + nbytes
        return hasher.digest()

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

    def _wrong_everywhere(self, bad: list[Piece]) -> PartCorrupt:
        ranges = ", ".join(f"bytes {piece.start} to {piece.stop} of {piece.file}" for piece in bad[:8])
        urls = ", ".join(upstream.url for upstream in self._upstreams.all)
        more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
        return PartCorrupt(
            f"version {self._manifest.version}", f"{ranges}{more} came with other bytes than their digests say from {urls}"
        )
