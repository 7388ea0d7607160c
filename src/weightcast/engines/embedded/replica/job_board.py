"""Jobs of the ranks as the front end sees them: begun by a command, followed by reports, done when all ranks are."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from weightcast.clock import Deadline
from weightcast.engines.embedded.messages import Report
from weightcast.engines.embedded.replica.verdicts import joined_error
from weightcast.errors import DeadlineExceeded, WeightcastError

Progress = Callable[[int, int], None]

_REMEMBERED = 16  # jobs whose reports are kept; those of older ones are late words of what was given up


class JobBoard:
    """The reports of one start of the ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = range(ranks)
        self._latest: OrderedDict[int, dict[int, Report]] = OrderedDict()
        self._news = asyncio.Event()
        self._failure: WeightcastError | None = None

    def report(self, report: Report) -> None:
        """A report came. It may come before the command that began the job is known to have been executed."""
        self._latest.setdefault(report.job, {})[report.rank] = report
        while len(self._latest) > _REMEMBERED:
            self._latest.popitem(last=False)
        self._news.set()

    def fail(self, error: WeightcastError) -> None:
        """No rank will report any more."""
        self._failure = self._failure or error
        self._news.set()

    async def wait(self, job: int, what: str, deadline: Deadline, progress: Progress | None = None) -> list[Any]:
        """One result per rank. Ends early when a rank fails: what the others still do is not waited for."""
        while True:
            self._news.clear()
            reports = self._latest.get(job, {})
            if self._failure is not None:
                raise self._failure
            if progress is not None and reports:
                progress(sum(one.nbytes for one in reports.values()), sum(one.total for one in reports.values()))
            errors = {rank: one.error for rank, one in reports.items() if one.error is not None}
            if errors:
                raise joined_error(what, errors, len(self._ranks))
            if len(reports) == len(self._ranks) and all(one.done for one in reports.values()):
                return [reports[rank].result for rank in self._ranks]
            try:
                async with asyncio.timeout(deadline.remaining()):
                    await self._news.wait()
            except TimeoutError:
                late = [rank for rank in self._ranks if rank not in reports or not reports[rank].done]
                raise DeadlineExceeded(f"{what} on rank(s) {', '.join(map(str, late))}", deadline.seconds) from None
