"""Several depots that have the same versions: which of them to ask, and which to leave alone for a while."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from time import monotonic
from typing import Literal

from weightcast import logs
from weightcast.errors import SourceFailed, WeightcastError, rebuilt
from weightcast.transports.http.client import DepotClient, OtherBytes

log = logs.get(__name__)

TRIES = 3  # without a byte in between, before a depot counts as failed
_AGAIN_S = 0.1
_REST_S, _LONGEST_REST_S = 1.0, 30.0
_SOON_S = 0.05  # waiting so long does not matter
_WEIGHT = 0.3  # of what was measured last

MIN_NBYTES, FIRST_NBYTES, MAX_NBYTES = 1 << 20, 8 << 20, 256 << 20
_GAPS = 100  # a request should take so many times as long as waiting for its first byte


Order = Literal["listed", "nearest"]


class Depot:
    """What is known of one depot. Guarded by the lock of `Depots`."""

    def __init__(self, client: DepotClient) -> None:
        self.client = client
        self.error: WeightcastError | None = None
        self.failures = self.rests = 0
        self.retry_at = 0.0
        self.first_byte_s: float | None = None
        self.rate: float | None = None  # bytes per second of one connection
        self.failed_at = 0.0

    @property
    def failed(self) -> bool:
        """Whether it was tried often enough. It is tried again later, as long as others go on."""
        return self.failures >= TRIES

    @property
    def request_nbytes(self) -> int:
        """How much to ask for at once: less of a slow one, as others can then do more."""
        if self.rate is None or self.first_byte_s is None:
            return FIRST_NBYTES
        return int(min(max(_GAPS * self.first_byte_s * self.rate, 4 * MIN_NBYTES), MAX_NBYTES))

    def rest(self, seconds: float) -> None:
        """Leave it alone for a while, longer each time."""
        self.retry_at = monotonic() + min(seconds * 2.0**self.rests, _LONGEST_REST_S)
        self.rests = min(self.rests + 1, 16)


class Depots:
    """Depots in the order in which they were named, or in that in which they are near. Any thread may call."""

    def __init__(self, clients: Sequence[DepotClient], *, spread: int = 0, order: Order = "listed") -> None:
        """`spread` is how many are used at once while they work, the first in the order; 0: all."""
        self.all = [Depot(client) for client in clients]
        self._spread, self._order = spread or len(self.all), order
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """All of them, for messages."""
        return ", ".join(depot.client.url for depot in self.all)

    # -- whom to ask --------------------------------------------------------------------------------------------------

    def in_order(self) -> list[Depot]:
        """Those that do not rest first. One whose distance is not known yet counts as near: so it becomes known."""
        now = monotonic()
        with self._lock:
            near = self._order == "nearest"
            return sorted(self.all, key=lambda depot: (depot.retry_at > now, (depot.first_byte_s or 0.0) if near else 0.0))

    def resting(self, depot: Depot) -> bool:
        """Whether it is to be left alone now."""
        with self._lock:
            return depot.retry_at > monotonic()

    def called(self, depot: Depot, avoid: Collection[Depot] = ()) -> bool:
        """Whether it should work: it is among the first that do not rest and are not to be avoided."""
        return self._spread == len(self.all) or depot in [one for one in self.in_order() if one not in avoid][: self._spread]

    def worthwhile(self, depot: Depot, nbytes: int, left: int) -> bool:
        """Whether a depot would send so many bytes before the others have sent all that are left. If nobody knows, it is."""
        now = monotonic()
        with self._lock:
            others = sum(one.rate or 0.0 for one in self.all if one is not depot and one.retry_at <= now)
            if depot.rate is None or others <= depot.rate:
                return True
            return nbytes / max(depot.rate, 1.0) <= left / others + _SOON_S

    def begin(self) -> None:
        """Give each another chance; at once if all of them rest."""
        with self._lock:
            for depot in self.all:
                depot.failures, depot.error = 0, None
            self._wake()

    def _wake(self) -> None:
        """If nobody else is left, those that only rest need not wait."""
        now = monotonic()
        if all(depot.failed or depot.retry_at > now for depot in self.all):
            for depot in self.all:
                if depot.failures == 0:
                    depot.retry_at = now

    # -- what was seen of them ----------------------------------------------------------------------------------------

    def answered(self, depot: Depot, seconds: float) -> None:
        """The first byte of an answer came after so long."""
        with self._lock:
            depot.first_byte_s = _mean(depot.first_byte_s, seconds)

    def moved(self, depot: Depot) -> None:
        """Bytes came."""
        if depot.failures or depot.rests or depot.error is not None:  # seldom, and this is asked for every block
            with self._lock:
                depot.failures = depot.rests = 0
                depot.error = None

    def delivered(self, depot: Depot, nbytes: int, seconds: float) -> None:
        """So much came, in so long."""
        with self._lock:
            depot.rate = _mean(depot.rate, nbytes / max(seconds, 1e-6))

    def spare(self, depot: Depot, seconds: float) -> None:
        """Others are faster at the moment."""
        with self._lock:
            depot.rest(seconds)
            self._wake()

    def fail(self, depot: Depot, error: WeightcastError, begun: float) -> bool:
        """A try that began then has failed; True if that was the last hope. Connections that break together are one
        failure.
        """
        with self._lock:
            now = monotonic()
            depot.error = _bare(error)
            if not isinstance(error, SourceFailed) or isinstance(error, OtherBytes):
                depot.failures = TRIES  # it would say the same again
            elif begun >= depot.failed_at:
                depot.failures += 1
            else:
                return False
            log.warning("depot failed", url=depot.client.url, failures=depot.failures, error=error)
            depot.failed_at = now
            if depot.failed:
                depot.rest(_REST_S)
            else:
                depot.retry_at = now + _AGAIN_S * 2 ** (depot.failures - 1)
            self._wake()
            return all(other.failed for other in self.all)

    def failure(self, what: str, silent_s: float = 0.0) -> WeightcastError:
        """One error for what each of them said, or did not say for so long."""
        quiet = f"was silent for {silent_s:.1f} s" if silent_s else "sent nothing"
        with self._lock:
            causes = [(depot.client.url, depot.error) for depot in self.all]
        # Copies: what is raised collects the frames that it passes, which refer to the memories.
        return combined(
            what,
            [(url, rebuilt(error.code, str(error)) if error else SourceFailed(f"{url} {quiet}.")) for url, error in causes],
        )


def combined(what: str, causes: Sequence[tuple[str, WeightcastError | None]]) -> WeightcastError:
    """The errors of several depots as one, of their class if they agree on it, that lists every cause."""
    errors = [error for _, error in causes if error is not None]
    if len(causes) == 1 and errors:
        return errors[0]
    lines = "".join(f"\n  {url}: {error or 'sent nothing'}" for url, error in causes)
    message = f"{what} failed at every depot:{lines}"
    codes = {error.code for error in errors}
    error = rebuilt(codes.pop(), message) if len(codes) == 1 else SourceFailed(message)
    error.__cause__ = errors[0] if errors else None
    return error


def _bare(error: WeightcastError) -> WeightcastError:
    """An error without the frames that it passed: they refer to the memories that were written to."""
    chained: BaseException | None = error
    while chained is not None:
        chained.__traceback__ = None
        chained = chained.__cause__ or chained.__context__
    return error


def _mean(before: float | None, now: float) -> float:
    return now if before is None else (1 - _WEIGHT) * before + _WEIGHT * now
