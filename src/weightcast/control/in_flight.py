"""The requests that are being answered, by the ids that their callers know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class InFlight:
    """A caller learns the id of an answer with its first piece; until then it knows only the `x-request-id` it sent."""

    def __init__(self) -> None:
        self._answers: dict[str, set[str]] = {}

    @contextmanager
    def called(self, caller_id: str | None, answer_id: str) -> Iterator[None]:
        """While inside, `caller_id` is another name of the request whose answer is `answer_id`."""
        if caller_id is None:
            yield
            return
        self._answers.setdefault(caller_id, set()).add(answer_id)
        try:
            yield
        finally:
            self._answers[caller_id].discard(answer_id)
            if not self._answers[caller_id]:
                del self._answers[caller_id]

    def engine_ids(self, ids: Iterable[str]) -> list[str]:
        """What the engine calls these requests, once each. An id that no caller has sent is the engine's own."""
        return list(dict.fromkeys(known for one in ids for known in sorted(self._answers.get(one, {one}))))
