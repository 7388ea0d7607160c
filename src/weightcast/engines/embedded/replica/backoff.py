"""How long to wait before the ranks are started again."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Backoff:
    """Delays of 0, `first_s`, twice that and so on up to `longest_s`; from 0 again after `healthy_s` seconds of health."""

    first_s: float = 0.5
    longest_s: float = 30.0
    healthy_s: float = 60.0
    _failures: int = field(default=0, init=False)

    def was_healthy(self, seconds: float) -> None:
        """The ranks were ready for this long before they failed."""
        if seconds >= self.healthy_s:
            self._failures = 0

    def next_s(self) -> float:
        """Seconds to wait after one more failure."""
        failures, self._failures = self._failures, self._failures + 1
        if failures == 0:
            return 0.0
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 64))
