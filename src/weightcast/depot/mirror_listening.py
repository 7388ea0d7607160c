"""What a relay is to take next: heard from its upstreams, or given up before and worth another try."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.depot.mirror_upstreams import Upstream, Upstreams
from weightcast.errors import Corrupt, NotFound, UpdateCancelled, WeightcastError
from weightcast.store.catalog import Catalog
from weightcast.wire.depot import Newest

log = logs.get(__name__)

ANSWER_S = 10.0  # for an upstream to answer a question
_PAUSE_S = 0.5  # when no upstream answers
_RETRY_S = (2.0, 60.0)  # until a version that was given up is tried again: at first, and at most


@dataclass
class _Retry:
    """A version that was given up, when to try it again, and how long that was put off."""

    newest: Newest
    at_s: float
    waited_s: float


class Listening:
    """Listens to the nearest upstream that answers. Every `poll_s` the others are asked whether it has missed something."""

    def __init__(self, upstreams: Upstreams, catalog: Catalog, *, stop: threading.Event, poll_s: float) -> None:
        self._upstreams, self._catalog, self._stop, self._poll_s = upstreams, catalog, stop, poll_s
        self._refused: set[str] = set()  # root digests of what was wrong everywhere
        self._retry: _Retry | None = None

    def hear(self, now: Newest | None) -> tuple[Newest, int] | None:
        """The version to take in the place of the one that is newest here, and the upstream that told of it.

        None if there was nothing for a while.
        """
        due = self._due()
        if due is not None:
            return due
        heard = self._listen()
        if heard is None or heard[0].root_digest in self._refused or not self._leads_on(heard[0], heard[1], now):
            return None
        return heard

    def taken(self) -> None:
        """What was heard of is here."""
        self._retry = None

    def given_up(self, newest: Newest, error: WeightcastError) -> None:
        """It is not: to be tried again when an upstream has it whole, unless it was wrong everywhere."""
        if isinstance(error, Corrupt):
            self._refused.add(newest.root_digest)
            self._retry = None
        elif self._retry is None or self._retry.newest != newest:
            self._retry = _Retry(newest, time.monotonic() + _RETRY_S[0], _RETRY_S[0])

    def _due(self) -> tuple[Newest, int] | None:
        retry = self._retry
        if retry is None or time.monotonic() < retry.at_s:
            return None
        retry.waited_s = min(2 * retry.waited_s, _RETRY_S[1])
        retry.at_s = time.monotonic() + retry.waited_s
        for index, upstream in enumerate(self._upstreams.all):
            if not upstream.rests and self._has_whole(upstream, retry.newest):
                return retry.newest, index
        return None

    def _has_whole(self, upstream: Upstream, newest: Newest) -> bool:
        try:
            offers = upstream.client.catalogue(deadline=Deadline.after(ANSWER_S, cancelled=self._stop)).versions
        except UpdateCancelled:
            raise
        except WeightcastError as error:
            upstream.failed(error)
            return False
        wanted = (newest.version, newest.root_digest, True)
        return any((offer.version, offer.root_digest, offer.complete) == wanted for offer in offers)

    def _listen(self) -> tuple[Newest, int] | None:
        """What the nearest upstream that answers says is newest, once that is news; or what another one knows already."""
        listened = False
        news: list[tuple[Newest, int]] = []
        everyone = list(enumerate(self._upstreams.all))
        fit = [(index, upstream) for index, upstream in everyone if not upstream.rests]
        for index, upstream in fit or [(index, upstream) for index, upstream in everyone if not upstream.worn]:
            answer = self._ask(upstream, 0.0 if listened else self._poll_s)
            if answer is not None and not listened:
                return answer, index
            if answer is not None:
                news.append((answer, index))
            listened = listened or not upstream.rests
        if not listened:
            self._stop.wait(_PAUSE_S)
        return max(news, key=lambda item: item[0].sequence, default=None)

    def _ask(self, upstream: Upstream, wait_s: float) -> Newest | None:
        """What an upstream says is newest, if that is other than what it said last."""
        after = upstream.seen.version if upstream.seen is not None else ""
        if self._retry is not None:
            wait_s = max(0.0, min(wait_s, self._retry.at_s - time.monotonic()))
        began, deadline = time.monotonic(), Deadline.after(wait_s + ANSWER_S, cancelled=self._stop)
        try:
            answer = upstream.client.newest(deadline=deadline, after=after, wait_s=wait_s)
        except UpdateCancelled:
            raise
        except NotFound:  # it has none yet
            answer = None
        except WeightcastError as error:
            silent_s = time.monotonic() - began - wait_s
            upstream.failed(error, cost_s=max(0.0, silent_s))
            upstream.seen = None  # it may tell something else when it answers again
            return None
        upstream.answered()
        if answer is not None:
            upstream.seen = answer
        return answer

    def _leads_on(self, newest: Newest, source: int, now: Newest | None) -> bool:
        """Whether to go there: to what was published later, or back with an upstream that has what is newest here too.

        One that has not is only late: it is not followed back.
        """
        if now is None or newest.sequence > now.sequence:
            return True
        if newest == now:
            return False
        upstream, deadline = self._upstreams.all[source], Deadline.after(ANSWER_S, cancelled=self._stop)
        try:
            told = upstream.client.manifest(newest.version, deadline=deadline)
            later = told.created_s > self._catalog.manifest(now.version).created_s  # a trainer that began anew, say
        except UpdateCancelled:
            raise
        except WeightcastError as error:
            log.debug("upstream failed", url=upstream.url, version=newest.version, error=error)
            return False
        return later or self._has_whole(upstream, now)
