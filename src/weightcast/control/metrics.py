"""What the server counts, in the text format of Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from weightcast.control.engine import Status
from weightcast.engines.embedded.messages import RankStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STATES = ("STARTING", "READY", "RESTARTING", "FAILED", "DRAINING", "CLOSED")
_LEVELS = ("rss_nbytes", "running", "waiting", "blocks", "blocks_free", "blocks_cached")
_NOT_NUMBERS = ("rank", "pid", "version")

Sample = tuple[str, Mapping[str, str], float]


class Histogram:
    """How many values were at most this large, for some bounds."""

    def __init__(self, bounds: Sequence[float] = _BOUNDS_S) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * len(self._bounds)
        self._count, self._sum = 0, 0.0

    def observe(self, value: float) -> None:
        """One more value."""
        self._count += 1
        self._sum += value
        for number, bound in enumerate(self._bounds):
            self._counts[number] += value <= bound

    def samples(self) -> Iterator[Sample]:
        """The lines that Prometheus wants."""
        for bound, count in zip(self._bounds, self._counts, strict=True):
            yield "_bucket", {"le": f"{bound:g}"}, count
        yield "_bucket", {"le": "+Inf"}, self._count
        yield "_sum", {}, self._sum
        yield "_count", {}, self._count


class Record:
    """One request while it is answered. `outcome` is "ok", an error's code, "aborted" or "disconnected"."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.perf_counter()
        self._said_something = False
        self.outcome = "internal_error"

    def said_something(self) -> None:
        """The engine has said something; the first time counts."""
        if not self._said_something:
            self._said_something = True
            self._metrics.first_token_s.observe(time.perf_counter() - self._began)

    def used(self, prompt: int, cached: int, made: int) -> None:
        """The tokens that the request took."""
        self._metrics.tokens.update({"prompt": prompt, "cached": cached, "completion": made})

    @property
    def seconds(self) -> float:
        """Since the request came."""
        return time.perf_counter() - self._began


class Metrics:
    """Counted since the server was started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.tokens: Counter[str] = Counter({"prompt": 0, "cached": 0, "completion": 0})
        self.in_flight = 0
        self.first_token_s = Histogram()
        self.request_s = Histogram()

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

    def render(self, status: Status, ranks: Sequence[RankStats]) -> str:
        """The whole page. `ranks` is empty while they cannot be asked."""
        pages = [*self._server(), *_replica(status), *_ranks(ranks)]
        return "".join(pages)

    def _server(self) -> Iterator[str]:
        requests = [
            ("", {"endpoint": endpoint, "outcome": outcome}, count) for (endpoint, outcome), count in self.requests.items()
        ]
        yield _family("requests_total", "counter", "Requests by how they ended.", requests)
        yield _family("requests_in_flight", "gauge", "Requests being answered.", [("", {}, self.in_flight)])
        for kind, words in (
            ("prompt", "of prompts"),
            ("cached", "of prompts that were in the prefix cache"),
            ("completion", "of answers"),
        ):
            yield _family(f"{kind}_tokens_total", "counter", f"Tokens {words}.", [("", {}, self.tokens[kind])])
        words = "Time until the engine's first output."
        yield _family("time_to_first_token_seconds", "histogram", words, self.first_token_s.samples())
        yield _family("request_seconds", "histogram", "Time to the end of a request.", self.request_s.samples())


def _replica(status: Status) -> Iterator[str]:
    states = [("", {"state": state}, float(state == status.state)) for state in _STATES]
    yield _family("replica_state", "gauge", "1 for the state that the replica is in.", states)
    yield _family("replica_restarts_total", "counter", "Times the ranks were started again.", [("", {}, status.restarts)])
    version = {"version": status.version, "root_digest": status.root_digest}
    yield _family("weight_version_info", "gauge", "The weight version that is served.", [("", version, 1)])


def _ranks(ranks: Sequence[RankStats]) -> Iterator[str]:
    for name in RankStats.__struct_fields__ if ranks else ():
        if name in _NOT_NUMBERS:
            continue
        level = name in _LEVELS
        shown = name.replace("_nbytes", "_bytes") if level else f"{name}_total"
        samples = [("", {"rank": str(one.rank)}, getattr(one, name)) for one in ranks]
        yield _family(f"rank_{shown}", "gauge" if level else "counter", f"{name} of a rank since its start.", samples)


def read_stats(results: Iterable[object]) -> list[RankStats]:
    """What ranks answered to `Describe`, as it came over the wire."""
    return [msgspec.convert(result, RankStats, from_attributes=True) for result in results]


def _family(name: str, kind: str, words: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP weightcast_{name} {words}", f"# TYPE weightcast_{name} {kind}"]
    for suffix, labels, value in samples:
        listed = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        lines.append(f"weightcast_{name}{suffix}{f'{{{listed}}}' if labels else ''} {value}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
