"""What is counted of updates and of the versions that answers were made with."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from weightcast.control.prometheus import Histogram, family
from weightcast.engines.base import UpdateStatus
from weightcast.worker.result import PHASES

_PHASES = (*PHASES, "total")
_VERSIONS = 32  # a trainer makes thousands; Prometheus keeps each that it has seen
_PAUSE_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class WeightMetrics:
    """Counted since the server was started."""

    def __init__(self) -> None:
        self._updates: Counter[str] = Counter({"done": 0})
        self._failures: Counter[str] = Counter()
        self._seconds = {phase: Histogram() for phase in _PHASES}
        self._pause_s = Histogram(_PAUSE_BOUNDS_S)
        self._nbytes = 0
        self._tokens: OrderedDict[str, int] = OrderedDict()

    def update_ended(self, status: UpdateStatus) -> None:
        """Count an update. The times are those that its answer has; of the pauses of its ranks the longest counts."""
        results = status.result or []
        if status.phase != "done":
            outcome = status.error.code if status.error else status.phase
            if status.phase != "cancelled":
                self._failures[outcome] += 1
        else:
            outcome = "same" if results and all(one.get("mode") == "none" for one in results) else "done"
        self._updates[outcome] += 1
        self._nbytes += sum(one.get("bytes", 0) for one in results) or status.nbytes
        if status.phase != "done":
            return
        for name, seconds in status.timeline.as_dict().items():
            self._seconds[name.removesuffix("_s")].observe(seconds)
        if outcome == "done":
            self._pause_s.observe(max((one.get("pause_s", 0.0) for one in results), default=0.0))

    def answered(self, version: str, tokens: int) -> None:
        """Tokens that a version has made. Only the last versions are kept."""
        self._tokens[version] = self._tokens.get(version, 0) + tokens
        self._tokens.move_to_end(version)
        if len(self._tokens) > _VERSIONS:
            self._tokens.popitem(last=False)

    def pages(self) -> Iterator[str]:
        """All families."""
        outcomes = [("", {"outcome": outcome}, count) for outcome, count in self._updates.items()]
        yield family("weight_updates_total", "counter", "Updates by how they ended.", outcomes)
        causes = [("", {"cause": cause}, count) for cause, count in self._failures.items()]
        yield family("weight_update_failures_total", "counter", "Updates that failed, by the code of their error.", causes)
        seconds = [sample for phase, one in self._seconds.items() for sample in one.samples({"phase": phase})]
        words = "Time of an update that succeeded, by phase; total is their sum."
        yield family("weight_update_seconds", "histogram", words, seconds)
        words = "Time for which an update kept requests waiting."
        yield family("weight_pause_seconds", "histogram", words, self._pause_s.samples())
        yield family("weight_update_bytes_total", "counter", "Bytes fetched, all ranks.", [("", {}, self._nbytes)])
        tokens = [("", {"version": version}, count) for version, count in self._tokens.items()]
        yield family("completion_tokens_by_version_total", "counter", "Tokens of answers by the version.", tokens)
