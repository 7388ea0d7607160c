"""What the server counts, and what it tells of its engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from weightcast.control.engine import Engine
from weightcast.control.health import Health
from weightcast.control.prometheus import Histogram, family
from weightcast.control.weight_metrics import WeightMetrics
from weightcast.engines.base import TAGS, UpdateStatus
from weightcast.engines.embedded.messages import RankStats
from weightcast.engines.states import ReplicaState

_LEVELS = ("rss_nbytes", "running", "waiting", "blocks", "blocks_free", "blocks_cached")
_NOT_NUMBERS = ("rank", "pid", "version")


class Record:
    """One request while it is answered. `outcome` is "ok", an error's code, "aborted" or "disconnected"."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.monotonic()
        self._said_something = False
        self.outcome = "internal_error"

    def said_something(self) -> None:
        """The engine has said something; the first time counts."""
        if not self._said_something:
            self._said_something = True
            self._metrics.first_token_s.observe(time.monotonic() - self._began)

    def used(self, prompt: int, cached: int, made: int) -> None:
        """The tokens that the request took."""
        self._metrics.tokens.update({"prompt": prompt, "cached": cached, "completion": made})

    def answered(self, version: str, tokens: int) -> None:
        """The version that made tokens of the answer."""
        self._metrics.weights.answered(version, tokens)

    @property
    def seconds(self) -> float:
        """Since the request came."""
        return time.monotonic() - self._began


class Metrics:
    """Counted since the server was started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.tokens: Counter[str] = Counter({"prompt": 0, "cached": 0, "completion": 0})
        self.in_flight = 0
        self.first_token_s = Histogram()
        self.request_s = Histogram()
        self.weights = WeightMetrics()

    def update_ended(self, status: UpdateStatus) -> None:
        """Count an update, whoever began it."""
        self.weights.update_ended(status)

    @contextmanager
    def request(self, endpoint: str) -> Iterator[Record]:
        """Count a request, however it ends."""
        record = Record(self)
        self.in_flight += 1
        try:
            yield record
        finally:
            self.in_flight -= 1
            self.requests[endpoint, record.outcome] += 1
            self.request_s.observe(record.seconds)

    def render(self, engine: Engine, ranks: Sequence[RankStats]) -> str:
        """The whole page. `ranks` is empty while they cannot be asked."""
        pages = [*self._server(), *_replica(engine), *self.weights.pages(), *_ranks(ranks)]
        return "".join(pages)

    def _server(self) -> Iterator[str]:
        requests = [
            ("", {"endpoint": endpoint, "outcome": outcome}, count) for (endpoint, outcome), count in self.requests.items()
        ]
        yield family("requests_total", "counter", "Requests by how they ended.", requests)
        yield family("requests_in_flight", "gauge", "Requests being answered.", [("", {}, self.in_flight)])
        for kind, words in (
            ("prompt", "of prompts"),
            ("cached", "of prompts that were in the prefix cache"),
            ("completion", "of answers"),
        ):
            yield family(f"{kind}_tokens_total", "counter", f"Tokens {words}.", [("", {}, self.tokens[kind])])
        words = "Time until the engine's first output."
        yield family("time_to_first_token_seconds", "histogram", words, self.first_token_s.samples())
        yield family("request_seconds", "histogram", "Time to the end of a request.", self.request_s.samples())


def _replica(engine: Engine) -> Iterator[str]:
    status, health = engine.status, Health.of(engine)
    states = [("", {"state": state}, float(state == status.state)) for state in ReplicaState]
    yield family("replica_state", "gauge", "1 for the state that the replica is in.", states)
    yield family("replica_restarts_total", "counter", "Times the ranks were started again.", [("", {}, status.restarts)])
    yield family("replica_paused", "gauge", "1 while requests wait for a resume.", [("", {}, int(health.paused))])
    asleep = [("", {"tag": tag}, int(tag in health.asleep)) for tag in TAGS]
    yield family("replica_asleep", "gauge", "1 for memory that was given back.", asleep)
    words = "0 normal, 1 updating, -1 clearing, -2 cleared, 2 failed."
    yield family("replica_legacy_status", "gauge", words, [("", {}, health.legacy_status)])
    version = {"version": status.version, "root_digest": status.root_digest}
    yield family("weight_version_info", "gauge", "The weight version that is served.", [("", version, 1)])


def _ranks(ranks: Sequence[RankStats]) -> Iterator[str]:
    for name in RankStats.__struct_fields__ if ranks else ():
        if name in _NOT_NUMBERS:
            continue
        level = name in _LEVELS
        shown = name.replace("_nbytes", "_bytes") if level else f"{name}_total"
        samples = [("", {"rank": str(one.rank)}, getattr(one, name)) for one in ranks]
        yield family(f"rank_{shown}", "gauge" if level else "counter", f"{name} of a rank since its start.", samples)


def read_stats(results: Iterable[object]) -> list[RankStats]:
    """What ranks answered to `Describe`, as it came over the wire."""
    return [msgspec.convert(result, RankStats, from_attributes=True) for result in results]
