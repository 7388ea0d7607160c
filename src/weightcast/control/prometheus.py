"""The text format of Prometheus: families of samples, and histograms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

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

    def samples(self, labels: Mapping[str, str] | None = None) -> Iterator[Sample]:
        """The lines that Prometheus wants, all with these labels."""
        own = dict(labels or {})
        for bound, count in zip(self._bounds, self._counts, strict=True):
            yield "_bucket", own | {"le": f"{bound:g}"}, count
        yield "_bucket", own | {"le": "+Inf"}, self._count
        yield "_sum", own, self._sum
        yield "_count", own, self._count


def family(name: str, kind: str, words: str, samples: Iterable[Sample]) -> str:
    """All lines of one metric."""
    lines = [f"# HELP weightcast_{name} {words}", f"# TYPE weightcast_{name} {kind}"]
    for suffix, labels, value in samples:
        listed = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        lines.append(f"weightcast_{name}{suffix}{f'{{{listed}}}' if labels else ''} {value}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
