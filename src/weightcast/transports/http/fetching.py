"""Fetching ranges from several depots at once, each byte once."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from time import monotonic
from typing import NamedTuple

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, UpdateCancelled, WeightcastError
from weightcast.transports.base import UNSEEN, Landed, Witness
from weightcast.transports.http.client import OneRange, Response
from weightcast.transports.http.connection import Connection
from weightcast.transports.http.depots import MIN_NBYTES, Depot, Depots
from weightcast.transports.http.patience import TICK_S
from weightcast.transports.http.ranges import Arrived, Stretch
from weightcast.wire.manifest import Manifest

log = logs.get(__name__)

BLOCK_NBYTES = 8 << 20  # told at once: costs few turns of the threads
STEAL_S = 1.0  # a depot that sends nothing for so long is passed over, if another one has nothing to do
MAX_RANGES = 32  # in one request: depots take more, and other servers may not
_JOIN_S = 5.0
_SILENCE = 1.5  # times the stall of one depot, until all of them count as silent
_SLOWER = 2.0  # from when on it is worth to take over half of what another depot still has to send

_Span = tuple[Stretch, int, int]


class Origin(NamedTuple):
    """A range of a file that came from one depot."""

    file: str
    start: int
    stop: int
    depot: Depot

    def meets(self, stretch: Stretch) -> bool:
        """Whether some of it lies in a stretch."""
        return self.file == stretch.file and self.start < stretch.stop and stretch.start < self.stop


class _Flight:
    """A range on its way from one depot to its memories: `at` is where the next byte goes, and up to `granted` one may be
    written at this moment without the lock.
    """

    def __init__(self, stretch: Stretch, start: int, stop: int, depot: Depot) -> None:
        self.stretch, self.start, self.at, self.granted, self.stop = stretch, start, start, start, stop
        self.depot = depot
        self.begun = self.since = monotonic()
        self.connection: Connection | None = None
        self.revoked = False

    @property
    def rate(self) -> float:
        return (self.at - self.start) / max(monotonic() - self.begun, 1e-6)


class Fetch:
    """Workers, one for each connection of each depot, that take ranges from one queue.

    A range whose depot fails goes back to the queue, without the bytes that came. The iterator `arrivals` tells each byte
    once and raises when all depots have failed. After `close`, nothing is written any more. The `witness` sees
    bytes in the worker that received them. Depots to `avoid` are asked only if all others have failed.
    """

    def __init__(
        self,
        depots: Depots,
        manifest: Manifest,
        *,
        connections: int,
        stall_s: float,
        deadline: Deadline,
        witness: Witness = UNSEEN,
        avoid: Collection[Depot] = (),
    ) -> None:
        self._depots, self._manifest, self._witness, self._avoid = depots, manifest, witness, avoid
        self._deadline, self._connections = deadline, connections
        self._stall_s, self._steal_s = stall_s, min(STEAL_S, stall_s / 4)
        self._what = f"receiving {manifest.version} from {depots.url}"
        self._stop = threading.Event()
        self._until = Deadline.after(deadline.remaining(), cancelled=self._stop)
        self._turn = threading.Condition()
        self._waiting: deque[_Span] = deque()
        self._flying: set[_Flight] = set()
        self._told: SimpleQueue[_Span | BaseException] = SimpleQueue()
        self._left = 0  # bytes that are wanted and were not told
        self._moved = monotonic()
        self._threads: list[threading.Thread] = []
        self.origins: list[Origin] = []

    # -- the caller's side --------------------------------------------------------------------------------------------

    def want(self, wanted: Iterable[Stretch]) -> None:
        """Fetch these too, after what was wanted before."""
        with self._turn:
            for stretch in wanted:
                self._waiting.append((stretch, stretch.start, stretch.stop))
                self._left += stretch.stop - stretch.start
            self._moved = monotonic()
            self._turn.notify_all()

    def start(self) -> None:
        """Begin. There are no more workers than there is work."""
        self._depots.begin()
        count = min(self._connections, math.ceil(self._left / (2 * MIN_NBYTES)))
        for number in range(count):
            for depot in self._depots.all:
                name = f"fetch {depot.client.url} {number}"
                work = logs.carried(self._work)
                self._threads.append(threading.Thread(target=work, args=(depot,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def arrivals(self) -> Iterator[Arrived]:
        """The bytes as they come, until there are none left to come."""
        while self._left:
            try:
                told = self._told.get(timeout=min(self._deadline.remaining(), TICK_S))
            except Empty:
                self._deadline.check(self._what)
                self._check_silence()
                continue
            if isinstance(told, BaseException):
                self._deadline.check(self._what)  # if a worker has met it, it is told as the caller's
                try:
                    raise told
                finally:
                    del told  # an error and a frame that know each other would keep the memories
            stretch, start, stop = told
            self._left -= stop - start
            yield from stretch.between(start, stop)
            self._deadline.check(self._what)

    def _check_silence(self) -> None:
        with self._turn:
            silent_s = monotonic() - self._moved
            if silent_s < _SILENCE * self._stall_s:
                return
        raise self._depots.failure(self._what, silent_s)

    def close(self) -> None:
        """Stop all workers, and wait for them. Safe twice."""
        with self._turn:
            self._stop.set()
            self._waiting.clear()
            for flight in self._flying:
                if flight.connection is not None:
                    flight.connection.abort()
            self._turn.notify_all()
        end = Deadline.after(_JOIN_S)
        for thread in self._threads:
            thread.join(end.remaining())
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left:  # looking up a host cannot be interrupted; it writes nothing afterwards
            log.warning(
                "thread left",
                what=f"fetching {self._manifest.version}",
                why=f"{', '.join(left)} still wait(s) for the network",
            )
        self._threads = []
        self._flying.clear()
        self._told = SimpleQueue()

    # -- the workers --------------------------------------------------------------------------------------------------

    def _work(self, depot: Depot) -> None:
        try:
            while flights := self._take(depot):
                self._fly(flights)
        except BaseException as error:  # noqa: BLE001 - the deadline, or a mistake of ours: the caller is told
            if not self._stop.is_set():
                self._told.put(error)

    def _take(self, depot: Depot) -> list[_Flight]:
        """The next ranges for a depot, to be asked for together, once there are any; none when it is over."""
        with self._turn:
            while not self._stop.is_set():
                if flights := [_Flight(*span, depot) for span in self._next(depot)]:
                    for flight in flights[1:]:
                        flight.begun = flight.since = math.inf  # so that no other depot takes it over before it begins
                    self._flying.update(flights)
                    return flights
                self._turn.wait(TICK_S)
            return []

    def _next(self, depot: Depot) -> list[_Span]:
        if self._depots.resting(depot):
            return []
        avoid = self._avoid if any(not one.failed for one in self._depots.all if one not in self._avoid) else ()
        if depot in avoid:
            return []
        if not self._depots.called(depot, avoid):
            return self._stuck(depot)
        if not self._waiting:
            return self._stuck(depot) or self._half(depot)
        stretch, start, stop = self._waiting[0]
        workers = len(self._threads)
        share = self._left // (2 * workers) if workers > 1 else self._left  # so that all end at about the same time
        most = max(MIN_NBYTES, min(depot.request_nbytes, share))
        end = stretch.cut(start, stop, most)
        if not self._depots.worthwhile(depot, end - start, self._left):
            return []
        self._waiting.popleft()
        if end < stop:
            self._waiting.appendleft((stretch, end, stop))  # which is more than there is room for in this request
        return [(stretch, start, end), *self._following(depot, stretch.file, end, most - (end - start))]

    def _following(self, depot: Depot, file: str, end: int, most: int) -> Iterator[_Span]:
        """The ranges that follow in a file, to be asked for in the same request: up to so many bytes."""
        for _ in range(MAX_RANGES - 1 if depot.client.takes_several else 0):
            if not self._waiting:
                return
            stretch, start, stop = self._waiting[0]
            if stretch.file != file or start < end or stop - start > most:
                return
            end, most = stop, most - (stop - start)
            yield self._waiting.popleft()

    def _stuck(self, depot: Depot) -> list[_Span]:
        """Take over from a depot that sends nothing what is not being written at this moment; that comes back when its
        connection ends.
        """
        now = monotonic()
        for flight in self._elsewhere(depot):
            if now - flight.since >= self._steal_s:
                log.debug("fetch stuck", url=flight.depot.client.url, why="another depot goes on")
                start, stop = flight.granted, flight.stop
                flight.revoked, flight.stop = True, start
                if flight.connection is not None:
                    flight.connection.abort()
                return [(flight.stretch, start, stop)] if start < stop else []
        return []

    def _half(self, depot: Depot) -> list[_Span]:
        """Take over half of what a slower depot still has to send."""
        now = monotonic()
        for flight in self._elsewhere(depot):
            if now - flight.begun < self._steal_s / 4:
                continue  # its speed is not known yet
            start, stop = flight.granted, flight.stop
            late_s = (stop - start) / max(flight.rate, 1.0)
            mine_s = (stop - start) / 2 / depot.rate + (depot.first_byte_s or 0.0) if depot.rate else 0.0
            if stop - start >= 2 * MIN_NBYTES and late_s > _SLOWER * mine_s + self._steal_s / 4:
                flight.stop = middle = start + (stop - start) // 2
                return [(flight.stretch, middle, stop)]
        return []

    def _elsewhere(self, depot: Depot) -> list[_Flight]:
        """What other depots are at work on. One that has just failed must not take anything from them."""
        if depot.failures:
            return []
        return [flight for flight in self._flying if flight.depot is not depot and not flight.revoked]

    def _fly(self, flights: Sequence[_Flight]) -> None:
        """Ask for ranges of a file in one request."""
        depot, file, at = flights[0].depot, flights[0].stretch.file, 0
        ranges = [(flight.at, flight.stop) for flight in flights]
        try:
            with depot.client.opened_ranges(self._manifest, file, ranges, deadline=self._until) as response:
                for at, flight in enumerate(flights):
                    response.begin(*ranges[at])
                    self._answered(flight, response.connection)
                    while self._granted(flight):
                        self._receive(flight, response)
                    if flight.at < ranges[at][1]:
                        break  # the rest comes from elsewhere, so what follows it cannot be reached
                    if at + 1 < len(flights):
                        self._end(flight, None)
        except (DeadlineExceeded, UpdateCancelled):
            raise  # the caller's, not the depot's
        except OneRange:
            self._end_all(flights[at:], None)  # they are asked for one by one from now on
        except WeightcastError as error:
            self._end_all(flights[at:], error)
        else:
            self._end_all(flights[at:], None)

    def _answered(self, flight: _Flight, connection: Connection) -> None:
        with self._turn:
            flight.connection, flight.since = connection, monotonic()
            if flight.begun == math.inf:
                flight.begun = flight.since
            else:
                self._depots.answered(flight.depot, flight.since - flight.begun)

    def _granted(self, flight: _Flight) -> bool:
        """Whether bytes up to `flight.granted` may be written now; False if there are none, or they are somebody else's."""
        with self._turn:
            if self._stop.is_set() or flight.revoked or flight.at >= flight.stop:
                flight.connection = None  # from here on it may be another one's
                return False
            flight.granted = min(flight.at + BLOCK_NBYTES, flight.stop)
            return True

    def _receive(self, flight: _Flight, response: Response) -> None:
        """Receive what was granted, or the part of it that is there soon. What has come is told, also if more does not."""
        at = flight.at
        try:
            for group in flight.stretch.groups(at, flight.granted):
                count = self._receive_large(response, group[0]) if len(group) == 1 else self._receive_small(response, group)
                at += count
                if count < sum(len(one.data) for one in group):
                    break
        finally:
            self._landed(flight, at)

    def _receive_large(self, response: Response, wanted: Arrived) -> int:
        follow = self._witness.follow(wanted.tensor, wanted.offset)
        count = 0
        try:
            count = response.receive([wanted.data]) if follow is None else response.stream(wanted.data, follow)
        finally:
            self._witness.landed(Landed(wanted.tensor, wanted.offset, count), followed=follow is not None)
        return count

    def _receive_small(self, response: Response, wanted: Sequence[Arrived]) -> int:
        left = count = response.receive([one.data for one in wanted])
        for one in wanted:
            nbytes = min(left, len(one.data))
            if nbytes:
                self._witness.landed(Landed(one.tensor, one.offset, nbytes))
            left -= nbytes
        return count

    def _landed(self, flight: _Flight, at: int) -> None:
        with self._turn:
            start, flight.at, flight.granted = flight.at, at, at
            if start < at:
                flight.since = self._moved = monotonic()
                self._depots.moved(flight.depot)
                self._told.put((flight.stretch, start, at))

    def _end_all(self, flights: Sequence[_Flight], error: WeightcastError | None) -> None:
        """Give back what did not come of the first, and the others, which have not begun. They stay in order."""
        for flight in reversed(flights[1:]):
            self._end(flight, None)
        self._end(flights[0], error)

    def _end(self, flight: _Flight, error: WeightcastError | None) -> None:
        """Give back what did not come."""
        depot = flight.depot
        with self._turn:
            self._flying.discard(flight)
            if flight.at > flight.start:
                self.origins.append(Origin(flight.stretch.file, flight.start, flight.at, depot))
            if self._stop.is_set():
                return
            if flight.at < flight.stop:
                self._waiting.appendleft((flight.stretch, flight.at, flight.stop))
            if flight.revoked or flight.at - flight.start >= MIN_NBYTES:  # of less, only waiting would be measured
                self._depots.delivered(depot, flight.at - flight.start, monotonic() - flight.begun)
            if flight.revoked:
                self._depots.spare(depot, self._steal_s)
            elif error is not None and self._depots.fail(depot, error, flight.begun):
                self._told.put(self._depots.failure(self._what))
            self._turn.notify_all()
